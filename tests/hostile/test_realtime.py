"""Attacks over the WebSocket: inputs are answered or close the socket; other sessions are not affected."""

import asyncio
import json
import logging
import resource
import string
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import uvicorn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from worldmodel.models.world_model import WorldModel
from worldmodel.serving.app import create_app
from worldmodel.serving.context import ServerContext
from worldmodel.serving.media import decoding
from worldmodel.serving.realtime import events
from worldmodel.serving.realtime.connection import ROUTE
from worldmodel.serving.settings import ServerConfig
from worldmodel.serving.worlds.service import WorldService

EVENT_TYPES = [events.event_type(event) for event in events.CLIENT_EVENT_CLASSES]
LEAKS = ("Traceback", "site-packages", "/work", "/home", "/root", "/tmp", ".py", "0x", "pydantic", "torch")


class Server:
    """A server in a thread of its own, and what it logged."""

    def __init__(self, model: WorldModel) -> None:
        self.service = WorldService(model)
        self.data_dir = TemporaryDirectory()
        config = ServerConfig(
            model_name="tiny",
            data_dir=Path(self.data_dir.name),
            max_worlds=1000,
            max_worlds_per_key=100,
            max_upload_bytes=2**20,
            requests_per_minute=6 * 10**7,
        )
        app = create_app(self.service, config)
        self.context: ServerContext = app.state.context
        self.server = uvicorn.Server(
            uvicorn.Config(app, port=0, log_level="warning", lifespan="off", ws_ping_interval=None)
        )
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        while not self.server.started:
            pass
        self.port = self.server.servers[0].sockets[0].getsockname()[1]

    @contextmanager
    def socket(self) -> Iterator[ClientConnection]:
        url = f"ws://127.0.0.1:{self.port}{ROUTE}"
        with connect(url, max_size=None, compression=None, close_timeout=2, ping_interval=None) as socket:
            yield socket

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join()
        self.context.database.close()
        self.data_dir.cleanup()
        asyncio.run(self.service.close())


class Witness:
    """Somebody else's session, which must go on whatever happens beside it."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket, self.rounds = socket, 0
        self.send(type="session.start", text="a red ball", pace="on_action")
        self.until("video.chunk_metadata")

    def send(self, **event: Any) -> None:
        self.socket.send(json.dumps(event))

    def until(self, kind: str) -> dict[str, Any]:
        while True:
            message = self.socket.recv(timeout=30)
            if isinstance(message, str) and json.loads(message)["type"] == kind:
                return json.loads(message)

    def plays_on(self) -> bool:
        name = f"w{self.rounds}"
        interaction = {"event_id": name, "event": {"action": None}}
        self.send(type="session.interaction", interaction=interaction)
        self.rounds += 1
        chunk = self.until("video.chunk_metadata")
        return chunk["event_ids"] == [name] and chunk["round"] == self.rounds


@pytest.fixture(scope="module")
def server(model: WorldModel) -> Iterator[Server]:
    made = Server(model)
    yield made
    made.close()
    decoding.close_decoder()


@pytest.fixture(scope="module")
def witness(server: Server) -> Iterator[Witness]:
    with server.socket() as socket:
        yield Witness(socket)


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing that a client sends is logged as an error of the server."""
    with caplog.at_level(logging.WARNING):
        yield
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def converse(
    server: Server, messages: list[str | bytes], until: frozenset[str] = frozenset({"the last"})
) -> tuple[list[dict[str, Any]], int]:
    """Send everything, then ask for a pong; return what was answered and how the socket was closed.

    `until` are ids of events, or types, which are all waited for.
    """
    answers: list[dict[str, Any]] = []
    with server.socket() as socket:
        with suppress(ConnectionClosed):
            for message in messages:
                socket.send(message)
            socket.send('{"type": "session.ping", "event_id": "the last"}')
        try:
            while not until <= {str(each.get(key)) for each in answers for key in ("event_id", "type")}:
                message = socket.recv(timeout=30)
                if isinstance(message, str):
                    events.SERVER_EVENTS.validate_json(message)
                    answers.append(json.loads(message))
        except ConnectionClosed as closed:
            return answers, closed.rcvd.code if closed.rcvd else 1006
    return answers, 1000


