"""Crafter as an environment of Gymnasium; its actions are words such as move_left or place_stone.

worldmodel record worldmodel.games.crafter:Crafter-v1 --policy worldmodel.games.crafter.policy:Play …
"""

from typing import Any

import crafter
import gymnasium
import numpy as np
from crafter import constants
from gymnasium import spaces

RULES: Any = constants
"""The game's materials, things, actions and what they need, which its package reads from a file."""
TILES = 9
"""Tiles along each side of a frame: seven rows of the map, and two of the inventory."""


class Game(crafter.Env):
    """The game of Hafner (2021), https://github.com/danijar/crafter, whose package was written for Gym.

    The package keeps the creatures of a region in a set, whose order is that of their addresses in memory,
    and draws one by its number. Here they are in the order of their places, so that a seed decides.
    """

    def _balance_chunk(self, chunk: Any, objs: Any) -> None:
        super()._balance_chunk(chunk, sorted(objs, key=lambda each: tuple(each.pos)))


class Crafter(gymnasium.Env):
    """The game for Gymnasium. The seed of `reset` decides the terrain and what creatures do.

    In frames of 72 x 72 pixels a tile has 8 x 8, which is one latent cell of the codec; in those of 64 x 64,
    the default of the game, tiles have 7 and share cells.

    Attributes:
        game: The game that is played.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012

    game: Any

    def __init__(self, render_mode: str | None = None, size: int = 8 * TILES) -> None:
        self.render_mode, self._size = render_mode, size
        self.game = Game(size=(size, size))
        self.observation_space = spaces.Box(0, 255, (size, size, 3), np.uint8)
        self.action_space = spaces.Discrete(len(self.game.action_names))

    def get_action_meanings(self) -> list[str]:
        return list(self.game.action_names)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.game = Game(size=(self._size, self._size), seed=int(self.np_random.integers(2**31 - 1)))
        self._frame = self.game.reset()
        return self._frame, {}

    def step(self, action: Any) -> Any:
        self._frame, reward, done, info = self.game.step(int(action))
        died = info["discount"] == 0
        info["player_pos"] = info["player_pos"].copy()  # of the game, which goes on
        return self._frame, float(reward), died, bool(done and not died), info

    def render(self) -> np.ndarray:
        """Return what was observed: to draw a night again would change the game's random numbers."""
        return self._frame


gymnasium.register("Crafter-v1", f"{__name__}:Crafter")
