"""Policies for MiniGrid, which random actions hardly ever solve: of 2,000 episodes of DoorKey, none.

worldmodel record minigrid:MiniGrid-DoorKey-6x6-v0 --policy worldmodel.games.minigrid:explore …
worldmodel record minigrid:BabyAI-GoToLocalS6N4-v0 --policy worldmodel.games.minigrid:Missions …
worldmodel rank worldmodel.games.minigrid:Player random --world minigrid-doorkey …
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from worldmodel.media import Frame

LEFT, RIGHT, FORWARD, PICK_UP, TOGGLE = 0, 1, 2, 3, 5
"""Actions of MiniGrid."""
EMPTY, WALL, FLOOR, DOOR, KEY, GOAL = 1, 2, 3, 4, 5, 8
"""Types of objects in its observations."""
OBJECTS = {"floor": FLOOR, "door": DOOR, "key": KEY, "goal": GOAL}
"""Types of the objects that the judge names; all others are in the way."""
OPEN, CLOSED, LOCKED = 0, 1, 2
"""States of doors."""
STATES = {"open": OPEN, "closed": CLOSED, "locked": LOCKED}
MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))
"""Columns and rows of a step up, right, down and left in the agent's view."""
FACINGS = ("up", "right", "down", "left")
"""Names of these directions."""
RANDOM_SHARE, TRY_SHARE, WANDER_SHARE = 0.35, 0.3, 0.15
"""Shares of random actions, of attempts at a locked door without a key, and of steps to anywhere."""


def explore(observation: Mapping[str, Any], space: Any, rng: np.random.Generator) -> int:
    """Go for the key, the door and the goal, with detours.

    Args:
        observation: A dictionary of MiniGrid; `image` has type, colour and state `[column, row, 3]` of the
            cells that the agent sees from the middle of the last row, facing up.
        space: The action space.
        rng: Random numbers.
    """
    image = np.asarray(observation["image"])
    agent = (image.shape[0] // 2, image.shape[1] - 1)
    has_key = image[agent][0] == KEY
    ahead = image[agent[0], agent[1] - 1]
    if rng.random() < RANDOM_SHARE:
        return int(rng.integers(space.n))
    if ahead[0] == DOOR and ahead[2] == LOCKED and not has_key and rng.random() < TRY_SHARE:
        return TOGGLE
    targets = _targets(image, agent, has_key)
    if not targets or rng.random() < WANDER_SHARE:
        targets = {place: FORWARD for place in np.ndindex(image.shape[:2]) if _is_free(image[place])}
        chosen = list(targets)[int(rng.integers(len(targets)))] if targets else agent
        targets = {chosen: FORWARD}
    first = _first_action(image, agent, targets)
    return int(rng.choice([LEFT, RIGHT, FORWARD])) if first is None else first


class Missions:
    """Carries out the missions of BabyAI (Chevalier-Boisvert et al., 2019, arXiv:1810.08272) by its bot."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def reset(self, seed: int) -> None:
        del seed
        self.bot: Any = None

    def __call__(self, observation: Mapping[str, Any]) -> int:
        if self.bot is None:  # the mission is known once the environment is reset
            from minigrid.utils.baby_ai_bot import BabyAIBot

            self.bot = BabyAIBot(self.env)
        return int(self.bot.replan())


class Player:
    """Solves a board of which it sees the frame alone, so that it can play in a learned world, too."""

    def __init__(self, env: Any) -> None:
        from worldmodel.games.minigrid_judge import MiniGridJudge

        self.judge, self.space = MiniGridJudge(), env.action_space

    def reset(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def __call__(self, observation: Frame) -> int:
        """Return the next action; a random one where no agent or no way is to be seen."""
        image, agent, facing = self._board(self.judge.read(observation))
        if agent is not None:
            carries = not (image[..., 0] == KEY).any()
            first = _first_action(image, agent, _targets(image, agent, carries), facing)
            if first is not None:
                return first
        return int(self.rng.integers(self.space.n))

    @staticmethod
    def _board(names: np.ndarray) -> tuple[np.ndarray, tuple[int, int] | None, int]:
        """Return the board as MiniGrid's observations have it, the agent's cell, and where it faces."""
        image, agent, facing = np.zeros((*names.T.shape, 3), int), None, 0
        for (row, column), name in np.ndenumerate(names):
            words = name.split()
            image[column, row, 0] = next((OBJECTS[word] for word in words if word in OBJECTS), WALL)
            image[column, row, 2] = next((STATES[word] for word in words if word in STATES), OPEN)
            if words[0] == "agent":
                agent, facing = (column, row), FACINGS.index(words[2])
                image[column, row, 0] = FLOOR
        return image, agent, facing


def _is_free(cell: np.ndarray) -> bool:
    return cell[0] in (EMPTY, FLOOR, GOAL) or (cell[0] == DOOR and cell[2] == OPEN)


def _targets(image: np.ndarray, agent: tuple[int, int], has_key: bool) -> dict[tuple[int, int], int]:
    """Return the cells to go for, and what to do in front of them."""
    found: dict[tuple[int, int], int] = {}
    for place in np.ndindex(image.shape[:2]):
        kind, _, state = image[place]
        if place == agent:
            continue
        if kind == GOAL:
            found[place] = FORWARD
        elif kind == KEY and not has_key:
            found[place] = PICK_UP
        elif kind == DOOR and state != OPEN and (has_key or state != LOCKED):
            found[place] = TOGGLE
    return found


def _first_action(
    image: np.ndarray, agent: tuple[int, int], targets: Mapping[tuple[int, int], int], facing: int = 0
) -> int | None:
    """Return the first action of a shortest way to the nearest target; None if none can be reached."""
    waiting: deque[tuple[int, int, int, int | None]] = deque([(*agent, facing, None)])
    seen = {(*agent, facing)}
    while waiting:
        column, row, facing, first = waiting.popleft()
        ahead = column + MOVES[facing][0], row + MOVES[facing][1]
        if ahead in targets:
            return targets[ahead] if first is None else first
        steps = [(LEFT, (column, row, (facing - 1) % 4)), (RIGHT, (column, row, (facing + 1) % 4))]
        if (
            min(ahead) >= 0
            and ahead[0] < image.shape[0]
            and ahead[1] < image.shape[1]
            and _is_free(image[ahead])
        ):
            steps.append((FORWARD, (*ahead, facing)))
        for action, place in steps:
            if place not in seen:
                seen.add(place)
                waiting.append((*place, action if first is None else first))
    return None
