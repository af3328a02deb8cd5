"""Examination of sources: effects, repeated and shifted actions, broken episodes, what a split shares."""

import json
import re
import shutil
import tarfile
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from moving_square import SPECS, examined, moving, stored
from PIL import Image
from pyarrow import parquet

from worldmodel.actions import Action, Camera, Pose
from worldmodel.cli import main
from worldmodel.config import ActionSpec, DataConfig, SourceConfig, WorldModelConfig
from worldmodel.data import examiner
from worldmodel.data.sources import open_source
from worldmodel.errors import ConfigError, InputError
from worldmodel.recording.clip_table import ClipTableStore
from worldmodel.recording.episode import RecordedEpisode, RecordingFormat
from worldmodel.recording.lerobot import LeRobotStore
from worldmodel.worlds import get_world


def test_effects_are_counted_and_what_was_never_seen_is_named(tmp_path: Path) -> None:
    episodes = [moving(seed) for seed in range(4)]
    found = examined(stored(tmp_path / "set", episodes))
    assert (found.fps, found.lengths, found.broken) == (10, [40] * 4, [])
    assert (found.repeated, found.lag, found.unseen) == (
        1,
        0,
        ["jump", "rewards", "ends of episodes"],
    )
    for name in ("left", "right"):
        true = sum(
            int((action.keys == (name,)) and (before != after).any())
            for episode in episodes
            for action, before, after in zip(
                episode.actions, episode.cameras["render"], episode.cameras["render"][1:], strict=False
            )
        )
        held = sum(action.keys == (name,) for episode in episodes for action in episode.actions)
        assert (found.effects[name].count, found.effects[name].changed) == (held, true)
        assert true < held  # at the edge nothing moves


def test_rewards_and_ends_are_counted(tmp_path: Path) -> None:
    rewards = np.zeros(40, np.float32)
    rewards[[7, 39]] = 1.0
    ended = replace(moving(0), rewards=rewards, terminated=True, truncated=False)
    found = examined(stored(tmp_path / "set", [ended, moving(1)]))
    assert (found.outcomes, found.rewards, found.ends, found.unseen) == (80, 2, 1, ["jump"])
    # As in datasets of others, the end is on the last row, which no frame follows.
    folder = stored(tmp_path / "others", [moving(0), moving(1)])
    path = folder / "data/chunk-000/file-000.parquet"
    rows = parquet.read_table(path)
    listed = rows.to_pylist()
    listed[40]["next.terminated"] = True
    parquet.write_table(pa.Table.from_pylist(listed, rows.schema), path)
    assert "ends of episodes" in examined(str(folder)).unseen


def test_actions_of_many_frames_are_examined(tmp_path: Path) -> None:
    for format in ("clips", "lerobot"):
        path = get_world("shapes").record(tmp_path / format, 2, rounds=3, format=format)
        found = examined(str(path))
        assert (found.lengths, found.broken) == ([3, 3], [])
        texts = {name: effect.count for name, effect in found.effects.items() if name.startswith('"')}
        assert sum(texts.values()) == 6


def test_mouse_camera_and_texts_are_counted_by_what_they_do() -> None:
    mouse = tuple(ActionSpec(name, "mouse") for name in ("yaw", "pitch"))
    for moved, found in (
        ((0.5, 0.0), ["mouse right"]),
        ((-0.5, 0.25), ["mouse left", "mouse down"]),
        ((0.0, -1.0), ["mouse up"]),
        ((0.0, 0.0), ["mouse still"]),
        (None, ["mouse still"]),
    ):
        assert examiner.labels(Action(mouse=moved), mouse) == found
    half = 0.5**0.5
    for pose, found in (
        (Pose((0.1, 0.0, -2.0)), ["camera moves -z"]),
        (Pose(rotation=(0.0, half, 0.0, half)), ["camera turns about +y"]),
        (Pose(rotation=(0.0, half, 0.0, -half)), ["camera turns about -y"]),
        (Pose(), ["camera still"]),
    ):
        assert examiner.labels(Action(camera=Camera("velocity", pose)), ()) == found
    assert examiner.labels(Action("go"), ()) == []
    assert examiner.labels(Action(), ()) == ["(no action)"]
    texts = {f"act {i}": examiner.Effects(i + 1, i) for i in range(examiner.MAX_TEXTS + 2)}
    counted = examiner.most_frequent(texts)
    assert len(counted) == examiner.MAX_TEXTS + 1 and '"act 2"' in counted and '"act 1"' not in counted
    assert counted["(2 other texts)"] == examiner.Effects(3, 1)


