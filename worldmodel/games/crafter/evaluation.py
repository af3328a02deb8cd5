"""The evaluation suite of Crafter: the tiles that a model shows against the game's own map.

A tile counts where it can be read from the true frame: in the middle of a night, noise hides those at the
edge.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from worldmodel.actions import Action
from worldmodel.config import WorldModelConfig
from worldmodel.errors import InputError
from worldmodel.eval.action_following import BATCH
from worldmodel.eval.data.outcomes import LATE, outcome_figures, outcome_tables
from worldmodel.eval.data.subjects import TITLES, subject_tables
from worldmodel.eval.examples import Album, Example
from worldmodel.eval.figures import Figure, bootstrap
from worldmodel.eval.goals import Goal
from worldmodel.eval.runner import Subject
from worldmodel.eval.suite import CardText, EvalSettings, Part
from worldmodel.eval.table import Table, Unit
from worldmodel.games.crafter import RULES, TILES
from worldmodel.games.crafter.films import Film, films, places, returns
from worldmodel.games.crafter.tiles import (
    OUTSIDE,
    SIDE,
    Names,
    materials_beside,
    read_bag,
    read_tiles,
    tile_names,
)
from worldmodel.media import Frame

ROUNDS = (1, 5, 10, 30)
"""Rounds after which tiles are compared."""
NEW_ROUNDS = 10
"""Rounds in which the ground that comes into view is looked at."""
WAYS = (4, 8)
"""Steps there, and back."""
UNLAWFUL = 0.003
"""Share of a material's neighbours below which another one beside it is unlawful."""
MEASURES: dict[str, tuple[str, Unit]] = {
    "cells": ("tiles right", "%"),
    "changed": ("tiles right where they changed", "%"),
    "known": ("tiles right where they changed, of ground that was in view before", "%"),
    "bag": ("things in the bag right", "%"),
    "bag_changed": ("things in the bag right where they changed", "%"),
}
"""Titles and units of what is measured after a number of rounds."""
NEW: dict[str, tuple[str, Unit]] = {
    "difference": ("difference of the shares of tiles from the true ones", "%"),
    "borders": ("the same of pairs of a new tile and a known one beside it", "%"),
    "lawful": ("such pairs that occur in the game", "%"),
    "right": ("tiles right", "%"),
    "achieved": ("whole bag right when something was achieved", "%"),
}
"""The same of new ground, and of achievements."""

Counts = dict[tuple[str, ...], list[tuple[float, float]]]
"""Hits and cases of every film, by measure, number of rounds and row."""
Fresh = dict[tuple[str, str], list[tuple[np.ndarray, np.ndarray]]]
"""Names of new ground that are shown, and the true ones, of every film by measure and row."""


