"""Writing of LeRobot datasets (v3.0), which `lerobot` itself and sources of kind `lerobot` read.

An episode of T actions has T + 1 rows, one for each frame: row t has the action after frame t and the reward
that followed. The last row has the last frame, and zeros for an action. Episodes are written in files of
`EPISODES_PER_FILE`; `meta/info.json` is replaced last, so a dataset is whole up to the last complete file at
any time.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from worldmodel.errors import InputError, OutputError, pip_install
from worldmodel.io import TEMPORARY_PREFIX, atomic_file, move
from worldmodel.media import VideoWriter
from worldmodel.recording.episode import RecordedEpisode, RecordingFormat

try:
    import pandas
    import pyarrow as pa
    from pyarrow import parquet
except ImportError:
    raise OutputError(f"A LeRobot dataset requires pyarrow: {pip_install('data')}.") from None

EPISODES_PER_FILE = 50
FILES_PER_CHUNK = 1000
VERSION = "v3.0"
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
PLAIN_COLUMNS = {
    "next.reward": "float32",
    "next.done": "bool",
    "next.terminated": "bool",
    "next.truncated": "bool",
    "info": "string",
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}
STATISTICS = ("min", "max", "mean", "std", "count")
IMAGE_STEP = 10
"""Every so many frames count in the statistics of images."""


class LeRobotStore:
    """A dataset that is being written.

    Raises:
        OutputError: the folder has a dataset of other settings, or cannot be written.
    """

    def __init__(self, folder: Path, format: RecordingFormat) -> None:
        self.folder, self.format = folder, format
        self.info_path = folder / "meta" / "info.json"
        self.done = self.frames = 0
        """Episodes in complete files, and their frames."""
        self.replaced = 0
        """Episodes of the file on the disk that the next one replaces."""
        self.tasks: list[str] = []
        self.features: dict[str, Any] = {}
        self.file: _File | None = None
        if self.info_path.is_file():
            self._resume(json.loads(self.info_path.read_text(encoding="utf-8")))

    def _resume(self, info: Mapping[str, Any]) -> None:
        before = info.get("worldmodel", {}).get("recording")
        if before != self.format.settings:
            raise OutputError(_different(self.folder, before, self.format.settings))
        self.features = {key: value for key, value in info["features"].items() if value["dtype"] == "video"}
        self.done, self.frames = info["total_episodes"], info["total_frames"]
        names = pandas.read_parquet(self.folder / "meta" / "tasks.parquet").sort_values("task_index").index
        self.tasks = [str(name) for name in names]

    def start(self, num_episodes: int) -> int:
        """Return the first episode that is still to be recorded, for a dataset of `num_episodes`.

        A file that was cut short is recorded again from its first episode, so that the dataset has
        the rows and frames that a run without an interruption writes.
        """
        rest = self.done % EPISODES_PER_FILE
        if self.done < num_episodes and rest:
            number = self.done // EPISODES_PER_FILE
            episodes = parquet.read_table(self.folder / _place(EPISODES_PATH, number))
            # It has more episodes if a recorder was killed before it replaced `meta/info.json`.
            self.frames -= sum(episodes["length"].to_pylist()[:rest])
            self.done -= rest
            self.replaced = rest
        return self.done

    def write(self, episode: RecordedEpisode) -> None:
        if self.file is None:
            self.file = _File(self)
        self.file.write(episode)
        if len(self.file.episodes) == EPISODES_PER_FILE:
            self.commit()

    def commit(self) -> None:
        """Complete the file that is being written, unless the one on the disk has more episodes."""
        if self.file is not None and len(self.file.episodes) > self.replaced:
            self.file.complete()
            self.replaced = 0
            self.done += len(self.file.episodes)
            self.frames = self.file.first_frame + self.file.rows
            self._write_info()
        self.discard()

    def discard(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None

    def finish(self) -> None:
        """Complete the dataset with its statistics."""
        self.commit()
        if self.done:
            with atomic_file(self.folder / "meta" / "stats.json") as temporary:
                temporary.write_text(json.dumps(self._statistics(), indent=2), encoding="utf-8")

    def task(self, text: str) -> int:
        """Return the index of a task, which is added if it is new."""
        if text not in self.tasks:
            self.tasks.append(text)
        return self.tasks.index(text)

    def _write_info(self) -> None:
        numbers = pandas.DataFrame({"task_index": range(len(self.tasks))}, index=pandas.Index(self.tasks))
        with atomic_file(self.folder / "meta" / "tasks.parquet") as temporary:
            numbers.to_parquet(temporary)
        specs = self.format.specs
        action = {"dtype": "float32", "shape": [len(specs)], "names": [spec.name for spec in specs]}
        plain = {
            name: {"dtype": kind, "shape": [1], "names": None} for name, kind in _plain(self.format).items()
        }
        info = {
            "codebase_version": VERSION,
            "robot_type": None,
            "total_episodes": self.done,
            "total_frames": self.frames,
            "total_tasks": len(self.tasks),
            "chunks_size": FILES_PER_CHUNK,
            "data_files_size_in_mb": 100,
            "video_files_size_in_mb": 200,
            "fps": self.format.fps,
            "splits": {"train": f"0:{self.done}"},
            "data_path": DATA_PATH,
            "video_path": VIDEO_PATH,
            "features": {
                **self.features,
                **({"action": action} if specs else {}),
                **self.format.columns,
                **plain,
            },
            "worldmodel": {
                "action_spec": [spec.as_dict() for spec in specs],
                "recording": self.format.settings,
                "last_row_is_last_frame": True,
            },
        }
        with atomic_file(self.info_path, durable=True) as temporary:
            temporary.write_text(json.dumps(info, indent=2), encoding="utf-8")

    def _statistics(self) -> dict[str, Any]:
        """Combine the statistics of all episodes."""
        paths = sorted((self.folder / "meta" / "episodes").glob("*/*.parquet"))
        rows = [row for path in paths for row in parquet.read_table(path).to_pylist()]
        names = sorted({column.split("/", 2)[1] for column in rows[0] if column.startswith("stats/")})
        result = {}
        for name in names:
            low, high, mean, std, count = (
                np.array([row[f"stats/{name}/{kind}"] for row in rows], np.float64) for kind in STATISTICS
            )
            weight = (count / count.sum()).reshape(-1, *[1] * (mean.ndim - 1))
            middle = (weight * mean).sum(0)
            spread = np.sqrt((weight * (std**2 + (mean - middle) ** 2)).sum(0))
            total = count.sum(0).astype(int)
            values = (low.min(0), high.max(0), middle, spread, total)
            result[name] = {kind: each.tolist() for kind, each in zip(STATISTICS, values, strict=True)}
        return result


class _File:
    """The episodes of one data file and its videos, in a temporary folder until all are there."""

    def __init__(self, store: LeRobotStore) -> None:
        self.store, self.first_frame = store, store.frames
        self.number = store.done // EPISODES_PER_FILE
        self.episodes: list[dict[str, Any]] = []
        self.rows = 0
        self.videos: dict[str, VideoWriter] = {}
        store.folder.mkdir(parents=True, exist_ok=True)
        self.staged = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=store.folder))
        self.schema = _schema(store.format)
        self.table = parquet.ParquetWriter(self.staged / "data.parquet", self.schema)

    def write(self, episode: RecordedEpisode) -> None:
        """Add an episode: a row group of the table, and frames to the videos."""
        store, index = self.store, self.store.done + len(self.episodes)
        length = len(episode.actions) * store.format.frames_per_action + 1
        places = {}
        for camera, frames in episode.cameras.items():
            key = f"observation.images.{camera}"
            self._write_video(key, frames, index)
            fps, end = store.format.fps, self.videos[key].num_frames
            places |= {
                f"videos/{key}/from_timestamp": (end - length) / fps,
                f"videos/{key}/to_timestamp": end / fps,
                **self._indexes(f"videos/{key}/"),
            }
        columns = _columns(episode, store, index, self.first_frame + self.rows, length)
        self.table.write_table(pa.Table.from_pydict(columns, self.schema))
        tasks = dict.fromkeys(columns["task_index"])
        self.episodes.append(
            {
                "episode_index": index,
                "tasks": [store.tasks[task] for task in tasks],
                "length": length,
                "seed": episode.seed,
                **self._indexes("data/"),
                "dataset_from_index": self.first_frame + self.rows,
                "dataset_to_index": self.first_frame + self.rows + length,
                **places,
                **_episode_statistics(episode, columns),
                **self._indexes("meta/episodes/"),
            }
        )
        self.rows += length

    def _indexes(self, prefix: str) -> dict[str, int]:
        chunk, file = divmod(self.number, FILES_PER_CHUNK)
        return {f"{prefix}chunk_index": chunk, f"{prefix}file_index": file}

    def _write_video(self, key: str, frames: np.ndarray, index: int) -> None:
        height, width = frames.shape[1:3]
        if key not in self.videos:
            self._check_shape(key, height, width, index)
            path = self.staged / f"{key}.mp4"
            self.videos[key] = VideoWriter(path, self.store.format.fps, height, width, recording=True)
        stream = self.videos[key].stream
        if (stream.height, stream.width) != (height, width):
            raise InputError(_other_size(key, index, height, width, stream.height, stream.width))
        for number, frame in enumerate(frames):
            self.videos[key].write(frame, keyframe=number == 0)

    def _check_shape(self, key: str, height: int, width: int, index: int) -> None:
        feature = {
            "dtype": "video",
            "shape": [height, width, 3],
            "names": ["height", "width", "channels"],
            "info": {
                "video.height": height,
                "video.width": width,
                "video.codec": "h264",
                "video.pix_fmt": "yuv444p",
                "video.is_depth_map": False,
                "video.fps": self.store.format.fps,
                "video.channels": 3,
                "has_audio": False,
            },
        }
        known = self.store.features.setdefault(key, feature)
        if known["shape"] != feature["shape"]:
            raise InputError(_other_size(key, index, height, width, *known["shape"][:2]))

    def complete(self) -> None:
        """Give all files their names, the episodes' last."""
        self.table.close()
        places = [(f"{key}.mp4", _place(VIDEO_PATH, self.number, key)) for key in self.videos]
        while self.videos:  # `close` must not close one again if the disk is full
            self.videos.popitem()[1].close()
        parquet.write_table(pa.Table.from_pylist(self.episodes), self.staged / "episodes.parquet")
        places += [("data.parquet", _place(DATA_PATH, self.number))]
        places += [("episodes.parquet", _place(EPISODES_PATH, self.number))]
        for name, place in places:
            target = self.store.folder / place
            target.parent.mkdir(parents=True, exist_ok=True)
            move(self.staged / name, target, durable=True)

    def close(self) -> None:
        """Remove what has no name yet."""
        with suppress(OSError):
            self.table.close()
        for video in self.videos.values():
            with suppress(OSError):
                video.close()
        shutil.rmtree(self.staged, ignore_errors=True)


