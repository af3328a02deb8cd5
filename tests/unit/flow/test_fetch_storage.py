"""The stage fetch with addresses of S3 and of the Hub: the real file systems, and local servers."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import huggingface_hub
import pyarrow as pa
import pytest
from object_store import BUCKET

from worldmodel.config.flow import FlowSourceConfig
from worldmodel.flow.sources import open_listing
from worldmodel.flow.stages import find_stage

COMMIT = "0" * 39 + "1"


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
        f"{s3}/web/page.mp4": "html",
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


class Hub(BaseHTTPRequestHandler):
    """What of the Hub's HTTP interface reading a file takes."""

    protocol_version = "HTTP/1.1"
    files: dict[str, bytes]
    ranges: list[str]

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path.startswith("/api/datasets/owner/name/tree"):
            entries = self.files.items()
            self._json([{"type": "file", "path": n, "size": len(each), "oid": n} for n, each in entries])
        elif path.startswith("/api/datasets/owner/name"):
            self._json({"id": "owner/name", "sha": COMMIT, "siblings": []})
        else:
            self._file(self.files.get(path.removeprefix("/datasets/owner/name/resolve/").partition("/")[2]))

    def do_HEAD(self) -> None:
        self.do_GET()

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), **{"Content-Type": "application/json"})

    def _file(self, data: bytes | None) -> None:
        if data is None:
            return self._send(404, b"", **{"X-Error-Code": "EntryNotFound"})
        if not (asked := self.headers.get("Range")):
            return self._send(200, data)
        self.ranges.append(asked)
        first, _, last = asked.removeprefix("bytes=").partition("-")
        part = data[int(first) : int(last) + 1 if last else None]
        found = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
        return self._send(206, part, **{"Content-Range": found})

    def _send(self, code: int, data: bytes, **headers: str) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(data)), "X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(video: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """The byte ranges that a local server was asked for, and settings with which it is hf://."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # CI forbids the real one
    files, ranges = {"clip.mp4": video, "shard.tar": bytes(512) + video + bytes(512)}, []
    handler = type("Handler", (Hub,), {"files": files, "ranges": ranges})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    yield ranges, {"storage_options": {"hf": {"endpoint": endpoint, "token": False}}}
    server.shutdown()
    server.server_close()


def test_files_of_the_hub_and_their_parts_are_fetched(
    hub: tuple[list[str], dict[str, Any]], video: bytes
) -> None:
    repository, (ranges, settings) = "hf://datasets/owner/name", hub
    rows = fetch(f"{repository}/clip.mp4", f"{repository}/shard.tar#512+{len(video)}", **settings)
    assert [row["video"] for row in rows] == [video, video]
    assert ranges == [f"bytes=512-{511 + len(video)}"], "no more than the part is read"
    assert rows[0]["final_address"] == f"{repository}/clip.mp4"
    (gone,) = fetch(f"{repository}/gone.mp4", **settings)
    (large,) = fetch(f"{repository}/clip.mp4", max_bytes=100, **settings)
    assert "gone.mp4" in gone["drop"]
    assert "larger" in large["drop"]
