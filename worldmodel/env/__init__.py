"""Gymnasium environments: worlds that an agent resets and steps, one alone or many in one batch.

env = WorldEnv("shapes-tiny", start="shapes")
observation, info = env.reset(seed=0)
observation, reward, terminated, truncated, info = env.step(env.action_space.sample())

Importing this module registers `worldmodel/ShapesTiny-v0`. Gymnasium 1 loads no plugins by itself, so where
the module is not imported, name it: `gymnasium.make("worldmodel.env:worldmodel/ShapesTiny-v0")`.

Rewards and endings are the task's, not the world's: `reward_fn` and `done_fn` bring them, and
`max_episode_steps` of `gymnasium.make` the horizon. Without them every reward is 0 and no episode ends.
"""

try:
    import gymnasium
    from gymnasium.vector import AutoresetMode
except ImportError as error:
    if not (error.name or "").startswith("gymnasium"):
        raise
    raise ImportError(
        "worldmodel.env needs gymnasium 1.1 or newer; install it with `pip install 'worldmodel[gym]'`.",
        name="gymnasium",
    ) from None

from worldmodel.env.single import DoneFn, Interface, RewardFn, Start, Steps, WorldEnv, shapes_scene
from worldmodel.env.vector import WorldVectorEnv

__all__ = [
    "AutoresetMode",
    "DoneFn",
    "Interface",
    "RewardFn",
    "Start",
    "Steps",
    "WorldEnv",
    "WorldVectorEnv",
    "shapes_scene",
]

gymnasium.register(
    id="worldmodel/ShapesTiny-v0",
    entry_point="worldmodel.env:WorldEnv",
    vector_entry_point="worldmodel.env:WorldVectorEnv",
    max_episode_steps=16,
    kwargs={"world": "shapes-tiny", "start": "shapes"},
)
