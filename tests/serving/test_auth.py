"""API keys, authentication and rate limits."""

import asyncio
import os
import re
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI, Request, WebSocket
from fastapi.responses import JSONResponse
from local_client import LocalClient
from served import bearer, local
from starlette.testclient import WebSocketDenialResponse

from worldmodel.errors import ConfigError
from worldmodel.models.world_model import WorldModel
from worldmodel.serving.auth import (
    ANONYMOUS,
    VARIABLE,
    KeyOptions,
    Keys,
    accepted_subprotocol,
    authenticate,
    check_bind,
)
from worldmodel.serving.context import Caller, require_key
from worldmodel.serving.errors import ApiError, RateLimitError
from worldmodel.serving.rate_limits import RequestLimiter
from worldmodel.serving.realtime.connection import ROUTE
from worldmodel.serving.settings import ServerConfig

KEY, OTHER = "some-key-0123456789", "other-key-0123456789"

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"


def app_with(keys: Keys) -> FastAPI:
    """A server as ours is put together: health open, all else behind the dependency."""
    app = FastAPI()
    app.state.context = SimpleNamespace(keys=keys)
    private = APIRouter(dependencies=[Depends(require_key)])

    @app.get("/health")
    async def health() -> str:
        return "ok"

    @private.get("/v1/whoami")
    @private.post("/v1/whoami")
    async def whoami(caller: Caller) -> str:
        return caller

    @app.websocket("/v1/live")
    async def live(websocket: WebSocket) -> None:
        try:
            caller = authenticate(websocket, keys)
        except ApiError as error:
            await websocket.send_denial_response(JSONResponse({}, error.status))
            return
        await websocket.accept(accepted_subprotocol(websocket))
        await websocket.send_text(caller)
        await websocket.close()

    @app.exception_handler(ApiError)
    async def refuse(_: Request, error: ApiError) -> JSONResponse:
        body = {"type": error.type, "code": error.code, "message": str(error)}
        return JSONResponse({"error": body}, error.status, error.headers)

    app.include_router(private)
    return app


@pytest.fixture
def client() -> LocalClient:
    return LocalClient(app_with(Keys([ALICE, BOB])))


# Keys


def test_caller_id_reveals_nothing_about_the_key() -> None:
    keys = Keys([ALICE, BOB])
    alice, bob = keys.caller(ALICE), keys.caller(BOB)
    assert alice and bob and alice != bob
    assert Keys([BOB, ALICE]).caller(ALICE) == alice  # so that it still owns its videos after a restart
    for shown in (repr(keys), str(vars(keys)), alice):
        assert ALICE not in shown and "alice" not in shown


@pytest.mark.parametrize("key", ["", ALICE[:-1], ALICE + "x", ALICE.upper(), ALICE + " ", "\udcff", "é" * 20])
def test_unknown_keys_have_no_caller_id(key: str) -> None:
    assert Keys([ALICE, BOB]).caller(key) is None
    assert Keys().caller(key) is None


@pytest.mark.parametrize(
    "key", ["short", "with space 0123456789", "comma,0123456789abcdef", "é" * 20, "x" * 257]
)
def test_invalid_key_is_rejected_without_being_printed(key: str) -> None:
    with pytest.raises(ConfigError, match="number 2") as caught:
        Keys([ALICE, key])
    assert key not in str(caught.value)


def test_keys_are_read_from_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# ours\n{ALICE}  # alice\n\n{BOB}\n")
    path.chmod(0o600)
    keys = Keys.load(path, {VARIABLE: "ignored"})
    assert len(keys) == 2
    assert keys.caller(ALICE) and keys.caller(BOB)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o602])
def test_key_file_accessible_to_others_is_rejected(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys"
    path.write_text(ALICE)
    path.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        Keys.load(path, {})


def test_key_file_without_keys_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.touch(0o600)
    for content, words in ((b"# none\n", "keys"), (b"\xff\xfe", "keys")):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=words):
            Keys.load(path, {})
    with pytest.raises(ConfigError, match="key"):
        Keys.load(tmp_path / "missing", {})


