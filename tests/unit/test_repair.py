"""Repaired copies of sources: what is dropped, changed and left, and that the original stays as it was."""

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from moving_square import SPECS, examined, moving, stored
from pyarrow import parquet

from worldmodel import media
from worldmodel.cli import main
from worldmodel.data.lerobot import LeRobotDataset
from worldmodel.errors import InputError
from worldmodel.recording.episode import RecordedEpisode, RecordingFormat
from worldmodel.recording.lerobot import LeRobotStore
from worldmodel.recording.repair import REPORT, chosen_fixes


def seen(episode: RecordedEpisode, change: Any) -> RecordedEpisode:
    return replace(episode, cameras={"render": np.ascontiguousarray(change(episode.cameras["render"]))})


def digest(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(str(path).encode() + path.read_bytes() for path in files)).hexdigest()


def kinds(folder: Path | str) -> set[str]:
    return {finding.kind for finding in examined(folder).faults}


def report(folder: Path) -> Any:
    return json.loads((folder / REPORT).read_text())


def broken(folder: Path) -> Path:
    """Twelve good episodes, and black, noise, reversed and inverted ones, a copy, and one with a NaN."""
    clean = [moving(seed, steps=60) for seed in range(16)]
    noise = np.random.default_rng(0).integers(0, 256, (61, 64, 64, 3), np.uint8)
    clean[0] = seen(clean[0], np.zeros_like)
    clean[1] = seen(clean[1], lambda frames: noise)
    clean[3] = seen(clean[3], lambda frames: frames[::-1])
    clean[4] = seen(clean[4], lambda frames: 255 - frames)
    stored(folder, [*clean, clean[7]])
    path = folder / "data/chunk-000/file-000.parquet"
    rows = parquet.read_table(path)
    listed = rows.to_pylist()
    listed[5 * 61 + 3]["action"] = [float("nan")] * 3
    parquet.write_table(pa.Table.from_pylist(listed, rows.schema), path)
    return folder


def test_sure_faults_are_repaired_and_suspicions_left(tmp_path: Path, capsys: Any) -> None:
    folder, fixed = broken(tmp_path / "set"), tmp_path / "fixed"
    before = digest(folder)
    assert {"black", "noise", "reversed", "inverted", "unreadable"} <= kinds(folder)
    assert main(["data", "check", str(folder), "--fix", str(fixed)]) == 0
    assert digest(folder) == before
    assert kinds(fixed) == {"reversed", "inverted"}
    told = report(fixed)
    gone = {name for each in told["dropped"] for name in each["episodes"]}
    assert gone == {f"set episode {number}" for number in (0, 1, 5, 16)}
    assert (told["episodes"], told["written"]) == (17, 13)
    assert {each["kind"] for each in told["left"]} == {"reversed", "inverted"}
    assert "dropped, black" in capsys.readouterr().out
    assert main(["data", "check", str(folder), "--fix", str(fixed)]) == 2  # it exists


def test_suspicions_are_repaired_by_name(tmp_path: Path) -> None:
    folder, fixed = broken(tmp_path / "set"), tmp_path / "fixed"
    assert main(["data", "check", str(folder), "--fix", str(fixed), "--fix-also", "reversed,inverted"]) == 0
    assert kinds(fixed) == set()
    source, copy = LeRobotDataset(str(folder)), LeRobotDataset(str(fixed))
    numbers, _, _ = source.steps(source.episodes[3])
    repaired, _, _ = copy.steps(copy.episodes[1])  # after 2, the first that is left
    assert np.array_equal(numbers, repaired)
    with pytest.raises(InputError, match="'colour'"):
        chosen_fixes("colour")


@pytest.mark.parametrize("late", [2, -1])
def test_a_lag_is_repaired_only_when_it_is_named(tmp_path: Path, late: int) -> None:
    episodes = []
    for seed in range(8):
        whole = moving(seed, late=max(late, 0), steps=60)
        if late < 0:  # the numbers come one step after what they did
            rows = np.roll(whole.numbers, -late, axis=0)
            whole = replace(whole, numbers=rows)
        episodes.append(whole)
    folder = stored(tmp_path / "set", episodes)
    assert main(["data", "check", str(folder), "--fix", str(tmp_path / "plain")]) == 0
    assert examined(tmp_path / "plain").lag == late
    assert main(["data", "check", str(folder), "--fix", str(tmp_path / "fixed"), "--fix-only", "lag"]) == 0
    found = examined(tmp_path / "fixed")
    assert found.lag == 0 and found.lengths == [60 - abs(late)] * 8 and "lag" not in kinds(tmp_path / "fixed")


