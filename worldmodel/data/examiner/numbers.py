"""Actions and outcomes as numbers: constant, repeated, out of scale, and where episodes end."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from worldmodel.actions import ActionSpec
from worldmodel.data.examiner.measures import Measures
from worldmodel.data.examiner.pictures import CHANCE, MINORITY, longest_run
from worldmodel.data.examiner.report import Finding, in_episodes

MIN_LENGTH = 8
"""Actions of an episode from which its numbers are compared."""
OUT_OF_SCALE = 12.0
"""Times the usual deviation of a number that an episode's must be, or its inverse."""


def number_findings(episodes: Sequence[Measures], specs: Sequence[ActionSpec]) -> list[Finding]:
    """Return what is wrong with the numbers of actions and with outcomes."""
    found = [*_constant(episodes), *_scales(episodes, specs), *_ends(episodes)]
    findings = in_episodes([(kind, text, each.name) for kind, text, each in found], len(episodes))
    repeated = repetition([each.numbers for each in episodes])
    if repeated > 1:
        findings.append(
            Finding(
                "repeated",
                f"every action is repeated {repeated} times: they change at every {repeated}th frame only; "
                "state the rate in the action spec, or keep one frame per action",
                amount=repeated,
            )
        )
    held = _held(episodes) if repeated == 1 else 1
    if held > 1:
        findings.append(
            Finding(
                "held",
                f"pictures change at every {held}th frame only: the videos have fewer frames than they "
                f"state; keep every {held}th frame and action",
                amount=held,
            )
        )
    return findings


def repetition(episodes: Sequence[np.ndarray]) -> int:
    """Return the number of steps for which every action is repeated, counted from the start of an episode."""
    found, changes = 0, 0
    for numbers in episodes:
        places = np.flatnonzero((numbers[1:] != numbers[:-1]).any(axis=1)) + 1
        found = math.gcd(found, *places.tolist())
        changes += len(places)
    return found if found > 1 and changes >= 10 else 1


def _held(episodes: Sequence[Measures]) -> int:
    """Return every how many frames the picture changes, where it does so in one rhythm."""
    for every in (6, 5, 4, 3, 2):
        in_phase = total = 0
        for each in episodes:
            places = np.flatnonzero(each.changed)
            if len(places):
                counts = np.bincount(places % every, minlength=every)
                in_phase, total = in_phase + int(counts.max()), total + len(places)
        if total >= 40 and in_phase > 0.98 * total:
            return every
    return 1


def _constant(episodes: Sequence[Measures]) -> Iterator[tuple[str, str, Measures]]:
    """Yield episodes whose actions never change, where those of others change too often for it."""
    long = [each for each in episodes if each.length >= MIN_LENGTH and each.numbers.shape[1]]
    changes = [(each.numbers[1:] != each.numbers[:-1]).any(axis=1) for each in long]
    rate = float(np.median([change.mean() for change in changes])) if long else 0.0
    odd: list[tuple[float, str, Measures]] = []
    for each, change in zip(long, changes, strict=True):
        run = longest_run(~change)
        logarithm = run * math.log(max(1 - rate, 1e-9)) + math.log(len(change) - run + 1)
        if logarithm < math.log(1e-2) and run > 0.4 * len(change):
            text = "the action stops changing" if change.any() else "the action never changes"
            odd.append((logarithm, text, each))
    odd.sort(key=lambda found: found[0])
    for count in range(len(odd), 0, -1):
        # So many of all episodes, each no more likely than the likeliest of them.
        if math.log(math.comb(len(long), count)) + count * odd[count - 1][0] < math.log(CHANCE):
            yield from (("constant", text, each) for _, text, each in odd[:count])
            return


def _scales(episodes: Sequence[Measures], specs: Sequence[ActionSpec]) -> Iterator[tuple[str, str, Measures]]:
    long = [
        each for each in episodes if each.length >= MIN_LENGTH and each.numbers.shape[1] == len(specs) > 0
    ]
    if len(long) < 4:
        return
    everything = np.concatenate([each.numbers for each in long])
    for column, spec in enumerate(specs):
        values = everything[:, column]
        if spec.kind == "key" or len(np.unique(values)) < 6:
            continue
        deviations = np.array([each.numbers[:, column].std() for each in long])
        usual = float(np.median(deviations))
        if not usual:
            continue
        for each, deviation in zip(long, deviations, strict=True):
            if deviation > OUT_OF_SCALE * usual:
                peak = np.abs(each.numbers[:, column] - np.median(each.numbers[:, column]))
                if (peak > peak.max() / 4).sum() <= max(2, 0.05 * len(peak)):
                    yield "spike", f"{spec.name} has values far outside of the others", each
                else:
                    yield (
                        "scale",
                        f"{spec.name} is about {deviation / usual:.0f} times as large as usual",
                        each,
                    )
        small = (deviations * OUT_OF_SCALE < usual) & (deviations > 0)
        if 0 < small.sum() <= MINORITY * len(long):
            for each, flag in zip(long, small, strict=True):
                if flag:
                    yield "scale", f"{spec.name} varies far less than usual", each


def _ends(episodes: Sequence[Measures]) -> Iterator[tuple[str, str, Measures]]:
    """Yield episodes that go on after their end, and those with a reward out of scale."""
    for each in episodes:
        if any(each.ended[:-1]) and sum(each.ended) <= 2:
            yield "ends", "the end is stated before the last step", each
    rewards = np.concatenate([each.rewards for each in episodes] or [[]])
    if len(rewards) < 40:
        return
    low, high = np.quantile(rewards, [0.005, 0.995])
    for each in episodes:
        if len(each.rewards) and high > low and np.ptp(each.rewards) > 50 * (high - low):
            yield "spike", "a reward is far outside of the others", each
