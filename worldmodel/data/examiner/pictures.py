"""Pictures that are not as they should be: black, still, noise, blurred, cropped, mirrored and the like.

Most are told by comparison with the other episodes of the source, since a dark game is not a fault. Where the
camera stands, an episode whose background differs is explained by the transformation of the usual one that
gives it.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import numpy as np
from PIL import Image

from worldmodel.data.examiner.measures import CELLS, Measures
from worldmodel.data.examiner.report import Finding, in_episodes
from worldmodel.media.scores import DARK

NOISE_CORRELATION = 0.25
"""Correlation of neighbouring pixels below which a picture is noise."""
MINORITY = 0.4
"""Largest share of episodes that are called unusual; of more, the others may be the odd ones."""
MIN_EPISODES = 6
"""Fewer episodes are not compared with each other."""
MAX_TYPICAL = 35.0
"""Usual difference of backgrounds from which the camera does not stand."""
TIGHT, APART = 6.0, 3.0
"""Usual difference of backgrounds up to which an episode can be called unlike the others, and times the
greatest difference of the others that its own must be."""
TURNING = ("mirrored", "upside_down", "turned", "displaced")
"""Transformations that layouts of one world can be of each other."""
CHANCE = 1e-6
"""Chance of naming a good episode as still or frozen, about."""
NEARER, NEAREST = 0.8, 0.6
"""Share of its difference from the usual background that an episode may have from a transformed one, if
several have, and if only one or two have."""
MIN_FROZEN = 8
"""Actions in a row that a frozen picture does not answer."""
MIN_JUMPS, SCENE, CUT, LEAST_CUT, FEW = 10, 15.0, 5.0, 6.0, 0.25
"""Frames that tell a cut, difference of the backgrounds before and after it, times the greatest tenth of
other changes that it must be, the least that these count as, and the largest share of episodes with cuts: in
more, the world itself has them."""
SURE, UNSURE = 0.8, 0.3
"""Share of its uses from which an action surely changes the picture, and the weight of one that need not: at
the edge of a world, many in a row may not."""
PLAIN = 6.0
"""Difference of the channels of the most colourful hundredth of a picture up to which it has no colours."""
CUTS = (0.05, 0.08, 0.1, 0.125, 0.15, 0.2, 0.25)
"""Shares of a side that are tried as cut off."""


def picture_findings(episodes: Sequence[Measures]) -> tuple[list[Finding], set[str]]:
    """Return what is wrong with pictures, and the names of episodes without usable ones."""
    dark = list(_dark(episodes))
    unusable = {each.name for _, _, each in dark}
    rest = [each for each in episodes if each.name not in unusable]
    still = list(_still(rest))
    unusable |= {each.name for _, _, each in still}
    found = [*dark, *still, *_outliers(rest), *_backgrounds(rest), *_jumps(rest)]
    return in_episodes([(kind, text, each.name) for kind, text, each in found], len(episodes)), unusable


def _dark(episodes: Sequence[Measures]) -> Iterator[tuple[str, str, Measures]]:
    """Yield episodes of which nothing, or not all, can be seen."""
    for each in episodes:
        dark = each.levels <= DARK
        if dark.all():
            yield "black", "all frames are black", each
        elif each.correlation < NOISE_CORRELATION:
            yield "noise", "the pictures are noise", each
        elif (run := longest_run(dark)) >= 2 and dark.mean() < 0.9 and not _usually_dark(episodes):
            yield "black", f"{'some' if run < len(dark) / 2 else 'many'} frames are black", each


def longest_run(flags: np.ndarray) -> int:
    """Return the length of the longest run of true values."""
    best = run = 0
    for flag in flags:
        run = run + 1 if flag else 0
        best = max(best, run)
    return best


def _usually_dark(episodes: Sequence[Measures]) -> bool:
    """Return whether dark frames are usual, as between the levels of a game."""
    return sum(bool((each.levels <= DARK).any()) for each in episodes) > max(1, MINORITY * len(episodes))


def _still(episodes: Sequence[Measures]) -> Iterator[tuple[str, str, Measures]]:
    """Yield episodes whose pictures do not change though actions do that usually change them.

    An action that is repeated counts once: whoever walks against a wall does so for long.
    """
    acting = [each for each in episodes if each.acts]
    steps = _usual_rates(acting, _steps)
    sure = {label for label, rate in steps.items() if rate > SURE}
    runs = _usual_rates(acting, _runs)
    for each in acting:
        odds = longest = 0.0
        run = most = 0
        for label, changed in _runs(each, sure):
            rate, weight = (steps[label], 1.0) if label in sure else (runs[label], UNSURE)
            odds = 0.0 if changed else odds - weight * math.log(1 - min(rate, 0.95))
            run = 0 if changed else run + 1
            longest, most = max(longest, odds), max(most, run)
        if longest > -math.log(CHANCE / len(acting)):
            if not each.changed.any():
                yield "still", "the picture never changes, though the actions do", each
            else:
                if most >= max(MIN_FROZEN, each.length / 3):
                    yield "frozen", "the picture freezes, though the actions do not", each
    for each in episodes:
        if not each.length or len(each.moments) < 2 or not len(each.jumps) > 3:
            continue
        typical = float(np.median([other.jumps.mean() for other in episodes if len(other.jumps)]))
        if not each.acts and each.jumps.max() < 0.05 < typical:
            yield "still", "the picture never changes", each


Trials = list[tuple[str, bool]]


def _usual_rates(episodes: Sequence[Measures], trials: Callable[[Measures], Trials]) -> dict[str, float]:
    """Return the share of its uses after which an action changed the picture, the median over episodes.

    So episodes that are still do not count.
    """
    rates: dict[str, list[float]] = {}
    for each in episodes:
        own: dict[str, list[bool]] = {}
        for label, changed in trials(each):
            own.setdefault(label, []).append(changed)
        for label, flags in own.items():
            rates.setdefault(label, []).append(sum(flags) / len(flags))
    return {label: float(np.median(found)) for label, found in rates.items()}


def _steps(each: Measures) -> Trials:
    """Return actions, and whether the picture changed after each."""
    names = ("|".join(labels) or text for labels, text in zip(each.labels, each.texts, strict=True))
    return [(name, bool(changed)) for name, changed in zip(names, each.changed, strict=True)]


def _runs(each: Measures, apart: Collection[str] = ()) -> Trials:
    """Return actions, repeated ones but those in `apart` once, and whether any changed the picture."""
    found: Trials = []
    for label, changed in _steps(each):
        if found and found[-1][0] == label and label not in apart:
            found[-1] = (label, found[-1][1] or changed)
        else:
            found.append((label, changed))
    return found


def _outliers(episodes: Sequence[Measures]) -> Iterator[tuple[str, str, Measures]]:
    """Yield episodes that are much noisier, more blurred, darker or greyer than the others."""
    if len(episodes) < MIN_EPISODES:
        return
    noise = np.array([each.noise for each in episodes])
    sharp = np.log([max(each.sharpness, 1e-6) for each in episodes])
    steep = np.array([each.steepness for each in episodes])
    colour = np.array([float(np.percentile(np.ptp(each.moments, axis=-1), 99)) for each in episodes])
    bars = np.array([each.bars for each in episodes])
    tests = (
        ("noise", "there is much more noise than usual", noise - 3 * np.median(noise) > 6),
        (
            "blurred",
            "the pictures are blurred",
            _low(sharp, math.log(2)) & (steep < 0.6 * np.nanmedian(steep)),
        ),
        ("grey", "the pictures have no colours", (colour <= PLAIN) & (np.median(colour) > 4 * PLAIN)),
        ("letterbox", "black bars take a part of the frame", bars - np.median(bars) > 0.06),
    )
    for kind, text, odd in tests:
        if 0 < odd.sum() <= MINORITY * len(episodes):
            yield from ((kind, text, each) for each, flag in zip(episodes, odd, strict=True) if flag)


def _low(values: np.ndarray, least: float) -> np.ndarray:
    """Return which values are below the others by `least` and by six times their usual deviation."""
    middle = np.median(values)
    spread = 1.4826 * float(np.median(np.abs(values - middle)))
    return values < middle - max(least, 6 * spread)


Picture = np.ndarray
Transform = Callable[[Picture], Picture]


def _transforms() -> Iterator[tuple[str, str, Transform]]:
    """Yield kinds, texts and functions of cells `[c, c, 3]`."""
    yield "mirrored", "the pictures are mirrored", lambda p: p[:, ::-1]
    yield "upside_down", "the pictures are upside down", lambda p: p[::-1]
    yield "upside_down", "the pictures are turned by 180 degrees", lambda p: p[::-1, ::-1]
    yield "turned", "the pictures are turned by 90 degrees", lambda p: np.rot90(p)
    yield "turned", "the pictures are turned by 90 degrees", lambda p: np.rot90(p, 3)
    yield "channels", "red and blue are swapped", lambda p: p[..., ::-1]
    yield "inverted", "the colours are inverted", lambda p: 255 - p
    for order in ((0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1)):
        yield "channels", "the colour channels are swapped", lambda p, order=order: p[..., order]
    for scale in (0.25, 0.4, 0.5, 0.6, 0.7, 1.4, 1.7, 2.0, 2.5):
        text = "the pictures are darker" if scale < 1 else "the pictures are brighter"
        yield "brightness", text, lambda p, scale=scale: np.clip(p * scale, 0, 255)
    for add in (-80, -60, -40, 40, 60, 80):
        text = "the pictures are darker" if add < 0 else "the pictures are brighter"
        yield "brightness", text, lambda p, add=add: np.clip(p + add, 0, 255)
    for cut in CUTS:
        for top, bottom, left, right in (
            (1, 1, 1, 1), (1, 1, 0, 0), (0, 0, 1, 1), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)
        ):  # fmt: skip
            edges = (cut * left, cut * top, 1 - cut * right, 1 - cut * bottom)
            yield "cropped", "a part of the picture is cut off", partial(_cropped, edges=edges)
    for cut in CUTS:
        for right, down in ((1, 0), (-1, 0), (0, 1), (0, -1)):
            shift = (round(cut * CELLS * down), round(cut * CELLS * right))
            yield "displaced", "the picture is displaced", lambda p, shift=shift: np.roll(p, shift, (0, 1))


def _cropped(picture: Picture, edges: tuple[float, ...]) -> Picture:
    box = tuple(CELLS * edge for edge in edges)
    image = Image.fromarray(np.clip(picture, 0, 255).astype(np.uint8))
    return np.asarray(image.resize((CELLS, CELLS), Image.Resampling.BILINEAR, box), np.float64)  # type: ignore[arg-type]


def _backgrounds(episodes: Sequence[Measures]) -> Iterator[tuple[str, str, Measures]]:
    """Yield episodes whose background is explained better by a transformation of the usual one."""
    if len(episodes) < MIN_EPISODES:
        return
    means = np.stack([each.mean for each in episodes])
    usual = np.median(means, axis=0)
    # Cells that are the same in most episodes, such as walls, tell more than those that differ anyway.
    weights = 1 / (4 + np.median(np.abs(means - usual), axis=0))
    weights /= weights.mean()
    away = (np.abs(means - usual) * weights).mean(axis=(1, 2, 3))
    typical = float(np.quantile(away, 0.6))
    if typical > MAX_TYPICAL:  # the camera does not stand, or every episode has another scene
        return
    explained: dict[int, tuple[float, str, str]] = {}
    for kind, text, transform in _transforms():
        if kind in TURNING and typical > TIGHT:
            continue  # where layouts vary, one may be the mirror image of the others
        changed = np.asarray(transform(usual), np.float64)
        ratios = (np.abs(means - changed) * weights).mean(axis=(1, 2, 3)) / np.maximum(away, 1e-3)
        near = _apart(ratios, away > max(3.0, typical / 2))
        # What explains odd episodes must be far from explaining the good ones: where scenes vary, a
        # transformed background may be nearer by chance.
        for index in near:
            explained[index] = min(explained.get(index, (1.0, "", "")), (float(ratios[index]), kind, text))
    far = away > 8 * typical + 25
    apart = typical < TIGHT and far.any() and away[far].min() > APART * away[~far].max()
    for index, each in enumerate(episodes):
        if index in explained:
            yield explained[index][1], explained[index][2], each
        elif apart and far[index]:
            yield "unlike", "the pictures are unlike those of all others", each


def _apart(ratios: np.ndarray, able: np.ndarray) -> list[int]:
    """Return the episodes with the lowest ratios if a gap is between them and all others."""
    order = [index for index in np.argsort(ratios).tolist() if able[index]]
    rest = float(ratios[~able].min()) if (~able).any() else math.inf
    for count in range(min(len(order), int(MINORITY * len(ratios))), 0, -1):
        last = float(ratios[order[count - 1]])
        after = min(rest, float(ratios[order[count]]) if count < len(order) else math.inf)
        if last < (NEARER if count >= 3 else NEAREST) and after > 0.9 and last < 0.85 * after:
            return order[:count]
    return []


def _jumps(episodes: Sequence[Measures]) -> Iterator[tuple[str, str, Measures]]:
    """Yield episodes with a cut: a jump far above the other changes, and another background after it."""
    cut = [
        each
        for each in episodes
        if not each.acts  # in a world, a step may show another place
        and len(each.jumps) >= MIN_JUMPS
        and each.scenes > SCENE
        and each.jumps.max() > CUT * max(LEAST_CUT, float(np.quantile(each.jumps, 0.9)))
    ]
    if len(cut) <= FEW * len(episodes):
        yield from (("cut", "there is a cut to another scene", each) for each in cut)