def test_cameras_columns_rates_and_the_split_are_kept(tmp_path: Path) -> None:
    feature = {"observation.state": {"dtype": "float32", "shape": [2], "names": ["x", "y"]}}
    store = LeRobotStore(tmp_path / "set", RecordingFormat(12.5, SPECS, {}, columns=feature))
    states = {}
    for seed in range(4):
        episode = moving(seed, steps=20)
        states[seed] = np.random.default_rng(seed).random((21, 2)).astype(np.float32)
        frames = episode.cameras["render"]
        cameras = {"render": frames if seed else np.zeros_like(frames), "wrist": 255 - frames[:, ::2]}
        store.write(replace(episode, cameras=cameras, columns={"observation.state": states[seed]}))
    store.finish()
    (tmp_path / "set/meta/split.json").write_text(json.dumps({"by": "episode", "held-out": [0, 2]}))
    assert main(["data", "check", str(tmp_path / "set"), "--fix", str(tmp_path / "fixed")]) == 0
    copy = LeRobotDataset(str(tmp_path / "fixed"), columns={"video": "render+wrist"})
    assert copy.stored_fps == 12.5 and len(copy.episodes) == 3
    assert [copy.shape_of(camera) for camera in copy.cameras] == [(64, 64), (32, 64)]
    rows = copy.files.table(copy.episodes[0].data_path)["observation.state"].to_pylist()
    assert np.allclose(np.array(rows), np.concatenate([states[seed] for seed in (1, 2, 3)]))
    assert json.loads((tmp_path / "fixed/meta/split.json").read_text())["held-out"] == [1]


def test_a_table_with_damaged_texts_becomes_a_dataset(recorded: Path, tmp_path: Path) -> None:
    clips = sorted(recorded.glob("*.mp4"))
    texts = ["a cafÃ© at night", "<b>two</b> dogs &amp; a cat", "a red ball", "a tree", "a house", "a boat"]
    rows = [json.dumps({"video": str(clip), "text": text}) for clip, text in zip(clips, texts, strict=True)]
    (recorded / "texts.jsonl").write_text("\n".join(rows))
    assert {"damaged_text", "markup"} <= kinds(recorded / "texts.jsonl")
    assert main(["data", "check", str(recorded / "texts.jsonl"), "--fix", str(tmp_path / "fixed")]) == 0
    assert not {"damaged_text", "markup"} & kinds(tmp_path / "fixed")
    assert {*LeRobotDataset(str(tmp_path / "fixed")).tasks.values()} >= {
        "a café at night",
        "two dogs & a cat",
    }


@pytest.mark.slow
def test_a_copy_that_was_interrupted_has_no_name(tmp_path: Path) -> None:
    folder, fixed = (
        stored(tmp_path / "set", [moving(seed, steps=60) for seed in range(60)]),
        tmp_path / "fixed",
    )
    command = [sys.executable, "-m", "worldmodel", "data", "check", str(folder), "--fix", str(fixed)]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(1200):
        if [*tmp_path.glob(".writing-*/meta/info.json")]:  # the first file of episodes is complete
            break
        time.sleep(0.05)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL and not fixed.exists()
    assert main(["data", "check", str(folder), "--fix", str(folder / "inside")]) == 2
    assert not (folder / "inside").exists()
    assert main(["data", "check", str(folder), "--fix", str(fixed)]) == 0
    assert len(LeRobotDataset(str(fixed)).episodes) == 60


def with_rows(folder: Path, change: Any) -> Path:
    """Change the rows of the first file of a dataset; they are counted over all episodes."""
    path = folder / "data/chunk-000/file-000.parquet"
    rows = parquet.read_table(path)
    listed = rows.to_pylist()
    change(listed)
    parquet.write_table(pa.Table.from_pylist(listed, rows.schema), path)
    return folder


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("mirrored", lambda frames: frames[:, :, ::-1]),
        ("turned", lambda frames: np.rot90(frames, 1, (1, 2))),
        ("channels", lambda frames: frames[..., ::-1]),
    ],
)
def test_changes_of_the_pictures_are_undone_where_they_are_named(
    tmp_path: Path, kind: str, change: Any
) -> None:
    def with_background(seed: int) -> RecordedEpisode:
        episode = moving(seed, steps=40)
        frames = episode.cameras["render"] // 8  # a dim square: the scenes hardly vary
        frames[:, :12, :40], frames[:, 50:, 50:] = (40, 160, 90), (200, 30, 60)  # no picture is symmetric
        return replace(episode, cameras={"render": frames})

    clean = [with_background(seed) for seed in range(12)]
    folder = stored(tmp_path / "set", [seen(clean[0], change), *clean[1:]])
    assert kind in kinds(folder)
    command = ["data", "check", str(folder), "--fix"]
    assert main([*command, str(tmp_path / "plain")]) == 0
    assert kind in kinds(tmp_path / "plain"), "a suspicion is left where it is not named"
    assert main([*command, str(tmp_path / "fixed"), "--fix-also", kind]) == 0
    assert kind not in kinds(tmp_path / "fixed")
    frames = media.read_video(next((tmp_path / "fixed/videos").rglob("*.mp4")), 64, 10, 41)
    expected = clean[0].cameras["render"].astype(int)
    assert np.abs(frames - expected).mean() < 6 < np.abs(change(expected) - expected).mean()


