"""Futures over HTTP: listed with probabilities, and made to happen by their codes."""

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from served import error_of, frames_of, local

from worldmodel.config import StateConfig
from worldmodel.models.world_model import WorldModel
from worldmodel.serving.client import Client
from worldmodel.serving.client.errors import BadRequestError

CODED = StateConfig(width=32, num_layers=1, num_heads=2, code_groups=3, code_classes=4)


@pytest.fixture(scope="module")
def coded(make_model: Callable[..., WorldModel]) -> WorldModel:
    model = make_model(state=CODED, num_inference_steps=1)
    assert model.state is not None
    torch.nn.init.normal_(model.state.to_latents.weight)  # zeros before training: all codes have one forecast
    return model


def test_futures_are_those_of_a_session_and_happen_by_their_codes(
    serve: Callable[..., str], coded: WorldModel, image: np.ndarray
) -> None:
    session = coded.session(3)
    session.reset(image)
    expected = session.futures("left", num_draws=40, max_futures=5)
    with Client(serve(coded)) as client:
        world = client.worlds.create(image, seed=3)
        found = world.futures("left", num_draws=40, max_futures=5)
        assert len(found) > 1
        assert [each.probability for each in found] == [each.probability for each in expected]
        assert [each.code for each in found] == [each.state.code for each in expected]
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.log_probability == pytest.approx(theirs.state.log_probability, abs=1e-4)
            assert np.abs(ours.frames.astype(int) - theirs.frames).max() <= 1
        assert world.refresh().round == 0  # nothing has happened
        last = found[-1]
        frames = world.step("left", code=last.code).frames
        assert np.abs(frames.astype(int) - last.frames).max() <= 1
        session.choose(expected[-1])
        following = world.step("right").frames  # remembers what was decided
        assert np.abs(following.astype(int) - session.step("right").frames).max() <= 1


def test_worlds_that_draw_and_worlds_that_choose_are_played_together(
    serve: Callable[..., str], coded: WorldModel, image: np.ndarray
) -> None:
    with Client(serve(coded)) as client:
        code = client.worlds.create(image, seed=1).futures("left")[0].code
        worlds = [client.worlds.create(image, seed=1) for _ in range(4)]
        made: list[np.ndarray] = [np.empty(0)] * 4

        def play(number: int) -> None:
            made[number] = worlds[number].step("left", code=code if number % 2 else None).frames

        threads = [threading.Thread(target=play, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        drawn = coded.session(1)
        drawn.reset(image)
        expected = drawn.step("left").frames
        for number in (0, 2):
            assert np.abs(made[number].astype(int) - expected).max() <= 1
        assert np.abs(made[1].astype(int) - made[3]).max() <= 1


def test_a_step_with_a_code_and_a_seed_may_be_sent_again_after_a_restart(
    coded: WorldModel, tmp_path: Path
) -> None:
    body = {"step_id": 1, "action": {"text": "left"}, "code": [3, 0, 2], "seed": 2**62}
    npy, url = {"format": "npy"}, f"sqlite:///{tmp_path / 'server.db'}"
    with local(coded, tmp_path / "data", database=url) as api:
        path = f"/v1/worlds/{api.post('/v1/worlds', json={'text': 'a ball'}).json()['id']}"
        frames = frames_of(api.post(f"{path}/step", json=body, params=npy))
    with local(coded, tmp_path / "data", database=url) as api:
        again = frames_of(api.post(f"{path}/step", json=body, params=npy))
        assert np.array_equal(frames, again)
        for changed in ({"code": [3, 0, 1]}, {"code": None}, {"seed": 1}, {"seed": None}, {"action": None}):
            refused = api.post(f"{path}/step", json=body | changed)
            assert error_of(refused, 409)["code"] == "step_already_committed", changed
        assert api.get(path).json()["round"] == 1


def test_temperature_and_bad_codes(
    serve: Callable[..., str], coded: WorldModel, model: WorldModel, image: np.ndarray
) -> None:
    with Client(serve(coded)) as client:
        likely = [
            client.worlds.create(image, seed=seed, temperature=0).step("left").frames for seed in (0, 1)
        ]
        # The code is the same; the noise of the generator is not.
        assert likely[0].shape == likely[1].shape
        world = client.worlds.create(image)
        for code in ((0, 0), (0, 0, 9)):
            with pytest.raises(BadRequestError, match="code"):
                world.step("left", code=code)
        with pytest.raises(BadRequestError, match="temperature"):
            client.worlds.create(image, temperature=-1)
    with Client(serve(model)) as client:
        with pytest.raises(BadRequestError, match="no code"):
            client.worlds.create(image).futures("left")
        with pytest.raises(BadRequestError, match="no code"):
            client.worlds.create(image, temperature=0.5)


def test_a_moved_world_draws_as_it_would_have(
    serve: Callable[..., str], coded: WorldModel, image: np.ndarray
) -> None:
    with Client(serve(coded)) as client:
        world = client.worlds.create(image, seed=5, temperature=1.5)
        world.step("left")
        copy = client.worlds.load(world.export())
        for action in ("right", "left"):
            assert np.array_equal(world.step(action).frames, copy.step(action).frames)
