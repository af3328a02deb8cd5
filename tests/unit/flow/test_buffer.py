"""Buffers of every kind: tar files and Lance datasets, in folders and on S3."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from clip_tables import MODEL
from flow_stages import flow_config
from safetensors.torch import load, save

from worldmodel.config import DataConfig, SourceConfig, StageConfig
from worldmodel.data.loader import batches
from worldmodel.errors import OutputError
from worldmodel.flow.buffer import open_buffer
from worldmodel.flow.buffer.base import Buffer
from worldmodel.flow.errors import FlowError
from worldmodel.flow.log.log import Log
from worldmodel.flow.storage import Storage
from worldmodel.flow.work.run import run_flow
from worldmodel.io import TEMPORARY_PREFIX
from worldmodel.media.encoding import encode_video
from worldmodel.plugins.lance.buffer import LanceBuffer


@pytest.fixture(params=["tar", "tar-s3", "lance", "lance-s3"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty buffer of each kind."""
    kind, _, s3 = request.param.partition("-")
    where = f"{request.getfixturevalue('s3')}/{tmp_path.name}" if s3 else str(tmp_path / "buffer")
    return f"lance:{where}" if kind == "lance" else where


@pytest.fixture
def buffer(address: str) -> Buffer:
    return open_buffer(address)


def rows(*values: bytes | None, first: int = 0, column: str = "latents") -> pa.RecordBatch:
    clips = [f"clip{first + index}" for index in range(len(values))]
    return pa.record_batch({"clip": clips, column: pa.array(values, pa.binary())})


def storage_of(address: str) -> Storage:
    return Storage(address.removeprefix("lance:"))


def test_values_are_read_as_they_were_written(buffer: Buffer) -> None:
    values = [b"one", None, b"", os.urandom(100_000)]
    places = buffer.write("encode", "1-a", rows(*values))
    assert buffer.read(places, "latents") == values
    order = [3, 0, 0, 2]
    assert buffer.read([places[i] for i in order], "latents") == [values[i] for i in order]
    assert buffer.read(places, "absent") == [None] * 4
    assert buffer.read([], "latents") == []


def test_tensors_keep_their_types(buffer: Buffer) -> None:
    tensors = {"target": torch.randn(3, 4).to(torch.bfloat16), "context": torch.randn(2, dtype=torch.float16)}
    place = buffer.write("encode", "1-a", rows(save(tensors)))
    (stored,) = buffer.read(place, "latents")
    assert stored is not None
    loaded = load(stored)
    assert {name: each.dtype for name, each in loaded.items()} == {
        "target": torch.bfloat16,
        "context": torch.float16,
    }
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_only_what_is_recorded_counts_when_a_clip_is_written_twice(buffer: Buffer) -> None:
    recorded = buffer.write("encode", "1-a", rows(b"first" * 1000))
    again = buffer.write("encode", "1-a", rows(b"second" * 1000))
    newer = buffer.write("encode", "2-b", rows(b"third" * 1000))
    assert len({*recorded, *again, *newer}) == 3
    assert buffer.compact([*recorded, *newer], older_than_s=0) > 0
    assert buffer.read([*recorded, *newer], "latents") == [b"first" * 1000, b"third" * 1000]
    with pytest.raises(FlowError):
        buffer.read(again, "latents")


def test_what_a_worker_is_about_to_record_is_not_removed(buffer: Buffer, address: str) -> None:
    places = buffer.write("encode", "1-a", rows(b"a", b"b"))
    before = storage_of(address).files()
    buffer.compact([])
    assert buffer.read(places, "latents") == [b"a", b"b"]
    assert before.keys() <= storage_of(address).files().keys()


