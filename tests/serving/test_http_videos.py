"""Video jobs: results, progress, ownership, cancellation."""

import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_client import LocalClient
from PIL import Image
from served import KEYS, assert_same_film, bearer, decoded, error_of, local, wait_for

from worldmodel.models.world_model import WorldModel
from worldmodel.serving.auth import Keys
from worldmodel.serving.videos.jobs import COUNT_S, VideoJob, VideoJobs

FOREVER = {"prompt": "a red ball", "num_frames": 512, "num_inference_steps": 64}


@pytest.fixture
def api(model: WorldModel, tmp_path: Path) -> Iterator[LocalClient]:
    limits = {"max_running_jobs": 1, "max_queued_jobs": 2, "max_jobs_per_key": 4}
    with local(model, tmp_path, **limits, requests_per_minute=60_000) as client:
        yield client


def ask(api: LocalClient, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    response = api.post("/v1/videos", json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


def film_of(api: LocalClient, video: dict[str, Any]) -> bytes:
    done = wait_for(api, video["id"])
    assert done["status"] == "completed", done
    assert done["progress"] == 100
    response = api.get(f"/v1/videos/{video['id']}/content")
    assert response.headers["content-type"] == "video/mp4"
    return response.content


def test_prompt_is_the_first_action_on_a_reference(
    api: LocalClient, model: WorldModel, image: np.ndarray, png: bytes
) -> None:
    fields = {"prompt": "the red ball moves left", "num_frames": "20", "seed": "3", "size": "32x32"}
    fields["actions"] = json.dumps([{"keys": ["left"]}])
    response = api.post("/v1/videos", data=fields, files={"input_reference": ("a.png", png)})
    assert response.status_code == 200, response.text
    video = response.json()
    assert (video["object"], video["seconds"], video["num_frames"], video["fps"]) == ("video", "2.5", 20, 8)
    session = model.session(seed=3)
    session.reset(image)
    # Three rounds hold twenty frames; the last one has no action of its own: time passes.
    rounds = [session.step(action).frames for action in ("the red ball moves left", {"keys": ["left"]}, None)]
    assert_same_film(film_of(api, video), np.concatenate(rounds)[:20])


def test_prompt_describes_the_first_frame_without_reference(api: LocalClient, model: WorldModel) -> None:
    video = ask(api, {"prompt": "a red ball", "actions": ["the red ball moves left", None], "seed": 5})
    session = model.session(seed=5)
    session.reset(text="a red ball")
    rounds = [session.step(action).frames for action in ("the red ball moves left", None)]
    assert_same_film(film_of(api, video), np.concatenate(rounds))


def test_forms_accept_bracketed_lists(api: LocalClient) -> None:
    fields = [
        ("prompt", (None, "a red ball")),
        ("actions[]", (None, "the red ball moves left")),
        ("actions[]", (None, "the blue box jumps")),
    ]
    assert api.post("/v1/videos", files=fields).json()["num_frames"] == 16
    twice = [*fields, fields[0]]
    assert error_of(api.post("/v1/videos", files=twice), 400)["code"] == "invalid_input"
    assert error_of(api.post("/v1/videos", data={"prompt": "a red ball"}), 415)  # a form of another kind


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "'prompt'"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "a ball", "size": "720x1280"}, "32x32"),
        ({"prompt": "a ball", "fps": 24}, "24"),
        ({"prompt": "a ball", "seconds": "4", "num_frames": 8}, "num_frames"),
        ({"prompt": "a ball", "num_frames": 1025}, "1 to 1024"),
        ({"prompt": "a ball", "seconds": "0"}, "1 to 1024"),
        ({"prompt": "a ball", "seconds": "four"}, "seconds"),
        ({"prompt": "a ball", "actions": ["wait"] * 3, "num_frames": 16}, "3 actions"),
        ({"prompt": "a ball", "actions": [{"keys": ["jump"]}]}, "jump"),
        ({"prompt": "a ball", "actions": [{"path": "x"}]}, "path"),
        ({"prompt": "a ball", "actions": "wait"}, "JSON list"),
        ({"prompt": "a ball", "lora": "/tmp/x"}, "'lora'"),
        ({"prompt": "a ball", "input_reference": "http://localhost/x.png"}, "input_reference"),
    ],
)
def test_invalid_requests_are_rejected_before_queueing(
    api: LocalClient, body: dict[str, Any], named: str
) -> None:
    assert named in error_of(api.post("/v1/videos", json=body), 400)["message"]
    assert api.get("/v1/videos").json()["data"] == []


