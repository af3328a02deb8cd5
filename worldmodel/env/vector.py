"""Many worlds as one environment: their rounds run as one batch."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from worldmodel.actions import Action
from worldmodel.actions.kind import describe_value
from worldmodel.env.actions import split_actions
from worldmodel.env.single import SessionLike, WorldEnv, check_choice
from worldmodel.episodes import StepResult
from worldmodel.errors import ConfigError, InputError
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout import LocalEngine, Session, play_round


def play_sessions(sessions: Sequence[Session], actions: Sequence[Action]) -> list[StepResult]:
    """Play one round of every session in one batch.

    The sessions share model, engine, number of denoising steps and guidance.

    Raises:
        InputError: a session was not reset, or the model does not take one of the actions; none has changed
            then.
    """
    first, states = sessions[0], [session.state for session in sessions]
    after = play_round(first.model, first.engine, states, actions, first.params)
    rows = zip(sessions, actions, after, strict=True)
    return [session.advance(action, state) for session, action, state in rows]


class WorldVectorEnv(VectorEnv[np.ndarray, Any, np.ndarray]):
    """Many worlds stepped together: one batch of the backbone, one of the generator, one of the decoder.

    Sub-environment `i` is a `WorldEnv` with seed `seed + i`, frame for frame up to float rounding.

    Args:
        world: A model, the name of a shipped one, a model folder; or one open session (`SessionLike`) for
            every sub-environment, stepped concurrently from threads, so that a server can batch them.
        num_envs: Number of worlds.
        max_episode_steps: Rounds after which an episode is truncated; None or -1 for no end.
        autoreset_mode: When a finished world is reset: in the next step, whose action it ignores
            (`"NextStep"`), in the same step (`"SameStep"`), or only by `reset` (`"Disabled"`).
        settings: Other arguments of `WorldEnv`.

    Raises:
        ConfigError: the settings do not fit the world or each other.
        ModelError: there is no such model.
    """

    metadata: dict[str, Any] = {**WorldEnv.metadata, "autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012
    _threads: ThreadPoolExecutor | None = None

    def __init__(
        self,
        world: WorldModel | str | Path | Sequence[SessionLike],
        num_envs: int = 1,
        *,
        max_episode_steps: int | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        **settings: Any,
    ) -> None:
        limit = None if max_episode_steps == -1 else max_episode_steps
        if num_envs < 1 or (limit is not None and limit < 1):
            raise ConfigError(
                f"num_envs is {num_envs} and max_episode_steps {max_episode_steps}; each must be 1 or more."
            )
        if not isinstance(autoreset_mode, AutoresetMode):
            check_choice("autoreset_mode", autoreset_mode, [mode.value for mode in AutoresetMode])
        self.envs = _sub_environments(world, num_envs, settings)
        self.num_envs, self.max_episode_steps = num_envs, limit
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        first = self.envs[0]
        self.metadata = {**first.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = first.render_mode
        self.single_action_space, self.single_observation_space = first.action_space, first.observation_space
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        if first.model is None:
            self._threads = ThreadPoolExecutor(num_envs, thread_name_prefix="world")
        self._observations = np.zeros(self.observation_space.shape or (), np.uint8)
        self._rounds = np.zeros(num_envs, np.int64)
        self._finished = np.zeros(num_envs, np.bool_)

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Reset all worlds, or those that `options["reset_mask"]` selects.

        Args:
            seed: Seed of the first world, increased by one for each further world; or one seed per world.
            options: As for `WorldEnv`, the same for all.

        Raises:
            InputError: the seeds or options cannot be used.
        """
        if seed is None or isinstance(seed, int | np.integer):
            seeds = [None if seed is None else int(seed) + row for row in range(self.num_envs)]
        else:
            seeds = list(seed)
        if len(seeds) != self.num_envs:
            raise InputError(f"There are {len(seeds)} seeds for {self.num_envs} worlds; pass one or as many.")
        given = dict(options or {})
        mask = np.asarray(given.pop("reset_mask", np.ones(self.num_envs, np.bool_)))
        if mask.shape != (self.num_envs,) or mask.dtype != np.bool_ or not mask.any():
            raise InputError(
                f"options['reset_mask'] must be {self.num_envs} booleans, at least one of them True."
            )
        infos: dict[str, Any] = {}
        for row in np.flatnonzero(mask).tolist():
            infos = self._add_info(infos, self._begin(row, seeds[row], given), row)
        return self._observations.copy(), infos

    def step(self, actions: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Play one round of every world whose episode has not ended.

        Raises:
            InputError: `reset` was not called, an action is not in the action space, or (without autoreset)
                an episode has ended. Worlds of a model are unchanged then.
        """
        rewards = np.zeros(self.num_envs, np.float64)
        terminations, truncations = np.zeros((2, self.num_envs), np.bool_)
        infos: dict[str, Any] = {}
        played, limit = self._play(actions), self.max_episode_steps
        for row, env in enumerate(self.envs):
            if row not in played:
                infos = self._add_info(infos, self._begin(row), row)
                continue
            self._observations[row], rewards[row], terminations[row], _, info = env.transition(*played[row])
            self._rounds[row] += 1
            truncations[row] = limit is not None and self._rounds[row] >= limit
            self._finished[row] = terminations[row] or truncations[row]
            if self._finished[row] and self.autoreset_mode is AutoresetMode.SAME_STEP:
                final = {"final_obs": self._observations[row].copy(), "final_info": info}
                infos, info = self._add_info(infos, final, row), self._begin(row)
            infos = self._add_info(infos, info, row)
        return self._observations.copy(), rewards, terminations, truncations, infos

    def render(self) -> tuple[Any, ...]:
        """Return the rendered frames of every world."""
        return tuple(env.render() for env in self.envs)

    def close_extras(self, **kwargs: Any) -> None:
        """End the threads that step live worlds."""
        if self._threads is not None:
            self._threads.shutdown()

    def _begin(
        self, row: int, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        self._observations[row], info = self.envs[row].reset(seed=seed, options=options)
        self._rounds[row], self._finished[row] = 0, False
        return info

    def _play(self, actions: Any) -> dict[int, tuple[Action, StepResult]]:
        """Play the worlds whose episodes have not ended; return their actions and results by row."""
        given = split_actions(actions)
        if len(given) != self.num_envs:
            raise InputError(
                f"The actions are {describe_value(actions)}; pass {self.num_envs}, one for each world."
            )
        if self.autoreset_mode is AutoresetMode.DISABLED and self._finished.any():
            row = int(self._finished.argmax())
            raise InputError(
                f"The episode of world {row} has ended; reset it with options['reset_mask'] first."
            )
        rows = np.flatnonzero(~self._finished).tolist()
        acts = [self.envs[row].to_action(given[row]) for row in rows]
        worlds = [self.envs[row].world for row in rows]
        if not rows:
            return {}
        if self._threads is not None:
            rounds = [self._threads.submit(world.step, act) for world, act in zip(worlds, acts, strict=True)]
            wait(rounds)  # before any of them raises, so that no world is still stepping afterwards
            results = [each.result() for each in rounds]
        else:
            results = play_sessions([world for world in worlds if isinstance(world, Session)], acts)
        return dict(zip(rows, zip(acts, results, strict=True), strict=True))


def _history_bytes(model: WorldModel) -> int:
    """Return the size of the longest reusable prefix: keys and values of all rounds but the current one."""
    longest_round = model.vision.round_tokens + model.action.max_tokens + model.config.num_queries
    positions = (model.config.context_rounds - 1) * longest_round
    return positions * model.backbone.position_bytes(model.backbone.model.dtype)


def _sub_environments(
    world: WorldModel | str | Path | Sequence[SessionLike], num_envs: int, settings: dict[str, Any]
) -> list[WorldEnv]:
    if isinstance(world, str | Path):
        world = WorldModel.from_pretrained(world)
    if isinstance(world, WorldModel):
        envs = [WorldEnv(world, **settings) for _ in range(num_envs)]
        engine = LocalEngine(world.backbone, max_cache_bytes=2 * num_envs * _history_bytes(world))
        for env in envs:
            env.engine = engine
        return envs
    if not isinstance(world, list | tuple) or len(world) != num_envs:
        raise ConfigError(f"Each sub-environment needs its own live world; pass a list of {num_envs}.")
    if len({id(each) for each in world}) != num_envs:
        raise ConfigError("The list has the same live world twice; open one for each sub-environment.")
    return [WorldEnv(each, **settings) for each in world]