def _place(pattern: str, number: int, video_key: str = "") -> str:
    chunk, file = divmod(number, FILES_PER_CHUNK)
    return pattern.format(chunk_index=chunk, file_index=file, video_key=video_key)


def _plain(format: RecordingFormat) -> dict[str, str]:
    """Return the types of the columns beside the action."""
    return {
        name: kind
        for name, kind in PLAIN_COLUMNS.items()
        if format.has_rewards or not name.startswith("next.")
    }


def _schema(format: RecordingFormat) -> Any:
    num_numbers = len(format.specs)
    action = {"action": pa.list_(pa.float32(), num_numbers) if num_numbers > 1 else pa.float32()}
    types = {"bool": pa.bool_(), "float32": pa.float32(), "int64": pa.int64(), "string": pa.string()}
    plain = {name: types[kind] for name, kind in _plain(format).items()}
    others = {name: _column_type(feature) for name, feature in format.columns.items()}
    return pa.schema([*(action if num_numbers else {}).items(), *others.items(), *plain.items()])


def _column_type(feature: Mapping[str, Any]) -> Any:
    """Return the type of a further column, whose rows are numbers or flat lists of them."""
    plain = pa.type_for_alias(feature["dtype"])
    size = int(np.prod(feature["shape"]))
    return plain if size == 1 else pa.list_(plain, size)


