"""Sources of episodes. An episode is a pure function of (task, seed, index), so any order can be replayed."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from worldmodel.config import DataConfig, StageConfig, WorldModelConfig
from worldmodel.config.imports import import_object
from worldmodel.episodes import Episode
from worldmodel.errors import ConfigError

SOURCE_KINDS = {
    "clips": "worldmodel.data.tables:TableSource",
    "text": "worldmodel.data.text:open_text",
    "webdataset": "worldmodel.data.tar:TarSource",
    "huggingface": "worldmodel.data.huggingface:HuggingFaceSource",
    "lerobot": "worldmodel.data.lerobot:LeRobotSource",
    "flow": "worldmodel.flow.log.source:FlowSource",
}
"""Kinds of sources that are read from files: what opens each, as `module:name`, imported on first use."""

_generators: "dict[str, str | Opener]" = {"shapes": "worldmodel.shapes.source:open_source"}
"""Kinds of sources that generate their episodes; see `register_source`."""


class Recipe(Protocol):
    """Instructions for one episode: a small object that is sent to the process that reads and decodes."""

    @property
    def name(self) -> str:
        """Name for messages."""
        ...

    @property
    def texts(self) -> Sequence[str]:
        """Texts of its episodes that are known before one is made; a tokenizer learns from them."""
        ...

    def episode(self, task: str, seed: int, index: int, rounds: int) -> Episode:
        """Return the episode, the same for the same arguments.

        Raises:
            InputError: its file or row cannot be used; the message names it.
        """
        ...


class Source(Protocol):
    """A source of episodes: the trainer calls `at`, and a worker the recipe's `episode`."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks for which it has episodes."""
        ...

    @property
    def size(self) -> int | None:
        """Number of episodes; None: unlimited."""
        ...

    @property
    def streams(self) -> int:
        """Number of streams that it is read from front to back; 0: episodes can be requested in any order.

        Episode `i` is in stream `i % streams`. Such a source also has the methods of `StreamedSource`.
        """
        ...

    def at(self, index: int) -> Recipe:
        """Return the recipe of an episode; of a finite source, row `index % size`. Thread-safe."""
        ...

    def cost(self, index: int, rounds: int) -> float:
        """Return the relative cost of training on an episode: its number of rounds, if known."""
        ...

    def close(self) -> None:
        """Close files and end threads."""
        ...


@runtime_checkable
class StreamedSource(Source, Protocol):
    """A source that is read front to back."""

    @property
    def window(self) -> int:
        """Number of rows of each stream that are shuffled together."""
        ...

    def sample(self) -> Iterator[Recipe]:
        """Yield the recipe of every row once, from all streams in turn."""
        ...

    def marks(self, window: int) -> dict[str, Any]:
        """Return bookmarks of the streams that this process reads, at or before a window; JSON."""
        ...

    def resume(self, bookmarks: Mapping[str, Any]) -> None:
        """Begin at bookmarks of an earlier run; called before `at`."""
        ...


Opener = Callable[[str, DataConfig, WorldModelConfig], Source]
"""Opens one of `data.sources` by its name, for a model; raises ConfigError if the source does not fit."""


def register_source(kind: str, opener: str | Opener) -> None:
    """Register a kind of source that generates its episodes.

    Args:
        kind: Value of `data.sources.NAME.kind`.
        opener: A function with the arguments of `open_source`, or its name as `module:name`.
    """
    _generators[kind] = opener


def open_sources(config: DataConfig, model: WorldModelConfig) -> dict[str, Source]:
    """Open all of `data.sources`.

    Raises:
        ConfigError: a setting of `data` is wrong, or as `open_source`.
    """
    if not config.sources:
        raise ConfigError("data.sources is empty; name at least one, for example {shapes: {kind: shapes}}.")
    for name, least in (("num_workers", 0), ("prefetch", 1), ("window", 1)):
        if getattr(config, name) < least:
            raise ConfigError(f"data.{name} is {getattr(config, name)}; use {least} or more.")
    if not 0 < config.timeout_s < math.inf:
        raise ConfigError(f"data.timeout_s is {config.timeout_s:g}; use a number of seconds above 0.")
    if not 0 <= config.max_bad_fraction <= 1:
        raise ConfigError(f"data.max_bad_fraction is {config.max_bad_fraction:g}; use a share from 0 to 1.")
    for name, source in config.sources.items():
        if not 0 <= source.weight < math.inf:
            raise ConfigError(f"data.sources.{name}.weight is {source.weight:g}; use 0 or more.")
    return {name: open_source(name, config, model) for name in config.sources}


def open_source(name: str, config: DataConfig, model: WorldModelConfig) -> Source:
    """Open one of `data.sources`, for a model whose frames and actions the episodes must fit.

    Raises:
        ConfigError: a setting or the source's index is wrong; the message names the source.
    """
    source = config.sources[name]
    openers = _generators | SOURCE_KINDS
    if source.kind not in openers:
        raise ConfigError(f"data.sources.{name}.kind is {source.kind!r}; use one of {', '.join(openers)}.")
    opener = openers[source.kind]
    if isinstance(opener, str):
        opener = import_object(opener)
    return opener(name, config, model.sized(source.size) if source.size else model)


def stage_weights(config: DataConfig, stage: StageConfig) -> dict[str, float]:
    """Return the weight of every source in a stage.

    Raises:
        ConfigError: the stage names a source that the data does not have.
    """
    if unknown := sorted(set(stage.sources) - set(config.sources)):
        raise ConfigError(
            f"A stage draws from {unknown[0]!r}, which is not in data.sources ({', '.join(config.sources)})."
        )
    return {
        name: stage.sources.get(name, 0.0) if stage.sources else source.weight
        for name, source in config.sources.items()
    }
