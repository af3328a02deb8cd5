"""Chat completions, image generation and the list of models."""

import asyncio
import base64
import gzip
import io
import itertools
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from local_client import LocalClient
from PIL import Image
from served import error_of, local

from worldmodel.media import encoding
from worldmodel.models.world_model import WorldModel
from worldmodel.serving.app import create_app
from worldmodel.serving.engine.completion import Completion, until
from worldmodel.serving.engine.local import InProcessEngine
from worldmodel.serving.server import Server
from worldmodel.serving.settings import ServerConfig
from worldmodel.serving.worlds.service import WorldService

SECRET = "/tmp/secret-place"


@pytest.fixture
def api(model: WorldModel, tmp_path: Path) -> Iterator[LocalClient]:
    with local(model, tmp_path) as client:
        yield client


def data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64," + base64.b64encode(data).decode()


@pytest.fixture(scope="module")
def image_part(image: np.ndarray) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url("image/png", encoding.encode_png(image))}}


def ask(api: LocalClient, *parts: dict[str, Any], **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": list(parts)}], **fields}
    return api.post("/v1/chat/completions", json=body)


def test_chat_describes_an_image(
    api: LocalClient, model: WorldModel, image: np.ndarray, image_part: dict[str, Any]
) -> None:
    session = model.session()
    session.reset(image)
    answer = ask(api, {"type": "text", "text": "how many"}, image_part, model="tiny").json()
    assert (answer["object"], answer["model"]) == ("chat.completion", "tiny")
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": session.describe("how many"),
        "refusal": None,
    }
    assert ask(api, image_part).json()["choices"][0]["message"]["content"] == session.describe()
    app: Any = api.app
    assert len(app.state.context.worlds) == 0


def test_chat_describes_a_video(api: LocalClient, model: WorldModel, image: np.ndarray) -> None:
    video = encoding.encode_video(np.stack([image, image[::-1], image, image[::-1]]), 8)
    part = {"type": "video_url", "video_url": {"url": data_url("video/mp4", video)}}
    session = model.session()
    session.reset(video)
    assert ask(api, part).json()["choices"][0]["message"]["content"] == session.describe()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n": 9}, "'n'"),
        ({"temperature": 3}, "temperature"),
        ({"tools": [{"type": "function"}]}, "'tools'"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream_options": {"include_everything": True}}, "include_everything"),
    ],
)
def test_chat_rejects_unsupported_options(
    api: LocalClient, image_part: dict[str, Any], fields: dict[str, Any], named: str
) -> None:
    assert named in error_of(ask(api, image_part, **fields), 400)["message"]


@pytest.mark.parametrize("temperature", [1e-39, 5e-324])
def test_the_lowest_temperatures_are_greedy(
    api: LocalClient, image_part: dict[str, Any], temperature: float
) -> None:
    """Divided by these, logits are beyond the range of their type."""
    answers = [
        ask(api, image_part, max_tokens=4, seed=0, temperature=each).json()["choices"][0]["message"]
        for each in (0, temperature)
    ]
    assert answers[0] == answers[1]


def test_chat_requires_exactly_one_image_or_video(api: LocalClient, image_part: dict[str, Any]) -> None:
    text = {"type": "text", "text": "how many"}
    for parts in ((text,), (image_part, image_part), (text, text, image_part)):
        assert "image or video" in error_of(ask(api, *parts), 400)["message"]
    assert error_of(ask(api, image_part, model="gpt"), 404)["code"] == "model_not_found"
    user = {"role": "user", "content": "how many"}
    in_system = {"role": "system", "content": [image_part]}
    for messages in ([{"role": "system", "content": [text]}], [user], [in_system, user]):
        error_of(api.post("/v1/chat/completions", json={"messages": messages}), 400)


def test_streamed_chat_with_an_invalid_request_has_its_status(
    api: LocalClient, image_part: dict[str, Any]
) -> None:
    """Nothing is sent before the first token, so that errors up to then are those of other requests."""
    assert error_of(ask(api, image_part, model="gpt", stream=True), 404)["code"] == "model_not_found"