def test_an_episode_that_goes_on_after_its_end_is_cut(tmp_path: Path) -> None:
    store = LeRobotStore(tmp_path / "set", RecordingFormat(10, SPECS, {}, 1, True))
    for seed in range(6):
        episode = moving(seed, steps=40)
        rewards = np.arange(40, dtype=np.float32)
        store.write(replace(episode, rewards=rewards, terminated=True, truncated=False))
    store.finish()

    def end_early(rows: list[dict[str, Any]]) -> None:
        for column in ("next.done", "next.terminated"):
            rows[2 * 41 + 24][column] = True

    folder = with_rows(tmp_path / "set", end_early)
    assert "ends" in kinds(folder)
    assert main(["data", "check", str(folder), "--fix", str(tmp_path / "fixed")]) == 0
    assert "ends" not in kinds(tmp_path / "fixed")
    source, copy = LeRobotDataset(str(folder)), LeRobotDataset(str(tmp_path / "fixed"))
    lengths = [len(copy.steps(episode)[0]) for episode in copy.episodes]
    assert lengths == [40, 40, 25, 40, 40, 40]
    numbers, _, outcomes = copy.steps(copy.episodes[2])
    assert np.array_equal(numbers, source.steps(source.episodes[2])[0][:25])
    assert outcomes[:, 0].tolist() == [*range(25)] and outcomes[:, 1].tolist() == [0.0] * 24 + [1.0]


def test_an_episode_whose_timestamps_go_back_is_left_out(tmp_path: Path) -> None:
    def go_back(rows: list[dict[str, Any]]) -> None:
        times = [row["timestamp"] for row in rows[41:82]]
        for row, time_s in zip(rows[41:82], reversed(times), strict=True):
            row["timestamp"] = time_s

    folder = stored(tmp_path / "set", [moving(seed, steps=40) for seed in range(6)])
    assert "timestamps" not in kinds(folder)
    with_rows(folder, go_back)
    assert "timestamps" in kinds(folder)
    assert main(["data", "check", str(folder), "--fix", str(tmp_path / "fixed")]) == 0
    assert "timestamps" not in kinds(tmp_path / "fixed")
    (dropped,) = report(tmp_path / "fixed")["dropped"]
    assert (dropped["kind"], dropped["episodes"]) == ("timestamps", ["set episode 1"])
    source, copy = LeRobotDataset(str(folder)), LeRobotDataset(str(tmp_path / "fixed"))
    kept = [number for number in range(6) if number != 1]
    for episode, number in zip(copy.episodes, kept, strict=True):
        assert np.array_equal(copy.steps(episode)[0], source.steps(source.episodes[number])[0])


@pytest.mark.parametrize("kind", ["webdataset", "huggingface"])
def test_tar_files_and_hugging_face_datasets_are_copied_without_their_faults(
    kind: str, recorded: Path, tmp_path: Path
) -> None:
    (tmp_path / "set").mkdir()
    files = [clip.read_bytes() for clip in sorted(recorded.glob("*.mp4"))]
    files[2] = files[2][: len(files[2]) // 2]
    if kind == "webdataset":
        argument, texts = f"webdataset:{tmp_path / 'set/0.tar'}", [f"clip {number}" for number in range(6)]
        with tarfile.open(tmp_path / "set/0.tar", "w") as tar:
            for number, (data, text) in enumerate(zip(files, texts, strict=True)):
                for name, content in ((f"{number}.mp4", data), (f"{number}.txt", text.encode())):
                    info = tarfile.TarInfo(name)
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    else:
        argument = f"huggingface:{tmp_path / 'set'}"
        parquet.write_table(pa.table({"video": files}), tmp_path / "set/train.parquet")
    before = digest(tmp_path / "set")
    assert "unreadable" in kinds(argument)
    assert main(["data", "check", argument, "--fix", str(tmp_path / "fixed")]) == 0
    assert digest(tmp_path / "set") == before
    told, copy = report(tmp_path / "fixed"), LeRobotDataset(str(tmp_path / "fixed"))
    assert (told["episodes"], told["written"], len(copy.episodes)) == (6, 5, 5)
    assert [each["kind"] for each in told["dropped"]] == ["unreadable"]
    if kind == "webdataset":
        assert {*copy.tasks.values()} >= {"clip 0", "clip 1", "clip 3", "clip 4", "clip 5"}
        assert "clip 2" not in copy.tasks.values()