def test_every_length_and_size_that_is_listed_works_and_no_other(model: WorldModel, tmp_path: Path) -> None:
    with local(model, tmp_path, max_video_frames=20) as api:
        (listed,) = api.get("/v1/models").json()["data"]
        assert (listed["size"], listed["fps"], listed["chunk_frames"]) == ("32x32", 8, 8)
        assert listed["max_seconds"] == 2.5
        lengths = {"0.125": 1, 0.125: 1, "1": 8, 1: 8, "1.1": 9, "2.5": 20, listed["max_seconds"]: 20}
        for seconds, frames in lengths.items():
            video = ask(api, {"prompt": "a ball", "seconds": seconds, "num_inference_steps": 1})
            assert video["num_frames"] == frames == round(8 * float(video["seconds"])), seconds
            assert len(decoded(film_of(api, video))) == frames
        for size in (listed["size"], "32X32", "auto", None):
            ask(api, {"prompt": "a ball", "size": size, "num_frames": 1, "num_inference_steps": 1})
        for seconds in ("2.6", 3, "٣", "0", "0.05", "-1", "1e3", "auto", "", "12345", True, [1]):
            assert_one_sentence(api.post("/v1/videos", json={"prompt": "a ball", "seconds": seconds}))
        for size in ("32x16", "64x64", "0x0", "32", "32x", "032x32", "square", "1280x720", 32, ""):
            for path in ("/v1/videos", "/v1/images/generations"):
                assert_one_sentence(api.post(path, json={"prompt": "a ball", "size": size}))


def assert_one_sentence(response: Any) -> None:
    message = error_of(response, 400)["message"]
    assert message.endswith(".") or "invalid" in message, message
    assert not any(part in message for part in ("\n", "^", "pattern")) and len(message) < 200


def test_progress_and_queue_position(api: LocalClient) -> None:
    video = ask(api, {"prompt": "a red ball", "num_frames": 32, "num_inference_steps": 32})
    second = ask(api, {"prompt": "a blue box"})
    third = ask(api, {"prompt": "a blue box"})
    assert [each["queue_position"] for each in (second, third)] == [1, 2]
    assert error_of(api.get(f"/v1/videos/{video['id']}/content"), 409)["code"] == "conflict"
    seen: list[int] = []
    while (now := api.get(f"/v1/videos/{video['id']}").json())["status"] != "completed":
        assert now["status"] in ("queued", "in_progress")
        seen.append(now["progress"])
        time.sleep(0.005)
    assert seen == sorted(seen)
    assert len(set(seen)) > 3
    assert max(seen) < 100
    assert now["inference_time_s"] > 0
    assert now["completed_at"] >= now["created_at"]
    assert wait_for(api, third["id"])["queue_position"] is None


def test_content_ranges_and_variants(api: LocalClient) -> None:
    video = ask(api, {"prompt": "a red ball", "num_frames": 20})
    film, path = film_of(api, video), f"/v1/videos/{video['id']}/content"
    part = api.get(path, headers={"range": "bytes=4-11"})
    assert (part.status_code, part.content) == (206, film[4:12])
    assert part.headers["content-range"] == f"bytes 4-11/{len(film)}"
    outside = api.get(path, headers={"range": "bytes=999999999-"})
    assert error_of(outside, 416)["code"] == "invalid_range"
    assert outside.headers["content-range"] == f"bytes */{len(film)}"
    assert error_of(api.get(path, headers={"range": "pages=1"}), 400)["type"] == "invalid_request_error"
    tag = part.headers["etag"]
    known = api.get(path, headers={"if-none-match": f'"other", {tag}'})
    assert (known.status_code, known.content, known.headers["etag"]) == (304, b"", tag)
    assert api.get(path, headers={"if-none-match": '"other"'}).content == film
    assert decoded(film).shape[1:3] == (256, 256)  # 32 x 32 pixels, enlarged for players
    thumbnail = api.get(path, params={"variant": "thumbnail"})
    assert Image.open(io.BytesIO(thumbnail.content)).size == (32, 32)
    sheet = api.get(path, params={"variant": "spritesheet"})
    assert Image.open(io.BytesIO(sheet.content)).size == (128, 128)
    assert error_of(api.get(path, params={"variant": "../../etc/passwd"}), 400)