def test_keys_follow_their_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys"
    path.write_text(ALICE)
    path.chmod(0o600)
    keys = Keys.load(path, {})
    alice = keys.caller(ALICE)
    assert alice and keys.caller(BOB) is None
    replacement = tmp_path / "next"
    replacement.write_text(f"{ALICE}\n{BOB}\n")
    replacement.chmod(0o600)
    replacement.replace(path)
    assert keys.caller(ALICE) == alice
    assert keys.caller(BOB)
    for spoil in (lambda: path.write_text("short"), lambda: path.write_text(""), path.unlink):
        spoil()
        assert keys.caller(BOB)  # a secret that went missing neither opens nor closes the server
        assert keys.caller("unknown-key-0123456789") is None
    assert len(caplog.records) == 3
    path.write_text(BOB)
    path.chmod(0o600)
    assert keys.caller(ALICE) is None
    assert keys.caller(BOB)


def test_a_line_of_the_key_file_has_limits_of_its_key(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{KEY} name=alice weight=2.5 max_worlds_per_key=3 admin # ours\n{OTHER}\n", "ascii")
    path.chmod(0o600)
    keys = Keys.load(path)
    alice, other = keys.caller(KEY), keys.caller(OTHER)
    assert alice is not None
    assert other is not None
    assert keys.options(alice) == KeyOptions("alice", 2.5, True, {"max_worlds_per_key": 3})
    assert keys.options(other) == keys.options("nobody") == KeyOptions()
    assert (keys.is_admin(alice), keys.is_admin(other)) == (True, False)
    config = ServerConfig("tiny", tmp_path, keys, max_worlds_per_key=7)
    assert [config.of_key("max_worlds_per_key", each) for each in (alice, other)] == [3, 7]
    for option in ("weight=0", "weight=nan", "colour=red", "max_worlds_per_key=-1", "name=a/b"):
        path.write_text(f"{KEY} {option}\n", "ascii")
        with pytest.raises(ConfigError, match=re.escape(option)):
            Keys.load(path)


def test_an_administrator_reads_metrics_and_ends_the_sessions_of_all_keys(
    model: WorldModel, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{KEY} admin\n{OTHER} name=bob\n", "ascii")
    path.chmod(0o600)
    mine, theirs = map(bearer, (KEY, OTHER))
    with local(model, tmp_path / "data", keys=Keys.load(path)) as api:
        world = api.post("/v1/worlds", json={"text": "a ball"}, headers=theirs).json()["id"]
        assert api.get("/metrics", headers=theirs).status_code == 403
        text = api.get("/metrics", headers=mine).text
        (spent,) = re.findall(r'worldmodel_model_seconds_total\{key="bob",purpose="step"\} (\S+)', text)
        assert float(spent) > 0
        with api.websocket_connect(ROUTE, headers=theirs) as socket:
            assert socket.receive_json()["type"] == "session.created"
            assert api.get("/v1/sessions", headers=theirs).status_code == 403
            listed = api.get("/v1/sessions", headers=mine).json()["data"]
            assert [(each["kind"], each["key"]) for each in listed] == [
                ("world", "bob"),
                ("websocket", "bob"),
            ]
            assert listed[0]["id"] == world
            for each in listed:
                assert api.delete(f"/v1/sessions/{each['id']}", headers=theirs).status_code == 403
                assert api.delete(f"/v1/sessions/{each['id']}", headers=mine).json()["deleted"] is True
            assert socket.receive_json()["reason"] == "stopped"
        assert api.get(f"/v1/worlds/{world}", headers=theirs).status_code == 404
        assert api.get("/v1/sessions", headers=mine).json()["data"] == []
        assert api.delete("/v1/sessions/none", headers=mine).status_code == 404


def test_each_key_finds_its_share_of_places_free(tmp_path: Path) -> None:
    config = ServerConfig("tiny", tmp_path, Keys([KEY, OTHER]))
    assert config.has_room("a", {"a": 5}, 8)
    assert not config.has_room("a", {"a": 6}, 8)  # two places are kept for the other key
    assert config.has_room("b", {"a": 6}, 8)
    assert config.has_room("b", {"a": 6, "b": 1}, 8)
    assert not config.has_room("b", {"a": 6, "b": 2}, 8)
    assert ServerConfig("tiny", tmp_path).has_room("anyone", {"anyone": 7}, 8)


def test_keys_are_read_from_the_environment() -> None:
    assert len(Keys.load(None, {VARIABLE: f" {ALICE}, {BOB}\n"})) == 2
    assert len(Keys.load(None, {})) == 0
    with pytest.raises(ConfigError, match=VARIABLE):
        Keys.load(None, {VARIABLE: " , "})  # a deployment whose secret went missing must not stand open


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.9.9.9"])
def test_loopback_needs_no_key(host: str) -> None:
    check_bind(host, Keys())


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "", "192.168.1.5", "example.org", "0", "localhost.example.org"]
)
def test_public_addresses_need_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match=VARIABLE):
        check_bind(host, Keys())
    check_bind(host, Keys([ALICE]))


