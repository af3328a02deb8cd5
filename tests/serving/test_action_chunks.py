"""Several actions in a round, over HTTP, WebSocket and as a remote environment."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from realtime_sessions import Server, serve
from served import near

from worldmodel.actions import Action
from worldmodel.config import ActionConfig
from worldmodel.env import WorldEnv
from worldmodel.errors import InputError
from worldmodel.models.world_model import WorldModel
from worldmodel.serving.client import Client

CHUNK: list[Any] = [{"keys": ["left"]}, {"keys": ["right"]}]


@pytest.fixture(scope="module")
def chunked(make_model: Callable[..., WorldModel]) -> WorldModel:
    """A model with an action for each of its two frames; tests must not change it."""
    return make_model(action=ActionConfig(keys=("left", "right"), per_round=2), chunk_frames=2)


def test_chunks_over_http(chunked: WorldModel, serve: Callable[..., str], image: np.ndarray) -> None:
    with Client(serve(chunked), timeout_s=60) as client:
        session = chunked.session()
        session.reset(image)
        with client.worlds.create(image) as world:
            assert world.info.action_schema.per_round == 2
            for action in (CHUNK, CHUNK[::-1], [None, "go on"], CHUNK[0]):
                assert near(world.step(action).frames, session.step(action).frames)
            with pytest.raises(InputError, match="3 actions"):
                world.step([*CHUNK, None])
            # The refused step changed nothing.
            assert near(world.step(CHUNK).frames, session.step(CHUNK).frames)
        with client.worlds.create(image) as world:
            there, here = (WorldEnv(each, actions="key") for each in (world, chunked.session()))
            assert there.action_space == spaces.MultiDiscrete([2, 2])
            for env in (there, here):
                env.reset(options={"observation": image})
            assert near(there.step([0, 1])[0], here.step([0, 1])[0])


def test_chunks_over_a_websocket(chunked: WorldModel) -> None:
    async def body(server: Server) -> None:
        async with server.client() as client:
            assert (await client.event())["action"]["per_round"] == 2
            await client.start(seed=3)
            await client.until("video.chunk_metadata")
            await client.act("both", {"chunk": CHUNK})
            applied = await client.until("session.interaction.applied")
            assert applied["event_id"] == "both"
            chunk = await client.until("video.chunk_metadata")
            assert Action.of(chunk["action"]) == Action.of(CHUNK)
            assert chunk["num_frames"] == 2
            await client.act("more", {"chunk": [*CHUNK, {}]})
            assert "3 actions" in (await client.refused())["message"]

    serve(chunked, body)
