"""LeRobot datasets (v3.0) in a local folder or on the Hub, each episode of which is one clip.

Only the index (`meta/`) is read when the source is opened. A video file is opened once in every process for
all of its episodes, and the actions of a data file are kept while its episodes are read. Files of a dataset
on the Hub are read piece by piece.
"""

import itertools
import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from worldmodel.config import (
    ActionConfig,
    ActionSpec,
    DataConfig,
    SourceConfig,
    TrainConfig,
    WorldModelConfig,
)
from worldmodel.data.clips import BrokenClip, Clip, Outcomes, RoundFormat, Span, Track
from worldmodel.data.recording import check_specs, read_recording, whole_fps
from worldmodel.errors import ConfigError, InputError
from worldmodel.media.shared_video import REMOTE
from worldmodel.types import Action

VERSION = "v3."
HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+(@[\w.-]+)?")
REWARD, ENDS = "next.reward", ("next.terminated", "next.done")
"""Columns of the reward and of the end of an episode; an episode that was cut short has not ended."""
MAX_BYTES = 2**28
"""Memory for the actions of data files, about, in every process."""


@dataclass(frozen=True)
class LeRobotEpisode:
    """Where an episode is."""

    index: int
    data_path: str
    first_row: int
    num_rows: int
    video_path: str
    start: float
    end: float


