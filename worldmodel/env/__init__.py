"""Gymnasium environments: single worlds, and vector environments whose worlds run in one batch.

env = WorldEnv("shapes-tiny", start="shapes")
observation, info = env.reset(seed=0)
observation, reward, terminated, truncated, info = env.step(env.action_space.sample())

Importing this module registers `worldmodel/ShapesTiny-v0`. Gymnasium 1 does not load plugins, so without the
import, prefix the id with the module: `gymnasium.make("worldmodel.env:worldmodel/ShapesTiny-v0")`.

A world does not define a task. `reward_fn` and `termination_fn` define one, and `max_episode_steps` of
`gymnasium.make` sets the horizon; without them, rewards and ends are predicted, or
0 and never by a model that predicts none.
"""

from worldmodel.errors import pip_install

try:
    import gymnasium
    from gymnasium.vector import AutoresetMode
except ImportError as error:
    if not (error.name or "").startswith("gymnasium"):
        raise
    raise ImportError(
        f"worldmodel.env needs gymnasium 1.1 or newer; install it with {pip_install('gym')}.",
        name="gymnasium",
    ) from None

from worldmodel.env.single import (
    RewardFn,
    SessionLike,
    StartFn,
    TerminationFn,
    WorldEnv,
    WorldSpec,
)
from worldmodel.env.starts import RecordedStarts
from worldmodel.env.vector import WorldVectorEnv

__all__ = [
    "AutoresetMode",
    "RecordedStarts",
    "RewardFn",
    "SessionLike",
    "StartFn",
    "TerminationFn",
    "WorldEnv",
    "WorldSpec",
    "WorldVectorEnv",
]

gymnasium.register(
    id="worldmodel/ShapesTiny-v0",
    entry_point="worldmodel.env:WorldEnv",
    vector_entry_point="worldmodel.env:WorldVectorEnv",
    max_episode_steps=16,
    kwargs={"world": "shapes-tiny", "start": "shapes"},
)