# Authentication


def test_only_health_is_open(client: LocalClient) -> None:
    assert client.get("/health").status_code == 200
    answer = client.get("/v1/whoami")
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_api_key"


def test_valid_keys_identify_callers(client: LocalClient) -> None:
    alice = client.get("/v1/whoami", headers=bearer(ALICE)).json()
    assert alice == Keys([ALICE]).caller(ALICE)
    assert alice != client.get("/v1/whoami", headers={"authorization": f"bearer {BOB}"}).json()


@pytest.mark.parametrize(
    "headers",
    [
        bearer(""),
        bearer(ALICE[:-1]),
        bearer(f"{ALICE} {BOB}"),
        {"Authorization": ALICE},
        {"Authorization": f"Basic {ALICE}"},
        {"X-Api-Key": ALICE},
        {"Cookie": f"key={ALICE}"},
        {"Sec-WebSocket-Protocol": f"worldmodel.key.{ALICE}"},
        {"Authorization": b"Bearer \xff\xfe"},
    ],
)
def test_only_the_bearer_header_is_accepted(client: LocalClient, headers: dict) -> None:
    assert client.get("/v1/whoami", headers=headers).status_code == 401
    assert client.get(f"/v1/whoami?key={ALICE}", headers=headers).status_code == 401


def test_two_authorization_headers_are_rejected(client: LocalClient) -> None:
    twice = [("Authorization", "Bearer wrong-0123456789abcdef"), ("Authorization", f"Bearer {ALICE}")]
    assert client.get("/v1/whoami", headers=twice).status_code == 401


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "testserver/health?", "evil/health#", "@", "a b", ""]
)
@pytest.mark.parametrize(
    "path", ["/v1/whoami", "//v1/whoami", "/health/../v1/whoami", "/%76%31/whoami", "/v1%2ewhoami"]
)
def test_no_spelling_of_host_or_path_bypasses_the_key(client: LocalClient, host: str, path: str) -> None:
    answer = client.get(path, headers={"Host": host})
    assert answer.status_code in (401, 404)


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "https://localhost.evil.example", "null", "http://["]
)
def test_without_keys_cross_origin_requests_are_rejected(origin: str) -> None:
    client = LocalClient(app_with(Keys()), base_url="http://127.0.0.1:8000")
    assert client.post("/v1/whoami").json() == ANONYMOUS
    assert client.post("/v1/whoami", headers={"Origin": "http://localhost:7860"}).json() == ANONYMOUS
    assert client.post("/v1/whoami", headers={"Origin": origin}).status_code == 403
    assert client.get("/health", headers={"Origin": origin}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "testserver", "", "192.168.1.5"],
)
def test_without_keys_dns_rebinding_is_rejected(host: str) -> None:
    client = LocalClient(app_with(Keys()))
    assert client.get("/v1/whoami", headers={"Host": host}).status_code == 403
    assert client.get("/v1/whoami", headers={"Origin": f"http://{host}"}).status_code == 403