def _columns(
    episode: RecordedEpisode, store: LeRobotStore, index: int, first: int, length: int
) -> dict[str, Any]:
    """Return the rows of an episode, one per frame."""
    steps = np.repeat(np.arange(len(episode.actions)), store.format.frames_per_action)
    numbers = np.zeros((length, episode.numbers.shape[1]), np.float32)
    numbers[:-1] = episode.numbers[steps]
    rewards = np.zeros(length, np.float32)
    rewards[:-1] = episode.rewards[steps] / store.format.frames_per_action
    texts = [episode.actions[step].text or episode.text for step in steps]
    ends = np.arange(length) >= length - 2
    infos = [json.dumps(info) for info in episode.infos] or ["{}"] * length
    columns = {
        "next.reward": rewards,
        "next.done": ends,
        "next.terminated": ends & episode.terminated,
        "next.truncated": ends & episode.truncated,
        "info": infos,
        "timestamp": np.arange(length, dtype=np.float32) / np.float32(store.format.fps),
        "frame_index": np.arange(length),
        "episode_index": np.full(length, index),
        "index": first + np.arange(length),
        "task_index": [store.task(text) for text in [*texts, texts[-1]]],
    }
    if numbers.shape[1]:
        columns["action"] = list(numbers) if numbers.shape[1] > 1 else numbers[:, 0]
    columns |= {name: list(rows) for name, rows in episode.columns.items()}
    wanted = ("action", *store.format.columns, *_plain(store.format))
    return {name: rows for name, rows in columns.items() if name in wanted}


