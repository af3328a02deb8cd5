"""The stage fetch with addresses of S3 and of the Hub: the real file systems, and local servers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import huggingface_hub
import pyarrow as pa
import pytest
from hub import DATASET, Hub, serve_hub
from object_store import BUCKET

from worldmodel.config.flow import FlowSourceConfig
from worldmodel.flow.sources import open_listing
from worldmodel.flow.stages import find_stage


def fetch(*addresses: str, **settings: Any) -> list[dict[str, Any]]:
    names = [str(number) for number in range(len(addresses))]
    batch = pa.record_batch({"clip": names, "address": pa.array(addresses, pa.string())})
    stage = find_stage("fetch")
    return stage.checked(batch, stage.make(**settings)(batch)).to_pylist()


@pytest.fixture(scope="module")
def video(counting: Path) -> bytes:
    return counting.read_bytes()


def put(name: str, data: bytes) -> None:
    boto3.client("s3").put_object(Bucket=BUCKET, Key=name, Body=data)


def test_objects_of_s3_and_their_parts_are_fetched(s3: str, video: bytes) -> None:
    put("web/clip.mp4", video)
    put("web/shard.tar", bytes(512) + video + bytes(512))
    part = f"{s3}/web/shard.tar#512+{len(video)}"
    whole, member = fetch(f"{s3}/web/clip.mp4", part)
    assert [whole["video"], member["video"]] == [video, video]
    assert (whole["num_bytes"], whole["media_type"], whole["robots"]) == (
        len(video),
        "video/mp4",
        "not asked",
    )
    assert whole["final_address"] == f"{s3}/web/clip.mp4"


def test_what_s3_does_not_have_is_dropped_by_name(s3: str, video: bytes) -> None:
    put("web/clip.mp4", video)
    put("web/page.mp4", b"<html></html>")
    put("web/empty.mp4", b"")
    bad = {
        f"{s3}/web/gone.mp4": "gone.mp4",
        "s3://no-such-bucket/clip.mp4": "no-such-bucket",
        f"{s3}/web": "folder",
        f"{s3}/web/page.mp4": "web page",
        f"{s3}/web/empty.mp4": "0 bytes",
        f"{s3}/web/clip.mp4#9+{len(video)}": str(9 + len(video)),
    }
    rows = fetch(*bad)
    assert [row["retry"] for row in rows] == [None] * len(bad)
    assert all(name in row["drop"] for name, row in zip(bad.values(), rows, strict=True))
    (large,) = fetch(f"{s3}/web/clip.mp4", max_bytes=100)
    assert "larger" in large["drop"]


def test_a_folder_of_s3_is_listed_and_fetched(s3: str, video: bytes) -> None:
    put("folder/a.mp4", video)
    put("folder/a.txt", b"a clip\n")
    source = FlowSourceConfig("folder", f"{s3}/folder")
    ((clip,),) = open_listing("mine", source, 0)
    assert (clip.address, clip.row) == (f"{s3}/folder/a.mp4", {"text": "a clip"})
    assert fetch(clip.address)[0]["video"] == video


def test_a_store_of_a_setting_is_asked(s3: str, video: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    put("web/clip.mp4", video)
    endpoint = boto3.client("s3").meta.endpoint_url
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    (row,) = fetch(f"{s3}/web/clip.mp4", storage_options={"s3": {"endpoint_url": endpoint}})
    assert row["video"] == video


@pytest.fixture
def hub(video: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Hub, dict[str, Any]]]:
    """A local server, and settings with which it is hf://."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # CI forbids the real one
    with serve_hub({"clip.mp4": video, "shard.tar": bytes(512) + video + bytes(512)}) as server:
        yield server, {"storage_options": {"hf": {"endpoint": server.endpoint, "token": False}}}


def test_files_of_the_hub_and_their_parts_are_fetched(hub: tuple[Hub, dict[str, Any]], video: bytes) -> None:
    repository, (server, settings) = f"hf://datasets/{DATASET}", hub
    rows = fetch(f"{repository}/clip.mp4", f"{repository}/shard.tar#512+{len(video)}", **settings)
    assert [row["video"] for row in rows] == [video, video]
    part = ("shard.tar", f"bytes=512-{511 + len(video)}")
    assert server.reads == [part], "no more than the part is read"
    assert rows[0]["final_address"] == f"{repository}/clip.mp4"
    (gone,) = fetch(f"{repository}/gone.mp4", **settings)
    (large,) = fetch(f"{repository}/clip.mp4", max_bytes=100, **settings)
    assert "gone.mp4" in gone["drop"]
    assert "larger" in large["drop"]