def test_directions_that_were_never_seen_are_named(tmp_path: Path) -> None:
    specs = tuple(ActionSpec(name, "mouse", low=-1, high=1, rate=10) for name in ("yaw", "pitch"))
    numbers = np.array([[0.5, 0], [-0.5, 0], [0, 0]], np.float32)
    actions = tuple(Action.of_numbers(specs, row) for row in numbers)
    frames = np.zeros((4, 64, 64, 3), np.uint8)
    store = LeRobotStore(tmp_path / "set", RecordingFormat(10, specs, {}))
    store.write(RecordedEpisode({"render": frames}, actions, numbers, np.ones(3, np.float32), True))
    store.finish()
    found = examined(str(tmp_path / "set"))
    assert found.unseen == ["mouse up", "mouse down"]
    assert [found.effects[f"mouse {way}"].count for way in ("left", "right", "still")] == [1, 1, 1]
    # A camera has no spec; a recording that somebody added motions to has its column.
    path = get_world("shapes").record(tmp_path / "clips", 1, rounds=2)
    row = json.loads(path.read_text())
    ahead = {"mode": "velocity", "data": {"translation": [0, 0, 1]}}
    path.write_text(json.dumps(row | {"camera": [ahead, ahead]}))
    found = examined(str(path))
    assert found.effects["camera moves +z"].count == 2
    assert {"camera moves -z", "camera turns about +x"} < {*found.unseen}


@pytest.mark.parametrize(("repeat", "late"), [(1, 0), (3, 0), (1, 2)])
def test_repeated_and_shifted_actions_are_found(tmp_path: Path, repeat: int, late: int) -> None:
    folder = stored(tmp_path / "set", [moving(seed, repeat, late) for seed in range(4)])
    found = examined(str(folder))
    assert (found.repeated, found.lag) == (repeat, late)


def test_equal_lengths_shares_of_actions_and_moving_pictures_are_said() -> None:
    effects = {"flap": examiner.Effects(30, 30), "glide": examiner.Effects(220, 220)}
    scrolling = examiner.Report(15, examined=5, lengths=[50] * 5, effects=effects).as_text()
    assert "50 in all" in scrolling and "--twins" in scrolling
    assert re.search(r"flap +30 times, +12\.0%", scrolling) and re.search(
        r"glide +220 times, +88\.0%", scrolling
    )
    still = {"flap": examiner.Effects(30, 30), "glide": examiner.Effects(220, 100)}
    standing = examiner.Report(15, examined=5, lengths=[50, 50, 50, 50, 40], effects=still).as_text()
    assert "in all" not in standing and "--twins" not in standing


