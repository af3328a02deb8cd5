"""Measures of one episode: a few kilobytes, by which episodes of a source are compared."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from worldmodel.actions import Action, ActionSpec, control_kinds, specs_by_kind
from worldmodel.episodes import Episode
from worldmodel.media import scores
from worldmodel.media.fingerprint import fingerprint, shrunk

CHANGED, CHANGED_PIXELS = 24, 4
"""Difference of a colour, of 255, and number of such pixels from which a picture counts as changed: more than
an encoder adds."""
NO_ACTION = "(no action)"
CELLS, MOMENTS = 32, 16
"""Cells along each side of a picture, and moments of an episode, that are kept."""
MIN_SCENE, MAX_SCENE = 5, 15
"""Frames before and after a jump that are compared."""
BLACK = 16
"""Grey values up to this are those of a bar."""
IMMERKAER = np.array([[1, -2, 1], [-2, 4, -2], [1, -2, 1]], np.float32)
"""The mask of J. Immerkær, Fast Noise Variance Estimation (1996): smooth areas and edges give about 0."""


@dataclass
class Measures:
    """What is kept of an episode, whose actions number `t`."""

    name: str
    numbers: np.ndarray
    """The actions as numbers of the specs, `[t, a]`."""
    labels: list[list[str]]
    """Names of what each action does."""
    texts: list[str]
    """Text of each action, "" without one."""
    said: list[str]
    """The different texts that belong to it."""
    changed: np.ndarray
    """Whether the picture changed after each action, `[t]`."""
    motion: np.ndarray
    """How far the middle of what moves went after each action, right and down, in sides of the picture."""
    extents: list[tuple[int, int]]
    """Height and width of the changed areas, of the steps in which a small part changed."""
    shape: tuple[int, int]
    """Height and width of the examined frames."""
    levels: np.ndarray
    """Brightness of the 99th percentile of every frame, `[f]`."""
    jumps: np.ndarray
    """Mean difference of cells between frames that follow each other, `[f - 1]`."""
    scenes: float
    """Greatest difference between the usual cells before and after one of the greatest jumps."""
    moments: np.ndarray
    """Cells at moments evenly spread over the episode, uint8 `[m, c, c, 3]`."""
    correlation: float
    """Between neighbouring pixels, the median over frames; 0 in noise."""
    noise: float
    """Standard deviation of the noise, estimated by Immerkær's mask."""
    sharpness: float
    steepness: float
    """Of the steepest edges, over the range of brightness; blur lowers it, however many edges there are."""
    bars: float
    """Share of the frame that black bars take."""
    mark: str
    """Hash of frames and actions."""
    print: int
    """Fingerprint of what it shows, 256 bits."""
    rewards: list[float] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Number of actions."""
        return len(self.numbers)

    @property
    def acts(self) -> bool:
        """Whether it has actions, and not only one text for all of it."""
        named = any(label != NO_ACTION for labels in self.labels for label in labels)
        return self.numbers.size > 0 or named or len({*self.texts}) > 1

    @property
    def mean(self) -> np.ndarray:
        """The median of its moments, `[c, c, 3]`: the background, where the camera stands."""
        return np.median(self.moments, axis=0)


def measure(episode: Episode, specs: Sequence[ActionSpec], texts: Sequence[str] = ()) -> Measures:
    """Return the measures of an episode that begins with an observation.

    Args:
        episode: the episode.
        specs: meaning of the numbers of its actions.
        texts: texts that belong to it, beside those of its actions.
    """
    last = np.stack([clip[-1] for clip in episode.observations])
    frames = np.concatenate(episode.observations)
    moved = (np.abs(np.diff(last.astype(np.int16), axis=0)) >= CHANGED).any(-1)
    chosen = np.unique(np.linspace(0, len(frames) - 1, MOMENTS).astype(int))
    some = frames[chosen]
    grey = np.stack([np.asarray(Image.fromarray(frame).convert("L")) for frame in some])
    small = np.stack([_cells(frame) for frame in frames])
    jumps = np.abs(np.diff(small.astype(np.int16), axis=0)).mean(axis=(1, 2, 3))
    mark = hashlib.sha256(frames.tobytes())
    mark.update(repr(episode.actions).encode())
    return Measures(
        episode.name,
        np.array([action.numbers(specs) for action in episode.actions]).reshape(len(episode.actions), -1),
        [labels(action, specs) for action in episode.actions],
        [action.text or "" for action in episode.actions],
        sorted({*texts, *(action.text for action in episode.actions if action.text)}),
        moved.sum(axis=(1, 2)) >= CHANGED_PIXELS,
        _motion(last),
        [box for each in np.asarray(moved) if (box := _box(each))],
        frames.shape[1:3],
        np.percentile(frames.max(axis=-1).reshape(len(frames), -1), 99, axis=1),
        jumps,
        _scenes(small, jumps),
        small[chosen],
        float(np.median([_correlation(each) for each in grey])),
        float(np.median([_noise(each) for each in grey])),
        scores.sharpness(grey),
        _steepness(grey),
        _bars(grey),
        mark.hexdigest(),
        int(fingerprint(np.stack([shrunk(frame) for frame in some])), 16),
        [outcome.reward for outcome in episode.outcomes],
        [outcome.ended for outcome in episode.outcomes],
    )


def labels(action: Action, specs: Sequence[ActionSpec]) -> list[str]:
    """Return names of an action: its keys, the signs of its numbers, the directions of mouse and camera."""
    own = {kind.name: specs_of_kind for kind, specs_of_kind in specs_by_kind(specs)}
    found: list[str] = []
    for kind in control_kinds():
        found += kind.effects(action.part(kind.name), own.get(kind.name, []))
    return found or ([] if action.text else [NO_ACTION])


def _cells(frame: np.ndarray) -> np.ndarray:
    return np.asarray(Image.fromarray(frame).resize((CELLS, CELLS), Image.Resampling.BOX))


def _scenes(cells: np.ndarray, jumps: np.ndarray) -> float:
    """Return how much the background differs before and after a jump, by the jump where it does most."""
    found = 0.0
    for place in np.argsort(jumps)[-3:] + 1:
        if MIN_SCENE <= place <= len(cells) - MIN_SCENE:
            before, after = (
                np.median(part[:MAX_SCENE], axis=0) for part in (cells[:place][::-1], cells[place:])
            )
            found = max(found, float(np.abs(before - after).mean()))
    return found


def _motion(frames: np.ndarray) -> np.ndarray:
    """Return how far the middle of what differs from the background went, `[f - 1, 2]`."""
    grey = frames.mean(axis=-1, dtype=np.float32)
    away = np.abs(grey - np.median(grey, axis=0))
    away[away < CHANGED] = 0
    total = away.sum(axis=(1, 2))
    height, width = grey.shape[1:]
    right = (away.sum(axis=1) * np.arange(width)).sum(axis=1) / np.maximum(total, 1) / width
    down = (away.sum(axis=2) * np.arange(height)).sum(axis=1) / np.maximum(total, 1) / height
    found = np.diff(np.stack([right, down], axis=1), axis=0)
    found[(total[1:] == 0) | (total[:-1] == 0)] = 0
    return found


def _box(changed: np.ndarray) -> tuple[int, int] | None:
    """Return height and width of the changed pixels, unless they are few or a large part of the picture."""
    if changed.sum() < CHANGED_PIXELS or changed.mean() > 0.1:
        return None
    rows, columns = (np.flatnonzero(changed.any(axis=axis)) for axis in (1, 0))
    return int(np.ptp(rows)) + 1, int(np.ptp(columns)) + 1


def _correlation(grey: np.ndarray) -> float:
    centred = grey - grey.mean(dtype=np.float32)
    power = float((centred**2).mean())
    return float((centred[:, 1:] * centred[:, :-1]).mean()) / power if power > 1 else 1.0


def _noise(grey: np.ndarray) -> float:
    windows = np.lib.stride_tricks.sliding_window_view(grey.astype(np.float32), (3, 3))
    return float(np.median(np.abs((windows * IMMERKAER).sum(axis=(2, 3))))) / 0.6745 / 6


def _steepness(grey: np.ndarray) -> float:
    found = []
    for frame in grey:
        low, high = np.percentile(frame, [1, 99.5])
        if high - low > scores.DARK:  # a plain frame has no edges
            steep = np.percentile(np.abs(scores.laplacian(frame)), 99.5)
            found.append(float(steep) / float(high - low))
    return float(np.median(found)) if found else math.nan


def _bars(grey: np.ndarray) -> float:
    """Return the share of the frame that even black bars with a straight border take.

    The score `letterbox` of a flow suits films; in games, the dark part of a scene would be a bar.
    """
    most, shown = grey.max(axis=0).astype(np.float32), 1.0
    for lines in (most, most.T):
        level, share = np.median(lines, axis=1), (lines > BLACK).mean(axis=1)
        for order in (slice(None), slice(None, None, -1)):
            dark = int(np.argmax(share[order] > 0.02))
            inside = level[order][dark : dark + 3]
            if (
                dark
                and share.any()
                and inside.max() - level[order][:dark].max() > 20
                and (share[order][dark : dark + 3].max() > 0.9)
            ):
                shown *= 1 - dark / len(lines)
    return 1 - shown
