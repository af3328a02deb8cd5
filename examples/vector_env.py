"""A batch of worlds as a Gymnasium vector environment with a reward."""

import gymnasium
import numpy as np

from worldmodel import Action


def redness(frames: np.ndarray, action: Action) -> float:
    """Reward red pixels in the last frame."""
    last = frames[-1].astype(float)
    return float((last[..., 0] - last[..., 1:].max(axis=-1)).clip(min=0).mean())


envs = gymnasium.make_vec("worldmodel.env:worldmodel/ShapesTiny-v0", num_envs=4, reward_fn=redness)
envs.action_space.seed(0)
observations, info = envs.reset(seed=0)
returns = np.zeros(4)
for _ in range(3):
    observations, rewards, terminated, truncated, info = envs.step(envs.action_space.sample())
    returns += rewards
print(f"observations {observations.shape} {observations.dtype}, returns {returns.round(2).tolist()}")
envs.close()