def _episode_statistics(episode: RecordedEpisode, columns: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    values = {"next.reward": columns["next.reward"][:, None]} if "next.reward" in columns else {}
    if "action" in columns:
        values["action"] = np.stack(columns["action"]).reshape(len(columns["info"]), -1)
    for name, rows in values.items():
        found |= dict(_statistics_of(name, rows, (0,), (-1,)))
    for camera, frames in episode.cameras.items():
        some = frames[::IMAGE_STEP] / 255.0
        found |= dict(_statistics_of(f"observation.images.{camera}", some, (0, 1, 2), (3, 1, 1)))
    return found


def _statistics_of(
    name: str, values: np.ndarray, axes: tuple[int, ...], shape: tuple[int, ...]
) -> Iterator[tuple[str, Any]]:
    for kind in STATISTICS[:-1]:
        yield f"stats/{name}/{kind}", getattr(values, kind)(axis=axes).reshape(shape).tolist()
    yield f"stats/{name}/count", [len(values)]


def _other_size(key: str, index: int, height: int, width: int, *known: int) -> str:
    return (
        f"Episode {index} has frames of {height}x{width} pixels in {key}, and earlier ones of "
        f"{known[0]}x{known[1]}; pass a size, to which all are resized."
    )


def _different(folder: Path, before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str:
    names = [name for name in now if (before or {}).get(name) != now[name]]
    changed = "; ".join(f"{name} {(before or {}).get(name)!r}, now {now[name]!r}" for name in names)
    return (
        f"{str(folder)!r} has a recording of other settings ({changed}); choose another folder, or the same "
        "settings."
    )
