"""Layouts of LeRobot datasets as others store them: versions, images in tables, cameras, rates, texts."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from worldmodel import media
from worldmodel.actions import Action
from worldmodel.config import (
    ActionConfig,
    ActionSpec,
    CodecConfig,
    DataConfig,
    SourceConfig,
    WorldModelConfig,
    build,
)
from worldmodel.data.examiner import examine, open_examined
from worldmodel.data.facts import read_facts
from worldmodel.data.lerobot import LeRobotDataset
from worldmodel.data.sources import Source, open_source
from worldmodel.errors import ConfigError, InputError
from worldmodel.recording.episode import RecordedEpisode, RecordingFormat
from worldmodel.recording.lerobot import LeRobotStore

FPS, SIDE = 10, 32
LENGTHS = (12, 9, 15)
"""Actions of the episodes."""


def grey(episode: int, frame: int) -> int:
    """Brightness of a frame, from which its episode and number can be told."""
    return 20 + 60 * episode + 3 * frame


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Episodes whose action `i` is (episode, i), seen from two cameras; tests must not change it."""
    specs = (ActionSpec("episode", rate=FPS), ActionSpec("number", rate=FPS))
    folder = tmp_path_factory.mktemp("layouts") / "set"
    store = LeRobotStore(folder, RecordingFormat(FPS, specs, {}))
    for episode, length in enumerate(LENGTHS):
        numbers = np.array([[episode, number] for number in range(length)], np.float32)
        frames = np.array([grey(episode, number) for number in range(length + 1)], np.uint8)
        front = np.broadcast_to(frames[:, None, None, None], (length + 1, SIDE, SIDE, 3)).copy()
        store.write(
            RecordedEpisode(
                {"front": front, "wrist": 255 - front},
                tuple(Action.of_numbers(specs, row) for row in numbers),
                numbers,
                np.zeros(length, np.float32),
                terminated=True,
                text=f"task {episode}",
            )
        )
    store.finish()
    info = json.loads((folder / "meta/info.json").read_text())
    del info["worldmodel"]
    (folder / "meta/info.json").write_text(json.dumps(info))
    return folder


def changed(dataset: Path, folder: Path, edit: Callable[[dict[str, Any], pa.Table], pa.Table | None]) -> Path:
    """Copy a dataset and change its `info.json` and the rows of its data file."""
    shutil.copytree(dataset, folder)
    path, data = folder / "meta/info.json", next((folder / "data").rglob("*.parquet"))
    info, table = json.loads(path.read_text()), parquet.read_table(data)
    table = edit(info, table)
    if table is not None:
        parquet.write_table(table, data, row_group_size=7)
    path.write_text(json.dumps(info))
    return folder


