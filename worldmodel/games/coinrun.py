"""CoinRun of Procgen, as envpool builds it; every seed is another level.

worldmodel record worldmodel.games.coinrun:CoinRun-v0 --policy worldmodel.games.coinrun:Run …
"""

from typing import Any

import envpool
import gymnasium
import numpy as np
from gymnasium import spaces

ACTIONS = ("down_left", "left", "up_left", "down", "wait", "up", "down_right", "right", "up_right")
"""The actions of Procgen that do something in CoinRun, in its order."""


class CoinRun(gymnasium.Env):
    """The game of Cobbe et al. (2019), https://arxiv.org/abs/1912.01588: get to the coin at the right end.

    The seed of `reset` decides the level.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None, task_id: str = "CoinrunEasy-v0") -> None:
        self.render_mode, self._task_id = render_mode, task_id
        self.observation_space = spaces.Box(0, 255, (64, 64, 3), np.uint8)
        self.action_space = spaces.Discrete(len(ACTIONS))

    def get_action_meanings(self) -> list[str]:
        return list(ACTIONS)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        level = int(self.np_random.integers(2**31 - 1))
        self._env = envpool.make_gymnasium(
            self._task_id, num_envs=1, seed=level, start_level=level, num_levels=1
        )
        return self._see(self._env.reset()[0]), {}

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, _ = self._env.step(np.array([int(action)]))
        return self._see(observation), float(reward[0]), bool(terminated[0]), bool(truncated[0]), {}

    def _see(self, observation: np.ndarray) -> np.ndarray:
        self._frame = np.ascontiguousarray(np.moveaxis(observation[0], 0, -1))
        return self._frame

    def render(self) -> np.ndarray:
        return self._frame


class Run:
    """Runs to the right with jumps, and sometimes goes back or waits."""

    def __init__(self, env: gymnasium.Env) -> None:
        del env
        self.chances = np.array([1, 3, 2, 1, 1, 3, 1, 8, 8], np.float64)
        self.chances /= self.chances.sum()

    def reset(self, seed: int) -> None:
        self.rng, self.left = np.random.default_rng(seed), 0

    def __call__(self, observation: Any) -> int:
        if not self.left:
            self.left = int(self.rng.integers(1, 10))
            self.action = int(self.rng.choice(len(ACTIONS), p=self.chances))
        self.left -= 1
        return self.action


gymnasium.register("CoinRun-v0", f"{__name__}:CoinRun")
