"""Policies that act while an environment is recorded: functions of what they saw and a seed."""

from collections.abc import Callable
from typing import Any, Protocol

import gymnasium
import numpy as np
from gymnasium import spaces

from worldmodel.config.imports import import_object
from worldmodel.errors import InputError

STICKINESS = 0.75
"""Probability with which the policy `sticky` repeats its last action: four steps on average."""


class Policy(Protocol):
    """Chooses actions."""

    def reset(self, seed: int) -> None:
        """Begin an episode."""
        ...

    def __call__(self, observation: Any) -> Any:
        """Return an element of the action space."""
        ...


class RandomPolicy:
    """Samples the action space, and repeats the last action with the probability `stickiness`."""

    def __init__(self, space: spaces.Space, stickiness: float = 0.0) -> None:
        self.space, self.stickiness = space, stickiness

    def reset(self, seed: int) -> None:
        self.space.seed(seed)
        self.rng, self.last = np.random.default_rng(seed), None

    def __call__(self, observation: Any) -> Any:
        if self.last is None or self.rng.random() >= self.stickiness:
            self.last = self.space.sample()
        return self.last


class FunctionPolicy:
    """Calls a function of (observation, action space, generator of random numbers)."""

    def __init__(self, function: Callable[[Any, spaces.Space, np.random.Generator], Any], space: Any) -> None:
        self.function, self.space = function, space

    def reset(self, seed: int) -> None:
        self.space.seed(seed)
        self.rng = np.random.default_rng(seed)

    def __call__(self, observation: Any) -> Any:
        return self.function(observation, self.space, self.rng)


class MixedPolicy:
    """Takes random actions instead of another policy's with the probability `epsilon`."""

    def __init__(self, policy: Policy, space: spaces.Space, epsilon: float) -> None:
        self.policy, self.other, self.epsilon = policy, RandomPolicy(space), epsilon

    def reset(self, seed: int) -> None:
        self.policy.reset(seed)
        self.other.reset(seed)
        self.rng = np.random.default_rng((seed, 1))

    def __call__(self, observation: Any) -> Any:
        action = self.policy(observation)
        return self.other(observation) if self.rng.random() < self.epsilon else action


def open_policy(name: str, env: gymnasium.Env, epsilon: float = 0.0) -> Policy:
    """Return a policy by its name.

    Args:
        name: `random`, `sticky`, `module:function`, `module:Class` with the methods of `Policy`, made for the
            environment, or `sb3:ALGORITHM:FILE`, a file that Stable-Baselines3 saved. Loading such a file
            runs code in it: use only files whose origin you know.
        env: the environment.
        epsilon: share of random actions.

    Raises:
        InputError: there is no such policy.
    """
    if not 0 <= epsilon <= 1:
        raise InputError(f"epsilon is {epsilon:g}; use a share from 0 to 1.")
    space = env.action_space
    if name in ("random", "sticky"):
        policy: Policy = RandomPolicy(space, STICKINESS if name == "sticky" else 0.0)
    elif name.startswith("sb3:"):
        policy = FunctionPolicy(_load_sb3(name), space)
    else:
        function = _function(name)
        policy = function(env) if isinstance(function, type) else FunctionPolicy(function, space)
    return MixedPolicy(policy, space, epsilon) if epsilon else policy


def _function(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise InputError(
            f"There is no policy {name!r}; use random, sticky, module:function or sb3:ALGORITHM:FILE."
        )
    try:
        function = import_object(name)
    except (ImportError, AttributeError) as error:
        raise InputError(f"The policy {name!r} cannot be imported ({error}); check its name.") from None
    if not callable(function):
        raise InputError(f"The policy {name!r} is not a function; name one that returns an action.")
    return function


def _load_sb3(name: str) -> Callable[..., Any]:
    _, _, rest = name.partition(":")
    algorithm, _, path = rest.partition(":")
    try:
        import stable_baselines3
    except ImportError:
        raise InputError(
            f"The policy {name!r} requires Stable-Baselines3: pip install stable-baselines3."
        ) from None
    kind = getattr(stable_baselines3, algorithm, None)
    if kind is None or not path:
        raise InputError(
            f"The policy {name!r} names no algorithm of Stable-Baselines3; use for example "
            f"sb3:PPO:{path or 'FILE'}."
        )
    try:
        model = kind.load(path, device="cpu")
    # A missing or damaged file, or one of another algorithm, raises many types.
    except Exception as error:
        raise InputError(
            f"{path!r} cannot be loaded as {algorithm} ({' '.join(str(error).split())})."
        ) from None
    return lambda observation, space, rng: model.predict(observation, deterministic=True)[0]
