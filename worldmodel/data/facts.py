"""Facts about a user's dataset on which the settings of a model and its training depend."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from worldmodel import media
from worldmodel.actions import Action, ActionKind, action_kinds, control_kinds, settings_of_specs
from worldmodel.actions.track import Track
from worldmodel.config import DataConfig, SourceConfig, WorldModelConfig
from worldmodel.data.argument import read_source
from worldmodel.data.clips import Clip, Files, Part
from worldmodel.data.columns import OUTCOME, Row, track_of
from worldmodel.data.footage import Images
from worldmodel.data.huggingface import HuggingFaceSource
from worldmodel.data.lerobot import LeRobotDataset
from worldmodel.data.recording import RATE_TOLERANCE, read_recording
from worldmodel.data.sources import Source, StreamedSource, open_source
from worldmodel.data.tables import Table, TableSource, first_rows, open_table
from worldmodel.data.tar import TarSource
from worldmodel.errors import ConfigError, InputError
from worldmodel.io import atomic_file

NUM_ROWS = 100
"""Rows of a source, from its beginning, whose actions are looked at."""
HELD_SHARE = 0.1
MAX_CHUNK = 8
"""Most frames of a round; where a round is longer, the frame rate is lowered."""
MAX_ANSWERS = 20
"""Videos, from the first, that are tried for one that can be read."""
TEXT_FPS = 8
"""Frame rate, and frames of a round, where actions have no rate of their own."""
BARE = WorldModelConfig(fps=TEXT_FPS, chunk_frames=TEXT_FPS)
"""A model that takes texts alone, with which a source is opened before its actions are known."""


@dataclass(frozen=True)
class DatasetFacts:
    """Contents of a dataset."""

    train: SourceConfig
    held: SourceConfig | None
    """The held-out part; None if there is none."""
    num_episodes: int
    height: int
    width: int
    """Size of its frames in pixels."""
    fps: int
    """Frame rate at which a round has `chunk_frames`."""
    chunk_frames: int
    action: Mapping[str, Any]
    """Settings of `model.action`."""
    pace: Literal["realtime", "on_action"]
    """on_action if no round of the dataset is without an action."""
    outcomes: bool
    """Whether it states rewards and ends of episodes."""
    uncertain: bool = False
    """Whether the same actions can lead to different futures."""


def read_facts(argument: str, out: Path, force: bool = False) -> DatasetFacts:
    """Look at a dataset.

    If nothing is held out, a LeRobot dataset in a folder gets a split; a table of clips is divided in two,
    `NAME-train.jsonl` and `NAME-held.jsonl` beside the config `NAME.yaml`.

    Args:
        argument: A LeRobot dataset (a folder, or `lerobot:NAME` on the Hub); a table of clips, a folder with
            one, or of videos or images; or tar files.
        out: The config that is being made.
        force: Replace parts of a table that exist.

    Raises:
        InputError: There is no such dataset, or nothing of it can be read.
        ConfigError: It cannot be read.
    """
    (source,) = read_source(argument).sources.values()
    if source.kind == "lerobot":
        return _lerobot(source.path)
    if source.kind not in ("clips", "webdataset"):
        raise InputError(
            f"{argument!r} is of kind {source.kind}; use a LeRobot dataset, clips, or tar files."
        )
    return _clips(source, out, force)


def _lerobot(path: str) -> DatasetFacts:
    dataset = LeRobotDataset(path)
    count = len(dataset.episodes)
    if not count:
        raise InputError(f"{path!r} has no episodes.")
    train, split = SourceConfig("lerobot", path), Path(path, "meta", "split.json")
    if count > 1 and Path(path).is_dir():
        hold_out(Path(path), count)
    height, width = dataset.shape
    rates = {spec.rate for spec in dataset.specs if spec.rate} if dataset.rate == dataset.fps else set()
    fps, chunk = _stated_round(path, dataset.fps, rates or {float(dataset.fps)})
    specs = dataset.specs if rates else [replace(spec, rate=0.0) for spec in dataset.specs]
    text = not dataset.sentences or len(set(dataset.sentences.values())) > 1
    return DatasetFacts(
        train,
        replace(train, split="held-out", weight=0.0) if split.exists() else None,
        count,
        int(height),
        int(width),
        fps,
        chunk,
        {"text": text, **settings_of_specs(specs)},
        _pace(_numbers(dataset)),
        dataset.states_outcomes,
    )


def _numbers(dataset: LeRobotDataset) -> Iterator[Action]:
    """Yield the actions in numbers of the first episodes, without damaged ones."""
    for episode in dataset.episodes[:NUM_ROWS] if dataset.specs else ():
        try:
            rows = dataset.steps(episode)[0]
        except InputError:
            continue
        yield from (Action.of_numbers(dataset.specs, row) for row in rows)


def _pace(actions: Iterable[Any]) -> Literal["realtime", "on_action"]:
    found = {action in (None, (), Action()) for action in actions}
    return "on_action" if found == {False} else "realtime"


def _clips(source: SourceConfig, out: Path, force: bool) -> DatasetFacts:
    kinds = {kind.name: kind for kind in action_kinds()}
    plain = {field: column for field, column in source.columns.items() if field not in {*kinds} - {"text"}}
    bare = open_source("data", DataConfig({"data": replace(source, columns=plain, numbers=())}), BARE)
    assert isinstance(bare, TableSource | TarSource)
    try:
        info, (rows, offered) = first_video(bare), read_rows(bare)
        named = {field: field for field in (*kinds, *OUTCOME) if field in offered}
        read = bare.reader.columns | (source.columns if source.kind == "clips" else named)
        tracks = read_tracks(rows, read)
        if source.preset:  # a row may have the texts of several clips
            tracks["text"] = [
                clip.text for clip in map(bare.at, range(min(NUM_ROWS, bare.size))) if isinstance(clip, Clip)
            ]
    finally:
        bare.close()
    specs, fps = (read_recording(source.video_root) if source.kind == "clips" else None) or ((), 0)
    fps = fps or info.fps or TEXT_FPS
    found = {name: setting for name, kind in kinds.items() if (setting := setting_of(kind, tracks[name]))}
    if source.preset:  # which names its texts in any case
        found.setdefault("text", True)
    untaken = {name: False for name, kind in kinds.items() if kind.default}
    action: dict[str, Any] = untaken | found | settings_of_specs(specs)
    if rates := {spec.rate for spec in specs if spec.rate}:
        fps, chunk = _stated_round(source.path, int(fps), rates)
    else:
        length = round_frames(tracks, fps, info.duration_s)
        fps, chunk = round_at(fps, length) if length else (TEXT_FPS, TEXT_FPS)
    outcomes = {*OUTCOME} <= read.keys()
    stated = {field: field for field in OUTCOME if outcomes}
    parts: tuple[SourceConfig, SourceConfig | None] = replace(source, columns=stated | source.columns), None
    if source.kind == "clips":
        columns = {
            field: column for field, column in source.columns.items() if field not in kinds or field in found
        }
        path, root = Path(source.path).expanduser(), os.path.abspath(source.video_root)
        parts = _divide(replace(source, path=str(path), root=root, columns=columns), out, force)
    taken = [value for kind in control_kinds() for track in tracks[kind.name] for value in track.values]
    return DatasetFacts(
        *parts, bare.size, info.height, info.width, fps, chunk, action, _pace(taken), outcomes
    )


def first_video(source: Source) -> media.MediaInfo:
    """Return what the first video that can be read is; images have a rate that is stated, or that of texts.

    Raises:
        InputError: none can be read.
    """
    reason = "it has no rows"
    sampled = (
        source.sample()
        if isinstance(source, StreamedSource) and source.streams
        else map(source.at, range(min(MAX_ANSWERS, source.size or 0)))
    )
    for recipe in islice(sampled, MAX_ANSWERS):
        try:
            video = getattr(recipe, "video", getattr(recipe, "image", None))
            if isinstance(video, Files | Part):
                video = video.read()
            if isinstance(video, Images):
                count, fps = len(video), video.fps or TEXT_FPS
                found = media.probe(video.files([0])[0], decode=False)
                return replace(found, fps=fps, num_frames=count, duration_s=count / fps)
            if isinstance(video, str | bytes):
                return media.probe(video, decode=False)
            reason = getattr(recipe, "reason", "") or reason
        except InputError as error:
            reason = f"{recipe.name}: {error}"
    raise InputError(f"No video can be read ({reason.rstrip('.')}).")


def read_rows(source: Source) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Return the first rows of a source that can be read, and the names of all of its columns."""
    if isinstance(source, HuggingFaceSource):
        return list(islice(source.whole, NUM_ROWS)), source.offered
    if isinstance(source, TableSource):
        with closing(open_table(source.path)) as table:  # the source's own has only the columns that it reads
            return list(first_rows(table, NUM_ROWS)), list(table.columns)
    rows = list(first_rows(source, NUM_ROWS)) if isinstance(source, TarSource) else []
    return rows, list(dict.fromkeys(column for row in rows for column in row))


