"""A policy for PushT that pushes the block around; random targets hardly ever move it.

worldmodel record gym_pusht:gym_pusht/PushT-v0 --policy worldmodel.worlds.pusht:Push …
"""

import numpy as np
from gymnasium import spaces

STEP = 60.0
"""Greatest distance of a target from the agent, in the units of the environment, whose side has 512."""
REACH = 90.0
"""Distance from the middle of the block at which a push begins."""


class Push:
    """Goes to a place beside the block and on to its other side; sometimes to anywhere.

    Observations are states of `obs_type: state`: the agent's x and y, the block's x and y, and its angle.
    """

    def __init__(self, space: spaces.Box) -> None:
        self.low, self.high = space.low, space.high

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
        nearest = agent + way * min(1.0, STEP / max(distance, 1e-6))
        return np.clip(nearest, self.low, self.high).astype(np.float32)

    def _push(self, block: np.ndarray) -> list[np.ndarray]:
        if self.rng.random() < 0.25:
            return [self.rng.uniform(self.low, self.high)]
        angle = self.rng.uniform(0, 2 * np.pi)
        side = np.array([np.cos(angle), np.sin(angle)])
        off = self.rng.normal(0, 25, 2)  # pushes beside the middle turn the block
        return [block + REACH * side + off, block + off - self.rng.uniform(0, REACH) * side]
