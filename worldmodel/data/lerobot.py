"""LeRobot datasets (v2.0, v2.1, v3.0) in a local folder or on the Hub, each episode of which is one clip.

Only the index (`meta/`) is read when the source is opened. A video file is opened once in every process for
all of its episodes, and the actions of a data file are kept while its episodes are read. Files of a dataset
on the Hub are read piece by piece.
"""

import itertools
import json
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from worldmodel.actions import Action, action_kind, specs_by_kind
from worldmodel.actions.track import Track
from worldmodel.config import (
    ActionConfig,
    ActionSpec,
    DataConfig,
    SourceConfig,
    TrainConfig,
    WorldModelConfig,
)
from worldmodel.data.clips import BrokenClip, Clip, Outcomes, RoundFormat, Span
from worldmodel.data.footage import ImageRows, Tiles, grid
from worldmodel.data.lerobot_index import Files, Footage, LeRobotEpisode, read_episodes, read_tasks
from worldmodel.data.recording import (
    RATE_TOLERANCE,
    VECTOR,
    check_specs,
    is_whole,
    read_recording,
    renamed,
    vector_names,
)
from worldmodel.errors import ConfigError, InputError, pip_install
from worldmodel.media.shared_video import REMOTE

VERSIONS = ("v2.", "v3.")
ACTIONS = ("action", "actions")
"""Features that hold actions, the first of which is read."""
HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+(@[\w.-]+)?")
LOG = logging.getLogger(__name__)
REWARD, ENDS = "next.reward", ("next.terminated", "next.done")
"""Columns of the reward and of the end of an episode; an episode that was cut short has not ended."""
INDEXES = ("index", "frame_index", "episode_index", "info", "next.truncated")
"""Columns that say nothing of the world."""
MAX_BYTES = 2**28
"""Memory for the actions of data files, about, in every process."""


