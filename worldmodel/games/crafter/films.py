"""Films of Crafter with what the game knows of every frame: those of the policy, and ways there and back."""

import itertools
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from worldmodel.actions import Action
from worldmodel.episodes import Outcome
from worldmodel.games.crafter import RULES, Crafter
from worldmodel.games.crafter.policy import MOVES, Play
from worldmodel.games.crafter.tiles import Moment, moment
from worldmodel.media import Frame, Frames

HISTORY = 16
"""Steps before a film that a model is shown."""
MOMENTS = 4
"""Films of an episode."""
LONGEST = 320
"""Steps of an episode, in which there is a day and a night."""


@dataclass(frozen=True, slots=True)
class Film:
    """A part of an episode.

    Attributes:
        past: The frames up to its beginning, uint8 `[t, h, w, 3]`.
        done: The actions between them.
        actions: Its actions.
        frames: The frame after each of them.
        start: What the game knew of the last frame of the past.
        moments: What it knew of the others.
        seen: Columns and rows in the world of the tiles that were in view before.
        outcomes: Reward and end after each action.
    """

    past: Frames
    done: tuple[Action, ...]
    actions: tuple[Action, ...]
    frames: Frames
    start: Moment
    moments: tuple[Moment, ...]
    seen: frozenset[tuple[int, int]]
    outcomes: tuple[Outcome, ...]


class Take:
    """Plays the game and keeps frames, actions and what the game knows."""

    def __init__(self, env: Crafter, frame: Frame) -> None:
        self.env = env
        self.frames, self.moments = [frame], [moment(env.game)]
        self.actions: list[Action] = []
        self.outcomes: list[Outcome] = []

    def step(self, action: int) -> Frame:
        """Play an action, and return the frame after it."""
        frame, reward, died, _, _ = self.env.step(action)
        self.frames.append(frame)
        self.moments.append(moment(self.env.game))
        self.actions.append(Action(keys=(RULES.actions[action],)))
        self.outcomes.append(Outcome(reward, died))
        return frame

    def fork(self) -> "Take":
        """Return the same take with a copy of the game."""
        other = Take.__new__(Take)
        other.env = deepcopy(self.env)
        for name in ("frames", "moments", "actions", "outcomes"):
            setattr(other, name, list(getattr(self, name)))
        return other

    def film(self, first: int, rounds: int) -> Film:
        """Return the film of up to `rounds` actions from the frame `first` on."""
        begin, end = max(0, first - HISTORY), min(first + rounds, len(self.actions))
        return Film(
            np.stack(self.frames[begin : first + 1]),
            tuple(self.actions[begin:first]),
            tuple(self.actions[first:end]),
            np.stack(self.frames[first + 1 : end + 1]),
            self.moments[first],
            tuple(self.moments[first + 1 : end + 1]),
            frozenset(cell for each in self.moments[begin : first + 1] for cell in places(each)),
            tuple(self.outcomes[first:end]),
        )


def places(shown: Moment) -> list[tuple[int, int]]:
    """Return column and row in the world of the tiles in view, in row-major order."""
    return [(int(column), int(row)) for column, row in shown.cells.reshape(-1, 2)]


@lru_cache(maxsize=2)
def films(seed: int, count: int, rounds: int) -> Sequence[Film]:
    """Return `count` films of the policy; those in which the player dies are shorter."""
    found: list[Film] = []
    for number in itertools.count():
        *_, take = _episode(seed, number)
        rng = np.random.default_rng((seed, number, 1))
        # In different parts of the episode, and each with at least one round.
        parts = np.linspace(HISTORY, len(take.actions), MOMENTS + 1).astype(int)
        for low, high in itertools.pairwise(parts):
            if low < high:
                found.append(take.film(int(rng.integers(low, high)), rounds))
        if len(found) >= count:
            break
    return found[:count]


@lru_cache(maxsize=4)
def returns(seed: int, count: int, steps: int) -> Sequence[Film]:
    """Return `count` films of `steps` moves in one direction, all of which succeed, and as many back."""
    found: list[Film] = []
    for number in itertools.count():
        rng = np.random.default_rng((seed, number, steps))
        after = HISTORY + int(rng.integers(LONGEST // 2))
        for take in _episode(seed + steps, number):
            film = _there_and_back(take, steps, rng) if len(take.actions) >= after else None
            if film is not None:
                found.append(film)
                break
        if len(found) == count:
            break
    return found


def _episode(seed: int, number: int) -> Iterator[Take]:
    """Yield a take after every step of an episode, in a world that no recording of a few thousand has."""
    chosen = int(np.random.SeedSequence((seed, number, 2)).generate_state(1)[0] >> 1)
    env = Crafter()
    frame, _ = env.reset(seed=chosen)
    policy = Play(env)
    policy.reset(chosen)
    take = Take(env, frame)
    while len(take.actions) < LONGEST and not (take.outcomes and take.outcomes[-1].ended):
        frame = take.step(policy(frame))
        yield take


def _there_and_back(take: Take, steps: int, rng: np.random.Generator) -> Film | None:
    """Return a way from where the player is; None if there is none, or a creature got in the way."""
    player = take.env.game._player
    names = list(MOVES)
    for name in rng.permutation(names).tolist():
        way = np.array(MOVES[name])
        if player.sleeping or not all(player.is_free(player.pos + n * way) for n in range(1, steps + 1)):
            continue
        back = next(other for other in names if MOVES[other] == (-way[0], -way[1]))
        tried = take.fork()
        for action in [name] * steps + [back] * steps:
            tried.step(RULES.actions.index(action))
        film = tried.film(len(take.actions), 2 * steps)
        aims = [np.add(film.start.place, min(n, 2 * steps - n) * way) for n in range(1, 2 * steps + 1)]
        if all(np.array_equal(each.place, aim) for each, aim in zip(film.moments, aims, strict=True)):
            return film
    return None
