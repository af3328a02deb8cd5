"""Videos made from other videos by the openai client: edits and extensions."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from local_client import LocalClient
from served import KEYS, assert_same_film, decoded, local, wait_for

from worldmodel.media import encoding
from worldmodel.models.world_model import WorldModel
from worldmodel.serving.auth import Keys
from worldmodel.serving.replicas.database import Database, videos

openai = pytest.importorskip("openai")
# The service whose shape this is has closed.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

FAST = {"seed": 4, "num_inference_steps": 1}


@pytest.fixture(scope="module")
def clients(serve: Callable[..., str]) -> list[Any]:
    address = serve(keys=Keys(KEYS), max_video_frames=64, max_videos_per_key=40)
    return [openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0) for key in KEYS]


@pytest.fixture(scope="module")
def client(clients: list[Any]) -> Any:
    return clients[0]


@pytest.fixture
def source(client: Any, image: np.ndarray) -> Any:
    """A completed video of two rounds that starts from an image and ends within its second round."""
    return make_source(client, image)


def make_source(client: Any, image: np.ndarray) -> Any:
    return client.videos.create_and_poll(
        prompt="the red ball moves left",
        input_reference=("reference.png", encoding.encode_png(image), "image/png"),
        seconds="1.5",
        extra_body={**FAST, "actions": ["the blue box jumps"]},
        poll_interval_ms=50,
    )


def change(method: Callable[..., Any], source: str, **fields: Any) -> Any:
    """Call `edit` or `extend` with the id of a video.

    The client (3.54.0) declares `video={"id": ...}` and then refuses all but files, so the id is sent as a
    field of its own.
    """
    more = {"video": {"id": source}, **fields.pop("extra_body", {})}
    return method(video=openai.omit, extra_body=more, **fields)


def film_of(client: Any, video: Any) -> np.ndarray:
    done = client.videos.poll(video.id, poll_interval_ms=50)
    assert done.status == "completed", done
    return decoded(client.videos.download_content(video.id).read())


def played(
    model: WorldModel, start: dict[str, Any], actions: Sequence[str | None], **params: Any
) -> np.ndarray:
    """Play rounds in a session, apart from the server."""
    session = model.session(**(params or FAST))
    session.reset(**start)
    return np.concatenate([session.step(action).frames for action in actions])


@pytest.mark.parametrize("from_text", [False, True])
def test_an_extension_continues_the_world_of_its_source(
    client: Any, model: WorldModel, image: np.ndarray, from_text: bool
) -> None:
    if from_text:
        source = client.videos.create_and_poll(
            prompt="a red ball", seconds="1.5", extra_body=FAST, poll_interval_ms=50
        )
        start, before = {"text": "a red ball"}, [None, None]
    else:
        source = make_source(client, image)
        start, before = {"observation": image}, ["the red ball moves left", "the blue box jumps"]
    longer = change(client.videos.extend, source.id, prompt="the blue box moves up", seconds="2.5")
    assert (longer.seconds, longer.num_frames, longer.seed) == ("4", 32, 4)
    assert (longer.remixed_from_video_id, longer.prompt) == (source.id, "the blue box moves up")
    film = film_of(client, longer)
    assert_same_film(film, played(model, start, [*before, "the blue box moves up", None]))
    own = film_of(client, source)
    assert np.abs(film[: len(own)].astype(int) - own.astype(int)).mean() < 1


def test_an_extension_takes_further_actions_and_can_be_extended(
    client: Any, model: WorldModel, image: np.ndarray, source: Any
) -> None:
    actions = ["the red ball jumps"]
    longer = change(
        client.videos.extend,
        source.id,
        prompt="the blue box moves up",
        seconds="2.5",
        extra_body={"actions": actions},
    )
    film_of(client, longer)
    longest = change(client.videos.extend, longer.id, prompt="the red ball moves left", seconds="1")
    all_actions = ["the red ball moves left", "the blue box jumps", "the blue box moves up", *actions]
    expected = played(model, {"observation": image}, [*all_actions, "the red ball moves left"])
    assert_same_film(film_of(client, longest), expected)


def test_an_upload_is_extended_from_its_last_frames(
    client: Any, model: WorldModel, image: np.ndarray
) -> None:
    clip = np.stack([np.roll(image, shift, 1) for shift in range(12)])
    upload = encoding.encode_video(clip, 8)
    longer = client.videos.extend(
        video=("clip.mp4", upload, "video/mp4"), prompt="the red ball jumps", seconds="1"
    )
    assert (longer.num_frames, longer.remixed_from_video_id) == (20, None)
    film = film_of(client, longer)
    assert np.abs(film[:12].astype(int) - decoded(upload).astype(int)).mean() < 4  # encoded twice
    after = played(model, {"observation": upload}, ["the red ball jumps"], seed=0)
    expected = decoded(encoding.encode_video(np.concatenate([clip, after]), 8))
    assert np.abs(film[12:].astype(int) - expected[12:].astype(int)).mean() < 2
    longest = change(client.videos.extend, longer.id, prompt="the blue box jumps", seconds="1")
    assert longest.num_frames == 28
    assert np.abs(film_of(client, longest)[:20].astype(int) - film.astype(int)).mean() < 1


@pytest.mark.parametrize("from_text", [False, True])
def test_an_edit_keeps_start_length_and_seed(
    client: Any, model: WorldModel, image: np.ndarray, from_text: bool
) -> None:
    if from_text:
        source = client.videos.create_and_poll(
            prompt="a red ball", seconds="1.5", extra_body=FAST, poll_interval_ms=50
        )
        start, further = {"text": "a red ball"}, None
    else:
        source, start, further = make_source(client, image), {"observation": image}, "the blue box jumps"
    edited = change(client.videos.edit, source.id, prompt="the red ball jumps")
    assert (edited.num_frames, edited.seed, edited.remixed_from_video_id) == (12, 4, source.id)
    assert_same_film(film_of(client, edited), played(model, start, ["the red ball jumps", further])[:12])
    others = change(
        client.videos.edit,
        source.id,
        prompt="the red ball jumps",
        extra_body={"actions": ["the red ball moves up"]},
    )
    expected = played(model, start, ["the red ball jumps", "the red ball moves up"])[:12]
    assert_same_film(film_of(client, others), expected)


def test_an_uploaded_video_is_edited_from_its_first_frame(
    client: Any, model: WorldModel, image: np.ndarray
) -> None:
    clip = np.stack([np.roll(image, shift, 1) for shift in range(12)])
    upload = encoding.encode_video(clip, 8)
    edited = client.videos.edit(video=("clip.mp4", upload, "video/mp4"), prompt="the red ball jumps")
    assert edited.num_frames == 12
    first = decoded(upload)[0].reshape(32, 8, 32, 8, 3)[:, 4, :, 4]  # enlarged for players
    film = film_of(client, edited)
    expected = played(model, {"observation": first}, ["the red ball jumps", None], seed=0)[:12]
    expected = decoded(encoding.encode_video(expected, 8))
    assert np.abs(film.astype(int) - expected.astype(int)).mean() < 4  # the upload was scaled in other ways


@pytest.mark.parametrize("method", ["edit", "extend"])
def test_a_source_is_one_completed_video_of_the_key(
    clients: list[Any], source: Any, image: np.ndarray, method: str
) -> None:
    client, other = clients
    more = {"prompt": "the red ball jumps"} | ({"seconds": "1"} if method == "extend" else {})
    path = {"edit": "/videos/edits", "extend": "/videos/extensions"}[method]
    with pytest.raises(openai.NotFoundError):
        change(getattr(other.videos, method), source.id, **more)
    with pytest.raises(openai.BadRequestError, match="video"):
        client.post(path, cast_to=object, body=more)
    png = ("a.png", encoding.encode_png(image), "image/png")
    with pytest.raises(openai.APIStatusError, match="image") as refused:
        getattr(client.videos, method)(video=png, **more)
    assert refused.value.status_code == 415
    unfinished = client.videos.create(
        prompt="a red ball", extra_body={"num_frames": 64, "num_inference_steps": 64}
    )
    with pytest.raises(openai.ConflictError, match="completed"):
        change(getattr(client.videos, method), unfinished.id, **more)
    client.videos.delete(unfinished.id)


@pytest.mark.parametrize("method", ["edit", "extend"])
def test_limits_of_new_videos_hold(client: Any, source: Any, method: str) -> None:
    call = getattr(client.videos, method)
    seconds = {"seconds": "2"} if method == "extend" else {}
    with pytest.raises(openai.BadRequestError, match="jump"):
        change(
            call,
            source.id,
            prompt="the red ball jumps",
            extra_body={"actions": json.dumps([{"keys": ["jump"]}])},
            **seconds,
        )
    with pytest.raises(openai.BadRequestError, match="actions"):
        change(call, source.id, prompt="wait", extra_body={"actions": ["wait"] * 3}, **seconds)
    if method == "extend":
        with pytest.raises(openai.BadRequestError, match="64"):
            change(call, source.id, prompt="wait", seconds="8")
        with pytest.raises(openai.BadRequestError, match="rounds"):  # the source's last round is longer
            change(call, source.id, prompt="wait", seconds="0.25")


@pytest.mark.parametrize("method", ["edit", "extend"])
def test_a_repeated_order_is_the_same_video(client: Any, source: Any, method: str) -> None:
    call = getattr(client.videos, method)
    more = {"seconds": "1"} if method == "extend" else {}
    key = {"Idempotency-Key": f"key-of-{method}"}
    first = change(call, source.id, prompt="the red ball jumps", extra_headers=key, **more)
    assert change(call, source.id, prompt="the red ball jumps", extra_headers=key, **more).id == first.id
    with pytest.raises(openai.ConflictError):
        change(call, source.id, prompt="the blue box jumps", extra_headers=key, **more)
    client.videos.poll(first.id, poll_interval_ms=50)
    client.videos.delete(source.id)  # the order is complete in itself
    assert change(call, source.id, prompt="the red ball jumps", extra_headers=key, **more).id == first.id


@pytest.mark.parametrize("path", ["edits", "extensions"])
def test_orders_survive_a_restart(model: WorldModel, image: np.ndarray, tmp_path: Path, path: str) -> None:
    def serve() -> LocalClient:
        return local(model, tmp_path, max_running_jobs=1, drain_timeout_s=0)

    upload = {"input_reference": ("a.png", encoding.encode_png(image))}
    with serve() as api:
        fields = {"prompt": "the red ball moves left", "seed": "4", "num_inference_steps": "1"}
        source = api.post("/v1/videos", data=fields, files=upload).json()["id"]
        wait_for(api, source)
        blocking = {"prompt": "a red ball", "num_frames": 512, "num_inference_steps": 64}
        blocker = api.post("/v1/videos", json=blocking).json()["id"]
        body = {"video": {"id": source}, "prompt": "the red ball jumps"}
        queued = api.post(f"/v1/videos/{path}", json=body).json()
        assert queued["status"] == "queued", queued
        api.delete(f"/v1/videos/{source}")
    database = Database(f"sqlite:///{tmp_path / 'server.db'}")
    database.run_now(lambda db: db.execute(sa.delete(videos).where(videos.c.id == blocker)))
    database.close()
    with serve() as api:
        assert wait_for(api, queued["id"])["status"] == "completed"
        film = decoded(api.get(f"/v1/videos/{queued['id']}/content").content)
    actions = ["the red ball moves left"] * (path == "extensions") + ["the red ball jumps"]
    assert_same_film(film, played(model, {"observation": image}, actions))
