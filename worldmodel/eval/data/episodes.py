"""Recorded episodes of a data source, read in batches and checked against a model."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from worldmodel.actions import Action
from worldmodel.config import DataConfig, WorldModelConfig, height_width
from worldmodel.data.sources import Source, open_source
from worldmodel.episodes import Episode, Outcome
from worldmodel.errors import InputError
from worldmodel.eval.action_following import BATCH
from worldmodel.media import Frame, Frames

MAX_SKIPPED = 100
"""Unusable episodes after which a source without any other is given up."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded episode.

    Attributes:
        start: The observation before the first round, its last frame.
        actions: The action of every round.
        clips: The true frames of every round, uint8 `[t, h, w, 3]`.
        outcomes: Reward and end of every round; none if the source does not state them.
        number: Its number in the source.
    """

    start: Frame
    actions: tuple[Action, ...]
    clips: tuple[Frames, ...]
    outcomes: tuple[Outcome, ...] = ()
    number: int = 0

    @property
    def starts(self) -> list[Frame]:
        """The frame before every round."""
        return [self.start, *(clip[-1] for clip in self.clips[:-1])]


@dataclass(slots=True)
class EpisodeReader:
    """Reads episodes of a source, the same for the same seed.

    A source of known size is sampled without replacement, so that every episode counts once.

    Attributes:
        data: Config of one source.
        model: Config of the model, whose frames and actions the episodes must fit.
        rounds: Most rounds of an episode.
        seed: Seed of the choice of episodes, and of their offsets in longer recordings.
        skipped: Reasons why episodes of the last pass could not be used.
    """

    data: DataConfig
    model: WorldModelConfig
    rounds: int
    seed: int
    skipped: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the source."""
        return next(iter(self.data.sources))

    def read(self, count: int | None = None, shuffled: bool = False) -> Iterator[Recorded]:
        """Yield up to `count` episodes; without a number all, or of an unlimited source without end.

        They come in the order of the source, which reads fastest, or shuffled if its size is known.

        Raises:
            ConfigError: The source cannot be opened.
            InputError: None of the episodes can be used, or their frames or actions do not fit the model.
        """
        settings = replace(self.data.sources[self.name], precomputed=False)  # true frames are compared
        data = replace(self.data, num_workers=0, sources={self.name: settings})
        source = open_source(self.name, data, self.model)
        self.skipped, used = [], 0
        try:
            if "rounds" not in source.tasks:
                raise InputError(f"The source {self.name!r} has no actions with the frames after them.")
            for index in self._indices(source, count, shuffled):
                try:
                    episode = source.at(index).episode("rounds", self.seed, index, self.rounds)
                except InputError as error:
                    self.skipped.append(str(error))
                    if not used and len(self.skipped) == MAX_SKIPPED:
                        break
                    continue
                used += 1
                yield replace(self._checked(episode), number=index)
        finally:
            source.close()
        if not used:
            raise InputError(
                f"None of the {len(self.skipped)} episodes of {self.name!r} can be used: {self.skipped[0]}."
            )

    def batches(self, count: int) -> Iterator[list[Recorded]]:
        """Yield up to `count` episodes in batches of the same number of rounds; for errors see `read`."""
        waiting: dict[int, list[Recorded]] = {}
        for episode in self.read(count):
            batch = waiting.setdefault(len(episode.actions), [])
            batch.append(episode)
            if len(batch) == BATCH:
                yield waiting.pop(len(episode.actions))
        yield from waiting.values()

    def _indices(self, source: Source, count: int | None, shuffled: bool) -> Iterable[int]:
        if source.size is None or source.streams:
            return itertools.count() if count is None else range(count)
        rng = np.random.default_rng(self.seed)
        chosen = rng.permutation(source.size)[:count].tolist()
        return chosen if shuffled else sorted(chosen)

    def _checked(self, episode: Episode) -> Recorded:
        start, *clips = episode.observations
        expected = (self.model.chunk_frames, *height_width(self.model.codec.image_size), 3)
        for clip in clips:
            if clip.shape != expected:
                raise InputError(
                    f"{episode.name}: its rounds have {_described(clip.shape)}, and this model's have "
                    f"{_described(expected)} (model.chunk_frames, model.codec.image_size)."
                )
        for action in episode.actions:
            try:
                action.check(self.model.action)
            except InputError as error:
                raise InputError(f"{episode.name}: {error}") from None
        if start.shape[1:] != expected[1:] or not len(start):
            raise InputError(f"{episode.name}: it has no frame of the model's size before its first action.")
        return Recorded(start[-1], episode.actions, tuple(clips), episode.outcomes)


def _described(shape: Sequence[int]) -> str:
    frames, height, width, _ = shape
    return f"{frames} frames of {width} x {height} pixels"
