"""PushT as an environment that can be copied, a policy that pushes the block, and a reward read from frames.

worldmodel record worldmodel.games.pusht:PushT-v0 --policy worldmodel.games.pusht:Push …
worldmodel plan MODEL --env worldmodel.games.pusht:PushT-v0 --reward worldmodel.games.pusht:progress …
"""

import functools
from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from worldmodel.actions import Action
from worldmodel.media import Frames

REACH = 90.0
"""Distance from the middle of the block at which a push begins."""
STEP = 60.0
"""Greatest distance of a target from the agent along each axis."""
SIDE = 512
"""Side of the environment, in its units."""
BLOCK, AGENT = (119, 136, 153), (65, 105, 225)
"""Colours of block and agent, RGB; the board is white."""
BARS = ((-60, 60, 0, 30), (-15, 15, 30, 120))
"""The rectangles of which the T consists: left, right, top and bottom from its origin."""
GOAL, GOAL_ANGLE = 256, np.pi / 4
"""Where the T has to be: x and y of its origin, and its angle."""
FAINT = 0.2
"""Share of the block's grey, or of the agent's blue, up to which a pixel counts for nothing."""


class PushT(gymnasium.Env):
    """The environment of Chi et al. (2023), https://arxiv.org/abs/2303.04137, as gym-pusht has it.

    An action is the way from the agent to its target, at most `STEP` along each axis, as in DINO-WM
    (arXiv:2411.04983); in gym-pusht it is the target. Its physics cannot be copied as they are: a copy is a
    new environment whose bodies are where these are, so it may differ a little where they touch (by up to 1.4
    of 512 after ten steps, in 40 copies), and much later on.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None, **settings: Any) -> None:
        self.render_mode, self._settings = render_mode, settings
        env = gymnasium.make("gym_pusht:gym_pusht/PushT-v0", render_mode=render_mode, **settings)
        self._env: Any = env.unwrapped
        self.observation_space = env.observation_space
        self.action_space = spaces.Box(-STEP, STEP, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self._env.reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        return self._env.step(np.clip(np.array(self._env.agent.position) + action, 0, SIDE))

    def render(self) -> np.ndarray:
        return self._env.render()

    def close(self) -> None:
        self._env.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> "PushT":
        copied = PushT(self.render_mode, **self._settings)
        ours, theirs = self._env, copied._env
        if hasattr(ours, "space"):
            theirs.reset()
            theirs.np_random = deepcopy(ours.np_random, memo)
            theirs._last_action = deepcopy(ours._last_action, memo)
            for one, other in ((ours.agent, theirs.agent), (ours.block, theirs.block)):
                other.angle, other.position = one.angle, one.position
                other.velocity, other.angular_velocity = one.velocity, one.angular_velocity
                theirs.space.reindex_shapes_for_body(other)
        return copied


def progress(frames: Frames, action: Action) -> float:
    """Return a reward of the newest frame: minus the distance of the block from its goal, in frame sides.

    It is the mean over the block's pixels of their distance from the goal, so it is 0 if block and goal have
    the same place and angle. A tenth of the agent's distance from the block is added, so that it goes there.
    Pixels count by how much of the block's grey, or of the agent's blue, they have: what a model blurs is
    where most of it is. -1 if less than a tenth of the block is seen.
    """
    frame = frames[-1].astype(np.float32)
    from_goal = _from_goal(*frame.shape[:2])
    grey = (255 - frame) / (255 - np.array(BLOCK))
    block = (2 * grey.min(axis=-1) - grey.max(axis=-1)).clip(FAINT, 1) - FAINT
    agent = ((frame[..., 2] - frame[..., 1]) / (AGENT[2] - AGENT[1])).clip(FAINT, 1) - FAINT
    side = max(agent.shape)
    if block.sum() < (from_goal == 0).sum() / 10:
        return -1.0
    away, approach = np.average(from_goal, weights=block), side
    if agent.sum() > 0.5:  # less may be noise anywhere
        places = np.indices(agent.shape)
        middle = [np.average(axis, weights=agent) for axis in places]
        approach = np.hypot(*(places - np.reshape(middle, (2, 1, 1))))[block > block.max() / 2].min()
    return -float(away + 0.1 * approach) / side


@functools.cache
def _from_goal(height: int, width: int) -> np.ndarray:
    """Return the distance of every pixel from the nearest one of the goal."""
    pixels = np.indices((height, width)).reshape(2, -1).T
    x, y = ((pixels[:, ::-1] + 0.5) * (SIDE / np.array([width, height])) - GOAL).T
    cos, sin = np.cos(GOAL_ANGLE), np.sin(GOAL_ANGLE)
    x, y = cos * x + sin * y, cos * y - sin * x
    inside = np.zeros(len(pixels), dtype=bool)
    for left, right, top, bottom in BARS:
        inside |= (x >= left) & (x <= right) & (y >= top) & (y <= bottom)
    distances = np.linalg.norm(pixels[:, None] - pixels[inside][None], axis=2).min(axis=1)
    return distances.reshape(height, width)


class Push:
    """Goes to a place beside the block and on to its other side; sometimes to anywhere.

    Observations are states of `obs_type: state`: the agent's x and y, the block's x and y, and its angle.
    """

    def __init__(self, env: gymnasium.Env) -> None:
        del env

    def reset(self, seed: int) -> None:
        self.rng, self.waypoints = np.random.default_rng(seed), []

    def __call__(self, observation: np.ndarray) -> np.ndarray:
        agent, block = observation[:2], observation[2:4]
        if not self.waypoints:
            self.waypoints = self._push(block)
        target = self.waypoints[0] + self.rng.normal(0, 4, 2)
        way = target - agent
        distance = float(np.hypot(*way))
        if distance < 20 or self.rng.random() < 0.05:  # now and then it gives up: a wall is in the way
            self.waypoints.pop(0)
        step = way * min(1.0, STEP / max(distance, 1e-6))
        return np.clip(step, -STEP, STEP).astype(np.float32)

    def _push(self, block: np.ndarray) -> list[np.ndarray]:
        if self.rng.random() < 0.25:
            return [self.rng.uniform(0, SIDE, 2)]
        angle = self.rng.uniform(0, 2 * np.pi)
        side = np.array([np.cos(angle), np.sin(angle)])
        off = self.rng.normal(0, 25, 2)  # pushes beside the middle turn the block
        return [block + REACH * side + off, block + off - self.rng.uniform(0, REACH) * side]


gymnasium.register("PushT-v0", f"{__name__}:PushT", max_episode_steps=300)
