"""Episodes that are in a source twice, or in two sources."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from worldmodel.data.examiner.measures import Measures
from worldmodel.data.examiner.report import Finding

NEAR = 12
"""Bits of 256 in which fingerprints of copies may differ; the stage `deduplicate` of a flow has the same."""
DIVERSE = 60
"""Median distance of fingerprints from which they alone tell copies; where all episodes show one scene,
cells decide."""
TOLERANCE = 20
"""Difference of the colour of a cell, of 255, up to which two pictures are copies."""
LENGTHS = 0.1
"""Share by which lengths of copies may differ."""
BITS = 20.0
"""Information in an episode's actions, in bits, from which equal actions are not a coincidence."""
MAX_COMPARED = 4000
"""Episodes that are compared with all others."""


def copy_findings(episodes: Sequence[Measures]) -> list[Finding]:
    """Return which episodes are copies of earlier ones, exactly or nearly."""
    pairs = list(_copies(episodes, episodes))
    if not pairs:
        return []
    surprise = _surprise(episodes)
    found: dict[tuple[str, bool], set[str]] = {}
    for mine, other, exact in pairs:
        chance = mine.acts and mine.length * surprise < BITS + 2 * math.log2(max(len(episodes), 2))
        found.setdefault(("copies" if exact else "near_copies", not chance), set()).update(
            {max(mine.name, other.name, key=[each.name for each in episodes].index)}
        )
    findings = []
    for (kind, fault), names in sorted(found.items()):
        what = "are copies of others" if kind == "copies" else "show the same as others"
        why = "" if fault else ", which is chance where a world is not random and episodes are short"
        text = f"{len(names)} of {len(episodes)} episodes {what}{why}"
        findings.append(Finding(kind, text, fault, tuple(sorted(names))))
    return findings


def leak_findings(
    name: str, episodes: Sequence[Measures], other_name: str, others: Sequence[Measures]
) -> list[Finding]:
    """Return which episodes of a source are also in another one."""
    pairs = list(_copies(episodes, others))
    if not pairs:
        return []
    surprise = _surprise([*episodes, *others])
    bits = BITS + math.log2(max(len(episodes) * len(others), 2))
    leaked, chance = set(), set()
    for mine, _, _ in pairs:
        (chance if mine.acts and mine.length * surprise < bits else leaked).add(mine.name)
    findings = []
    if leaked:
        text = f"{len(leaked)} of {len(episodes)} episodes of {name} are also in {other_name}"
        findings.append(Finding("leak", text, True, tuple(sorted(leaked))))
    if chance - leaked:
        short = f"{len(chance - leaked)} of {len(episodes)} short episodes of {name}"
        text = f"{short} are in {other_name}, too, by chance"
        findings.append(Finding("leak", text, False, tuple(sorted(chance - leaked))))
    return findings


def _copies(
    episodes: Sequence[Measures], others: Sequence[Measures]
) -> Iterator[tuple[Measures, Measures, bool]]:
    """Yield pairs of copies and whether they are exact; of one source, each pair once."""
    same = episodes is others
    marks: dict[str, list[Measures]] = {}
    for each in others:
        marks.setdefault(each.mark, []).append(each)
    exact: set[tuple[str, str]] = set()
    for each in episodes:
        for other in marks.get(each.mark, ()):
            if other is each:
                break  # of one source, only those before it
            exact.add((each.name, other.name))
            yield each, other, True
    prints = np.array([_bytes(each.print) for each in others[:MAX_COMPARED]], np.uint8).reshape(-1, 32)
    distances = [
        np.bitwise_count(prints ^ _bytes(each.print)).sum(axis=1) for each in episodes[:MAX_COMPARED]
    ]
    if not distances:
        return
    diverse = float(np.median(np.concatenate(distances))) >= DIVERSE
    for number, (each, row) in enumerate(zip(episodes, distances, strict=False)):
        for index in np.flatnonzero(row <= NEAR).tolist():
            other = others[index]
            if (same and index >= number) or (each.name, other.name) in exact or not _moves(each):
                continue
            if _alike(each, other, diverse):
                yield each, other, False


def _alike(mine: Measures, other: Measures, diverse: bool) -> bool:
    """Return whether two episodes with near fingerprints show the same."""
    if abs(mine.length - other.length) > LENGTHS * max(mine.length, other.length):
        return False
    if mine.moments.shape != other.moments.shape:
        return False
    away = np.abs(mine.moments.astype(np.int16) - other.moments).max(axis=(1, 2, 3))
    if mine.length and not (mine.texts == other.texts and _same_numbers(mine, other)):
        return False
    if diverse:
        return float(np.median(away)) <= 4 * TOLERANCE
    return float(away.max()) <= TOLERANCE and mine.length == other.length


def _same_numbers(mine: Measures, other: Measures) -> bool:
    same = mine.numbers.shape == other.numbers.shape
    return same and bool(np.allclose(mine.numbers, other.numbers, rtol=1e-3, atol=1e-3, equal_nan=True))


def _moves(each: Measures) -> bool:
    """Return whether an episode changes more than copies may differ."""
    return len(each.moments) > 1 and int(np.ptp(each.moments, axis=0).max()) > 2 * TOLERANCE


def _bytes(print_: int) -> np.ndarray:
    return np.frombuffer(print_.to_bytes(32), np.uint8)


def _surprise(episodes: Sequence[Measures]) -> float:
    """Return the bits that an action tells after the one before it, on average."""
    pairs: Counter[tuple[str, str]] = Counter()
    firsts: Counter[str] = Counter()
    for each in episodes:
        names = [str(row.tolist()) + text for row, text in zip(each.numbers, each.texts, strict=True)]
        pairs.update(pairwise(names))
        firsts.update(names[:-1])
    total = pairs.total()
    return sum(n / total * math.log2(firsts[first] / n) for (first, _), n in pairs.items()) if total else 0.0
