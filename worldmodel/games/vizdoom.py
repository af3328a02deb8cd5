"""A maze of ViZDoom with keys and mouse, seen from inside, and a policy that walks through it.

worldmodel record worldmodel.games.vizdoom:DoomMaze-v0 --policy worldmodel.games.vizdoom:Walk …
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from vizdoom.gymnasium_wrapper.gymnasium_env_defns import VizdoomScenarioEnv

KEYS = ("MOVE_FORWARD", "MOVE_BACKWARD", "MOVE_LEFT", "MOVE_RIGHT")
TICS = 5
"""Tics of the game, of which there are 35 a second, for an action."""
DEGREES = 4.0
"""Greatest turn in a tic."""
STANDSTILL = 2.0
"""Mean change of a pixel, of 255, below which a step forward has met a wall."""


class DoomMaze(gymnasium.Env):
    """The scenario My Way Home: find the vest, from another room each time.

    The actions hold any of four keys and turn by the mouse: a mouse at 1 turns 20 degrees to the right. Its
    vertical motion does nothing.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 35 // TICS}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self._env = VizdoomScenarioEnv(
            "my_way_home.cfg",
            frame_skip=TICS,
            render_mode=render_mode,
            available_buttons=[*KEYS, "TURN_LEFT_RIGHT_DELTA"],
            screen_resolution="RES_160X120",
        )
        self._env.game.set_living_reward(0)  # only the vest is an event
        self.observation_space = self._env.observation_space
        self.action_space = spaces.Dict(
            {"keys": spaces.MultiBinary(len(KEYS)), "mouse": spaces.Box(-1, 1, (2,), np.float32)}
        )
        keys = [{"name": key.removeprefix("MOVE_").lower(), "kind": "key"} for key in KEYS]
        mouse = {"kind": "mouse", "unit": "deg", "scale": DEGREES * TICS, "frame": "camera"}
        self.action_specs = [*keys, {"name": "yaw", **mouse}, {"name": "unused", **mouse}]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self._env.reset(seed=seed)

    def step(self, action: dict[str, Any]) -> Any:
        turn = np.array([action["mouse"][0] * DEGREES], np.float32)
        return self._env.step({"binary": action["keys"], "continuous": turn})

    def render(self) -> Any:
        return self._env.render()

    def close(self) -> None:
        self._env.close()


class Walk:
    """Walks with turns, and turns away where the picture has stopped to change: at a wall."""

    def __init__(self, env: gymnasium.Env) -> None:
        del env

    def reset(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.left, self.keys, self.turn = 0, np.zeros(len(KEYS), np.int8), 0.0
        self.last = np.zeros((), np.float32)

    def __call__(self, observation: Any) -> dict[str, Any]:
        screen = np.asarray(observation["screen"], np.float32)
        change, self.last = np.abs(screen - self.last).mean(), screen
        if self.keys[0] and self.turn == 0 and change < STANDSTILL:
            self.left, self.turn = int(self.rng.integers(4, 9)), float(self.rng.choice([-1, 1]))
        elif not self.left:
            self.left = int(self.rng.integers(1, 8))
            sideways = self.rng.random() < 0.2
            self.keys[:] = 0
            self.keys[0] = self.rng.random() < 0.8
            self.keys[1] = not self.keys[0] and self.rng.random() < 0.5
            self.keys[2 + int(self.rng.integers(2))] = sideways
            self.turn = float(self.rng.uniform(-1, 1) if self.rng.random() < 0.4 else 0)
        self.left -= 1
        mouse = np.array([self.turn, self.rng.uniform(-1, 1)], np.float32)
        return {"keys": self.keys.copy(), "mouse": mouse}


gymnasium.register("DoomMaze-v0", f"{__name__}:DoomMaze")