def version_2(dataset: Path, folder: Path, stated: str) -> Path:
    """Write a dataset as versions 2.0 and 2.1 do: files of its own for every episode, an index in jsonl."""
    info = json.loads((dataset / "meta/info.json").read_text())
    table = parquet.read_table(next((dataset / "data").rglob("*.parquet")))
    (folder / "meta").mkdir(parents=True)
    info |= {
        "codebase_version": stated,
        "chunks_size": 2,
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    }
    (folder / "meta/info.json").write_text(json.dumps(info))
    owners, lines = np.array(table["episode_index"]), []
    for episode in range(len(LENGTHS)):
        rows = np.flatnonzero(owners == episode)
        name = f"chunk-{episode // 2:03d}"
        path = folder / f"data/{name}/episode_{episode:06d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table.take(rows), path)
        for camera in ("front", "wrist"):
            video = folder / f"videos/{name}/observation.images.{camera}/episode_{episode:06d}.mp4"
            video.parent.mkdir(parents=True, exist_ok=True)
            values = np.array([grey(episode, number) for number in range(len(rows))], np.uint8)
            values = values if camera == "front" else 255 - values
            frames = np.broadcast_to(values[:, None, None, None], (len(rows), SIDE, SIDE, 3)).copy()
            media.write_video(frames, video, FPS, scale=1)
        lines.append({"episode_index": episode, "tasks": [f"task {episode}"], "length": len(rows)})
    (folder / "meta/episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tasks = [{"task_index": number, "task": f"task {number}"} for number in range(len(LENGTHS))]
    (folder / "meta/tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in tasks))
    return folder


def opened(path: Path, columns: dict[str, str] | None = None, **changes: Any) -> Source:
    config = SourceConfig("lerobot", str(path), columns=columns or {})
    action = build(ActionConfig, {"text": True, "vector": 2} | changes.pop("action", {}))
    codec = CodecConfig(image_size=SIDE, temporal_factor=1)
    settings = {"fps": FPS, "chunk_frames": 1, "action": action, "codec": codec, **changes}
    return open_source("mine", DataConfig({"mine": config}), WorldModelConfig(**settings))


def check_whole(source: Source) -> None:
    """Check the frames, actions and texts of all episodes."""
    for episode, length in enumerate(LENGTHS):
        found = source.at(episode).episode("rounds", 0, episode, 999)
        seen = np.array([clip[-1].mean() for clip in found.observations])
        assert np.abs(seen - [grey(episode, number) for number in range(length + 1)]).max() < 2
        assert [action.vector for action in found.actions] == [(episode, number) for number in range(length)]
        assert {action.text for action in found.actions} == {f"task {episode}"}


@pytest.mark.parametrize("stated", ["v2.0", "v2.1", "v3.0"])
def test_older_versions_are_read_whatever_they_state(dataset: Path, tmp_path: Path, stated: str) -> None:
    source = opened(version_2(dataset, tmp_path / "set", stated))
    assert source.size == len(LENGTHS)
    check_whole(source)


def test_a_new_layout_that_states_an_old_version_is_read(dataset: Path, tmp_path: Path) -> None:
    check_whole(
        opened(changed(dataset, tmp_path / "set", lambda info, _: info.update(codebase_version="v2.1")))
    )


def test_images_in_the_table_are_read(dataset: Path, tmp_path: Path) -> None:
    def with_images(info: dict[str, Any], table: pa.Table) -> pa.Table:
        info["features"]["observation.images.front"]["dtype"] = "image"
        cells = []
        for episode, number in zip(
            table["episode_index"].to_pylist(), table["frame_index"].to_pylist(), strict=True
        ):
            png = io.BytesIO()
            Image.new("RGB", (SIDE, SIDE), (grey(episode, number),) * 3).save(png, "PNG")
            cells.append({"bytes": png.getvalue(), "path": f"{number}.png"})
        return table.append_column("observation.images.front", pa.array(cells))

    path = changed(dataset, tmp_path / "set", with_images)
    for video in (path / "videos/observation.images.front").rglob("*.mp4"):
        video.unlink()
    check_whole(opened(path))


def test_a_column_of_actions_is_trained_on(dataset: Path, tmp_path: Path) -> None:
    """Its name is that of openpi and LIBERO; it was left out without a word."""

    def renamed(info: dict[str, Any], table: pa.Table) -> pa.Table:
        info["features"]["actions"] = info["features"].pop("action")
        return table.rename_columns([{"action": "actions"}.get(name, name) for name in table.column_names])

    path = changed(dataset, tmp_path / "set", renamed)
    check_whole(opened(path))
    assert [spec.name for spec in LeRobotDataset(str(path)).specs] == ["episode", "number"]
    check_whole(opened(dataset, {"vector": "action"}))
    with pytest.raises(ConfigError, match=r"columns\.vector is 'joints'"):
        opened(dataset, {"vector": "joints"})


def test_a_camera_is_chosen_and_several_are_tiled(dataset: Path) -> None:
    frame = opened(dataset, {"video": "wrist"}).at(1).episode("rounds", 0, 0, 99).observations[0][-1]
    assert abs(frame.mean() - (255 - grey(1, 0))) < 2
    both = opened(dataset, {"video": "front+wrist"}).at(1).episode("rounds", 0, 0, 99)
    for number, clip in enumerate(both.observations):
        left, right = clip[-1][:, : SIDE // 2], clip[-1][:, SIDE // 2 :]
        assert abs(left.mean() - grey(1, number)) < 3 and abs(right.mean() - (255 - grey(1, number))) < 3
    assert LeRobotDataset(str(dataset), columns={"video": "front+wrist"}).shape == (SIDE, 2 * SIDE)
    assert LeRobotDataset(str(dataset)).unread == ["observation.images.wrist"]


@pytest.mark.parametrize(("fps", "model_fps"), [(12.5, 12), (10, 4), (10, 7), (29.97, 15)])
def test_frames_and_actions_of_other_rates_are_drawn_by_their_times(
    dataset: Path, tmp_path: Path, fps: float, model_fps: int
) -> None:
    """A frame is the one on screen at its time, and its action the one that covers most of it."""

    def faster(info: dict[str, Any], table: pa.Table) -> None:
        info["fps"] = fps

    path = changed(version_2(dataset, tmp_path / "old", "v2.1"), tmp_path / "set", faster)
    for video in path.rglob("*.mp4"):
        with media.open_video(video.read_bytes()) as opened_video:
            frames = opened_video.read(SIDE, None, 100)
        write_at(frames, video, fps)
    rate = 30 if fps == 29.97 else fps
    found = opened(path, fps=model_fps).at(2).episode("rounds", 0, 0, 999)
    count = int(LENGTHS[2] / rate * model_fps + 1e-3)
    assert len(found.actions) == count
    for number, action in enumerate(found.actions):
        start, end = number / model_fps, (number + 1) / model_fps
        shares = [min(end, (i + 1) / rate) - max(start, i / rate) for i in range(LENGTHS[2])]
        assert action.vector is not None
        assert shares[int(action.vector[1])] == pytest.approx(max(shares), abs=1e-6)
        shown = (found.observations[number][-1].mean() - grey(2, 0)) / 3
        assert -0.7 < start * rate - shown < 1.2
    assert read_facts(str(path), tmp_path / "world.yaml").fps == round(fps)


def write_at(frames: np.ndarray, path: Path, fps: float) -> None:
    """Write a video of a fractional rate."""
    from fractions import Fraction

    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream(
            "libx264", rate=Fraction(fps).limit_denominator(1001), options={"crf": "1"}
        )
        stream.width, stream.height, stream.pix_fmt = SIDE, SIDE, "yuv444p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def test_texts_come_from_the_column_that_is_named(dataset: Path, tmp_path: Path) -> None:
    def told(info: dict[str, Any], table: pa.Table) -> pa.Table:
        info["features"]["language_instruction"] = {"dtype": "string", "shape": [1]}
        info["features"]["subtask_index"] = {"dtype": "int64", "shape": [1]}
        rows = len(table)
        table = table.append_column("language_instruction", pa.array(["put it down"] * rows))
        return table.append_column("subtask_index", pa.array([number % 2 for number in range(rows)]))

    path = changed(dataset, tmp_path / "set", told)
    parquet.write_table(
        pa.table({"subtask_index": [0, 1], "subtask": ["reach", "grasp"]}), path / "meta/subtasks.parquet"
    )
    check_whole(opened(path))
    episode = opened(path, {"text": "language_instruction"}).at(0).episode("rounds", 0, 0, 2)
    assert [action.text for action in episode.actions] == ["put it down"] * 2
    episode = opened(path, {"text": "subtask"}).at(0).episode("rounds", 0, 0, 99)
    assert [action.text for action in episode.actions][:3] == ["reach", "grasp", "reach"]
    with pytest.raises(ConfigError, match=r"columns\.text is 'caption'"):
        opened(path, {"text": "caption"})
    kinds = {finding.kind for finding in examine(open_examined(str(path))).report().findings}
    assert {"unread_text", "unread"} <= kinds


def test_one_episode_with_other_widths_breaks_no_other(dataset: Path, tmp_path: Path) -> None:
    def ragged(info: dict[str, Any], table: pa.Table) -> pa.Table:
        rows = [list(map(float, row)) for row in table["action"].to_pylist()]
        rows[3] = [1.0, 2.0, 3.0]
        place = table.column_names.index("action")
        return table.set_column(place, "action", pa.array(rows, pa.list_(pa.float32())))

    source = opened(changed(dataset, tmp_path / "set", ragged))
    with pytest.raises(InputError, match="other than 2 numbers"):
        source.at(0).episode("rounds", 0, 0, 1)
    assert source.at(1).episode("rounds", 0, 0, 99).actions[2].vector == (1, 2)


def test_rewards_that_are_no_numbers_harm_only_models_of_rewards(dataset: Path, tmp_path: Path) -> None:
    def broken(info: dict[str, Any], table: pa.Table) -> pa.Table:
        place = table.column_names.index("next.reward")
        return table.set_column(place, "next.reward", pa.array([float("nan")] * len(table), pa.float32()))

    path = changed(dataset, tmp_path / "set", broken)
    check_whole(opened(path))
    with pytest.raises(InputError, match="reward that is not a finite number"):
        opened(path, outcomes=True).at(0).episode("rounds", 0, 0, 1)


def test_cameras_of_an_episode_begin_at_other_times_of_their_files(dataset: Path, tmp_path: Path) -> None:
    """The wrist of each episode is in a file of its own, the front in one for all."""
    folder = shutil.copytree(dataset, tmp_path / "set")
    index, key = next((folder / "meta/episodes").rglob("*.parquet")), "videos/observation.images.wrist"
    rows = parquet.read_table(index).to_pylist()
    for number, row in enumerate(rows):
        length, before = LENGTHS[number] + 1, 4 * number
        values = np.array([0] * before + [255 - grey(number, frame) for frame in range(length)], np.uint8)
        frames = np.broadcast_to(values[:, None, None, None], (len(values), SIDE, SIDE, 3)).copy()
        video = folder / f"videos/observation.images.wrist/chunk-000/file-{10 + number:03d}.mp4"
        media.write_video(frames, video, FPS, scale=1)
        row |= {f"{key}/file_index": 10 + number, f"{key}/from_timestamp": before / FPS}
        row[f"{key}/to_timestamp"] = (before + length) / FPS
    parquet.write_table(pa.Table.from_pylist(rows), index)
    check_whole(opened(folder, {"video": "front"}))
    wrist = opened(folder, {"video": "wrist"})
    for episode, length in enumerate(LENGTHS):
        found = wrist.at(episode).episode("rounds", 0, episode, 999)
        seen = np.array([clip[-1].mean() for clip in found.observations])
        assert np.abs(seen - [255 - grey(episode, frame) for frame in range(length + 1)]).max() < 2


def merged(dataset: Path, folder: Path, edit: Callable[[list[dict[str, Any]]], None]) -> Path:
    """Copy a dataset and change its index of episodes as a merge of datasets might."""
    shutil.copytree(dataset, folder)
    index = next((folder / "meta/episodes").rglob("*.parquet"))
    rows = parquet.read_table(index).to_pylist()
    edit(rows)
    info = json.loads((folder / "meta/info.json").read_text()) | {"total_episodes": len(rows)}
    (folder / "meta/info.json").write_text(json.dumps(info))
    parquet.write_table(pa.Table.from_pylist(rows), index)
    return folder


def test_an_episode_that_is_indexed_twice_is_refused(dataset: Path, tmp_path: Path) -> None:
    folder = merged(dataset, tmp_path / "set", lambda rows: rows.append(dict(rows[1])))
    with pytest.raises(ConfigError, match="episode 1 is in meta/episodes twice"):
        opened(folder)


@pytest.mark.parametrize("column", ["length", "dataset_from_index", "{video}/from_timestamp"])
def test_an_episode_without_its_place_is_a_bad_one(dataset: Path, tmp_path: Path, column: str) -> None:
    """NaN, which tables have where a merge did not find a value."""
    name = column.format(video="videos/observation.images.front")

    def lose(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row[name] = float("nan") if row["episode_index"] == 1 else float(row[name])

    source = opened(merged(dataset, tmp_path / "set", lose))
    with pytest.raises(InputError, match=r"episode 1: .*meta/episodes"):
        source.at(1).episode("rounds", 0, 1, 1)
    for episode in (0, 2):
        assert len(source.at(episode).episode("rounds", 0, episode, 999).actions) == LENGTHS[episode]


def test_empty_row_groups_and_unknown_statistics_change_nothing(dataset: Path, tmp_path: Path) -> None:
    """As after rows were deleted, and where a number never changes."""
    folder = shutil.copytree(dataset, tmp_path / "set")
    data = next((folder / "data").rglob("*.parquet"))
    table = parquet.read_table(data)
    with parquet.ParquetWriter(data, table.schema) as writer:
        for part in (table.slice(0, 0), table.slice(0, 5), table.slice(0, 0), table.slice(5)):
            writer.write_table(part)
    (folder / "meta/stats.json").write_text('{"action": {"std": [0.0, NaN], "max": [-1e9, 1e9]}}')
    check_whole(opened(folder))
