"""Actions over HTTP, WebSocket and the client have the same effect as in the library."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from local_client import LocalClient
from served import near
from steering import ALL, FORWARD

from worldmodel.actions import Action
from worldmodel.models.world_model import WorldModel
from worldmodel.serving.actions import ActionBody, ActionSchema, action_body, plain
from worldmodel.serving.app import create_app
from worldmodel.serving.auth import Keys
from worldmodel.serving.client import BadRequestError, Client
from worldmodel.serving.client.payloads import as_json
from worldmodel.serving.realtime.connection import ROUTE
from worldmodel.serving.settings import ServerConfig
from worldmodel.serving.worlds.service import WorldService

THERE = {"mode": "target", "data": {"translation": [0, 1, 1], "rotation": [0, 0.6, 0, 0.8]}}
ACTIONS: tuple[dict[str, Any] | None, ...] = (
    {"mouse": [0.5, -1]},
    {"camera": FORWARD},
    None,
    {"text": "go on", "keys": ["w"], "mouse": [0, 0.25], "vector": [0.1, 1], "camera": THERE},
)
BAD: tuple[tuple[Any, str], ...] = (
    ({"mouse": [0.5]}, "mouse"),
    ({"mouse": [0.5, 3]}, "-1 to 1"),
    ({"mouse": ["0.5", 0]}, "mouse"),
    ({"vector": [0, 2]}, "use 0 to 1"),
    ({"camera": {"data": {"rotation": [0, 0, 0, 2]}}}, "unit quaternion"),
    ({"camera": {"data": {"rotation": [0, 0, 90]}}}, "rotation"),
    ({"camera": {"mode": "speed", "data": {}}}, "mode"),
    ({"camera": {"mode": "target"}}, "data"),
    ({"camera": {"data": {"translation": [0, 0, 1e9]}}}, "beyond"),
    ({"camera": {"data": {}, "matrix": []}}, "matrix"),
)
KEY = "a-key-that-is-long-enough"


@pytest.fixture(scope="module")
def address(world: WorldModel, serve: Callable[..., str]) -> str:
    return serve(world, keys=Keys([KEY]), requests_per_minute=60_000)


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[Client]:
    with Client(address, KEY, timeout_s=60) as client:
        yield client


def test_client_matches_session_for_every_action(
    client: Client, world: WorldModel, image: np.ndarray
) -> None:
    session = world.session(seed=3)
    session.reset(image)
    with client.worlds.create(image, seed=3) as there:
        assert there.info.action_schema == ActionSchema.of(ALL)
        for action in ACTIONS:
            assert near(there.step(action).frames, session.step(action).frames)
        for action, named in BAD:
            with pytest.raises((BadRequestError, ValueError), match=named):
                there.step(action)
        with there.fork() as other:
            expected = session.fork().step({"camera": THERE}).frames
            assert near(other.step(Action.of({"camera": THERE})).frames, expected)
        there.reset(image)  # the camera is back where the world began
        session.reset(image)
        assert near(there.step({"camera": THERE}).frames, session.step({"camera": THERE}).frames)


def test_server_rejects_invalid_actions(address: str, client: Client, image: np.ndarray) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    with (
        client.worlds.create(image, seed=3) as there,
        httpx.Client(base_url=address, headers=headers) as http,
    ):
        for action, named in BAD:
            answer = http.post(f"/v1/worlds/{there.id}/step", json={"step_id": 1, "action": action})
            assert answer.status_code == 400, answer.text
            assert named in answer.json()["error"]["message"]
        assert there.refresh().round == 0


def test_remote_world_is_an_environment_with_every_action(
    client: Client, world: WorldModel, image: np.ndarray
) -> None:
    pytest.importorskip("gymnasium")
    from worldmodel.env import WorldEnv

    with client.worlds.create(image, seed=4) as there:
        kinds: Any = ("keys", "mouse", "camera")
        envs = [WorldEnv(each, start="shapes", actions=kinds) for each in (there, world.session(4))]
        assert envs[0].world_spec == envs[1].world_spec
        assert envs[0].action_space == envs[1].action_space
        assert near(*(env.reset(seed=1)[0] for env in envs))
        action = envs[0].action_space.sample()
        assert near(*(env.step(action)[0] for env in envs))


def test_websocket_session_accepts_every_action(world: WorldModel, tmp_path: Any, image: np.ndarray) -> None:
    config = ServerConfig(model_name="tiny", data_dir=tmp_path, keys=Keys([KEY]))
    session = world.session(seed=5)
    session.reset(text="a red ball")
    app = create_app(WorldService(world), config)
    headers = {"authorization": f"Bearer {KEY}"}
    with LocalClient(app, headers=headers) as http, http.websocket_connect(ROUTE, headers=headers) as socket:

        def until(*kinds: str) -> dict[str, Any]:
            while (event := socket.receive_json())["type"] not in kinds:
                for _ in range(event.get("num_messages", 0)):
                    socket.receive_bytes()
            return event

        assert until("session.created")["action"] == ActionSchema.of(ALL).model_dump()
        socket.send_json({"type": "session.start", "text": "a red ball", "pace": "on_action", "seed": 5})
        for _ in range(until("video.chunk_metadata")["num_messages"]):
            socket.receive_bytes()
        for number, action in enumerate(ACTIONS):
            event = {"event_id": f"e{number}", "event": {"action": action}}
            socket.send_json({"type": "session.interaction", "interaction": event})
            chunk = until("video.chunk_metadata", "error")
            assert chunk["event_ids"] == [f"e{number}"]
            assert as_json(chunk["action"]) == as_json(action)
            for _ in range(chunk["num_messages"]):
                socket.receive_bytes()
        for action, named in BAD:
            event = {"event_id": "bad", "event": {"action": action}}
            socket.send_json({"type": "session.interaction", "interaction": event})
            refused = until("error")
            assert named in refused["error"]["message"]
            assert not refused["fatal"]
        socket.send_json({"type": "session.stop"})


NUMBERS = st.lists(st.floats(-2, 2) | st.integers(-1, 1), min_size=1, max_size=4)
JSON = st.none() | st.booleans() | st.integers() | st.floats() | st.text("wa{[", max_size=3) | NUMBERS
CAMERAS = st.fixed_dictionaries(
    {"data": JSON | st.fixed_dictionaries({}, optional={"translation": JSON, "rotation": JSON})},
    optional={"mode": JSON | st.just("target")},
)
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "text": JSON,
        "keys": JSON | st.just(["w"]),
        "mouse": JSON,
        "vector": JSON,
        "camera": JSON | CAMERAS,
    },
)


@given(sent=JSON | BODIES)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_action_json_round_trip(sent: Any) -> None:
    """Whatever the wire lets through, the library reads as the same action as without a wire."""
    try:
        action = Action.of(plain(ActionBody.model_validate(sent)))
    except ValueError:
        return
    assert action == Action.of(sent)
    back = action_body(action)
    assert (back is None) == (action == Action())
    assert Action.of(plain(back)) == action
    assert Action.of(json.loads(json.dumps(as_json(action)))) == action