def test_deleting_stops_generation_within_a_step(api: LocalClient, monkeypatch: pytest.MonkeyPatch) -> None:
    app: Any = api.app
    denoiser = app.state.context.models.first.denoising
    stop, steps_at = VideoJobs._stop, list[int]()

    async def stop_at(job: VideoJob) -> None:
        steps_at.append(denoiser.occupancy.steps)
        await stop(job)

    monkeypatch.setattr(VideoJobs, "_stop", staticmethod(stop_at))
    running, queued = ask(api, FOREVER), ask(api, FOREVER)
    while api.get(f"/v1/videos/{running['id']}").json()["progress"] < 1:
        time.sleep(0.01)
    assert api.delete(f"/v1/videos/{queued['id']}").json()["deleted"] is True
    gone = api.delete(f"/v1/videos/{running['id']}")
    assert gone.json() == {"id": running["id"], "object": "video.deleted", "deleted": True}
    time.sleep(0.5)
    assert denoiser.occupancy.steps - steps_at[0] <= 1  # the one that ran
    assert error_of(api.get(f"/v1/videos/{running['id']}"), 404)
    assert list(app.state.context.jobs.storage.folder.glob(f"*{running['id']}*")) == []


def test_progress_is_sent_as_events_until_the_video_has_finished(api: LocalClient) -> None:
    video = ask(api, {"prompt": "a red ball", "num_frames": 64, "num_inference_steps": 64})
    with api.stream("GET", f"/v1/videos/{video['id']}/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        sent = [
            json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line.startswith("data")
        ]
    assert {each["id"] for each in sent} == {video["id"]}
    assert [each["progress"] for each in sent] == sorted({each["progress"] for each in sent})
    assert (sent[-1]["status"], sent[-1]["progress"]) == ("completed", 100)
    assert len(sent) >= 2
    assert error_of(api.get("/v1/videos/video_none/events"), 404)


def test_full_queue_is_answered_with_retry_after(api: LocalClient) -> None:
    videos = [ask(api, FOREVER) for _ in range(3)]  # one runs, two wait
    refused = api.post("/v1/videos", json=FOREVER)
    assert error_of(refused, 429)["code"] == "too_many_requests"
    assert int(refused.headers["retry-after"]) >= 1
    assert api.get("/ready").status_code == 503
    assert api.get("/ready").json() == {"status": "full"}
    for video in videos:
        api.delete(f"/v1/videos/{video['id']}")
    time.sleep(COUNT_S)
    assert api.get("/ready").json() == {"status": "ok"}


def test_idempotency_key_returns_the_same_video(api: LocalClient, png: bytes) -> None:
    body = {"prompt": "a red ball", "num_frames": 8}
    first = ask(api, body, **{"Idempotency-Key": "one"})
    assert ask(api, body, **{"Idempotency-Key": "one"})["id"] == first["id"]
    assert ask(api, body, **{"Idempotency-Key": "two"})["id"] != first["id"]
    wait_for(api, first["id"])
    assert ask(api, body, **{"Idempotency-Key": "one"})["id"] == first["id"]
    other = api.post("/v1/videos", json={**body, "seed": 1}, headers={"Idempotency-Key": "one"})
    assert error_of(other, 409)["code"] == "idempotency_key_reused"
    upload = {"input_reference": ("x", png)}
    other = api.post("/v1/videos", data=body, files=upload, headers={"Idempotency-Key": "one"})
    assert error_of(other, 409)["code"] == "idempotency_key_reused"


