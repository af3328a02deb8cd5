"""Crafter as an environment of Gymnasium; its actions are words such as move_left or place_stone.

worldmodel record worldmodel.games.crafter:Crafter-v1 --policy sticky …
"""

from typing import Any

import crafter
import gymnasium
import numpy as np
from gymnasium import spaces


class Crafter(gymnasium.Env):
    """The game of Hafner (2021), https://github.com/danijar/crafter, whose package was written for Gym.

    The seed of `reset` decides the terrain and what creatures do.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None, size: int = 64) -> None:
        self.render_mode, self._size = render_mode, size
        self._env = crafter.Env(size=(size, size))
        self.observation_space = spaces.Box(0, 255, (size, size, 3), np.uint8)
        self.action_space = spaces.Discrete(len(self._env.action_names))

    def get_action_meanings(self) -> list[str]:
        """Return the names of the actions."""
        return list(self._env.action_names)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._env = crafter.Env(size=(self._size, self._size), seed=int(self.np_random.integers(2**31 - 1)))
        return self._env.reset(), {}

    def step(self, action: Any) -> Any:
        observation, reward, done, info = self._env.step(int(action))
        died = info["discount"] == 0
        info["player_pos"] = info["player_pos"].copy()  # of the game, which goes on
        return observation, float(reward), died, bool(done and not died), info

    def render(self) -> np.ndarray:
        return self._env.render()


gymnasium.register("Crafter-v1", f"{__name__}:Crafter")
