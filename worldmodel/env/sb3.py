"""Vector environments for the learners of Stable-Baselines3 (extra `rl`)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from worldmodel.errors import ConfigError, pip_install

try:
    from stable_baselines3.common.vec_env import VecEnv
    from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn
except ImportError:
    raise ImportError(
        f"worldmodel.env.sb3 needs Stable-Baselines3; install it with {pip_install('rl')}.",
        name="stable_baselines3",
    ) from None


class StableBaselinesEnv(VecEnv):
    """A Gymnasium vector environment as Stable-Baselines3 has them, with batched steps.

    PPO("CnnPolicy", StableBaselinesEnv(WorldVectorEnv(model, 16, autoreset_mode="SameStep", actions="key")))

    Args:
        envs: The vector environment, which resets a finished world in the same step.

    Raises:
        ConfigError: it resets worlds in another way.
    """

    def __init__(self, envs: VectorEnv) -> None:
        mode = envs.metadata.get("autoreset_mode")
        if mode is not AutoresetMode.SAME_STEP:
            raise ConfigError(
                f"The vector environment has the autoreset mode {mode}; create it with "
                "autoreset_mode='SameStep', which learners of Stable-Baselines3 expect."
            )
        self.envs, self._actions = envs, np.empty(0)
        self.render_mode = envs.render_mode
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)

    def reset(self) -> VecEnvObs:
        """Reset all worlds and return their observations `[n, …]`; `seed` takes effect here."""
        seeds = None if all(each is None for each in self._seeds) else self._seeds
        observations, info = self.envs.reset(seed=seeds)  # type: ignore[arg-type] -- a list is allowed
        self.reset_infos = self._infos(info)
        self._reset_seeds()
        return observations

    def step_async(self, actions: np.ndarray) -> None:
        """Keep the actions `[n, …]` of the next step."""
        self._actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        """Step all worlds in one batch; observations of finished ones are those after their reset."""
        observations, rewards, terminated, truncated, info = self.envs.step(self._actions)
        infos = self._infos(info)
        for row in np.flatnonzero(terminated | truncated).tolist():
            infos[row]["terminal_observation"] = infos[row].pop("final_obs")
            infos[row]["TimeLimit.truncated"] = bool(truncated[row] and not terminated[row])
        return observations, rewards.astype(np.float32), terminated | truncated, infos

    def close(self) -> None:
        """Close the vector environment."""
        self.envs.close()

    def get_images(self) -> Sequence[np.ndarray | None]:
        """Return the newest frame of every world, which `render` tiles."""
        frames: Any = self.envs.render() or ()
        return list(frames)

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """Return an attribute of the vector environment, once for each of the worlds."""
        return [getattr(self.envs, attr_name)] * len(self._rows(indices))

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Set an attribute of the vector environment."""
        setattr(self.envs, attr_name, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of the vector environment, and return the result for each of the worlds."""
        found = getattr(self.envs, method_name)(*method_args, **method_kwargs)
        return [found] * len(self._rows(indices))

    def env_is_wrapped(self, wrapper_class: Any, indices: VecEnvIndices = None) -> list[bool]:
        """Return False: worlds of a batch have no wrappers of their own."""
        return [False] * len(self._rows(indices))

    def _rows(self, indices: VecEnvIndices) -> Sequence[int]:
        return list(self._get_indices(indices))

    def _infos(self, info: dict[str, Any]) -> list[dict[str, Any]]:
        return [_of_row(info, row) for row in range(self.num_envs)]


def _of_row(info: dict[str, Any], row: int) -> dict[str, Any]:
    """Return what one world put into the arrays of an info: masks `_name` say which worlds did."""
    return {
        name: _of_row(values, row) if isinstance(values, dict) else values[row]
        for name, values in info.items()
        if not name.startswith("_") and (f"_{name}" not in info or info[f"_{name}"][row])
    }
