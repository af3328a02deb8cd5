"""Opening of any source for examination, at its own frame rate and with all of its actions."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from worldmodel.actions import ActionSpec, action_kinds, settings_of_specs
from worldmodel.config import (
    ActionConfig,
    CodecConfig,
    DataConfig,
    SourceConfig,
    VisionConfig,
    WorldModelConfig,
    build,
)
from worldmodel.data.argument import read_source
from worldmodel.data.columns import OUTCOME
from worldmodel.data.facts import (
    TEXT_FPS,
    first_video,
    read_rows,
    read_tracks,
    round_at,
    round_frames,
    setting_of,
)
from worldmodel.data.lerobot import LeRobotDataset
from worldmodel.data.recording import read_recording
from worldmodel.data.sources import SOURCE_KINDS, Recipe, Source, StreamedSource, open_source
from worldmodel.episodes import Episode
from worldmodel.errors import InputError

MAX_SIDE = 128
"""Pixels along the longer side to which larger frames are shrunk."""
MAX_FRAMES = 2000
"""Frames of an episode that are looked at."""


@dataclass(frozen=True)
class Examined:
    """A source opened for examination."""

    name: str
    source: Source
    config: SourceConfig
    specs: tuple[ActionSpec, ...]
    fps: int
    native: tuple[int, int] = (0, 0)
    """Height and width of its frames in the file; 0 if they are not known."""
    unread: tuple[str, ...] = ()
    """Columns that it has, and that nothing reads."""

    @property
    def size(self) -> int:
        """Number of its episodes."""
        assert self.source.size is not None
        return self.source.size

    def recipes(self, most: int) -> Iterator[tuple[int, Recipe]]:
        """Yield numbers and recipes of up to `most` episodes, spread over the source; of 0, of all."""
        if isinstance(self.source, StreamedSource) and self.source.streams:
            yield from enumerate(islice(self.source.sample(), most or None))
            return
        chosen = range(self.size)
        if 0 < most < self.size:
            chosen = np.unique(np.linspace(0, self.size - 1, most).astype(int)).tolist()
        yield from ((number, self.source.at(number)) for number in chosen)

    def episode(self, index: int) -> Episode:
        """Return a whole episode.

        Raises:
            InputError: it is broken.
        """
        return self.read(self.source.at(index), index)

    def read(self, recipe: Recipe, index: int) -> Episode:
        """Return the whole episode of a recipe; an image is one of one frame.

        Raises:
            InputError: it is broken.
        """
        if "rounds" in self.source.tasks:
            return recipe.episode("rounds", 0, index, MAX_FRAMES)
        found = recipe.episode(self.source.tasks[-1], 0, index, 1)
        frames = next(clip for clip in found.observations if len(clip))
        return Episode(found.name, (frames[:1],))


def open_examined(argument: str, split: str = "all") -> Examined:
    """Open a source of any kind by its argument.

    Raises:
        ConfigError: the source cannot be read.
        InputError: there is none, or none of its videos can be read.
    """
    ((name, source),) = read_source(argument).sources.items()
    if source.kind == "lerobot" and source.split == "train":
        source = replace(source, split=split)
    return open_config(name, source)


def open_config(name: str, source: SourceConfig) -> Examined:
    """Open a source of a config.

    Raises:
        ConfigError: as `open_examined`.
        InputError: as `open_examined`.
    """
    if source.kind not in SOURCE_KINDS or source.kind == "text":
        raise InputError(f"{name!r} is of kind {source.kind}, which has no episodes in files to examine.")
    source = replace(source, numbers=())  # vectors as they are stored, and not as a model takes them
    return _lerobot(name, source) if source.kind == "lerobot" else _clips(name, source)


def _lerobot(name: str, source: SourceConfig) -> Examined:
    dataset = LeRobotDataset(source.path, name, source.columns)
    rate = max((spec.rate for spec in dataset.specs), default=0.0) or dataset.fps
    model = _model(
        dataset.shape, dataset.fps, max(1, round(dataset.fps / rate)), settings_of_specs(dataset.specs)
    )
    opened = _open(name, source, model)
    return Examined(name, opened, source, dataset.specs, dataset.fps, dataset.shape, tuple(dataset.unread))


def _clips(name: str, source: SourceConfig) -> Examined:
    source = replace(source, precomputed=False)
    kinds = {kind.name: kind for kind in action_kinds()}
    plain = {field: column for field, column in source.columns.items() if field not in {*kinds} - {"text"}}
    bare = _open(name, replace(source, columns=plain), _model((64, 64), TEXT_FPS, 1, {}))
    try:
        rows, offered = read_rows(bare)
        columns = {field: field for field in (*kinds, *OUTCOME) if field in offered} | source.columns
        info = first_video(bare)
        tracks = read_tracks(rows, columns)
    finally:
        bare.close()
    specs, fps = (read_recording(source.video_root) if source.kind == "clips" else None) or ((), 0)
    given = {field: setting for field, kind in kinds.items() if (setting := setting_of(kind, tracks[field]))}
    taken = {field: column for field, column in columns.items() if field not in kinds or field in given}
    if len({*OUTCOME} & {*taken}) == 1:
        taken = {field: column for field, column in taken.items() if field not in OUTCOME}
    rates = {spec.rate for spec in specs if spec.rate}
    if rates:
        chunk = max(1, round(fps / max(rates)))
    else:
        length = round_frames(tracks, fps or info.fps or TEXT_FPS, info.duration_s)
        fps, chunk = round_at(fps or info.fps or TEXT_FPS, length) if length else (fps or _whole(info.fps), 1)
    action = {field: setting for field, setting in given.items() if not kinds[field].default}
    model = _model((info.height, info.width), fps, chunk, action | settings_of_specs(specs))
    kept = {field: column for field, column in taken.items() if model.action.takes.get(field, True)}
    opened = _open(name, replace(source, columns=kept), model)
    reader = getattr(opened, "reader", None)
    needed = {*getattr(reader, "needed", ()), getattr(opened, "video", "")}
    unread = tuple(column for column in offered if column not in needed)
    if not specs and "vector" in given:
        specs = _numbered(tracks["vector"], fps / chunk)
    return Examined(
        name, opened, replace(source, columns=kept), specs, fps, (info.height, info.width), unread
    )


def _numbered(tracks: list[Any], rate: float) -> tuple[ActionSpec, ...]:
    """Return specs of vectors that none describes."""
    size = max((len(value) for track in tracks for value in track.values if value), default=0)
    return tuple(ActionSpec(f"vector_{index}", rate=rate) for index in range(size))


def _model(native: tuple[int, int], fps: int, chunk: int, action: Mapping[str, Any]) -> WorldModelConfig:
    """Return a model that takes all actions of a source, and sees its frames nearly as they are."""
    scale = min(1.0, MAX_SIDE / max(native))
    size = tuple(max(16, 8 * round(side * scale / 8)) for side in native)
    return WorldModelConfig(
        codec=CodecConfig(image_size=size, temporal_factor=1),
        vision=VisionConfig(max_frames=chunk + 1, merge=1),
        action=build(ActionConfig, {"text": True, **action}),
        fps=fps,
        chunk_frames=chunk,
        outcomes=True,
    )


def _open(name: str, source: SourceConfig, model: WorldModelConfig) -> Source:
    return open_source(name, DataConfig({name: source}, window=64), model)


def _whole(fps: float | None) -> int:
    return max(1, round(fps)) if fps and math.isfinite(fps) else TEXT_FPS