def test_videos_are_paginated_per_key(model: WorldModel, tmp_path: Path) -> None:
    mine, other = map(bearer, KEYS)
    with local(model, tmp_path, keys=Keys(KEYS), max_running_jobs=1) as api:
        names = [ask(api, {"prompt": "a red ball"}, **mine)["id"] for _ in range(5)]
        newest = api.get("/v1/videos", params={"limit": 2}, headers=mine).json()
        assert [each["id"] for each in newest["data"]] == [names[4], names[3]]
        assert (newest["first_id"], newest["last_id"], newest["has_more"]) == (names[4], names[3], True)
        rest = api.get("/v1/videos", params={"after": names[3]}, headers=mine).json()
        assert [each["id"] for each in rest["data"]] == names[2::-1]
        assert rest["has_more"] is False
        oldest = api.get("/v1/videos", params={"order": "asc", "limit": 1}, headers=mine).json()
        assert [each["id"] for each in oldest["data"]] == names[:1]
        assert error_of(api.get("/v1/videos", params={"limit": 0}, headers=mine), 400)

        assert api.get("/v1/videos", headers=other).json()["data"] == []
        assert error_of(api.get("/v1/videos", params={"after": names[0]}, headers=other), 404)
        for method, verb in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            assert error_of(api.request(method, f"/v1/videos/{names[0]}{verb}", headers=other), 404)


def test_job_above_its_deadline_fails(model: WorldModel, tmp_path: Path) -> None:
    with local(model, tmp_path, job_deadline_s=0.3, video_lifetime_s=0) as api:
        failed = wait_for(api, ask(api, FOREVER)["id"])
        assert failed["error"]["code"] == "deadline_exceeded"
        assert failed["progress"] < 100
        assert error_of(api.get(f"/v1/videos/{failed['id']}/content"), 409)
        assert 'worldmodel_jobs_total{outcome="failed"} 1.0' in api.get("/metrics").text
        app: Any = api.app
        api.portal.call(app.state.context.jobs.sweep)  # type: ignore[union-attr]
        assert error_of(api.get(f"/v1/videos/{failed['id']}"), 404)


def test_storage_failure_leaves_no_partial_files(model: WorldModel, tmp_path: Path) -> None:
    """A disk that is full, as a folder that takes no more files, delays the video until it takes them."""
    with local(model, tmp_path) as api:
        app: Any = api.app
        storage = app.state.context.jobs.storage
        video = ask(api, {"prompt": "a red ball", "num_frames": 64})
        blocked = storage.path(video["id"], "spritesheet")
        blocked.mkdir()
        (blocked / "x").touch()
        until = time.monotonic() + 120
        while not storage.path(video["id"], "thumbnail").exists():  # stored before it
            assert time.monotonic() < until
            time.sleep(0.1)
        assert api.get(f"/v1/videos/{video['id']}").json()["status"] == "in_progress"
        assert error_of(api.get(f"/v1/videos/{video['id']}/content"), 409)
        (blocked / "x").unlink()
        blocked.rmdir()
        while api.get(f"/v1/videos/{video['id']}").json()["status"] == "in_progress":
            assert time.monotonic() < until
            time.sleep(0.5)
        assert api.get(f"/v1/videos/{video['id']}/content").status_code == 200
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".writing-")]


def test_a_reference_may_come_in_chunks_and_without_a_type(api: LocalClient, png: bytes) -> None:
    """A form whose file has neither content type nor length, of a request without length."""
    parts = [
        b'--frontier\r\ncontent-disposition: form-data; name="prompt"\r\n\r\nthe red ball moves left\r\n',
        b'--frontier\r\ncontent-disposition: form-data; name="input_reference"; filename="a.png"\r\n\r\n',
        png,
        b"\r\n--frontier--\r\n",
    ]
    headers = {"content-type": "multipart/form-data; boundary=frontier"}
    response = api.post("/v1/videos", content=iter(parts), headers=headers)
    assert response.status_code == 200, response.text
    video = response.json()
    assert len(decoded(film_of(api, video))) == video["num_frames"]
    assert "/" not in video["model"], "no path of the host"
