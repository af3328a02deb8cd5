"""A policy that plays Crafter: it collects, crafts, builds, fights, eats, drinks and sleeps.

It reads the state of the game, also what is out of view, since it only records. Chance decides what it does
when nothing is urgent, so that recordings show many states and not one way through the game.
"""

import heapq
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from crafter import objects

from worldmodel.games.crafter import RULES

Cell = tuple[int, int]
MOVES = {"move_left": (-1, 0), "move_right": (1, 0), "move_up": (0, -1), "move_down": (0, 1)}
SOURCES = {"wood": "tree", "stone": "stone", "coal": "coal", "iron": "iron", "diamond": "diamond"}
"""Where each thing that crafts use comes from."""
CRAFTS = (
    "place_table", "make_wood_pickaxe", "make_wood_sword", "make_stone_pickaxe", "make_stone_sword",
    "place_furnace", "make_iron_pickaxe", "make_iron_sword",
)  # fmt: skip
"""In the order in which they become possible."""
DIG = 2
"""Steps to pass a tile that is removed first, against 1 for a free one."""
FAR = 30
"""Longest way to a target, in steps."""
RANDOM, WHIM = 0.06, 0.25
"""Shares of random actions, and of aims that are taken at random."""
OUTSIDE = 0.02
"""Share of attempts to sleep that end without a shelter."""
PATIENCE = 40
"""Steps after which an aim is given up."""


