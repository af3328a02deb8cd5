"""Whether actions are in their places: the lag at which they tell most about the pictures.

The measure is the mutual information of an action and what the picture did after it, for each lag: whether it
changed, or, where it always does, the direction in which the middle of what moves went. It needs no model of
what actions do, and says nothing where all lags tell the same. The lag of a source is that of the highest
information, and its certainty the share of resamples of the episodes (or of parts of them, where there are
few) with the same one. Single episodes are compared by the likelihood of what their pictures did under the
table of all episodes. Where actions are forces, the direction of motion follows one frame later; that is
not a fault.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from worldmodel.data.examiner.measures import Measures
from worldmodel.data.examiner.report import Finding, in_episodes

LAGS = range(-5, 6)
"""Lags that are compared: the picture is related to the action that many steps earlier."""
MIN_STEPS = 30
"""Fewer steps tell nothing of a source, and a third of them nothing of an episode."""
MIN_INFORMATION = 0.03
"""Nats of information below which nothing is told; chance gives less."""
MIN_GAIN = 1.15
"""Times the information of the second lag that the first must have."""
RESAMPLES, CERTAIN = 200, 0.99
STANDING = 0.004
"""Motion, in sides of the picture, up to which the middle of what moves stands."""
BLOCK = 15
"""Steps of the parts that are resampled where there are few episodes."""
MAX_SYMBOLS = 24
"""Different actions that are told apart; of more, each number is looked at alone."""
ALONE, TOGETHER, SUSPECT = 24.0, 12.0, 3.0
"""Log-likelihood by which another explanation must be better to name one episode, and several with the same
one; and from which an episode is left out of the table. Steps that follow each other are not independent, so
these are far above what chance gives."""
TOGETHER_COUNT = 3
LEAST = 0.02
"""Least probability in the table: a few steps of an episode are not evidence enough."""


@dataclass(frozen=True)
class Timing:
    """The lag of a source."""

    lag: int | None
    """None: it cannot be told."""
    certainty: float
    information: Mapping[int, float]
    symbols: tuple[np.ndarray, ...] = ()
    """Number of each action among the different ones, of every episode."""
    outcomes: tuple[np.ndarray, ...] = ()
    """What the picture did after each action: 0 or 1 if it changed, or one of 9 directions."""
    directed: bool = False
    """Whether outcomes are directions."""


def find_lag(episodes: Sequence[Measures]) -> Timing:
    """Return the lag between the actions and the pictures of a source."""
    changes = [each.changed.astype(int) for each in episodes]
    directions = [_directions(each.motion) for each in episodes]
    first = _find_lag(_symbols(episodes), changes)
    if first.lag is not None:
        return first
    second = replace(_find_lag(_symbols(episodes), directions), directed=True)
    return first if second.lag is None else second


def _directions(motion: np.ndarray) -> np.ndarray:
    """Return directions of motions `[t, 2]`: 4 for none, and `8 - d` for the opposite of `d`."""
    signs = np.where(np.abs(motion) > STANDING, np.sign(motion), 0).astype(int)
    return 4 + 3 * signs[:, 0] + signs[:, 1] if len(motion) else np.empty(0, int)


def _find_lag(candidates: Sequence[Sequence[np.ndarray]], outcomes: Sequence[np.ndarray]) -> Timing:
    best, best_tables = Timing(None, 0.0, {}), np.empty(0)
    for symbols in candidates:
        tables = _tables(symbols, outcomes)
        if not len(tables) or int(tables[:, 0].sum()) < MIN_STEPS:
            continue
        information = dict(zip(LAGS, _information(tables.sum(0)).tolist(), strict=True))
        if not best.information or max(information.values()) > max(best.information.values()):
            best = Timing(None, 0.0, information, tuple(symbols), tuple(outcomes))
            best_tables = tables
    if not best.information:
        return best
    first, second = sorted(best.information.values(), reverse=True)[:2]
    lag = max(best.information, key=best.information.__getitem__)
    if first < MIN_INFORMATION or first < MIN_GAIN * second:
        return best
    rng = np.random.default_rng(0)
    drawn = rng.multinomial(len(best_tables), np.full(len(best_tables), 1 / len(best_tables)), RESAMPLES)
    resampled = np.tensordot(drawn, best_tables, axes=1)
    places = [LAGS[int(np.argmax(_information(each)))] for each in resampled]
    certainty = places.count(lag) / RESAMPLES
    return replace(best, lag=lag if certainty >= CERTAIN else None, certainty=certainty)


def _symbols(episodes: Sequence[Measures]) -> list[list[np.ndarray]]:
    """Return candidates of the actions as numbers of the different ones, of every episode."""
    names = [["|".join(sorted(labels)) or text for labels, text in zip(each.labels, each.texts, strict=True)]
             for each in episodes]  # fmt: skip
    candidates = [names]
    if any(each.numbers.shape[1] for each in episodes):
        width = max(each.numbers.shape[1] for each in episodes)
        fitting = [each.numbers for each in episodes if each.numbers.shape[1] == width]
        middle = np.median(np.concatenate(fitting), axis=0)
        signs = [
            np.sign(np.round(each.numbers - middle, 3)) if each.numbers.shape[1] == width else None
            for each in episodes
        ]
        if all(each is not None for each in signs):
            candidates.append([[row.tobytes() for row in each] for each in signs])  # type: ignore[union-attr]
            candidates += [
                [each[:, number].tolist() for each in signs]  # type: ignore[index]
                for number in range(width if width > 1 else 0)
            ]
    found = []
    for candidate in candidates:
        different = {
            name: number for number, name in enumerate(dict.fromkeys(n for e in candidate for n in e))
        }
        if 1 < len(different) <= MAX_SYMBOLS:
            found.append([np.array([different[name] for name in each], int) for each in candidate])
    return found


def _tables(symbols: Sequence[np.ndarray], outcomes: Sequence[np.ndarray]) -> np.ndarray:
    """Count (action, outcome) in every episode or part of one, `[parts, lags, symbols, outcomes]`."""
    count = 1 + max((int(each.max()) for each in symbols if len(each)), default=0)
    margin, few = max(map(abs, LAGS)), len(symbols) < 12
    found = []
    kinds = 1 + max((int(each.max()) for each in outcomes if len(each)), default=0)
    for own, did in zip(symbols, outcomes, strict=True):
        places = np.arange(margin, len(own) - margin)
        parts = np.array_split(places, max(1, len(places) // BLOCK)) if few else [places]
        for part in parts:
            if not len(part):
                continue
            table = np.zeros((len(LAGS), count, kinds), np.int64)
            for number, lag in enumerate(LAGS):
                np.add.at(table[number], (own[part - lag], did[part]), 1)
            found.append(table)
    return np.array(found)


def _information(tables: np.ndarray) -> np.ndarray:
    """Return the mutual information of tables `[lags, symbols, outcomes]` in nats, corrected for chance.

    Source: G. Miller, Note on the bias of information estimates (1955).
    """
    total = np.maximum(tables.sum(axis=(1, 2), keepdims=True), 1)
    p = tables / total
    rows, columns = p.sum(axis=2, keepdims=True), p.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(p > 0, p * np.log(p / (rows * columns)), 0.0)
    freedom = ((rows > 0).sum(axis=(1, 2)) - 1) * ((columns > 0).sum(axis=(1, 2)) - 1)
    return np.maximum(terms.sum(axis=(1, 2)) - freedom / (2 * total[:, 0, 0]), 0.0)


def lag_findings(episodes: Sequence[Measures], found: Timing) -> list[Finding]:
    """Return what is wrong with the places of actions, of the source and of single episodes."""
    if found.lag is None:
        return []
    findings = []
    if found.lag:
        frames = f"{abs(found.lag)} frame{'s' if abs(found.lag) > 1 else ''}"
        where = (
            f"pictures follow their actions {frames} late" if found.lag > 0 else f"actions are {frames} late"
        )
        findings.append(
            Finding(
                "lag",
                f"{where}, certainty {found.certainty:.0%}: row t needs the action between frames t and "
                "t + 1; leave it if the world itself answers late, as to forces",
                not (found.directed and found.lag == 1),
                amount=found.lag,
            )
        )
    trusted = list(range(len(episodes)))
    odd: dict[int, tuple[str, float]] = {}
    for _ in range(3):  # odd episodes blur the table by which they are found
        table, marginal = _likelihood(found, trusted)
        odd = {}
        for index, symbols in enumerate(found.symbols):
            explained = _explain(found.outcomes[index], symbols, found.lag, table, marginal, found.directed)
            if explained:
                odd[index] = explained
        trusted = [index for index in range(len(episodes)) if odd.get(index, ("", 0.0))[1] < SUSPECT]
        if len(trusted) < len(episodes) / 2:
            return findings
    texts = {
        "reversed": "pictures run backwards against their actions",
        "opposite": "actions lead into the opposite direction than in others",
        "foreign": "actions tell nothing of the pictures, as if they were those of other episodes",
    }
    alike = Counter(reason for reason, gain in odd.values() if gain > TOGETHER)
    named, amounts = [], {}
    for index, (reason, gain) in odd.items():
        alone = found.directed or alike[reason] < TOGETHER_COUNT
        if gain > (ALONE if alone else TOGETHER):
            shifted = f"actions are shifted against the other episodes' by {reason} frames"
            kind = reason if reason in texts else "lag"
            if kind == "lag":
                amounts[shifted] = int(reason)
            named.append((kind, texts.get(reason, shifted), episodes[index].name))
    return findings + in_episodes(named, len(episodes), amounts)


def _explain(
    outcomes: np.ndarray,
    symbols: np.ndarray,
    usual: int,
    table: np.ndarray,
    marginal: np.ndarray,
    directed: bool,
) -> tuple[str, float] | None:
    """Return what explains the pictures of an episode best if its actions do not, and by how much better.

    Args:
        outcomes: what the picture did after each action.
        symbols: the actions.
        usual: lag of the source.
        table: log p(outcome | action).
        marginal: log p(outcome).
        directed: whether outcomes are directions.
    """
    margin = max(map(abs, LAGS)) + abs(usual)
    places = np.arange(margin, len(symbols) - margin)
    if len(places) < MIN_STEPS / 3:
        return None

    def score(lag: int, seen: np.ndarray) -> float:
        return float(table[symbols[places - lag], seen[places]].sum())

    own = score(usual, outcomes)
    shifts = [lag for lag in LAGS if 0 < abs(lag - usual) <= max(LAGS)]
    scores = {f"{lag - usual:+d}": score(lag, outcomes) - own for lag in shifts}
    backwards = outcomes[::-1]
    scores["reversed"] = score(usual, 8 - backwards if directed else backwards) - own
    if directed:
        scores["opposite"] = score(usual, 8 - outcomes) - own
    else:
        # Directions are wrong where what moves stays in one place for long, so they do not tell this.
        scores["foreign"] = float(marginal[outcomes[places]].sum()) - own + SUSPECT
    best = max(scores, key=scores.__getitem__)
    return (best, scores[best]) if scores[best] > 0 else None


def _likelihood(found: Timing, chosen: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return log p(outcome | action) `[symbols, outcomes]` and log p(outcome) of some episodes."""
    assert found.lag is not None
    margin = max(map(abs, LAGS))
    kinds = 9 if found.directed else 2
    table = np.ones((1 + max(int(each.max()) for each in found.symbols if len(each)), kinds))
    for index in chosen:
        symbols, outcomes = found.symbols[index], found.outcomes[index]
        places = np.arange(margin, len(symbols) - margin)
        np.add.at(table, (symbols[places - found.lag], outcomes[places]), 1)
    known = np.maximum(table / table.sum(axis=1, keepdims=True), LEAST)
    return np.log(known), np.log(table.sum(axis=0) / table.sum())