def test_a_stream_that_takes_too_long_ends_with_an_error(
    model: WorldModel, tmp_path: Path, image_part: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = InProcessEngine._next_token
    calls = itertools.count()

    def slower(engine: InProcessEngine, *args: Any) -> Any:
        token = compute(engine, *args)
        if next(calls):
            time.sleep(0.3)
        return 0 if token == engine.backbone.end else token  # the text never ends by itself

    monkeypatch.setattr(InProcessEngine, "_next_token", slower)
    with local(model, tmp_path, step_deadline_s=2) as client:
        events = ask(client, image_part, stream=True).text.strip().split("\n\n")
        assert len(events) > 1
        error = json.loads(events[-1].removeprefix("data: "))["error"]
        assert error["code"] == "deadline_exceeded"
        app: Any = client.app
        assert len(app.state.context.worlds) == 0


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1/x.png",
        "https://example.org/x.png",
        "file:///etc/passwd",
        "ftp://localhost/x",
        "\\\\server\\x.png",
        SECRET,
        "data:text/plain,hello",
        "data:image/png;base64,%%%%",
        "data:image/png;base64,",
        "data:image/png;base64," + base64.b64encode(b"not an image").decode(),
        "data:;base64,AAAA",
        "DATA:image/png;base64,AAAA",
    ],
)
def test_only_data_urls_are_accepted(api: LocalClient, url: str) -> None:
    response = ask(api, {"type": "image_url", "image_url": {"url": url}})
    assert response.status_code in (400, 415)
    assert SECRET not in response.text
    assert "passwd" not in response.text


def test_image_generation_matches_session(api: LocalClient, model: WorldModel) -> None:
    body = {"prompt": "a red ball", "n": 2, "seed": 5, "size": "32x32", "response_format": "b64_json"}
    answer = api.post("/v1/images/generations", json=body).json()
    assert len(answer["data"]) == 2
    for seed, each in enumerate(answer["data"], 5):
        made = np.asarray(Image.open(io.BytesIO(base64.b64decode(each["b64_json"]))))
        expected = model.session(seed=seed).reset(text="a red ball")[-1]
        assert np.abs(made.astype(int) - expected.astype(int)).max() <= 1
    for wrong, named in (
        ({"size": "1024x1024"}, "32x32"),
        ({"response_format": "url"}, "response_format"),
        ({"n": 9}, "'n'"),
        ({"quality": "hd"}, "no field 'quality'"),
    ):
        refused = api.post("/v1/images/generations", json={**body, **wrong})
        assert named in error_of(refused, 400)["message"]


def test_models_health_and_openapi(api: LocalClient) -> None:
    (described,) = api.get("/v1/models").json()["data"]
    assert (described["id"], described["pace"], described["confidence_threshold"]) == (
        "tiny",
        "realtime",
        None,
    )
    assert described["tasks"] == ["rounds", "imagine", "describe", "ask", "inverse"]
    assert api.get("/health").json() == {"status": "ok"}
    assert api.get("/ready").json() == {"status": "ok"}
    schema = api.get("/openapi.json").json()
    operations = [
        (path, verb, each) for path, verbs in schema["paths"].items() for verb, each in verbs.items()
    ]
    assert len(operations) >= 20
    for path, verb, operation in operations:
        assert operation["summary"], path
        assert "422" not in operation["responses"]
        assert all(each["description"] for each in operation["responses"].values()), (path, verb)
        closed = path not in ("/health", "/ready")
        assert bool(operation.get("security")) is closed
        assert ("401" in operation["responses"]) is closed
    common = {"200", "401", "403", "413", "429", "503"}
    for path, verb, declared in (
        ("/health", "get", {"200", "503"}),
        ("/ready", "get", {"200", "503"}),
        ("/v1/models", "get", common),
        ("/v1/worlds", "get", common),
        ("/v1/worlds/{world_id}", "delete", common | {"400", "404", "409"}),
        ("/v1/worlds/{world_id}/infer_action", "post", common | {"400", "404", "409", "504"}),
        ("/v1/worlds/{world_id}/step", "post", common | {"400", "404", "408", "409", "415", "504"}),
    ):
        assert schema["paths"][path][verb]["responses"].keys() == declared, path
    content = schema["paths"]["/v1/videos"]["post"]["requestBody"]["content"]
    assert set(content) == {"application/json", "multipart/form-data"}
    assert content["multipart/form-data"]["schema"]["properties"]["input_reference"]["format"] == "binary"
    assert "ActionBody" in schema["components"]["schemas"]