def test_the_command_names_broken_episodes_and_draws_a_sheet(tmp_path: Path, capsys: Any) -> None:
    folder = stored(tmp_path / "set", [moving(seed) for seed in range(3)])
    path = folder / "data/chunk-000/file-000.parquet"
    rows = parquet.read_table(path)
    listed = rows.to_pylist()
    listed[3]["action"] = [float("nan")] * 3
    parquet.write_table(pa.Table.from_pylist(listed, rows.schema), path)
    sheet = tmp_path / "sheet.png"
    assert main(["data", "check", str(folder), "--sheet", str(sheet), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["broken"]) == 1 and "not a finite number" in found["broken"][0]
    assert found["lengths"] == [40, 40] and Image.open(sheet).width > 8 * 128
    assert main(["data", "check", str(folder), "--sheet", str(sheet)]) == 0
    assert "never seen, so it cannot be learned: jump" in capsys.readouterr().out
    assert main(["data", "check", str(tmp_path)]) == 2


def test_a_sheet_shows_whole_frames_of_the_whole_episode(tmp_path: Path) -> None:
    """A wide frame keeps its aspect, and the last of eight columns is the last frame."""
    episode = moving(0)
    frames = np.ascontiguousarray(episode.cameras["render"][:, :32])
    frames[-1] = (255, 0, 255)
    folder = stored(tmp_path / "set", [replace(episode, cameras={"render": frames})])
    sheet = np.asarray(examiner.draw_sheet(examiner.open_examined(str(folder))))
    rows, columns = np.nonzero((np.abs(sheet.astype(int) - (255, 0, 255)) < 40).all(-1))
    assert columns.min() > sheet.shape[1] * 7 // 8 - 8
    assert (np.ptp(columns) + 1, np.ptp(rows) + 1) == (128, 64)


def test_a_layout_is_held_out_whole(tmp_path: Path) -> None:
    starts = [4, 24, 44]
    episodes = [moving(seed, start=starts[seed % 3]) for seed in range(9)]
    folder = stored(tmp_path / "set", [*episodes, episodes[0]])
    opened = examiner.open_examined(str(folder))
    held, counts = examiner.split(opened, 0.2, "layout", seed=1)
    assert {starts[index % 3] for index in held} == {starts[held[0] % 3]} and len(held) >= 3
    assert counts["pairs"] == 40 * len(held) and counts["near"] >= counts["exact"]
    twin = next(seed for seed in range(50) if 0 in examiner.split(opened, 0.05, "episode", seed)[0])
    held, counts = examiner.split(opened, 0.05, "episode", twin)
    assert held == [0] and counts["near"] == counts["pairs"] == 40  # episode 9 is the same
    for share, by in ((0, "episode"), (0.5, "colour")):
        with pytest.raises(InputError, match="episode or layout"):
            examiner.split(opened, share, by)
    with pytest.raises(InputError, match="none would be left"):
        examiner.split(examiner.open_examined(str(stored(tmp_path / "one", episodes[:1]))), 0.5)


def test_frames_are_not_kept_to_compare_them(tmp_path: Path) -> None:
    opened = examiner.open_examined(str(stored(tmp_path / "set", [moving(seed) for seed in range(12)])))
    examiner.split(opened)  # imports, and opens the file
    tracemalloc.start()
    try:
        examiner.split(opened)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 12 * 40 * 64**2 * 3 / 2  # half of the frames


def test_a_table_is_divided_in_two(tmp_path: Path) -> None:
    store = ClipTableStore(tmp_path, RecordingFormat(10, SPECS, {}))
    for seed in range(5):
        store.write(moving(seed, steps=6))
    table = tmp_path / "clips.jsonl"
    split = ["data", "split", str(table), "--share", "0.4"]
    assert main(split) == 0
    parts = [(tmp_path / f"clips-{part}.jsonl") for part in ("train", "held")]
    rows = [[json.loads(line)["seed"] for line in part.read_text().splitlines()] for part in parts]
    assert [len(each) for each in rows] == [3, 2] and sorted([*rows[0], *rows[1]]) == [0, 1, 2, 3, 4]
    assert [examiner.open_examined(str(part)).size for part in parts] == [3, 2]
    assert main(split) == 2 and main([*split, "--force"]) == 0


def test_a_folder_without_a_table_is_divided_in_two(tmp_path: Path) -> None:
    for seed in range(5):
        folder = tmp_path / "set" / f"run{seed}"
        folder.mkdir(parents=True)
        for number, frame in enumerate(moving(seed, steps=6).cameras["render"]):
            Image.fromarray(frame).save(folder / f"{number}.png")
    assert main(["data", "split", str(tmp_path / "set"), "--share", "0.4"]) == 0
    parts = [str(tmp_path / f"set-{part}.jsonl") for part in ("train", "held")]
    assert [examiner.open_examined(part).size for part in parts] == [3, 2]
    assert sorted(path.name for path in (tmp_path / "set").iterdir()) == [f"run{seed}" for seed in range(5)]


def test_a_source_reads_its_split(tmp_path: Path) -> None:
    folder = stored(tmp_path / "set", [moving(seed, steps=6) for seed in range(5)])
    model = WorldModelConfig(fps=20, chunk_frames=2)

    def size(split: str) -> int | None:
        data = DataConfig({"mine": SourceConfig("lerobot", str(folder), split=split)})
        return open_source("mine", data, model).size

    with pytest.raises(ConfigError, match="no split"):
        size("held-out")
    assert main(["data", "split", str(folder), "--share", "0.4"]) == 0
    assert [size(split) for split in ("train", "held-out", "all")] == [3, 2, 5]
    with pytest.raises(ConfigError, match="'test'"):
        size("test")
    copied = tmp_path / "copy"
    shutil.copytree(folder, copied)
    assert json.loads((copied / "meta" / "split.json").read_text())["by"] == "episode"


def test_pictures_of_one_layout_may_differ_by_the_losses_of_a_video() -> None:
    """Rounded colours, as a hash needs them, fall apart where one lies between two steps."""
    rng, layouts = np.random.default_rng(0), examiner.Layouts()
    board = rng.integers(0, 256, (16, 16, 3)).repeat(4, 0).repeat(4, 1)
    noisy = [np.clip(board + rng.normal(0, 6, board.shape), 0, 255).astype(np.uint8) for _ in range(8)]
    assert {layouts.number(frame) for frame in noisy} == {0}
    moved = board.copy()
    moved[8:16, 8:16] = 255 - moved[8:16, 8:16]
    assert layouts.number(moved.astype(np.uint8)) == 1
    assert layouts.number(noisy[0]) == 0


def test_three_lines_are_said_before_a_training(tmp_path: Path) -> None:
    episodes = [moving(seed, late=2) for seed in range(6)]
    data = DataConfig(
        {
            "mine": SourceConfig("lerobot", str(stored(tmp_path / "set", episodes))),
            "world": SourceConfig("shapes"),
            "none": SourceConfig("lerobot", "user/name-on-the-hub"),
            "held": SourceConfig("lerobot", str(tmp_path / "set"), weight=0.0),
        }
    )
    lines = list(examiner.glance(data))
    assert len(lines) == 3 and all(line.startswith("mine: ") for line in lines)
    assert "6 episodes" in lines[0] and "2 frames early" in lines[1] and "lag" in lines[2]


def test_sources_of_every_kind_are_examined(shard: Path, recorded: Path, tmp_path: Path) -> None:
    parquet.write_table(
        pa.table({"video": [clip.read_bytes() for clip in sorted(recorded.glob("*.mp4"))], "extra": [1] * 6}),
        tmp_path / "train.parquet",
    )
    for argument in (recorded / "clips.jsonl", f"webdataset:{shard}", f"huggingface:{tmp_path}"):
        found = examined(argument)
        assert (found.examined, found.broken) == (6, []), argument
        assert [finding for finding in found.faults if finding.kind != "same_text"] == []
    unread = [finding for finding in examined(f"huggingface:{tmp_path}").findings if finding.kind == "unread"]
    assert "extra" in unread[0].text


def test_some_episodes_are_read_and_all_of_two_sources_compared(tmp_path: Path, capsys: Any) -> None:
    first = stored(tmp_path / "a", [moving(seed) for seed in range(6)])
    second = stored(tmp_path / "b", [moving(seed) for seed in (9, 3, 10)])
    assert examined(first, 3).examined == 3
    sheet = ["--sheet", str(tmp_path / "sheet.png"), "--json"]
    assert main(["data", "check", str(first), str(second), *sheet]) == 0
    found = json.loads(capsys.readouterr().out)[str(second)]
    leaks = [finding for finding in found["findings"] if finding["kind"] == "leak"]
    assert [leak["episodes"] for leak in leaks] == [["b episode 1"]] and leaks[0]["fault"]


def test_faults_of_some_episodes_are_named_with_them(tmp_path: Path) -> None:
    """One of each family: pictures, the places of actions, numbers, copies and broken episodes."""

    def seen(episode: RecordedEpisode, change: Any) -> RecordedEpisode:
        return replace(episode, cameras={"render": np.ascontiguousarray(change(episode.cameras["render"]))})

    clean = [moving(seed, steps=60) for seed in range(20)]
    noise = np.random.default_rng(0).integers(0, 256, (61, 64, 64, 3), np.uint8)
    changes: dict[int, tuple[str, Any]] = {
        0: ("black", np.zeros_like),
        1: ("noise", lambda frames: noise),
        2: ("still", lambda frames: frames[:1].repeat(61, axis=0)),
        3: ("reversed", lambda frames: frames[::-1]),
        4: ("inverted", lambda frames: 255 - frames),
    }
    episodes = [seen(each, changes[i][1]) if i in changes else each for i, each in enumerate(clean)]
    found = examined(stored(tmp_path / "set", [*episodes, clean[7]]))
    named = {finding.kind: finding.episodes for finding in found.faults}
    for number, (kind, _) in changes.items():
        assert named[kind] == (f"set episode {number}",), kind
    assert named["copies" if "copies" in named else "near_copies"] == ("set episode 20",)
    assert examined(stored(tmp_path / "clean", clean)).faults == []


def test_published_tables_are_found_by_their_columns(recorded: Path, tmp_path: Path) -> None:
    clips = sorted(recorded.glob("*.mp4"))
    (tmp_path / "videos" / "pages").mkdir(parents=True)
    for number, clip in enumerate(clips):
        shutil.copy(clip, tmp_path / "videos" / "pages" / f"{number}.mp4")
        shutil.copy(clip, tmp_path / "videos" / f"{number}.mp4")
    numbers = range(len(clips))
    tables = {
        "webvid": [f"{i},https://x/{i}.mp4,pages,words {i}" for i in numbers],
        "openvid": [f"{i}.mp4,words {i},5,3" for i in numbers],
        "sekai": [f"{i}.mp4,words {i}" for i in numbers],
    }
    headers = {
        "webvid": "videoid,contentUrl,page_dir,name",
        "openvid": "video,caption,aesthetic score,motion score",
        "sekai": "videoFile,caption",
    }
    for name, rows in tables.items():
        path = tmp_path / f"{name}.csv"
        path.write_text("\n".join([headers[name], *rows]) + "\n")
        opened = examiner.open_examined(str(path))
        assert (opened.size, opened.config.preset) == (len(clips), "" if name == "sekai" else name)
        assert examiner.examine(opened).broken == []
    for argument in (tmp_path / "shards" / "a.tar", tmp_path / "shards"):
        if argument.suffix:
            argument.parent.mkdir()
            with tarfile.open(argument, "w") as tar:
                for clip in clips:
                    tar.add(clip, clip.name)
        assert examined(argument).examined == len(clips)