class LeRobotDataset:
    """The index of a dataset.

    Args:
        path: a folder, or the name of a dataset on the Hub: user/name, or user/name@revision.
        key: config key of the source, for messages.
        camera: feature of the video; empty takes the first.

    Raises:
        ConfigError: it cannot be opened, has another version, or has no such camera.
    """

    def __init__(self, path: str, key: str = "the dataset", camera: str = "") -> None:
        folder = Path(path).expanduser()
        if not (folder.exists() or HUB_NAME.fullmatch(path)):
            raise ConfigError(f"{key}: there is no {path!r}; pass a folder, or user/name on the Hub.")
        self.root = os.path.abspath(folder) if folder.exists() else f"{REMOTE}datasets/{path}"
        try:
            from pyarrow import ArrowException
        except ImportError:
            raise ConfigError(f"{key} requires pyarrow: pip install 'worldmodel[data]'.") from None
        try:
            with self.open("meta/info.json") as file:
                self.info = json.load(file)
            if not isinstance(self.info, dict):
                raise ValueError("meta/info.json is not an object")
            self._check(key, camera)
            self.tasks = self._read_tasks()
            self.episodes = self._read_episodes()
        except (OSError, ArrowException, KeyError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            reason = " ".join(str(error).split()).rstrip(".")
            raise ConfigError(
                f"{key}: {path!r} cannot be read as a LeRobot dataset ({type(error).__name__}: {reason})."
            ) from None
        self.actions = lru_cache(maxsize=self._most_tables())(self._actions)

    def _check(self, key: str, camera: str) -> None:
        version = str(self.info.get("codebase_version", ""))
        if not version.startswith(VERSION):
            raise ConfigError(
                f"{key} has the LeRobot version {version or 'unknown'}; convert it to v3.0 with lerobot."
            )
        self.stored_fps = float(self.info["fps"])
        self.fps = whole_fps(self.stored_fps, key)
        features = self.info["features"]
        cameras = [name for name, feature in features.items() if feature["dtype"] == "video"]
        if not cameras:
            raise ConfigError(f"{key} stores no camera as video; convert its images to video with lerobot.")
        matching = [
            name for name in cameras if camera in ("", name, name.removeprefix("observation.images."))
        ]
        if not matching:
            raise ConfigError(f"{key}.columns.video is {camera!r}; use one of {', '.join(cameras)}.")
        self.camera = matching[0]
        own = (self.info.get("worldmodel") or {}).get("action_spec")
        if own is not None:
            specs, held = map(ActionSpec.of, own), features.get("action", {"shape": [0]})
            # One without a rate of its own has that of the rows.
            slower = self.stored_fps / self.fps
            self.specs = tuple(replace(spec, rate=spec.rate / slower or self.fps) for spec in specs)
            if len(self.specs) != math.prod(held["shape"]):
                raise ValueError("its action_spec does not have an entry for each number of an action")
        elif "action" in features:
            self.specs = _specs(features["action"], self.fps)
        else:
            self.specs = ()

    def open(self, path: str) -> Any:
        """Open a file of the dataset.

        Raises:
            OSError: there is none.
        """
        if not self.root.startswith(REMOTE):
            return open(os.path.join(self.root, path), "rb")
        import fsspec

        return fsspec.open(f"{self.root}/{path}", "rb").open()  # type: ignore[attr-defined]

    def _table(self, path: str, columns: list[str] | None = None) -> Any:
        from pyarrow import parquet

        with self.open(path) as file:
            return parquet.read_table(file, columns=columns)

    def _read_tasks(self) -> dict[int, str]:
        table = self._table("meta/tasks.parquet")
        names = next(name for name in table.column_names if name != "task_index")
        return dict(zip(table["task_index"].to_pylist(), map(str, table[names].to_pylist()), strict=True))

    def _read_episodes(self) -> list[LeRobotEpisode]:
        video = f"videos/{self.camera}"
        columns = ["episode_index", "length", "data/chunk_index", "data/file_index", "dataset_from_index"]
        columns += [
            f"{video}/{name}" for name in ("chunk_index", "file_index", "from_timestamp", "to_timestamp")
        ]
        rows = [row for path in self._episode_files() for row in self._table(path, columns).to_pylist()]
        rows = sorted(rows, key=lambda row: row["episode_index"])[: int(self.info["total_episodes"])]
        first: dict[str, int] = {}
        episodes = []
        for row in rows:
            data = self._place("data", row["data/chunk_index"], row["data/file_index"])
            place = self._place("video", row[f"{video}/chunk_index"], row[f"{video}/file_index"])
            first.setdefault(data, row["dataset_from_index"])
            episodes.append(
                LeRobotEpisode(
                    row["episode_index"],
                    data,
                    row["dataset_from_index"] - first[data],
                    row["length"],
                    f"{self.root}/{place}",
                    row[f"{video}/from_timestamp"],
                    row[f"{video}/to_timestamp"],
                )
            )
        return episodes

    def _episode_files(self) -> list[str]:
        if not self.root.startswith(REMOTE):
            paths = sorted(Path(self.root, "meta", "episodes").glob("*/*.parquet"))
            return [str(path.relative_to(self.root)) for path in paths]
        import fsspec

        files, _ = fsspec.core.url_to_fs(self.root)
        pattern = f"{self.root.removeprefix(REMOTE)}/meta/episodes/*/*.parquet"
        return sorted(path[path.index("meta/episodes/") :] for path in files.glob(pattern))

    def _place(self, kind: str, chunk: int, file: int) -> str:
        pattern = self.info[f"{kind}_path"]
        path = pattern.format(chunk_index=chunk, file_index=file, video_key=self.camera)
        if os.path.isabs(path) or ".." in path.split("/"):
            raise ValueError(f"its {kind}_path {pattern!r} leaves the folder")
        return path

    def _most_tables(self) -> int:
        """Return how many data files of average length have actions of `MAX_BYTES`."""
        files = len({episode.data_path for episode in self.episodes})
        rows = sum(episode.num_rows for episode in self.episodes)
        row_bytes = 4 * (len(self.specs) + len(self._outcome_columns())) + 16
        return max(1, files * MAX_BYTES // max(1, rows * row_bytes))

    def _actions(self, path: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return the actions, tasks, episodes and outcomes (reward, end) of all rows of a data file."""
        names = ["task_index", "episode_index", *(["action"] if self.specs else [])]
        stated = self._outcome_columns()
        table = self._table(path, [*names, *stated])
        none = np.zeros((len(table), 0), np.float32)
        outcomes = np.concatenate([none, *(_numbers(table[name]) for name in stated)], axis=1)
        actions = _numbers(table["action"]) if self.specs else none
        return actions, table["task_index"].to_numpy(), table["episode_index"].to_numpy(), outcomes

    @property
    def states_outcomes(self) -> bool:
        """Whether it has the rewards of actions and the ends of episodes."""
        return bool(self._outcome_columns())

    def _outcome_columns(self) -> list[str]:
        ends = [name for name in ENDS if name in self.info["features"]]
        return [REWARD, ends[0]] if ends and REWARD in self.info["features"] else []

    def steps(self, episode: LeRobotEpisode) -> tuple[np.ndarray, list[str], np.ndarray]:
        """Return the action after each frame of an episode but the last, its task in words, and its outcome.

        Outcomes are `[steps, 2]`, reward and end, or `[steps, 0]` if the dataset does not state them.

        Raises:
            InputError: the episode has one frame, other actions than frames, or damaged data.
        """
        try:
            actions, tasks, owners, outcomes = self.actions(episode.data_path)
        # A missing or damaged parquet file raises many types.
        except Exception as error:
            raise InputError(f"{episode.data_path} cannot be read ({' '.join(str(error).split())})") from None
        rows = slice(episode.first_row, episode.first_row + episode.num_rows)
        found = int((owners[rows] == episode.index).sum())
        frames = round((episode.end - episode.start) * self.stored_fps)
        if found != episode.num_rows or frames != episode.num_rows:
            raise InputError(f"it has {found} actions and {frames} frames; record or convert it again")
        if frames < 2:
            raise InputError("it has one frame, and an action needs the frames before and after it")
        if not np.isfinite(actions[rows]).all():
            raise InputError("it has an action that is not a finite number")
        texts = [self.tasks.get(int(task), "") for task in tasks[rows]]
        return actions[rows][:-1], texts[:-1], outcomes[rows][:-1]

    def clip(self, number: int, format: RoundFormat, takes: ActionConfig) -> Clip | BrokenClip:
        """Return an episode as a clip with its actions."""
        episode = self.episodes[number]
        name = f"{os.path.basename(self.root)} episode {episode.index}"
        try:
            numbers, texts, outcomes = self.steps(episode)
            rate = max((spec.rate for spec in self.specs), default=0.0) or self.fps
            stride = max(1, round(self.fps / rate))
            taken = [column for column, spec in enumerate(self.specs) if takes.takes[spec.field]]
            specs, numbers = [self.specs[column] for column in taken], numbers[::stride, taken]
            actions = [Action.of_numbers(specs, row) for row in numbers.tolist()]  # one per action, not frame
            for action in set(actions):
                action.check(takes)
            rewards, ends = outcomes.T.tolist() if outcomes.shape[1] else ((), ())
            known = Outcomes(tuple(rewards), tuple(map(bool, ends)), self.fps) if rewards else None
        except InputError as error:
            return BrokenClip(name, str(error))
        tracks: dict[str, Any] = {
            field: Track(tuple(getattr(action, field) for action in actions), per_action=True)
            for field in ("keys", "vector", "mouse")
            if takes.takes[field] and any(spec.kind in (field, "key") for spec in self.specs)
        }
        if takes.text and any(texts):
            tracks["text"] = _text_track(texts, self.fps)
        span = Span(episode.video_path, episode.start, episode.num_rows, self.fps, self.stored_fps)
        return Clip(name, span, format, **tracks, outcomes=known)


class LeRobotSource:
    """The episodes of a LeRobot dataset.

    Raises:
        ConfigError: as `LeRobotDataset`, or the model does not take its actions or its frame rate.
    """

    streams = 0

    def __init__(self, name: str, data: DataConfig, model: WorldModelConfig) -> None:
        config, key = data.sources[name], f"data.sources.{name}"
        self.dataset = LeRobotDataset(config.path, key, config.columns.get("video", ""))
        self.format, self.takes = RoundFormat.of(model), model.action
        check_specs(key, self.dataset.specs, model)
        slow, fast = sorted([self.dataset.fps, float(model.fps)])
        if fast % slow:
            raise ConfigError(
                f"{key} has {self.dataset.fps:g} frames per second, and the model {model.fps}; set model.fps "
                "to a multiple or a divisor."
            )
        self.chosen = self._chosen(key, config.split)
        self.size = len(self.chosen)
        told = ("imagine", "describe") if model.action.text and any(self.dataset.tasks.values()) else ()
        self.tasks = ("rounds", "inverse", *told)
        if not self.size:
            raise ConfigError(f"{key} has no episodes.")

    def at(self, index: int) -> Clip | BrokenClip:
        """Return an episode."""
        return self.dataset.clip(self.chosen[index % self.size], self.format, self.takes)

    def _chosen(self, key: str, split: str) -> list[int]:
        """Return the episodes of a split, which `worldmodel data split` stores."""
        held: list[int] = []
        try:
            with self.dataset.open("meta/split.json") as file:
                held = [int(number) for number in json.load(file)["held-out"]]
            if not all(0 <= number < len(self.dataset.episodes) for number in held):
                raise ValueError("it names episodes that do not exist")
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{key}: meta/split.json cannot be read ({type(error).__name__}: {error}); run `worldmodel "
                "data split` again."
            ) from None
        except OSError:
            if split not in ("train", "all"):
                raise ConfigError(
                    f"{key}.split is {split!r}, but the dataset has no split; run `worldmodel data split` or "
                    "leave it out."
                ) from None
        everything = range(len(self.dataset.episodes))
        splits = {
            "all": list(everything),
            "held-out": held,
            "train": sorted(set(everything) - set(held)),
        }
        if split not in splits:
            raise ConfigError(f"{key}.split is {split!r}; use {', '.join(splits)}.")
        return splits[split]

    def cost(self, index: int, rounds: int) -> float:
        """Return the number of rounds of an episode."""
        episode = self.dataset.episodes[self.chosen[index % self.size]]
        frames = int((episode.num_rows - 1) / self.dataset.fps * self.format.fps + 1e-3)
        return max(1, min(rounds, frames // self.format.chunk))

    def close(self) -> None:
        """Forget the actions that are in memory."""
        self.dataset.actions.cache_clear()


def _numbers(column: Any) -> np.ndarray:
    """Return a column of numbers or lists of them as `[rows, numbers]`, without an object for each."""
    values = column.combine_chunks()
    while hasattr(values.type, "value_type"):
        values = values.flatten()
    return values.to_numpy(zero_copy_only=False).astype(np.float32).reshape(len(column), -1)


def _text_track(texts: Sequence[str], fps: float) -> Track:
    """Return the task in words: one for the episode, or one for each interval."""
    if len(set(texts)) == 1:
        return Track((texts[0],))
    starts = [0, *(i for i in range(1, len(texts)) if texts[i] != texts[i - 1])]
    ends = [*starts[1:], len(texts)]
    times = tuple((start / fps, end / fps) for start, end in zip(starts, ends, strict=True))
    return Track(tuple(texts[start] or None for start in starts), times=times)


def _specs(feature: Any, fps: float) -> tuple[ActionSpec, ...]:
    """Return what is known of the actions of a dataset without specs of ours: their names and rate."""
    size, names = int(np.prod(feature["shape"])), feature.get("names")
    if isinstance(names, dict):  # {"motors": [...]}, or the index of each name
        indexed = all(isinstance(part, int) for part in names.values())
        names = sorted(names, key=names.__getitem__) if indexed else list(itertools.chain(*names.values()))
    if not isinstance(names, list) or len(names) != size:
        names = [f"action_{index}" for index in range(size)]
    return tuple(ActionSpec(str(name), rate=fps) for name in names)


def with_action_spec(config: TrainConfig) -> TrainConfig:
    """Return a run whose model states what its actions mean, as the first of its recordings does.

    A model that states it already keeps what it has; every source is checked against it when it is opened.
    """
    if config.model.action.spec:
        return config
    takes = config.model.action
    for source in config.data.sources.values():
        specs = _stated(source) if source.weight else ()
        if spec := tuple(each for each in specs if takes.takes[each.field]):
            return replace(config, model=replace(config.model, action=replace(takes, spec=spec)))
    return config


def _stated(source: SourceConfig) -> tuple[ActionSpec, ...]:
    """Return the action spec of a source, if it has one."""
    if source.kind == "lerobot":
        return LeRobotDataset(source.path).specs
    if source.kind != "clips":
        return ()
    specs, _ = read_recording(source.root or Path(source.path).parent) or ((), 0)
    return tuple(spec for spec in specs if spec.field in source.columns)