@pytest.mark.slow
def test_large_bodies_do_not_stop_the_server(
    model: WorldModel, tmp_path: Path, listening: Callable[[Any], AbstractContextManager[str]]
) -> None:
    """Bodies near the limit, several at once: other requests wait for parsing and decoding a little only."""
    content = base64.b64encode(bytes(56 * 2**20)).decode()
    body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": ""}}]}]}
    body["messages"][0]["content"][0]["image_url"]["url"] = f"data:video/mp4;base64,{content}"
    data = json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    delays: list[float] = []
    with listening(create_app(WorldService(model), ServerConfig("tiny", tmp_path))) as url:

        def send() -> int:
            return httpx.post(
                f"{url}/v1/chat/completions", content=data, headers=headers, timeout=120
            ).status_code

        with ThreadPoolExecutor(6) as threads, httpx.Client(base_url=url) as client:
            sent = [threads.submit(send) for _ in range(6)]
            while not all(each.done() for each in sent):
                began = time.monotonic()
                assert client.get("/health").status_code == 200
                delays.append(time.monotonic() - began)
            assert {each.result() for each in sent} == {415}  # zeros are not a video
    assert max(delays) < 2


def test_server_without_an_engine_is_not_ready_and_exits(model: WorldModel, tmp_path: Path) -> None:
    service = WorldService(model)
    config = ServerConfig("tiny", tmp_path, drain_timeout_s=0)
    app = create_app(service, config)
    with LocalClient(app) as api:
        assert api.get("/ready").status_code == 200
        service.engine.alive = (
            False  # as after a crash of vLLM's processes: tests/serving/test_vllm_engine.py
        )
        assert (api.get("/ready").status_code, api.get("/ready").json()) == (503, {"status": "failed"})
        assert (api.get("/health").status_code, api.get("/health").json()) == (503, {"status": "failed"})
        assert asyncio.run(stops(Server(app, config)))


def test_text_ends_before_a_stop_and_holds_back_what_may_be_one() -> None:
    async def grow(*texts: str) -> AsyncGenerator[Completion, None]:
        for number, text in enumerate(texts, start=1):
            yield Completion(text, 3, number, "length" if number == len(texts) else None)

    async def read(*texts: str) -> list[tuple[str, str | None]]:
        return [(each.text, each.finish_reason) async for each in until(grow(*texts), ["END", "##"])]

    ended = asyncio.run(read("a", "a E", "a EN", "a END b", "a END b c"))
    assert ended == [("a", None), ("a ", None), ("a ", None), ("a ", "stop")]
    assert asyncio.run(read("#", "#a", "#a E")) == [("", None), ("#a", None), ("#a E", "length")]


def test_a_compressed_body_is_refused_by_name(api: LocalClient) -> None:
    packed = gzip.compress(b'{"text": "a ball"}')
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    for path in ("/v1/worlds", "/v1/chat/completions"):
        assert api.post(path, content=packed, headers=headers).status_code == 415


async def stops(server: Server) -> bool:
    """Return whether a server, looked at ten times per second, decides to stop."""
    for tick in range(50):
        if await server.on_tick(tick):
            return True
        await asyncio.sleep(0.05)
    return False
