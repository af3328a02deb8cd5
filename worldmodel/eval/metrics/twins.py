"""Two futures of one moment, under two sequences of actions, beside both truths: whether a model obeys.

Everything is measured over the pixels where the two true films differ: the rest says nothing of the actions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from worldmodel.errors import InputError
from worldmodel.eval.metrics import Metric, Played
from worldmodel.media import Frames

MIN_DIFFERENCE = 32
"""Difference of a pixel in any colour, in grey levels; compression of the recording alone makes less."""
MIN_PIXELS = 4
"""Differing pixels from which two frames differ."""


class Obeyed(Metric):
    """The two films of the model are nearer to their own truths than to each other's: chance is 50 %.

    Two films that are the same are not: a copy of the last frame obeys nothing.
    """

    name, title = "obeyed", "obeyed"

    def __call__(self, played: Played) -> Sequence[bool]:
        return [
            _square(pair.made, pair.true) + _square(pair.other_made, pair.other_true)
            < _square(pair.made, pair.other_true) + _square(pair.other_made, pair.true)
            for pair in differing(played)
        ]


class Contrast(Metric):
    """Distance of the model's two films over that of their truths, where these differ: 1 for the truth."""

    name, title, unit = "contrast", "contrast", ""

    def __call__(self, played: Played) -> Sequence[float]:
        return [
            distance((pair.made, pair.other_made)) / distance((pair.true, pair.other_true))
            for pair in differing(played)
        ]


class ErrorThere(Metric):
    """Error of the model's two films over that of a copy of the last frame, where the truths differ."""

    name, title, unit = "error_there", "error there, of a copy's", ""

    def __call__(self, played: Played) -> Sequence[float]:
        return [
            distance((pair.made, pair.true), (pair.other_made, pair.other_true))
            / distance((pair.before, pair.true), (pair.before, pair.other_true))
            for pair in differing(played)
        ]


@dataclass(frozen=True, slots=True)
class Pair:
    """Values of two films of a model and of their truths, where the truths differ."""

    before: Float[np.ndarray, "n 3"]
    """Those of the frame before the films."""
    made: Float[np.ndarray, "n 3"]
    true: Float[np.ndarray, "n 3"]
    other_made: Float[np.ndarray, "n 3"]
    other_true: Float[np.ndarray, "n 3"]


def where_differ(one: Frames, other: Frames) -> Bool[np.ndarray, "t h w"]:
    """Return the pixels where two true films differ."""
    apart = np.abs(one.astype(np.int16) - other).max(axis=-1) >= MIN_DIFFERENCE
    return apart & (apart.sum(axis=(1, 2), keepdims=True) >= MIN_PIXELS)


def differing(played: Played) -> Iterator[Pair]:
    """Yield the pairs of films of a batch, whose truths must differ.

    Raises:
        InputError: the rounds have no twins.
    """
    twin = played.twin
    if twin is None:
        raise InputError(
            "The rounds have no twin futures, which these metrics compare; `worldmodel eval --data` reports "
            "them for a recording made with --twins."
        )
    films = zip(played.starts, played.clips, played.truth, twin.clips, twin.truth, strict=True)
    for start, made, true, other_made, other_true in films:
        where = where_differ(true, other_true)
        before = np.broadcast_to(start, true.shape)
        values = (each[where].astype(np.float64) for each in (before, made, true, other_made, other_true))
        yield Pair(*values)


def distance(*pairs: tuple[np.ndarray, np.ndarray]) -> float:
    """Return the root of the mean square difference of values, over all pairs together."""
    return float(np.sqrt(np.mean([_square(*pair) for pair in pairs])))


def _square(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.square(one - other).mean())