def read_tracks(rows: Iterable[Row], columns: Mapping[str, str]) -> dict[str, list[Track]]:
    """Return the actions of rows by kind; a row that cannot be read has none."""
    tracks: dict[str, list[Track]] = {kind.name: [] for kind in action_kinds()}
    for row in rows:
        for kind in action_kinds():
            with suppress(InputError):
                tracks[kind.name].append(track_of(row.get(columns.get(kind.name, "")) or None, kind))
    return tracks


def setting_of(kind: ActionKind, tracks: list[Track]) -> Any:
    """Return the setting of a kind for the values of its column; None if it says nothing."""
    values = {value for track in tracks for value in track.values if not kind.is_absent(value)}
    return kind.setting_of_values(list(values)) if values else None


def round_frames(tracks: Mapping[str, list[Track]], fps: float, duration_s: float) -> float | None:
    """Return the frames between two actions; None if no action lasts shorter than its clip."""
    controls = [track for kind in control_kinds() for track in tracks[kind.name]]
    for chosen in (controls, tracks["text"]):
        spans = [end - start for track in chosen for start, end in track.times]
        if spans:
            return min(spans) * fps
        counts = [len(track.values) for track in chosen if track.per_action]
        if counts:
            return (duration_s * fps - 1) / counts[0]
    return None


