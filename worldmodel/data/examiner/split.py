"""Choice of the episodes that are held out, and what they share with the others."""

from collections import Counter, defaultdict
from typing import Any

import numpy as np

from worldmodel.data.examiner.opening import Examined
from worldmodel.errors import InputError

TOLERANCE = 16
"""Difference of the mean colour of a cell, of 255, up to which two pictures show the same layout."""
PARTS = 48
"""Parts in which pictures are compared, one after another."""


def split(
    examined: Examined, share: float = 0.1, by: str = "episode", seed: int = 0
) -> tuple[list[int], dict[str, Any]]:
    """Choose episodes to hold out, and count what they share with the rest.

    Args:
        examined: the source.
        share: share of the episodes that is held out, at least one.
        by: `episode`, or `layout` to hold out all episodes that begin with the same picture, up to the losses
            of a video.
        seed: seed of the choice.

    Returns:
        The episodes that are held out, and the counts of their (frame, action) pairs: all, those that also
        occur in training exactly, and nearly (the same picture of 8 x 8 cells in steps of 32).

    Raises:
        InputError: a setting is out of range, or nothing would be left to train on.
    """
    if by not in ("episode", "layout") or not 0 < share < 1:
        raise InputError(f"by is {by!r} and share {share:g}; use episode or layout, and 0 to 1.")
    exact, near, groups = [], [], defaultdict(list)
    layouts = Layouts()
    for index in range(examined.size):
        try:
            episode = examined.episode(index)
        except InputError:
            exact.append(Counter())
            near.append(Counter())
            continue
        frames = [clip[-1] for clip in episode.observations]
        groups[layouts.number(frames[0]) if by == "layout" else index].append(index)
        pairs = list(zip(frames, map(str, episode.actions), strict=False))
        # Hashes: the frames of a long recording do not fit into memory.
        exact.append(Counter(hash((frame.tobytes(), action)) for frame, action in pairs))
        near.append(Counter(hash((small_hash(frame), action)) for frame, action in pairs))
    order = np.random.default_rng(seed).permutation(len(groups))
    listed, held = list(groups.values()), []
    for number in order:
        if held and len(held) >= share * examined.size:
            break
        held += listed[number]
    rest = set(range(examined.size)) - set(held)
    if not rest or len(groups) < 2:
        raise InputError(
            f"The source has {len(groups)} different {by}s, of which none would be left to train on."
        )
    counts: dict[str, Any] = {"pairs": sum(sum(near[index].values()) for index in held)}
    for name, tables in (("exact", exact), ("near", near)):
        known = set().union(*(tables[index] for index in rest))
        counts[name] = sum(
            number for index in held for pair, number in tables[index].items() if pair in known
        )
    return sorted(held), counts


class Layouts:
    """Numbers pictures; two are the same if no cell of 1/16 of a side differs by more than `TOLERANCE`."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []
        self._count = 0

    def number(self, frame: np.ndarray) -> int:
        """Return the number of the first picture that is the same."""
        height, width = (max(1, side // 16) for side in frame.shape[:2])
        rows, columns = frame.shape[0] // height, frame.shape[1] // width
        cells = frame[: rows * height, : columns * width].reshape(rows, height, columns, width, 3)
        means = cells.mean((1, 3), dtype=np.float32).ravel()
        # A few scattered cells tell most pictures apart, so that their other cells are never compared.
        parts = np.array_split(np.random.default_rng(0).permutation(means), PARTS)
        if not self._parts:
            self._parts = [np.empty((1024, part.size), np.float32) for part in parts]
        same = np.arange(self._count)
        for known, part in zip(self._parts, parts, strict=True):
            same = same[np.abs(known[same] - part).max(axis=1) <= TOLERANCE]
        if same.size:
            return int(same[0])
        if self._count == len(self._parts[0]):
            self._parts = [np.concatenate([known, np.empty_like(known)]) for known in self._parts]
        for known, part in zip(self._parts, parts, strict=True):
            known[self._count] = part
        self._count += 1
        return self._count - 1


def small_hash(frame: np.ndarray) -> bytes:
    """Return the mean colours of 8 x 8 cells in steps of 32: equal for pictures that look alike."""
    cells = frame.reshape(8, frame.shape[0] // 8, 8, frame.shape[1] // 8, 3).mean((1, 3))
    return np.round(cells / 32).astype(np.uint8).tobytes()