class LeRobotDataset:
    """The index of a dataset.

    Args:
        path: a folder, or the name of a dataset on the Hub: user/name, or user/name@revision.
        key: config key of the source, for messages.
        columns: by field of a source: `video`, the feature of the camera, or several with + between them,
            which are tiled (the first camera by default); `vector`, the feature of the actions; `text`, that
            of the texts (the task by default).

    Raises:
        ConfigError: it cannot be opened, has another version, or has no such feature.
    """

    def __init__(self, path: str, key: str = "the dataset", columns: Mapping[str, str] | None = None) -> None:
        folder = Path(path).expanduser()
        if not (folder.exists() or HUB_NAME.fullmatch(path)):
            raise ConfigError(f"{key}: there is no {path!r}; pass a folder, or user/name on the Hub.")
        self.root = os.path.abspath(folder) if folder.exists() else f"{REMOTE}datasets/{path}"
        self.files = Files(self.root)
        try:
            from pyarrow import ArrowException
        except ImportError:
            raise ConfigError(f"{key} requires pyarrow: {pip_install('data')}.") from None
        try:
            with self.files.open("meta/info.json") as file:
                self.info = json.load(file)
            if not isinstance(self.info, dict):
                raise ValueError("meta/info.json is not an object")
            self._check(key, columns or {})
            self.tasks = read_tasks(self.files)
            self._choose_text(key, (columns or {}).get("text", ""))
            self.episodes = read_episodes(self.files, self.info, self.cameras)
        except (OSError, ArrowException, KeyError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            reason = " ".join(str(error).split()).rstrip(".")
            raise ConfigError(
                f"{key}: {path!r} cannot be read as a LeRobot dataset ({type(error).__name__}: {reason})."
            ) from None
        self.actions = lru_cache(maxsize=self._most_tables())(self._actions)

    def _check(self, key: str, columns: Mapping[str, str]) -> None:
        version = str(self.info.get("codebase_version", ""))
        if not version.startswith(VERSIONS):
            raise ConfigError(
                f"{key} has the LeRobot version {version or 'unknown'}; versions 2.0, 2.1 and 3.0 are read."
            )
        if unknown := sorted({*columns} - {"video", "vector", "text"}):
            raise ConfigError(f"{key}.columns has {unknown[0]!r}; use video, vector or text.")
        self.stored_fps = float(self.info["fps"])
        if not 0 < self.stored_fps < math.inf:
            raise ConfigError(f"{key} has {self.stored_fps:g} frames per second; correct meta/info.json.")
        self.fps = max(1, round(self.stored_fps))
        # 30 for 29.97, every frame with its own action; of other fractions frames are drawn by their times.
        self.rate = float(self.fps) if is_whole(self.stored_fps) else self.stored_fps
        features = self.info["features"]
        offered = [name for name, feature in features.items() if feature["dtype"] in ("video", "image")]
        if not offered:
            raise ConfigError(f"{key} stores no camera, neither as video nor as images.")
        wanted = columns.get("video", "")
        self.cameras = [_feature(name, offered) for name in wanted.split("+")] if wanted else offered[:1]
        if not all(self.cameras):
            raise ConfigError(f"{key}.columns.video is {wanted!r}; use one of {', '.join(offered)}.")
        self.action = columns.get("vector") or next((name for name in ACTIONS if name in features), "")
        if self.action and self.action not in features:
            known = [
                name for name, each in features.items() if str(each["dtype"]).startswith(("float", "int"))
            ]
            raise ConfigError(f"{key}.columns.vector is {self.action!r}; use one of {', '.join(known)}.")
        own = (self.info.get("worldmodel") or {}).get("action_spec")
        if own is not None:
            specs, held = map(ActionSpec.of, own), features.get("action", {"shape": [0]})
            # A spec without a rate has the rate of the rows.
            slower = self.stored_fps / self.rate
            self.specs = tuple(replace(spec, rate=spec.rate / slower or self.rate) for spec in specs)
            if len(self.specs) != math.prod(held["shape"]):
                raise ValueError("its action_spec does not have an entry for each number of an action")
        else:
            self.specs = _specs(features[self.action], self.rate) if self.action else ()

    def _choose_text(self, key: str, column: str) -> None:
        """Choose the column of the texts: a number of a sentence, or the sentence itself."""
        features = self.info["features"]
        texts = [name for name, feature in features.items() if feature["dtype"] in ("string", "language")]
        if not column:
            told = any(self.tasks.values())
            column = "task" if told else next((name for name in texts if "instruction" in name), "task")
        self.text, self.sentences = f"{column}_index", self.tasks
        if column in texts:
            self.text, self.sentences = column, {}
        elif column != "task":
            if f"{column}_index" not in features:
                known = [*texts, *(name[:-6] for name in features if name.endswith(("task_index",)))]
                raise ConfigError(f"{key}.columns.text is {column!r}; use one of {', '.join(known)}.")
            self.sentences = read_tasks(self.files, column)

    @property
    def has_texts(self) -> bool:
        """Whether it has texts of its episodes."""
        return not self.sentences or any(self.sentences.values())

    @property
    def camera(self) -> str:
        """Feature of the first camera that is read."""
        return self.cameras[0]

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of its frames in pixels; of several cameras, of all tiles together."""
        height, width = self.shape_of(self.camera)
        rows, columns = grid(len(self.cameras))
        return height * rows, width * columns

    def shape_of(self, camera: str) -> tuple[int, int]:
        """Return height and width of the frames of a camera in pixels."""
        feature = self.info["features"][camera]
        first = (feature.get("names") or [""])[0] in ("channel", "channels", "rgb", "c")
        height, width = feature["shape"][int(first) :][:2]
        return int(height), int(width)

    def _most_tables(self) -> int:
        """Return how many data files of average length have actions of `MAX_BYTES`."""
        files = len({episode.data_path for episode in self.episodes})
        rows = sum(episode.num_rows for episode in self.episodes)
        row_bytes = 4 * (len(self.specs) + len(self._outcome_columns())) + 16
        return max(1, files * MAX_BYTES // max(1, rows * row_bytes))

    def _actions(self, path: str) -> tuple[np.ndarray, list[str], np.ndarray, np.ndarray]:
        """Return the actions, texts, episodes and outcomes (reward, end) of all rows of a data file."""
        names = ["episode_index", *([self.action] if self.specs else [])]
        stated = self._outcome_columns()
        table = self.files.table(path, list(dict.fromkeys([*names, self.text, *stated])))
        none = np.zeros((len(table), 0), np.float32)
        outcomes = np.concatenate([none, *(_numbers(table[name]) for name in stated)], axis=1)
        actions = _numbers(table[self.action], len(self.specs)) if self.specs else none
        said = table[self.text].to_pylist()
        texts = [str(each or "") for each in said]
        if self.sentences:
            texts = [self.sentences.get(int(each or 0), "") for each in said]
        return actions, texts, table["episode_index"].to_numpy(), outcomes

    @property
    def states_outcomes(self) -> bool:
        """Whether it has the rewards of actions and the ends of episodes."""
        return bool(self._outcome_columns())

    def _outcome_columns(self) -> list[str]:
        ends = [name for name in ENDS if name in self.info["features"]]
        return [REWARD, ends[0]] if ends and REWARD in self.info["features"] else []

    def steps(self, episode: LeRobotEpisode) -> tuple[np.ndarray, list[str], np.ndarray]:
        """Return the action after each frame of an episode but the last, its text, and its outcome.

        Outcomes are `[steps, 2]`, reward and end, or `[steps, 0]` if the dataset does not state them.

        Raises:
            InputError: the episode has one frame, other actions than frames, or damaged data.
        """
        if episode.broken:
            raise InputError(episode.broken)
        try:
            actions, texts, owners, outcomes = self.actions(episode.data_path)
        # A missing or damaged parquet file raises many types.
        except Exception as error:
            raise InputError(f"{episode.data_path} cannot be read ({' '.join(str(error).split())})") from None
        rows = slice(episode.first_row, episode.first_row + episode.num_rows)
        # Offsets that do not fit the file would give an episode the actions of another one, unnoticed.
        found, count = int((owners[rows] == episode.index).sum()), episode.num_rows
        if found != count:
            raise InputError(f"it has {found} rows of {count}; record or convert it again")
        for each in episode.footage:
            frames = count if each.column else round((each.end - each.start) * self.stored_fps)
            if frames != count:
                rate = count / max(each.end - each.start, 1e-9)
                raise InputError(
                    f"it has {count} actions and {frames} frames, as if its video had {rate:.4g} frames per "
                    f"second and not the fps of meta/info.json, {self.stored_fps:g}; correct one, or record "
                    "it again"
                )
        if count < 2:
            raise InputError("it has one frame, and an action needs the frames before and after it")
        if not np.isfinite(actions[rows]).all():
            wrong = np.isneginf(actions[rows]).all(axis=1)
            raise InputError(
                f"it has actions of other than {len(self.specs)} numbers"
                if wrong.any()
                else "it has an action that is not a finite number"
            )
        return actions[rows][:-1], texts[rows][:-1], outcomes[rows][:-1]

    def times(self, episode: LeRobotEpisode) -> np.ndarray:
        """Return the times of the rows of an episode, in seconds; empty if the dataset has none.

        Raises:
            InputError: its data cannot be read.
        """
        if "timestamp" not in self.info["features"]:
            return np.empty(0)
        try:
            column = self.files.table(episode.data_path, ["timestamp"])["timestamp"]
        except Exception as error:  # as `steps`
            raise InputError(f"{episode.data_path} cannot be read ({' '.join(str(error).split())})") from None
        return _numbers(column)[episode.first_row :][: episode.num_rows].astype(np.float64).ravel()

    @property
    def unread(self) -> list[str]:
        """Columns and cameras that it has, and that are not read."""
        read = {*self.cameras, self.action, self.text, "timestamp", "task_index", *ENDS, *INDEXES}
        return [name for name in self.info["features"] if name not in {*read, *self._outcome_columns()}]

    def clip(
        self,
        number: int,
        format: RoundFormat,
        takes: ActionConfig,
        outcomes: bool = True,
        names: Sequence[str] = (),
    ) -> Clip | BrokenClip:
        """Return an episode as a clip with its actions.

        Args:
            number: of the episode.
            format: of the model's rounds.
            takes: the actions that the model takes.
            outcomes: whether rewards are needed; if not, values that are not numbers are ignored.
            names: of the numbers of vectors (`vector_names`).
        """
        episode = self.episodes[number]
        name = f"{os.path.basename(self.root)} episode {episode.index}"
        try:
            numbers, texts, stated = self.steps(episode)
            rate = max((spec.rate for spec in self.specs), default=0.0) or self.rate
            stride = max(1, round(self.rate / rate))
            taken = [column for column, spec in enumerate(self.specs) if takes.takes[spec.field]]
            specs, numbers = [self.specs[column] for column in taken], numbers[::stride, taken]
            actions = [Action.of_numbers(specs, row) for row in numbers.tolist()]  # one per action, not frame
            if names:
                arranged = partial(action_kind(VECTOR).arranged, names=names, settings=takes.vector)
                actions = [replace(action, vector=arranged(action.vector)) for action in actions]
            for action in set(actions):
                action.check(takes)
            usable = stated.shape[1] and (outcomes or np.isfinite(stated).all())
            rewards, ends = stated.T.tolist() if usable else ((), ())
            known = Outcomes(tuple(rewards), tuple(map(bool, ends)), self.rate) if rewards else None
        except InputError as error:
            return BrokenClip(name, str(error))
        controls = {
            kind.name: self._track([action.part(kind.name) for action in actions], stride, format)
            for kind, _ in specs_by_kind(specs)
        }
        text = _text_track(texts, self.rate) if takes.text and any(texts) else Track()
        shots = tuple(self._shot(each, episode) for each in episode.footage)
        video = shots[0] if len(shots) == 1 else Tiles(shots)
        return Clip(name, video, format, text, controls=controls, outcomes=known)

    def _track(self, values: list[Any], stride: int, format: RoundFormat) -> Track:
        """Return the values of a control: one for each action, or where the rates differ, by their times."""
        if abs(format.fps / format.action_frames * stride / self.rate - 1) <= RATE_TOLERANCE:
            return Track(tuple(values), per_action=True)
        step = stride / self.rate
        times = tuple((index * step, (index + 1) * step) for index in range(len(values)))
        return Track(tuple(values), times=times)

    def _shot(self, footage: Footage, episode: LeRobotEpisode) -> Span | ImageRows:
        if footage.column:
            path = f"{self.root}/{footage.path}"
            return ImageRows(path, footage.column, episode.first_row, episode.num_rows, self.rate, self.root)
        return Span(footage.path, footage.start, episode.num_rows, self.rate, self.stored_fps)


class LeRobotSource:
    """The episodes of a LeRobot dataset.

    Raises:
        ConfigError: as `LeRobotDataset`, or the model does not take its actions or its frame rate.
    """

    streams = 0

    def __init__(self, name: str, data: DataConfig, model: WorldModelConfig) -> None:
        config, key = data.sources[name], f"data.sources.{name}"
        self.dataset = LeRobotDataset(config.path, key, config.columns)
        self.format, self.takes, self.outcomes = RoundFormat.of(model), model.action, model.outcomes
        # Frames and actions are drawn by their times, so rates need not agree.
        specs = renamed(self.dataset.specs, config.numbers)
        check_specs(key, [replace(spec, rate=0.0) for spec in specs], model)
        self.names = vector_names(key, self.dataset.specs, config.numbers, model.action)
        recorded = max((spec.rate for spec in self.dataset.specs), default=0.0)
        if recorded > model.fps / model.action_frames * (1 + RATE_TOLERANCE):
            LOG.warning(
                "%s has %g actions per second and the model takes %g: of the others it will know nothing; "
                "set model.action.per_round or chunk_frames to take them all.",
                key,
                recorded,
                model.fps / model.action_frames,
            )
        self.chosen = self._chosen(key, config.split)
        self.size = len(self.chosen)
        told = ("imagine", "describe") if model.action.text and self.dataset.has_texts else ()
        self.tasks = ("rounds", "inverse", *told)
        if not self.size:
            raise ConfigError(f"{key} has no episodes.")

    def at(self, index: int) -> Clip | BrokenClip:
        chosen = self.chosen[index % self.size]
        return self.dataset.clip(chosen, self.format, self.takes, self.outcomes, self.names)

    def frame_sizes(self) -> np.ndarray:
        """Return height and width of the frames of every episode, which are equal, `[n, 2]`."""
        return np.tile(self.dataset.shape, (self.size, 1))

    def _chosen(self, key: str, split: str) -> list[int]:
        """Return the episodes of a split, which `worldmodel data split` stores."""
        held: list[int] = []
        try:
            with self.dataset.files.open("meta/split.json") as file:
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
        frames = int((episode.num_rows - 1) / self.dataset.rate * self.format.fps + 1e-3)
        return max(1, min(rounds, frames // self.format.chunk))

    def close(self) -> None:
        self.dataset.actions.cache_clear()


def _feature(name: str, offered: Sequence[str]) -> str:
    """Return the feature of a name, with or without the usual prefix; empty if there is none."""
    return next((each for each in offered if name in (each, each.removeprefix("observation.images."))), "")


def _numbers(column: Any, width: int = 0) -> np.ndarray:
    """Return a column of numbers or lists of them as `[rows, numbers]`, without an object for each.

    Args:
        column: the column.
        width: numbers of a row; a row with others is minus infinity. 0: all rows have equally many.
    """
    values = column.combine_chunks()
    counts = np.ones(len(column), np.int64)
    while hasattr(values.type, "value_type"):
        if hasattr(values, "offsets"):
            ends = values.offsets.to_numpy()
            inner = np.concatenate([[0], np.cumsum(counts)])
            counts = np.add.reduceat(np.append(np.diff(ends), 0), inner[:-1]) if len(counts) else counts
        else:
            counts = counts * values.type.list_size
        values = values.flatten()
    found = values.to_numpy(zero_copy_only=False).astype(np.float32)
    if not width or found.size == width * len(column):
        return found.reshape(len(column), -1)
    right = np.repeat(counts == width, counts)
    rows = np.full((len(column), width), -np.inf, np.float32)
    rows[counts == width] = found[right].reshape(-1, width)
    return rows


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
    """Return a run whose model states what its actions mean, as its recordings do.

    A model that states it already keeps what it has; every source is checked against it when it is opened.
    """
    if config.model.action.spec:
        return config
    takes, found = config.model.action, dict[tuple[str, str], ActionSpec]()
    for source in config.data.sources.values():
        for spec in renamed(_stated(source), source.numbers) if source.weight else ():
            if takes.takes[spec.field]:
                found.setdefault((spec.kind, spec.name), spec)
    if not found:
        return config
    action = replace(takes, spec=tuple(found.values()))
    return replace(config, model=replace(config.model, action=action))


def _stated(source: SourceConfig) -> tuple[ActionSpec, ...]:
    """Return the action spec of a source, if it has one."""
    if source.kind == "lerobot":
        return LeRobotDataset(source.path, columns=source.columns).specs
    if source.kind != "clips":
        return ()
    specs, _ = read_recording(source.video_root) or ((), 0)
    return tuple(spec for spec in specs if spec.field in source.columns)
