"""Clips whose frames are numbered images in a folder, and cameras whose poses are in files of arrays."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clip_tables import open_table, write_table
from moving_square import examined
from PIL import Image

from worldmodel.actions import Camera, Pose
from worldmodel.config import ActionConfig, CodecConfig, WorldModelConfig
from worldmodel.data.argument import read_source
from worldmodel.data.poses import FLIP, read_poses
from worldmodel.data.sources import Source, open_source
from worldmodel.errors import ConfigError, InputError

FPS = 8
MODEL = WorldModelConfig(
    codec=CodecConfig(image_size=32), action=ActionConfig(camera=True), fps=FPS, chunk_frames=8
)


def images(folder: Path, count: int, first: int = 1, name: str = "{:09d}.jpg") -> Path:
    """Images whose brightness is 20 + 3 * their position."""
    folder.mkdir(parents=True)
    for index in range(count):
        Image.new("RGB", (48, 32), (20 + 3 * index,) * 3).save(
            folder / name.format(first + index), quality=95
        )
    return folder


def seen(source: Source, index: int = 0, rounds: int = 2) -> np.ndarray:
    episode = source.at(index).episode("rounds", 0, index, rounds)
    return np.concatenate([each.mean(axis=(1, 2, 3)) for each in episode.observations])


def test_a_folder_of_numbered_images_is_a_clip(tmp_path: Path) -> None:
    images(tmp_path / "run/a", 40, name="frame_{}.png")
    rows = [{"path": "run/a"}, {"path": "run/a", "start": 1.0, "end": 3.25}]
    columns = {"video": "path", "start": "start", "end": "end"}
    source = open_table(write_table(tmp_path, rows), columns, MODEL)
    assert np.abs(np.diff(seen(source)) - 3).max() < 0.5
    assert np.abs(seen(source, 1, 9) - (20 + 3 * np.arange(8, 25))).max() < 3, "two rounds from a second on"
    twice = [{"path": "run/a", "fps": 16}]
    source = open_table(write_table(tmp_path, twice), {"video": "path", "fps": "fps"}, MODEL)
    assert np.abs(np.diff(seen(source)) - 6).max() < 0.5, "every other image"
    (tmp_path / "run/a/frame_20.png").unlink()
    with pytest.raises(ConfigError, match="39 images with numbers from 1 to 40, and some between"):
        open_table(tmp_path / "clips.jsonl", {"video": "path"}, MODEL)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="has no numbered images"):
        open_table(write_table(tmp_path, [{"path": "empty"}]), {"video": "path"}, MODEL)


def test_videos_and_folders_of_images_need_no_table(counting: Path, tmp_path: Path) -> None:
    images(tmp_path / "deep/run", 24)
    images(tmp_path / ".cache/run", 24)
    (tmp_path / "deep/walk.mp4").write_bytes(counting.read_bytes())
    (tmp_path / "deep/walk.txt").write_text("a walk\n")
    (tmp_path / "deep/run.txt").write_text("a run")
    (tmp_path / "deep/cover.jpg").write_bytes((tmp_path / "deep/run/000000001.jpg").read_bytes())
    data = read_source(str(tmp_path))
    source = open_source(next(iter(data.sources)), data, MODEL)
    found = {source.at(index).texts: seen(source, index) for index in range(source.size or 0)}
    assert {*found} == {("a run",), ("a walk",)}
    assert np.abs(np.diff(found["a run",]) - 3).max() < 0.5
    report = examined(str(tmp_path))
    assert not [finding for finding in report.findings if finding.kind == "unreadable"]
    images(tmp_path / "alone", 24)
    only = read_source(str(tmp_path / "alone"))
    assert np.abs(np.diff(seen(open_source("alone", only, MODEL))) - 3).max() < 0.5, "the folder itself"
    (tmp_path / "deep/walk.txt").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"walk\.txt.* is not UTF-8"):
        source.at(1).episode("rounds", 0, 0, 1)


def test_frame_folders_with_their_ends_need_no_columns(tmp_path: Path) -> None:
    """As the annotations of OpenDV: a json list, with images at 10 Hz."""
    images(tmp_path / "full_images/channel/video", 60)
    part = {"first_frame": "000000011.jpg", "last_frame": "000000050.jpg"}
    rows = [{"cmd": 0, "blip": "a road", "folder": "full_images/channel/video", **part}]
    (tmp_path / "clips.json").write_text(json.dumps(rows))
    (source,) = read_source(str(tmp_path / "clips.json")).sources.values()
    assert source.preset == "opendv"
    opened = open_table(Path(source.path), {}, MODEL, preset="opendv")
    found = [opened.at(0).episode("rounds", 0, index, 3) for index in range(12)]
    for episode in found:
        frames = np.concatenate([each.mean(axis=(1, 2, 3)) for each in episode.observations])
        numbers = (frames - 20) / 3
        assert numbers.min() > 9.5
        assert numbers.max() < 49.5
        assert np.diff(numbers).mean() == pytest.approx(10 / FPS, abs=0.1)
    assert opened.at(0).episode("describe", 0, 0, 1).answer == "a road"
    report = examined(str(tmp_path / "clips.json"))
    assert not [finding for finding in report.findings if finding.kind == "unreadable"]


def matrices(count: int) -> np.ndarray:
    """Poses from the camera to the world: a turn of 3 degrees to the right and a step forward each."""
    found, pose = [], np.eye(4)
    turn, step = np.eye(4), np.eye(4)
    angle = np.radians(3)
    turn[:3, :3] = [[np.cos(angle), 0, np.sin(angle)], [0, 1, 0], [-np.sin(angle), 0, np.cos(angle)]]
    step[2, 3], step[1, 3] = 0.5, 0.1  # forward, and down
    start = np.eye(4)
    start[:3, :3], start[:3, 3] = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0], (7, -2, 3)
    start[:3, :3] *= np.sign(np.linalg.det(start[:3, :3]))
    for _ in range(count):
        found.append(start @ pose)
        pose = pose @ turn @ step
    return np.stack(found)


@pytest.mark.parametrize("name", ["cam_c2w", "extrinsic", ".npy"])
def test_poses_in_files_are_motions_of_the_camera(counting: Path, tmp_path: Path, name: str) -> None:
    """A round of a second has eight steps: 24 degrees, whatever the pose at the start, and the file."""
    found = matrices(64)
    if name == ".npy":
        np.save(tmp_path / "poses.npy", found[:, :3].astype(np.float32))
    else:
        arrays: dict[str, Any] = {name: np.linalg.inv(found) if name == "extrinsic" else found}
        np.savez_compressed(tmp_path / "poses.npz", intrinsic=np.eye(3), **arrays)
    (tmp_path / counting.name).write_bytes(counting.read_bytes())
    path = next(tmp_path.glob("poses.*")).name
    rows = [{"videoFile": counting.name, "cameraFile": path, "caption": "a walk"}]
    columns = {"video": "videoFile", "camera": "cameraFile", "text": "caption"}
    source = open_table(write_table(tmp_path, rows), columns, MODEL)
    expected = np.linalg.inv(found[0]) @ found[8]
    for index in range(6):
        episode = source.at(0).episode("rounds", 0, index, 3)
        for action in episode.actions:
            camera = action.camera
            assert isinstance(camera, Camera)
            assert camera.mode == "velocity"
            x, y, z = camera.pose.translation
            assert (x, -y, z) == pytest.approx(tuple(expected[:3, 3]), abs=2e-3)
            half = np.radians(12)
            assert camera.pose.rotation == pytest.approx((0, np.sin(half), 0, np.cos(half)), abs=2e-3)


def test_targets_are_relative_to_the_first_pose(tmp_path: Path) -> None:
    found = matrices(5)
    np.save(tmp_path / "a.npy", found)
    track = read_poses(str(tmp_path / "a.npy"), 4.0)
    assert track.times == ((0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0))
    last: Camera = track.values[-1]
    assert (last.mode, type(last.pose)) == ("target", Pose)
    relative = np.linalg.inv(found[0]) @ found[4]
    assert last.pose.translation == pytest.approx(tuple(FLIP @ relative[:3, 3]), abs=1e-6)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.zeros((4, 2)), r"shape \(4, 2\)"),
        (np.zeros((4, 4, 4)), "turn nothing"),
        (np.full((4, 4, 4), np.nan), "not finite"),
        (np.array([{"a": 1}], dtype=object), "Object arrays"),
        ({"depth": np.eye(4)}, "it has depth, and none of"),
        (b"no zip", "cannot be read"),
        (None, "cannot be read"),
        ({"c2w": np.zeros((2**20, 3, 4))}, "more than 64 MiB"),
    ],
)
def test_files_that_are_no_poses_are_bad_rows(tmp_path: Path, value: Any, words: str) -> None:
    path = tmp_path / "a.npz"
    if isinstance(value, dict):
        np.savez_compressed(path, **value)
    elif isinstance(value, bytes):
        path.write_bytes(value)
    elif value is not None:
        np.savez(path, c2w=value)
    with pytest.raises(InputError, match=words):
        read_poses(str(path), FPS)


def test_paths_of_poses_are_inside_the_set(counting: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", matrices(64))
    inner = tmp_path / "set"
    inner.mkdir()
    (inner / counting.name).write_bytes(counting.read_bytes())
    rows = [{"path": counting.name, "camera": "../a.npy"}]
    with pytest.raises(ConfigError, match="outside of"):
        open_table(write_table(inner, rows), {"video": "path", "camera": "camera"}, MODEL)
    bad = write_table(inner, [{"path": counting.name, "camera": "a.npy", "fps": "fast"}], "bad.jsonl")
    with pytest.raises(ConfigError, match="its fps is 'fast'"):
        open_table(bad, {"video": "path", "camera": "camera", "fps": "fps"}, MODEL)