@pytest.mark.parametrize("kind", ["tar", "tar-s3"])
def test_files_that_are_not_the_buffers_are_never_removed(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    address = f"{request.getfixturevalue('s3')}/shared" if kind == "tar-s3" else str(tmp_path)
    storage, buffer = Storage(address), open_buffer(address)
    log = "log/b44bbc274f1ab1fa/000000-4da218de.tar"
    others = {"catalog.db", "notes.txt", "mine/films/a.tar", log, f"{'0' * 32}.tar"}
    interrupted = f"encode/1-a/{TEMPORARY_PREFIX}{'0' * 16}.tar"  # of a worker that was killed
    for name in (*others, interrupted):
        storage.write(name, b"content")
    buffer.write("encode", "1-a", rows(b"never recorded"))
    assert buffer.sizes().keys() == {("encode", "1-a")}
    assert buffer.compact([], older_than_s=-60) > 0
    assert storage.files().keys() == others


def test_what_is_written_by_others_is_found(buffer: Buffer, address: str) -> None:
    first = buffer.write("encode", "1-a", rows(b"a"))
    assert buffer.read(first, "latents") == [b"a"]
    other = open_buffer(address)
    second = other.write("encode", "1-a", rows(b"b", first=1))
    third = other.write("encode", "1-a", rows(b"c", first=2, column="masks"))
    other.compact([*first, *second, *third], older_than_s=0)
    assert buffer.read([*second, *first], "latents") == [b"b", b"a"]
    assert buffer.read(third, "masks") == [b"c"]


def test_threads_may_write_at_the_same_time(buffer: Buffer) -> None:
    def write(number: int) -> list[str]:
        return buffer.write("encode", "1-a", rows(*(b"%d" % number,) * 3, first=3 * number))

    with ThreadPoolExecutor(4) as pool:
        places = [place for found in pool.map(write, range(8)) for place in found]
    assert buffer.read(places, "latents") == [b"%d" % (index // 3) for index in range(24)]


def test_writers_that_make_a_dataset_together_lose_no_rows(tmp_path: Path) -> None:
    # Lance repeats a commit that creates a dataset as one that overwrites it.
    buffer = open_buffer(f"lance:{tmp_path}")
    values = (b"0", b"1", b"2", b"3")
    with ThreadPoolExecutor(len(values)) as pool:
        for key in range(60):
            written = [pool.submit(buffer.write, "encode", f"{key}-a", rows(value)) for value in values]
            places = [place for each in written for place in each.result()]
            assert buffer.read(places, "latents") == list(values)


@pytest.mark.parametrize("damage", ["cut off", "missing"])
def test_damage_is_an_error_that_names_the_file(buffer: Buffer, address: str, damage: str) -> None:
    places = buffer.write("encode", "1-a", rows(b"x" * 30_000))
    storage = storage_of(address)
    for name in storage.files():
        if name.endswith((".tar", ".lance")):
            storage.write(name, storage.read(name)[:2000]) if damage == "cut off" else storage.delete(name)
    with pytest.raises(FlowError, match="encode/1-a"):
        open_buffer(address).read(places, "latents")


def test_a_place_of_another_buffer_is_refused(buffer: Buffer) -> None:
    with pytest.raises(FlowError, match="elsewhere"):
        buffer.read([json.dumps({"elsewhere": 1})], "latents")


@contextmanager
def full_disk() -> Iterator[None]:
    """Let no file grow beyond 4 KiB: the limit of the process, which fails as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("kind", ["", "lance:"])
def test_a_full_disk_loses_nothing(tmp_path: Path, kind: str) -> None:
    buffer = open_buffer(f"{kind}{tmp_path / 'buffer'}")
    kept = buffer.write("encode", "1-a", rows(b"kept"))
    with full_disk(), pytest.raises(OutputError, match="buffer"):
        buffer.write("encode", "1-a", rows(os.urandom(300_000)))
    more = buffer.write("encode", "1-a", rows(b"more", first=1))
    assert buffer.read([*kept, *more], "latents") == [b"kept", b"more"]
    buffer.compact([*kept, *more], older_than_s=0)
    assert buffer.read([*kept, *more], "latents") == [b"kept", b"more"]


@pytest.mark.parametrize("kind", ["", pytest.param("lance:", marks=pytest.mark.slow)])  # it tries for 5 s
def test_a_store_that_refuses_is_an_error(s3: str, kind: str) -> None:
    with pytest.raises(OutputError, match="no-such-bucket"):
        open_buffer(f"{kind}s3://no-such-bucket/buffer").write("encode", "1-a", rows(b"a"))


def test_small_fragments_of_lance_are_merged_without_new_places(tmp_path: Path) -> None:
    buffer = LanceBuffer(str(tmp_path))
    places = [buffer.write("encode", "1-a", rows(b"%d" % i, first=i))[0] for i in range(6)]
    buffer.compact(places, older_than_s=0)
    assert len(buffer._newest("encode/1-a").get_fragments()) == 1
    assert buffer.read(places[::-1], "latents") == [b"%d" % i for i in reversed(range(6))]


WRITER = """
import json, sys
import pyarrow as pa
from worldmodel.flow.buffer import open_buffer
for number in range(6):
    clips = [f"{sys.argv[2]}-{number}-{row}" for row in range(4)]
    batch = pa.record_batch({"clip": clips, "latents": pa.array([clip.encode() for clip in clips])})
    print(json.dumps([clips, open_buffer(sys.argv[1]).write("encode", "1-a", batch)]))
"""


@pytest.mark.slow
def test_processes_may_write_at_the_same_time(address: str) -> None:
    command = [sys.executable, "-P", "-c", WRITER, address]
    writers = [
        subprocess.Popen([*command, str(number)], stdout=subprocess.PIPE, text=True) for number in range(3)
    ]
    lines = [json.loads(line) for writer in writers for line in writer.communicate()[0].splitlines()]
    assert len(lines) == 18
    places = {clip: place for line in lines for clip, place in zip(*line, strict=True)}
    stored = open_buffer(address).read(list(places.values()), "latents")
    assert stored == [clip.encode() for clip in places]


def episodes(log: str) -> list[tuple[bytes, str | None]]:
    """Return frames and texts of the first steps that train on a log."""
    data = DataConfig({"web": SourceConfig("flow", log)}, timeout_s=300)
    stage = StageConfig(steps=4, batch_size=2, rounds=1, tasks={"rounds": 1.0})
    with batches(data, MODEL, stage, 5, 0, 0, 1) as loader:
        return [
            (np.concatenate(each.observations).tobytes(), each.actions[0].text)
            for step in loader
            for batch in step
            for each in batch.episodes
        ]


def test_a_flow_on_s3_trains_like_one_in_folders(s3: str, tmp_path: Path) -> None:
    rows = []
    for number in range(5):
        frames = np.full((17, 32, 32, 3), 40 * number, np.uint8)
        (tmp_path / f"{number}.mp4").write_bytes(encode_video(frames, fps=8))
        rows.append({"address": f"{number}.mp4", "text": f"clip {number}"})
    table = tmp_path / "clips.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stages = {"read": {}, "measure": {}}
    local = flow_config(tmp_path / "local", table, stages, segment_size=2)
    places = {name: f"{s3}/flow/{name}" for name in ("buffer", "log")}
    remote = flow_config(tmp_path / "remote", table, stages, segment_size=2, **places)
    for config in (local, remote):
        run_flow(config)
    expected, found = Log(local.place("log")), Log(remote.place("log"))
    assert found.end() == expected.end() == (3, 5)
    for number in range(3):
        assert found.storage.read(f"{number:06d}.json") == expected.storage.read(f"{number:06d}.json")
        assert all(clip.file.startswith(s3) for clip in found.segment(number))
    assert not [path for path in Path(remote.folder).rglob("*") if not path.name.startswith("catalog.db")]
    assert episodes(places["log"]) == episodes(local.place("log"))
