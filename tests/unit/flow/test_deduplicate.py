"""Clips that show the same as earlier ones are left out of the log, whatever the order of the work."""

import io
import json
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pytest
from flow_stages import flow_config
from PIL import Image

from worldmodel import media
from worldmodel.config.flow import FlowConfig
from worldmodel.errors import ConfigError
from worldmodel.flow.catalog.duplicates import NEAR
from worldmodel.flow.log.log import Log
from worldmodel.flow.log.status import StatusReader
from worldmodel.flow.stages import deduplicate, find_stage
from worldmodel.flow.work.run import run_flow


def scene(seed: int, side: int = 160) -> np.ndarray:
    """Two seconds of a camera that moves over a texture, `[16, side, side, 3]`."""
    ground = np.random.default_rng(seed).integers(0, 255, (12, 20, 3), dtype=np.uint8)
    image = Image.fromarray(ground).resize((320, 192), Image.Resampling.BICUBIC)
    crops = [image.crop((4 * i, 8, 4 * i + 160, 168)).resize((side, side)) for i in range(16)]
    return np.stack([np.asarray(crop) for crop in crops])


def distances(videos: list[bytes]) -> np.ndarray:
    """Bits that differ between the fingerprints of every two videos."""
    chosen = find_stage("deduplicate")
    columns = {"duration_s": pa.float64(), "start_s": pa.float64(), "end_s": pa.float64()}
    empty = {name: pa.nulls(len(videos), kind) for name, kind in columns.items()}
    names = [str(number) for number in range(len(videos))]
    batch = pa.record_batch({"clip": names, "video": pa.array(videos, pa.large_binary()), **empty})
    result = chosen.checked(batch, chosen.make()(batch))
    bits = [int(text, 16) for text in result.column("fingerprint").to_pylist()]
    return np.array([[(one ^ other).bit_count() for other in bits] for one in bits])


def test_copies_are_near_and_other_clips_are_not(tmp_path: Path) -> None:
    def video(name: str, frames: np.ndarray, fps: float = 8) -> bytes:
        media.write_video(frames, tmp_path / name, fps, scale=1)
        return (tmp_path / name).read_bytes()

    originals = [video(f"{seed}.mp4", scene(seed)) for seed in range(3)]
    for seed, original in enumerate(originals):
        smaller = video("smaller.mp4", scene(seed, 96))
        larger = video("larger.mp4", scene(seed, 224))
        found = distances([original, original, smaller, larger])
        assert found[0, 1] == 0
        assert found.max() <= NEAR
    apart = distances(originals)
    assert apart[~np.eye(3, dtype=bool)].min() > 60
    backwards = distances([originals[0], video("backwards.mp4", scene(0)[::-1])])
    assert backwards[0, 1] > 15


class Pipe(io.RawIOBase):
    """A file that cannot be changed where it has been written, so that no header has the length."""

    def __init__(self) -> None:
        self.data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.data += bytes(data)
        return len(data)


def test_few_frames_are_looked_at_whatever_a_header_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, seen = Pipe(), []
    with av.open(pipe, "w", format="webm", options={"live": "1"}) as container:
        stream = container.add_stream("libvpx", rate=8)
        stream.width = stream.height = 160
        for frame in scene(0):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    assert media.probe(bytes(pipe.data), decode=False).duration_s == 2.0  # of its packets
    media.write_video(scene(0), tmp_path / "a.mp4", 8, scale=1)
    shrunk = deduplicate.shrunk
    monkeypatch.setattr(deduplicate, "shrunk", lambda frame: seen.append(1) or shrunk(frame))
    assert distances([bytes(pipe.data), (tmp_path / "a.mp4").read_bytes()])[0, 1] <= NEAR
    assert len(seen) <= 64


def test_parts_with_the_fingerprint_of_their_whole_are_no_copies_of_each_other(tmp_path: Path) -> None:
    texts = [
        f"{bits:064x}" for bits in (2**200 - 1, 2**90 - 1, 2**200 - 1)
    ]  # the last is a copy of the first
    rows = []
    for number, each in enumerate(texts):
        (tmp_path / f"{number}.bin").write_bytes(b"x" * 100)
        rows.append(json.dumps({"address": f"{number}.bin", "text": each}))
    table = tmp_path / "clips.jsonl"
    table.write_text("\n".join(rows))
    stages = {"read": {}, "measure": {}, "given": {}, "halves": {"settings": {"parts": 3}}}
    flow = flow_config(tmp_path / "flow", table, stages, segment_size=4, max_in_flight=16, pack=["text"])
    run_flow(flow)
    assert log_of(flow)[0] == [0, 0, 0, 1, 1, 1]
    with closing(StatusReader(flow)) as reader:
        assert reader.read().stages[-1].dropped == 3