class Play:
    """Chooses aims, goes there and acts; for `worldmodel record --policy`."""

    def __init__(self, env: Any) -> None:
        self.env = env.unwrapped

    def reset(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.aim: Callable[[], str | None] | None = None
        self.left = 0
        self.script: list[str] = []
        self.way: list[Cell] = []

    def __call__(self, observation: Any) -> int:
        self.game = self.env.game
        self.world, self.player = self.game._world, self.game._player
        self.here: Cell = int(self.player.pos[0]), int(self.player.pos[1])
        return RULES.actions.index(self._choose())

    def _choose(self) -> str:
        if self.player.sleeping:
            return "noop"
        if self.rng.random() < RANDOM:
            action = str(self.rng.choice(RULES.actions))
            if self._material(self._step(action)) != "lava":
                return action
        if self.script:
            return self.script.pop(0)
        if (danger := self._danger()) is not None:
            return danger
        for _ in range(5):
            if self.aim is None or self.left <= 0:
                self.aim, self.left, self.way = self._new_aim(), PATIENCE, []
            self.left -= 1
            action = self.aim()
            if action is not None:
                return action
            self.aim = None
            if self.script:
                return self.script.pop(0)
        return str(self.rng.choice(list(MOVES)))

    def _new_aim(self) -> Callable[[], str | None]:
        """Return what to do next: what is urgent, else sometimes a whim, else the next craft."""
        bag = self.player.inventory
        if bag["drink"] < 4:
            return self._collect("water", bag["drink"] + int(self.rng.integers(2, 6)))
        if bag["food"] < 4:
            return self._hunt(objects.Plant, objects.Cow)
        if bag["energy"] < 3 or (self._is_dark() and bag["energy"] < 9 and self.rng.random() < 0.8):
            return self._sleep
        if self.rng.random() < WHIM:
            return self._whim()
        for craft in CRAFTS:
            name = craft.split("_", 1)[1]
            if bag.get(name) or (name not in bag and self.player.achievements[craft]):
                continue
            needs = RULES.make[name] if craft.startswith("make") else RULES.place[name]
            return self._craft(craft, needs["uses"], needs.get("nearby", ()))
        return self._collect("diamond") if self.rng.random() < 0.5 else self._whim()

    def _whim(self) -> Callable[[], str | None]:
        return [
            self._plant,
            self._plant,
            self._collect("water", 9),
            self._collect("stone", int(self.rng.integers(1, 10))),
            self._collect("tree", int(self.rng.integers(1, 10))),
            self._hunt(objects.Cow),
            self._hunt(objects.Zombie, objects.Skeleton),
            self._hunt(objects.Plant),
            self._wander(),
            self._wander(),
            self._do_in_vain(),
        ][int(self.rng.integers(11))]

    def _collect(self, material: str, until: int = 1) -> Callable[[], str | None]:
        """Go to a material and take it until there is enough in the bag."""
        ((name, _),) = RULES.collect[material]["receive"].items()
        require = RULES.collect[material]["require"]

        def act() -> str | None:
            bag = self.player.inventory
            if bag[name] >= min(until, 9) or any(bag[tool] < 1 for tool in require):
                return None
            return self._go(lambda cell: self._material(cell) == material and not self._object(cell))

        return act

    def _hunt(self, *kinds: type) -> Callable[[], str | None]:
        """Go to the nearest creature, or ripe plant, and hit it."""

        def is_prey(cell: Cell) -> bool:
            found = self._object(cell)
            return isinstance(found, kinds) and getattr(found, "ripe", True)

        def act() -> str | None:
            self.way = []  # it moves
            return self._go(is_prey)

        return act

    def _craft(self, action: str, uses: dict[str, int], nearby: tuple[str, ...]) -> Callable[[], str | None]:
        """Collect what a craft uses, go to the table or furnace that it needs, and make it."""
        count = self.player.achievements[action]

        def act() -> str | None:
            bag = self.player.inventory
            if self.player.achievements[action] > count:
                return None
            for thing, amount in uses.items():
                if bag[thing] < amount:
                    # A little more than it needs: the next craft uses it, too.
                    return self._collect(SOURCES[thing], amount + int(self.rng.integers(0, 3)))()
            near, _ = self.world.nearby(self.player.pos, 1)
            for thing in nearby:
                if thing not in near:
                    found = self._go(lambda cell, thing=thing: self._material(cell) == thing, touch=False)
                    return found or self._craft(f"place_{thing}", RULES.place[thing]["uses"], ())()
            if action.startswith("place"):
                return self._place(action)
            return action

        return act

    def _plant(self) -> str | None:
        """Look for a sapling in the grass, and plant it."""
        if self.player.inventory["sapling"]:
            self.aim = None
            return self._place("place_plant")
        return self._go(lambda cell: self._material(cell) == "grass" and not self._object(cell))

    def _wander(self) -> Callable[[], str | None]:
        """Go far in one direction, which shows new ground, and sometimes build on the way."""
        towards = self.rng.normal(size=2)
        goal = tuple(int(x) for x in np.clip(self.here + towards / np.hypot(*towards) * 12, 1, 62))

        def act() -> str | None:
            if self.player.inventory["stone"] > 1 and self.rng.random() < 0.1:
                return "place_stone"
            return self._go(lambda cell: abs(cell[0] - goal[0]) + abs(cell[1] - goal[1]) < 3, touch=False)

        return act

    def _do_in_vain(self) -> Callable[[], str | None]:
        """Try any action where one is: most have no effect, which is to be learned, too."""
        self.script = [str(self.rng.choice(RULES.actions[5:])) for _ in range(3)]
        return lambda: None

    def _sleep(self) -> str | None:
        """Dig two tiles into rock, step back and close the entrance: zombies come to sleepers outside."""
        self.aim = None
        bag = self.player.inventory
        solid = ("stone", "coal", "iron", "water", "tree")

        def closed(cell: Cell) -> bool:
            return self._material(cell) in solid

        def is_shelter(cell: Cell, ahead: Cell) -> bool:
            first, second, third = (_add(cell, ahead, n) for n in (1, 2, 3))
            sides = [(ahead[1], ahead[0]), (-ahead[1], -ahead[0])]
            walls = [_add(each, side) for each in (first, second) for side in sides]
            return all(self._material(each) == "stone" for each in (first, second)) and all(
                closed(each) for each in (*walls, third)
            )

        if bag["wood_pickaxe"] and not any(isinstance(each, objects.Zombie) for each in self._near(6)):
            for name, ahead in MOVES.items():
                if is_shelter(self.here, ahead):
                    back = next(other for other, way in MOVES.items() if way == (-ahead[0], -ahead[1]))
                    self.script = [name, "do", name, "do", name, back, "place_stone", "sleep"]
                    return self.script.pop(0)
            if self.player.inventory["energy"] > 0:
                found = self._go(lambda c: any(is_shelter(c, way) for way in MOVES.values()), touch=False)
                if found is not None:
                    self.aim = self._sleep
                    return found
        return "sleep" if bag["energy"] < 2 or self.rng.random() < OUTSIDE else None

    def _is_dark(self) -> bool:
        return self.world.daylight < 0.5

    def _danger(self) -> str | None:
        """Turn to a zombie or skeleton beside the player, and hit it."""
        for name, way in MOVES.items():
            if isinstance(self._object(_add(self.here, way)), objects.Zombie | objects.Skeleton):
                return "do" if tuple(self.player.facing) == way else name
        return None

    def _place(self, action: str) -> str | None:
        """Place something in front, or turn until that is possible."""
        ahead = _add(self.here, tuple(self.player.facing))
        where = RULES.place[action.removeprefix("place_")]["where"]
        if self._material(ahead) in where and not self._object(ahead):
            return action
        return str(self.rng.choice(list(MOVES)))

    def _go(self, is_target: Callable[[Cell], bool], touch: bool = True) -> str | None:
        """Return the next action of the way to the nearest target; None if there is no way, or it ends here.

        Args:
            is_target: Whether a tile is one.
            touch: Whether to act on the target instead of standing on it or beside it.
        """
        if not touch and any(is_target(cell) for cell in (self.here, *self._around(self.here))):
            return None
        if not self.way or not is_target(self.way[-1]) or self.here not in self.way[:-1]:
            self.way = self._path(is_target)
        if len(self.way) < 2:
            return None
        after = self.way[self.way.index(self.here) + 1]
        ahead = after[0] - self.here[0], after[1] - self.here[1]
        turn = next(name for name, way in MOVES.items() if way == ahead)
        walk = self._is_free(after) and not (touch and after == self.way[-1])
        if walk or tuple(self.player.facing) != ahead:
            if self._is_free(after) and not walk:  # grass to search: the player would walk onto it
                self.way = []
            return turn
        return "do"

    def _path(self, is_target: Callable[[Cell], bool]) -> list[Cell]:
        """Return the shortest way to a target, with digging; empty if there is none within `FAR` steps."""
        before: dict[Cell, Cell] = {self.here: self.here}
        cost: dict[Cell, int] = {self.here: 0}
        waiting = [(0, self.here)]
        while waiting:
            reached, cell = heapq.heappop(waiting)
            if cell != self.here and is_target(cell):
                way = [cell]
                while way[-1] != self.here:
                    way.append(before[way[-1]])
                return way[::-1]
            if reached > cost[cell] or reached > FAR or (cell != self.here and not self._passable(cell)):
                continue
            for other in self._around(cell):
                price = reached + (1 if self._is_free(other) else DIG)
                if price < cost.get(other, FAR + 2) and (self._passable(other) or is_target(other)):
                    before[other], cost[other] = cell, price
                    heapq.heappush(waiting, (price, other))
        return []

    def _passable(self, cell: Cell) -> bool:
        """Return whether one can go there, if need be by digging."""
        material = self._material(cell)
        if material in RULES.walkable:
            return self._object(cell) is None
        collect = RULES.collect.get(material or "")
        tools = self.player.inventory
        return (
            collect is not None
            and collect["leaves"] in RULES.walkable
            and material != "tree"
            and all(tools[tool] for tool in collect["require"])
        )

    def _is_free(self, cell: Cell) -> bool:
        return self._material(cell) in RULES.walkable and self._object(cell) is None

    def _around(self, cell: Cell) -> Iterator[Cell]:
        return (_add(cell, way) for way in MOVES.values())

    def _near(self, distance: int) -> set[Any]:
        return self.world.nearby(self.player.pos, distance)[1]

    def _step(self, action: str) -> Cell:
        return _add(self.here, MOVES.get(action, (0, 0)))

    def _material(self, cell: Cell) -> str | None:
        return self.world[cell][0]

    def _object(self, cell: Cell) -> Any:
        return self.world[cell][1]


def _add(cell: Cell, way: Cell, times: int = 1) -> Cell:
    return cell[0] + times * way[0], cell[1] + times * way[1]