def test_openapi_document_has_the_security_scheme(client: LocalClient) -> None:
    document = client.get("/openapi.json").json()
    assert document["paths"]["/v1/whoami"]["get"]["security"] == [{"HTTPBearer": []}]
    assert "security" not in document["paths"]["/health"]["get"]


def connected(client: LocalClient, **options: object) -> tuple[str, str | None]:
    with client.websocket_connect("/v1/live", **options) as session:
        return session.receive_text(), session.accepted_subprotocol


def test_websocket_accepts_header_or_subprotocol(client: LocalClient) -> None:
    alice = Keys([ALICE]).caller(ALICE)
    assert connected(client, headers=bearer(ALICE)) == (alice, None)
    offers = ["worldmodel.v1", f"worldmodel.key.{ALICE}"]
    assert connected(client, subprotocols=offers) == (alice, "worldmodel.v1")
    assert connected(client, subprotocols=offers[1:]) == (alice, None)  # the key is never sent back


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"subprotocols": [ALICE]},
        {"subprotocols": ["worldmodel.v1", "worldmodel.key."]},
        {"headers": bearer("wrong"), "subprotocols": [f"worldmodel.key.{ALICE}"]},
    ],
)
def test_websocket_rejects_other_credentials(client: LocalClient, options: dict) -> None:
    with pytest.raises(WebSocketDenialResponse) as caught:
        connected(client, **options)
    assert caught.value.status_code == 401


def test_without_keys_cross_origin_websocket_is_rejected() -> None:
    client = LocalClient(app_with(Keys()))
    assert connected(client)[0] == ANONYMOUS
    with pytest.raises(WebSocketDenialResponse) as caught:
        connected(client, headers={"Origin": "http://evil.example"})
    assert caught.value.status_code == 403


def test_app_without_context_fails_closed() -> None:
    app = app_with(Keys())
    del app.state.context

    async def ask() -> int:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return (await client.get("/v1/whoami")).status_code

    assert asyncio.run(ask()) == 500


# Limits


class Clock:
    """A clock whose time is set by the test."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_concurrent_requests_are_limited_per_key() -> None:
    limiter = RequestLimiter(lambda _: (2, 20), 40, Clock())
    with limiter.request("alice"), limiter.request("alice"):
        with pytest.raises(RateLimitError, match=r"\b2\b"), limiter.request("alice"):
            pass
        with limiter.request("bob"):
            pass
    with limiter.request("alice"):
        pass


def test_failed_request_releases_its_slot() -> None:
    limiter = RequestLimiter(lambda _: (1, 20), 40, Clock())
    for _ in range(3):
        with pytest.raises(RuntimeError), limiter.request("alice"):
            raise RuntimeError


def test_rate_limit_allows_a_burst_and_then_a_steady_rate() -> None:
    clock = Clock()
    limiter = RequestLimiter(lambda _: (99, 2), 3, clock)

    def allowed() -> int:
        for count in range(50):
            try:
                limiter.request("alice").__enter__()
            except RateLimitError:
                return count
        return 50

    assert allowed() == 3
    with pytest.raises(RateLimitError) as caught, limiter.request("alice"):
        pass
    assert caught.value.retry_after == pytest.approx(0.5)
    assert caught.value.headers == {"Retry-After": "1"}
    clock.now += 1
    assert allowed() == 2
    clock.now += 1000
    assert allowed() == 3
    with limiter.request("bob"):
        pass


def test_key_file_of_another_user_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys"
    path.write_text(ALICE)
    path.chmod(0o600)
    status = os.stat_result((*os.stat(path)[:4], 12345, *os.stat(path)[5:]))  # only root could give it away
    monkeypatch.setattr(os, "fstat", lambda _: status)
    with pytest.raises(ConfigError, match="another user"):
        Keys.load(path, {})