@pytest.mark.parametrize("distance", [-1, 16])
def test_a_distance_that_is_not_searched_is_refused(distance: int) -> None:
    with pytest.raises(ConfigError, match="max_distance"):
        find_stage("deduplicate").make(max_distance=distance)


NUM_CLIPS = 60


def fingerprints() -> list[int]:
    """Of ten different clips, 50 copies of which up to 7 bits differ."""
    rng = np.random.default_rng(0)
    originals = [int.from_bytes(rng.bytes(32)) for _ in range(10)]
    found = []
    for _ in range(NUM_CLIPS):
        flips = rng.choice(256, rng.integers(0, 8), replace=False)
        found.append(originals[rng.integers(10)] ^ sum(1 << int(bit) for bit in flips))
    return found


def expected(max_distance: int) -> list[int]:
    """The clips that are kept, by comparing each with all kept before it."""
    bits, kept = fingerprints(), []
    for number, each in enumerate(bits):
        if all((each ^ bits[other]).bit_count() > max_distance for other in kept):
            kept.append(number)
    return kept


def config(folder: Path, max_distance: int = 6, wait_s: float = 0.0, name: str = "flow") -> FlowConfig:
    table = folder / "clips.jsonl"
    rows = [{"address": f"{n}.bin", "text": f"{bits:064x}"} for n, bits in enumerate(fingerprints())]
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stages = {"given": {"workers": 2, "settings": {"max_distance": max_distance, "wait_s": wait_s}}}
    columns = {"address": "address", "text": "text"}
    return flow_config(
        folder / name, table, stages, segment_size=4, max_in_flight=16, pack=["address"],
        sources={"files": {"path": str(table), "columns": columns}},
    )  # fmt: skip


def log_of(config: FlowConfig) -> tuple[list[int], list[str]]:
    """Numbers of the clips of a log, and the hashes of its segments."""
    log = Log(config.place("log"))
    end = log.end()
    assert end is not None
    numbers = []
    for number in range(end[0]):
        for clip in log.segment(number):
            start, size = clip.parts["json"]
            address = json.loads(Path(clip.file).read_bytes()[start : start + size])["address"]
            numbers.append(int(Path(address).stem))
    indices = [json.loads(log.storage.read(f"{number:06d}.json")) for number in range(end[0])]
    return numbers, [index["sha256"] for index in indices]


@pytest.mark.parametrize("max_distance", [0, 6, 15])
def test_the_first_of_several_copies_is_kept(tmp_path: Path, max_distance: int) -> None:
    flow = config(tmp_path, max_distance)
    run_flow(flow)
    kept, _ = log_of(flow)
    assert kept == expected(max_distance)
    assert len(kept) < NUM_CLIPS
    with closing(StatusReader(flow)) as reader:
        pack = reader.read().stages[-1]
        (verdict,) = reader.verdicts("pack")
    assert (pack.done, pack.dropped, pack.waiting) == (len(kept), NUM_CLIPS - len(kept), 0)
    assert verdict.count == NUM_CLIPS - len(kept)
    assert "shows the same" in verdict.reason
    assert verdict.examples[0]["fields"]["copy_of"]


def test_the_log_depends_neither_on_the_order_of_the_work_nor_on_stops(tmp_path: Path) -> None:
    whole = config(tmp_path)
    run_flow(whole)
    slow = config(tmp_path, wait_s=0.01, name="stopped")
    for limit in (10, 25, 1000):
        stop = threading.Event()
        with closing(StatusReader(slow, create=True)) as reader:

            def watch(
                reader: StatusReader = reader, limit: int = limit, stop: threading.Event = stop
            ) -> None:
                if reader.read().stages[0].done >= limit:
                    stop.set()

            run_flow(slow, watch, stop=stop)
    assert log_of(slow) == log_of(whole)


def test_copies_that_are_added_later_are_dropped_although_no_segment_follows(tmp_path: Path) -> None:
    flow = config(tmp_path)
    run_flow(flow)
    before = log_of(flow)
    with (tmp_path / "clips.jsonl").open("a") as file:
        file.write(json.dumps({"address": "60.bin", "text": f"{fingerprints()[0]:064x}"}) + "\n")
    run_flow(flow)
    assert log_of(flow) == before
    with closing(StatusReader(flow)) as reader:
        pack = reader.read().stages[-1]
    assert (pack.dropped, pack.waiting) == (NUM_CLIPS + 1 - len(before[0]), 0)