def check(answers: list[dict[str, Any]], code: int) -> None:
    assert code in {1000, 1008, 1009, 1013}
    for answer in answers:
        if answer["type"] == "error":
            message = answer["error"]["message"]
            assert answer["error"]["code"] != "internal_error"
            assert message
            assert len(message) <= events.MAX_MESSAGE_CHARACTERS
            assert not any(leak in message for leak in LEAKS), message


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    # No text that a leak could be taken for: refusals may repeat what they refuse.
    | st.text(st.characters(exclude_characters="./x", exclude_categories=["Cs"]), max_size=20)
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(string.ascii_letters), inner, max_size=4)
    ),
    max_leaves=12,
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "event_id": JSON,
        "text": JSON | st.just("a ball"),
        "upload": JSON | st.booleans(),
        "seed": JSON,
        "num_inference_steps": JSON | st.integers(-1, 3),
        "format": JSON | st.sampled_from(["jpeg", "png", "fmp4"]),
        "pace": JSON | st.sampled_from(["realtime", "on_action"]),
        "interaction": JSON
        | st.fixed_dictionaries(
            {
                "event_id": st.just("e") | JSON,
                "event": st.fixed_dictionaries({"action": JSON | st.just("wait")}),
            }
        ),
        "replace": st.booleans(),
        "snapshot": JSON,
        "question": JSON,
        "path": JSON,
    },
)
EVENTS = st.builds(lambda kind, fields: {"type": kind} | fields, st.sampled_from(EVENT_TYPES) | JSON, FIELDS)
GOOD = st.sampled_from(
    [
        {"type": "session.start", "text": "a ball", "pace": "on_action"},
        {"type": "session.start", "upload": True},
        {
            "type": "session.interaction",
            "interaction": {"event_id": "e", "event": {"action": "the ball jumps"}},
        },
        {"type": "session.snapshot"},
        {"type": "session.restore", "snapshot": "snapshot-none"},
        {"type": "session.undo"},
        {"type": "session.update", "pace": "realtime"},
        {"type": "session.describe"},
    ]
)
MESSAGES = (EVENTS | GOOD | JSON).map(json.dumps) | st.text(max_size=60) | st.binary(max_size=200)


# The server's thread may draw random numbers while Hypothesis watches for them.
@pytest.mark.filterwarnings("ignore:Do not use the .random. module")
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(messages=st.lists(MESSAGES, max_size=8))
def test_any_messages_are_answered_or_close_the_socket(
    server: Server, witness: Witness, quiet: None, messages: list[str | bytes]
) -> None:
    check(*converse(server, messages))


def test_other_sessions_are_not_affected(server: Server, witness: Witness, quiet: None) -> None:
    """After the fuzz above, and before the floods below."""
    assert witness.plays_on()
    assert len(server.context.worlds) == 1


START = json.dumps({"type": "session.start", "text": "a ball", "pace": "on_action"})


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        (["[" * 30_000], "invalid_event"),
        (['{"type":' * 4000], "invalid_event"),
        (['{"type": "session.start", "text": "\\ud800"}'], "invalid_event"),
        (['{"type": "session.start", "text": "a", "seed": ' + "9" * 5000 + "}"], "invalid_event"),
        (['{"type": "session.start", "text": "a", "guidance_scale": 1e999}'], "invalid_event"),
        (
            [json.dumps({"type": "session.start", "text": "a", "image_url": "http://127.0.0.1/"})],
            "invalid_event",
        ),
        (["x" * 2**20], "message_too_large"),
        ([b"\0" * (2**20 + 1)], "message_too_large"),
        (['{"type": "session.start", "upload": true}', b"\x80\x04\x95" * 99], "unsupported_format"),
        (
            ['{"type": "session.start", "upload": true}', b"\x89PNG\r\n\x1a\n" + b"\0" * 999],
            "invalid_request",
        ),
        (['{"type": "session.start", "upload": true}', START], "out_of_order"),
    ],
)
def test_known_attacks_are_rejected(
    server: Server, witness: Witness, quiet: None, messages: list[str | bytes], code: str
) -> None:
    # An upload is looked at after the pong.
    late = {"error"} if isinstance(messages[-1], bytes) else set()
    answers, closed = converse(server, messages, until=frozenset({"the last", *late}))
    check(answers, closed)
    assert code in {answer["error"]["code"] for answer in answers if answer["type"] == "error"}
    assert witness.plays_on()


@pytest.mark.parametrize(
    "message",
    ['{"type": "session.ping"}', "no event", START, b"\0" * 1000],
)
def test_flood_closes_the_socket_with_bounded_memory(
    server: Server, witness: Witness, quiet: None, message: str | bytes
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answers, closed = converse(server, [message] * 5000)
    check(answers, closed)
    assert closed in {1008, 1006}
    codes = [answer["error"]["code"] for answer in answers if answer["type"] == "error"]
    assert codes[-1:] == ["too_many_messages"] or closed == 1006
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 2**10
    assert witness.plays_on()


def test_action_queue_cannot_be_flooded(server: Server, witness: Witness, quiet: None) -> None:
    event = {"event_id": "e", "event": {"action": {"keys": ["left"] * 16, "vector": [0.0] * 3}}}
    act = json.dumps({"type": "session.interaction", "interaction": event})
    answers, closed = converse(server, [START, *[act] * 40])
    check(answers, closed)
    assert {answer["error"]["code"] for answer in answers if answer["type"] == "error"} <= {
        "out_of_order",
        "queue_full",
        "too_many_messages",
    }
    assert witness.plays_on()


def test_worlds_of_disconnected_clients_are_closed(server: Server, witness: Witness, quiet: None) -> None:
    for _ in range(5):
        with server.socket() as socket:
            socket.send(START)
            while json.loads(socket.recv(timeout=30))["type"] != "video.start":
                continue
            socket.send('{"type": "session.update", "pace": "realtime"}')
            socket.socket.close()  # without a word
    assert until(lambda: len(server.context.worlds) == 1)
    assert witness.plays_on()


def until(condition: Callable[[], bool]) -> bool:
    """Whether something comes true within a few seconds."""
    pause = threading.Event()
    return any(condition() or pause.wait(0.1) for _ in range(50))