class CrafterSuite:
    """The evaluation suite of Crafter (`worldmodel.eval.suite.EvalSuite`)."""

    splits: Mapping[str, str] = {}

    def __init__(self) -> None:
        self.goals: Sequence[Goal] = _goals()
        self.card = CARD

    def check(self, config: WorldModelConfig) -> None:
        if config.codec.image_size != SIDE * TILES or config.chunk_frames != 1:
            raise InputError(
                f"The suite of Crafter reads frames of {SIDE * TILES} x {SIDE * TILES} pixels, one for every "
                f"action, and this model has {config.chunk_frames} of {config.codec.image_size}; record with "
                "the environment's own size."
            )
        if missing := set(RULES.actions) - set(config.action.keys):
            raise InputError(f"The model lacks the keys {', '.join(sorted(missing))}; name all of Crafter's.")

    def parts(self, settings: EvalSettings, config: WorldModelConfig | None, album: Album) -> list[Part]:
        seed, count = settings.seed, settings.num_samples
        rounds = max(ROUNDS)
        parts = [
            Part(
                "films",
                count * (rounds + LATE),
                lambda subject: measure_films(subject, films(seed, count, rounds), seed, album),
                film_tables,
            )
        ]
        for steps in WAYS:
            some = -(-count // 2)
            parts.append(
                Part(
                    f"returns/{steps}",
                    2 * steps * some,
                    lambda subject, steps=steps, some=some: measure_returns(
                        subject, returns(seed, some, steps), seed
                    ),
                    lambda found, steps=steps: subject_tables(
                        {"kept": found},
                        f"{steps} steps away and back",
                        {"kept": ("tiles as they were", "%")},
                        RETURN,
                    ),
                )
            )
        return parts

    def session_inputs(self, rng: np.random.Generator, count: int) -> tuple[Frame, list[Action]]:
        film = films(int(rng.integers(2**31)), 1, max(ROUNDS))[0]
        return film.past[-1], [film.actions[i % len(film.actions)] for i in range(count)]


def measure_films(
    subject: Subject, shown: Sequence[Film], seed: int, album: Album | None = None
) -> dict[str, Any]:
    """Play films of the policy on the model's own frames, and compare every tile with the game's.

    Returns:
        `rounds`: figures by number of rounds, measure and row; `new`: of the ground that came into view, and
        of achievements; `outcomes`: of rewards and ends.
    """
    counts: Counts = {}
    fresh: Fresh = {}
    true, made = [], []
    for batch, clips, outcomes in _played(subject, shown, seed):
        for row, film in enumerate(batch):
            rows = _readings(subject, film, [clip[row] for clip in clips])
            _compare(counts, film, rows)
            _look_at_new(counts, fresh, film, rows)
            if outcomes:
                true.append(film.outcomes)
                made.append([each[row] for each in outcomes])
            if album is not None:
                album.add(_example(film, [clip[row] for clip in clips], rows))
    results: dict[str, Any] = {"rounds": {}, "new": {}}
    for (measure, number, name), pairs in counts.items():
        group = results["new"] if measure in NEW else results["rounds"].setdefault(number, {})
        group.setdefault(measure, {})[name] = _share(pairs)
    for (measure, name), pairs in fresh.items():
        results["new"].setdefault(measure, {})[name] = _difference(pairs)
    results["outcomes"] = outcome_figures(true, made)
    return results


def film_tables(results: Mapping[str, Any]) -> list[Table]:
    """Return the tables of `measure_films`."""
    tables = []
    for number, found in results["rounds"].items():
        about = "Changed: since the frame before the first round. Things: the sixteen of the bag."
        tables += subject_tables(found, f"Against the game's map, round {number}", MEASURES, about)
    about = (
        f"Tiles that came into view in the first {NEW_ROUNDS} rounds and were not before. A difference is "
        f"half the sum of distances between shares. Materials beside which less than "
        f"{100 * UNLAWFUL:g} % of the neighbours are like a tile do not have it beside them in the game."
    )
    tables += subject_tables(results["new"], "New ground and achievements", NEW, about)
    return tables + outcome_tables(results["outcomes"])


def measure_returns(subject: Subject, shown: Sequence[Film], seed: int) -> dict[str, Figure]:
    """Play ways there and back; return the share of tiles that are shown again as they were.

    Tiles count that went out of view and, in the game, have not changed. The row `copy` is the true frame at
    the turning point, repeated.
    """
    counts: Counts = {}
    for batch, clips, _ in _played(subject, shown, seed):
        for row, film in enumerate(batch):
            turn, last = film.moments[len(film.actions) // 2 - 1], film.moments[-1]
            away = set(places(turn))
            left = np.array([cell not in away for cell in places(last)]).reshape(last.tiles.shape)
            counted = (
                left & (last.tiles == film.start.tiles) & (read_tiles(film.frames[-1], last) == last.tiles)
            )
            coded = subject.reconstruct(film.frames[-1:][None])[0, -1]
            for name, tiles in {
                "model": read_tiles(clips[-1][row], film.start, last),
                "codec": read_tiles(coded, last),
                "copy": read_tiles(film.frames[len(film.actions) // 2 - 1], turn),
            }.items():
                _count(counts, ("kept", name), tiles == last.tiles, counted)
    return {name: _share(pairs) for (_, name), pairs in counts.items()}


def _played(
    subject: Subject, shown: Sequence[Film], seed: int
) -> Iterator[tuple[list[Film], list[np.ndarray], list[Any]]]:
    """Play films of equal lengths together; yield them with the frames `[b, h, w, 3]` and outcomes by round.

    Where the player dies, rounds are added after it, for an end that is predicted late.
    """
    waiting: dict[tuple[int, int], list[int]] = {}
    for index, film in enumerate(shown):
        waiting.setdefault((len(film.actions), len(film.done)), []).append(index)
    for same in waiting.values():
        for first in range(0, len(same), BATCH):
            chosen = same[first : first + BATCH]
            batch = [shown[index] for index in chosen]
            worlds = subject.open(
                np.stack([film.past for film in batch]),
                [seed + index for index in chosen],
                [film.done for film in batch],
            )
            clips, outcomes = [], []
            late = LATE * any(film.outcomes[-1].ended for film in batch)
            for number in range(len(batch[0].actions) + late):
                clip = worlds.step([film.actions[min(number, len(film.actions) - 1)] for film in batch])
                clips.append(clip[:, -1])
                outcomes.append(getattr(worlds, "outcomes", ()))
            yield batch, clips[: len(batch[0].actions)], outcomes if all(outcomes) else []


Reading = tuple[Names, np.ndarray]
"""Tiles and bag of a frame."""


def _readings(subject: Subject, film: Film, made: Sequence[Frame]) -> dict[str, list[Reading]]:
    """Return what every row shows after each round."""
    coded = subject.reconstruct(film.frames[:, None])[:, -1]
    still = read_tiles(film.past[-1], film.start), read_bag(film.past[-1])

    def read(frames: Sequence[Frame]) -> list[Reading]:
        pairs = zip(frames, film.moments, strict=True)
        return [(read_tiles(frame, film.start, at), read_bag(frame)) for frame, at in pairs]

    return {
        "model": read(made),
        "codec": read(list(coded)),
        "copy": [still] * len(film.frames),
        "truth": read(list(film.frames)),
    }


def _compare(counts: Counts, film: Film, rows: Mapping[str, Sequence[Reading]]) -> None:
    """Add the tiles and things that are right after some numbers of rounds."""
    for number in ROUNDS:
        if number > len(film.moments):
            continue
        now = film.moments[number - 1]
        earlier = film.seen.union(*(places(each) for each in film.moments[: number - 1]))
        known = np.array([cell in earlier for cell in places(now)]).reshape(now.tiles.shape)
        readable = rows["truth"][number - 1][0] == now.tiles
        changed = readable & (now.tiles != film.start.tiles)
        for name, readings in rows.items():
            if name == "truth":
                continue
            tiles, bag = readings[number - 1]
            right, same = tiles == now.tiles, bag == now.bag
            _count(counts, ("cells", str(number), name), right, readable)
            _count(counts, ("changed", str(number), name), right, changed)
            _count(counts, ("known", str(number), name), right, changed & known)
            _count(counts, ("bag", str(number), name), same, np.ones_like(same))
            _count(counts, ("bag_changed", str(number), name), same, now.bag != film.start.bag)


def _look_at_new(counts: Counts, fresh: Fresh, film: Film, rows: Mapping[str, Sequence[Reading]]) -> None:
    """Add the tiles that come into view, and the bag where something was achieved."""
    seen, before = set(film.seen), film.start
    found: dict[tuple[str, str], list[tuple[np.ndarray, np.ndarray]]] = {}
    right: dict[tuple[str, str], list[bool]] = {}
    for number, now in enumerate(film.moments[:NEW_ROUNDS]):
        known = np.array([cell in seen for cell in places(now)]).reshape(now.tiles.shape)
        new = (rows["truth"][number][0] == now.tiles) & ~known
        seen.update(places(now))
        true_borders = _borders(now.tiles, new, known)
        for name, readings in rows.items():
            tiles, bag = readings[number]
            borders = _borders(tiles, new, known)
            found.setdefault(("difference", name), []).append((tiles[new], now.tiles[new]))
            found.setdefault(("borders", name), []).append((borders, true_borders))
            right.setdefault(("lawful", name), []).extend(border in _lawful_borders() for border in borders)
            if name != "truth":
                right.setdefault(("right", name), []).extend((tiles == now.tiles)[new])
                if now.unlocked != before.unlocked:
                    right.setdefault(("achieved", name), []).append(bool((bag == now.bag).all()))
        before = now
    for key, pairs in found.items():
        shown, true = (np.concatenate(each) for each in zip(*pairs, strict=True))
        if len(true):
            fresh.setdefault(key, []).append((shown, true))
    for (measure, name), answers in right.items():
        counts.setdefault((measure, "", name), []).append((float(sum(answers)), float(len(answers))))


def _borders(tiles: Names, new: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Return the pairs of names where new ground lies beside known ground, such as `grass|water`."""
    found = []
    for axis, step in product((0, 1), (1, -1)):
        border = new & np.roll(known, step, axis)
        # Cells that wrapped around the edge are not neighbours.
        edge = 0 if step == 1 else -1
        border[(slice(None),) * axis + (edge,)] = False
        found += [f"{a}|{b}" for a, b in zip(np.roll(tiles, step, axis)[border], tiles[border], strict=True)]
    return np.array(found, dtype=str)


@cache
def _lawful_borders() -> frozenset[str]:
    """Return the pairs that occur in generated worlds, and all with something that does not."""
    beside, names = materials_beside(), {OUTSIDE, *RULES.materials}
    built = set(tile_names()) - names | {"table", "furnace"}
    lawful = {f"{a}|{b}" for (a, b), share in beside.items() if share >= UNLAWFUL}
    every = names | built
    return frozenset(lawful | {f"{a}|{b}" for a, b in product(every, every) if {a, b} & built})


def _count(counts: Counts, key: tuple[str, ...], right: np.ndarray, counted: np.ndarray) -> None:
    counts.setdefault(key, []).append((float((right & counted).sum()), float(counted.sum())))


def _share(pairs: Sequence[tuple[float, float]]) -> Figure:
    """Return hits over cases with a bootstrap interval over films; n is the number of cases."""
    hits, cases = np.array(pairs, np.float64).T
    return bootstrap(
        lambda rows: hits[rows].sum() / max(cases[rows].sum(), 1e-9), len(pairs), int(cases.sum())
    )


def _difference(pairs: Sequence[tuple[Names, Names]]) -> Figure:
    """Return half the sum over names of the distance between their shares, shown and true."""
    names = {
        name: index for index, name in enumerate(sorted({*np.concatenate([x for p in pairs for x in p])}))
    }
    tables = np.zeros((2, len(pairs), len(names)))
    for row, pair in enumerate(pairs):
        for which, tiles in enumerate(pair):
            for name in tiles:
                tables[which, row, names[name]] += 1

    def distance(rows: np.ndarray) -> float:
        shown, true = (table[rows].sum(axis=0) / table[rows].sum() for table in tables)
        return float(np.abs(shown - true).sum() / 2)

    return bootstrap(distance, len(pairs), int(tables[0].sum()))


def _example(film: Film, made: Sequence[Frame], rows: Mapping[str, Sequence[Reading]]) -> Example:
    """Show some rounds of a film."""
    shown = [number - 1 for number in (1, 2, 3, *ROUNDS[1:]) if number <= len(made)]
    wrong = [int((rows["model"][i][0] != film.moments[i].tiles).sum()) for i in shown]
    caption = " / ".join(str(film.actions[i]) for i in shown)
    start = film.past[-1]
    return Example(
        "films of the policy",
        caption,
        None,
        np.stack([start, *(film.frames[i] for i in shown)]),
        np.stack([start, *(made[i] for i in shown)]),
        f"rounds {', '.join(str(i + 1) for i in shown)}; wrong tiles {', '.join(map(str, wrong))}",
    )


RETURN = (
    "Of tiles that went out of view and did not change. Copy: the true frame at the turning point, repeated."
)


def _goals() -> tuple[Goal, ...]:
    """Return the figures of the published table."""
    least = dict(zip(ROUNDS, (0.92, 0.85, 0.75, 0.6), strict=True))
    goals = []
    for measure, title in (
        ("changed", "Tiles right where they changed"),
        ("cells", "Tiles right"),
        ("known", "Tiles right where they changed, of known ground"),
        ("bag", "Things in the bag right"),
    ):
        for number in ROUNDS:
            path = ("films", "rounds", str(number), measure)
            target = least[number] if measure == "changed" else None
            goals.append(_goal(f"{title}, round {number}", path, at_least=target))
    goals.append(
        _goal("New ground: difference of tiles' shares", ("films", "new", "difference"), at_most=0.1)
    )
    goals.append(_goal("New ground: difference of borders' shares", ("films", "new", "borders")))
    goals.append(_goal("New ground: lawful borders", ("films", "new", "lawful")))
    for steps, target in zip(WAYS, (0.9, 0.8), strict=True):
        goals.append(
            _goal(
                f"{steps} steps away and back: tiles as they were", ("returns", str(steps)), at_least=target
            )
        )
    goals.append(_goal("Whole bag right when something was achieved", ("films", "new", "achieved")))
    goals.append(_goal("Rewards, F1", ("films", "outcomes", "reward_f1"), "", at_least=0.8))
    goals.append(_goal("Ends of episodes, F1", ("films", "outcomes", "end_f1"), ""))
    goals.append(Goal("Speed of one session", ("speed", "fps"), "fps", at_least=15))
    return tuple(goals)


def _goal(title: str, path: tuple[str, ...], unit: Unit = "%", **targets: float | None) -> Goal:
    beside = {TITLES[row]: (*path, row) for row in TITLES if row != "model"}
    return Goal(title, (*path, "model"), unit, **targets, baselines=beside)


CARD = CardText(
    about="A world model of [Crafter](https://github.com/danijar/crafter), a survival game of tiles.\n",
    usage="""```python
from worldmodel import WorldModel

session = WorldModel.from_pretrained("{name}").session(seed=0)
session.reset("first_frame.png")
frames = session.step({"keys": ["move_left"]}).frames
session.save("rollout.mp4")
```
""",
    data="Recorded from the game (MIT) with the policy `worldmodel.games.crafter.policy:Play`.\n",
    judging=(
        "The model goes on from 16 recorded steps of worlds that were not recorded. A tile is right if it is "
        "that of the game's own map, with what stands on it and where that looks."
    ),
    limits=("It knows this game alone, in frames of 72 x 72 pixels.",),
    dataset="crafter",
)
