"""Every field of every method of the openai client: those that work, and those that are refused.

The table in docs/reference/http.md has the same fields.
"""

import base64
import inspect
import re
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served import decoded

from worldmodel.media import encoding

openai = pytest.importorskip("openai")
# The service whose shape this is has closed.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

TABLE = Path(__file__).parents[2] / "docs" / "reference" / "http.md"
IMAGE = np.random.default_rng(0).integers(0, 256, (4, 4, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
PNG = ("a.png", encoding.encode_png(IMAGE), "image/png")
MP4 = ("a.mp4", encoding.encode_video(np.stack([IMAGE] * 16), 8), "video/mp4")
URL = "data:image/png;base64," + base64.b64encode(PNG[1]).decode()
QUESTION = [
    {"type": "text", "text": "how many"},
    {"type": "image_url", "image_url": {"url": URL, "detail": "auto"}},
]
CHAT = {"messages": [{"role": "user", "content": QUESTION}], "model": "tiny", "max_completion_tokens": 4}
TOOL = {"type": "function", "function": {"name": "look"}}
ID = "video_0123456789abcdefghijkl"

REQUIRED: dict[str, dict[str, Any]] = {
    "videos.create": {"prompt": "a red ball"},
    "videos.create_and_poll": {"prompt": "a red ball", "poll_interval_ms": 50},
    "videos.retrieve": {"video_id": ID},
    "videos.poll": {"video_id": ID},
    "videos.delete": {"video_id": ID},
    "videos.list": {},
    "videos.download_content": {"video_id": ID},
    "videos.remix": {"video_id": ID, "prompt": "the red ball jumps"},
    "videos.edit": {"video": MP4, "prompt": "the red ball jumps"},
    "videos.extend": {"video": MP4, "prompt": "the red ball jumps", "seconds": "1"},
    "images.generate": {"prompt": "a red ball"},
    "images.edit": {"image": PNG, "prompt": "the red ball jumps"},
    "chat.completions.create": CHAT,
    "models.list": {},
    "models.retrieve": {"model": "tiny"},
}
"""Arguments that a call of each method needs."""
GENERATION = {"seed": 3, "num_inference_steps": 1, "guidance_scale": 2.0}
IMAGES = [{"model": "tiny"}, {"n": 2}, {"size": "32x32"}, {"size": "auto"}]
IMAGES += [{"response_format": "b64_json"}, {"output_format": "png"}]
IMAGES += [{"extra_body": {name: value}} for name, value in GENERATION.items()]
VIDEOS = [{"input_reference": PNG}, {"model": "tiny"}, {"seconds": "2"}, {"size": "32x32"}]
VIDEOS += [
    {"seconds": 1},
    {"size": "32X32"},
    {"size": "auto"},
    {"extra_body": {"input_reference": {"image_url": URL}}},
]
VIDEOS += [{"extra_body": {name: value}} for name, value in GENERATION.items()]
VIDEOS += [{"extra_body": {"actions": ["the red ball jumps"]}}, {"extra_body": {"num_frames": 8, "fps": 8}}]
WORKING: dict[str, list[dict[str, Any]]] = {
    "videos.create": VIDEOS,
    "videos.create_and_poll": VIDEOS,
    "videos.list": [{"after": None}, {"limit": 1}, {"order": "asc"}],
    "videos.edit": [{"extra_body": {"actions": ["the red ball jumps"], "model": "tiny"}, "video": MP4}],
    "videos.extend": [{"extra_body": {"actions": ["the red ball jumps"], "model": "tiny"}, "seconds": "2"}],
    "images.generate": IMAGES,
    "images.edit": IMAGES,
    "chat.completions.create": [
        {"max_tokens": 2, "max_completion_tokens": openai.omit},
        {"n": 2, "temperature": 1.0, "seed": 3},
        {"stop": ["x", "y"], "user": "me"},
        {"top_p": 1, "frequency_penalty": 0, "presence_penalty": 0, "logprobs": False, "store": False},
        {"tools": [], "response_format": {"type": "text"}},
        {"stream": True, "stream_options": {"include_usage": True}},
    ],
}
"""Fields that the server takes, beyond those that a call needs."""
NO_IMAGE_FIELDS: dict[str, Any] = {
    "background": "opaque", "complexity": "low", "frame_count": 2, "frame_duration_ms": 100,
    "moderation": "low", "output_compression": 50, "partial_images": 1, "quality": "high",
    "safety_identifier": "me", "stream": True, "svg": True, "user": "me",
}  # fmt: skip
REFUSED: dict[str, dict[str, Any]] = {
    "images.generate": {**NO_IMAGE_FIELDS, "style": "vivid", "response_format": "url", "size": "1024x1024"},
    "images.edit": {**NO_IMAGE_FIELDS, "input_fidelity": "high", "markup": PNG, "mask": PNG},
    "chat.completions.create": {
        "audio": {"voice": "alloy", "format": "mp3"}, "frequency_penalty": 1.0, "function_call": "auto",
        "functions": [{"name": "look"}], "logit_bias": {"1": 1}, "logprobs": True, "metadata": {"a": "b"},
        "modalities": ["text"], "moderation": {"model": "x"}, "parallel_tool_calls": False,
        "prediction": {"type": "content", "content": "x"}, "presence_penalty": 1.0, "prompt_cache_key": "x",
        "prompt_cache_options": {}, "prompt_cache_retention": "24h", "reasoning_effort": "low",
        "response_format": {"type": "json_object"}, "safety_identifier": "me", "service_tier": "auto",
        "store": True, "tool_choice": "auto", "tools": [TOOL], "top_logprobs": 2, "top_p": 0.5,
        "verbosity": "low", "web_search_options": {},
        "n": 9, "temperature": 3.0, "max_tokens": 1025,
    },
    "videos.create": {"size": "720x1280", "negative_prompt": "a blue box", "n": 2},  # the model reads no text
}  # fmt: skip
"""Fields and values that the server refuses; the first ones of each method are all that the client has."""
NO_ROUTE: dict[str, dict[str, Any]] = {
    "videos.create_character": {"name": "ball", "video": MP4},
    "videos.get_character": {"character_id": "x"},
    "images.create_variation": {"image": PNG},
    "chat.completions.retrieve": {"completion_id": "x"},
    "chat.completions.list": {},
    "chat.completions.update": {"completion_id": "x", "metadata": {}},
    "chat.completions.delete": {"completion_id": "x"},
    "models.delete": {"model": "tiny"},
}
"""Methods that the server does not have."""
OF_CLIENT = {"extra_headers", "extra_query", "extra_body", "timeout", "poll_interval_ms"}


@pytest.fixture(scope="module")
def client(serve: Callable[..., str]) -> Any:
    address = serve(max_jobs_per_key=64, max_queued_jobs=64)
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def video(client: Any) -> Any:
    return client.videos.create_and_poll(prompt="a red ball", poll_interval_ms=50)


def method_of(client: Any, name: str) -> Callable[..., Any]:
    return attrgetter(name)(client)


def fields_of(client: Any, method: str) -> set[str]:
    found = inspect.signature(inspect.unwrap(method_of(client, method))).parameters
    return {name for name in found if name != "self"} - OF_CLIENT


def arguments(method: str, video: Any) -> dict[str, Any]:
    given = REQUIRED[method]
    return {**given, "video_id": video.id} if "video_id" in given else given


def rows() -> dict[str, list[str]]:
    """Return the cells of the table by method."""
    found = {}
    for line in TABLE.read_text("utf-8").splitlines():
        first, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for method in re.findall(r"`([a-z_.]+\.[a-z_]+)`", first) if line.startswith("| `") else ():
            if not method.startswith("session."):  # a message of a WebSocket
                found[method] = cells
    return found


@pytest.mark.parametrize("method", [name for name in REQUIRED if name != "videos.delete"])
def test_every_method_of_the_table_works(client: Any, video: Any, method: str) -> None:
    for more in WORKING.get(method, [{}]):
        given = {name: value for name, value in more.items() if value is not None}
        answer = method_of(client, method)(**{**arguments(method, video), **given})
        if more.get("stream"):
            assert next(iter(answer)).choices
        if more.get("n"):
            assert len(getattr(answer, "choices", None) or answer.data) == 2
        if method.startswith("videos.create"):
            assert answer.status in ("queued", "in_progress", "completed")


@pytest.mark.parametrize(
    ("method", "field"), [(method, field) for method, fields in REFUSED.items() for field in fields]
)
def test_what_is_refused_is_named(client: Any, method: str, field: str) -> None:
    value, given = REFUSED[method][field], dict(REQUIRED[method])
    if field in fields_of(client, method):
        given[field] = value
    else:
        given["extra_body"] = {field: value}
    with pytest.raises(openai.BadRequestError) as refused:
        method_of(client, method)(**given)
    # A second upload is refused before its name is read.
    assert field in refused.value.message or (value is PNG and "files" in refused.value.message)


@pytest.mark.parametrize("method", NO_ROUTE)
def test_methods_without_a_route(client: Any, method: str) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        method_of(client, method)(**NO_ROUTE[method])
    assert refused.value.status_code in (404, 405)


def test_guidance_and_seed_of_a_video_are_followed(client: Any) -> None:
    films = []
    for more in ({}, {"guidance_scale": 1.0}, {"guidance_scale": 4.0}, {"seed": 5}):
        made = client.videos.create_and_poll(prompt="a red ball", extra_body=more, poll_interval_ms=50)
        films.append(decoded(client.videos.download_content(made.id).read()))
    same, *others = (np.abs(films[0].astype(int) - film.astype(int)).mean() for film in films[1:])
    assert same < 1 < min(others)


def test_all_fields_of_the_client_are_in_the_table(client: Any) -> None:
    """A version of the client with other fields fails here, as does a field that the table forgets."""
    table = rows()
    assert set(table) == {*REQUIRED}
    for method in REQUIRED:
        works = {*REQUIRED[method]} | {name for more in WORKING.get(method, []) for name in more}
        if method == "videos.download_content":
            works.add("variant")
        fields = fields_of(client, method)
        refused = {*REFUSED.get(method, {})}
        assert fields <= works | refused, method
        supported, not_supported = table[method]
        if not supported.startswith("all"):
            named = works - OF_CLIENT - {"video_id"} | {
                name for more in WORKING.get(method, []) for name in more.get("extra_body", {})
            }
            assert [name for name in sorted(named) if f"`{name}" not in supported] == [], method
        missing = [name for name in sorted(refused & fields - works) if f"`{name}" not in not_supported]
        assert missing == [], method
