"""A Gymnasium environment in place of games that are not installed: a square on a board of 64 x 64 pixels."""

from typing import Any, ClassVar

import gymnasium
import numpy as np

NUM_ACTIONS = 9


class Board(gymnasium.Env[np.ndarray, int]):
    """The action says which way the square goes: rows of a 3 x 3 grid of directions, the middle one waits."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 15}

    def __init__(self, render_mode: str = "rgb_array") -> None:
        self.render_mode = render_mode
        self.observation_space = gymnasium.spaces.Box(0, 255, (64, 64, 3), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(NUM_ACTIONS)
        self.place = np.zeros(2, int)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.place = self.np_random.integers(0, 48, 2)
        return self.render(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.place = np.clip(self.place + 4 * (np.array(divmod(int(action), 3)) - 1), 0, 48)
        return self.render(), float(self.place[0] == 0), False, False, {}

    def render(self) -> np.ndarray:
        frame = np.full((64, 64, 3), 40, np.uint8)
        row, column = self.place
        frame[row : row + 16, column : column + 16] = (220, 180, 40)
        return frame


gymnasium.register("Board-v0", entry_point=Board)