def round_at(fps: float, frames: float) -> tuple[int, int]:
    """Return a frame rate, and the frames between two actions at it, of which there are few."""
    length = max(1, round(frames))
    chunk = next(n for n in range(min(length, MAX_CHUNK), 0, -1) if length % n == 0)
    return max(1, round(fps * chunk / length)), chunk


def _stated_round(key: str, fps: int, rates: set[float]) -> tuple[int, int]:
    """Return the same for stated rates of actions, exactly."""
    length = max(1, round(fps / max(rates)))
    fitting = (n for n in range(min(length, MAX_CHUNK), 0, -1) if length % n == 0 == fps * n % length)
    chunk = next(fitting, 0)
    for rate in sorted(rates):
        if not chunk or abs(rate * length - fps) > RATE_TOLERANCE * fps:
            raise ConfigError(
                f"{key!r} has {rate:g} actions per second in {fps} frames per second, and a model needs "
                f"a whole number of frames for each, the same for all and at most {MAX_CHUNK} at a whole "
                "frame rate; record it again at another rate."
            )
    return fps * chunk // length, chunk


def held_out(count: int, seed: int = 0) -> list[int]:
    """Return the numbers of a tenth of the episodes, at least one."""
    order = np.random.default_rng(seed).permutation(count)
    return sorted(order[: max(1, round(HELD_SHARE * count))].tolist())


def hold_out(folder: Path, count: int) -> list[int]:
    """Return the held-out episodes of a recording; in a LeRobot dataset without a split, store one.

    Args:
        folder: The LeRobot dataset or the folder of the table, which `new` divides in the same way.
        count: Its number of episodes.

    Raises:
        InputError: its split cannot be read.
    """
    split = folder / "meta" / "split.json"
    if split.is_file():
        try:
            return [int(number) for number in json.loads(split.read_text(encoding="utf-8"))["held-out"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{str(split)!r} cannot be read ({type(error).__name__}: {error}); run `worldmodel data "
                "split` again."
            ) from None
    held = held_out(count)
    if (folder / "meta" / "info.json").is_file():
        with atomic_file(split) as temporary:
            temporary.write_text(json.dumps({"by": "episode", "seed": 0, "held-out": held}), encoding="utf-8")
    return held


def _divide(source: SourceConfig, out: Path, force: bool) -> tuple[SourceConfig, SourceConfig | None]:
    """Write the rows of a table into one for training and one that is held out."""
    with closing(open_table(source.path)) as table:
        if len(table) < 2:
            return source, None
        train, held = write_parts(table, held_out(len(table)), out, force)
    return replace(source, path=str(train)), replace(source, path=str(held), weight=0.0)


def write_parts(table: Table, held: list[int], path: Path, force: bool) -> list[Path]:
    """Write the rows of a table for training, `NAME-train.jsonl`, and those held out, `NAME-held.jsonl`.

    Raises:
        InputError: a file exists and is not to be replaced.
    """
    paths = [path.with_name(f"{path.stem}-{part}.jsonl") for part in ("train", "held")]
    for each in paths:
        if each.exists() and not force:
            raise InputError(f"{str(each)!r} exists; pass --force to replace it.")
    rest = sorted(set(range(len(table))) - set(held))
    for each, numbers in zip(paths, (rest, held), strict=True):
        write_rows(table, numbers, each)
    return paths


def write_rows(table: Table, numbers: Iterable[int], path: Path) -> None:
    """Write some rows of a table into another one, as jsonl; damaged ones are left out."""
    with atomic_file(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for number in numbers:
            with suppress(InputError):
                file.write(json.dumps(dict(table.row(number)), default=str) + "\n")
