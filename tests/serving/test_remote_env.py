"""Remote worlds as Gymnasium environments."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

pytest.importorskip("gymnasium")

from served import near

from worldmodel.env import WorldEnv, WorldVectorEnv
from worldmodel.errors import InputError
from worldmodel.models.world_model import WorldModel
from worldmodel.serving.auth import Keys
from worldmodel.serving.client import Client

KEY = "a-key-that-is-long-enough"


@pytest.fixture(scope="module")
def client(serve: Callable[..., str]) -> Iterator[Client]:
    with Client(serve(keys=Keys([KEY])), KEY, timeout_s=60) as client:
        yield client


def test_remote_world_as_environment(client: Client, model: WorldModel, image: np.ndarray) -> None:
    with client.worlds.create(image, seed=4) as world:
        there, here = (WorldEnv(each, start="shapes", obs_type="clip") for each in (world, model.session(4)))
        assert there.world_spec == here.world_spec
        for episode in range(2):
            assert near(there.reset(seed=episode)[0], here.reset(seed=episode)[0])
            for action in ([1, 0], [0, 0]):
                assert near(there.step(action)[0], here.step(action)[0])
        text = "a red ball at the left"
        assert near(*(env.reset(options={"text": text})[0] for env in (there, here)))


def test_remote_vector_environment_steps_concurrently(
    client: Client, model: WorldModel, image: np.ndarray
) -> None:
    worlds = [client.worlds.create(image, seed=seed) for seed in (1, 2)]
    settings = {"start": "shapes", "actions": "text", "max_episode_steps": 2}
    there = WorldVectorEnv(worlds, 2, **settings)
    here = WorldVectorEnv([model.session(seed) for seed in (1, 2)], 2, **settings)
    assert near(there.reset(seed=0)[0], here.reset(seed=0)[0])
    with pytest.raises(InputError, match="tokens"):
        there.step(["", "red " * 300])
    there.reset(seed=0)
    for actions in (["the red ball jumps", ""], ["", "the blue box moves left"], ["", ""], ["", ""]):
        made, expected = there.step(actions), here.step(actions)
        assert near(made[0], expected[0])
        assert np.array_equal(made[3], expected[3])
    there.close()
    for world in worlds:
        world.close()
