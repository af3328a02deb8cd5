"""A Gymnasium environment of one world."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import gymnasium
import numpy as np
from gymnasium import spaces

from worldmodel.actions import Action
from worldmodel.config import ActionConfig, ImageSize, height_width
from worldmodel.env.actions import (
    ActionType,
    ActionTypes,
    action_space,
    parse_action_schema,
    resolve_action_types,
    to_action,
)
from worldmodel.episodes import Outcome, StepResult
from worldmodel.errors import ConfigError, InputError
from worldmodel.media import Frames
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout import LocalEngine, Session
from worldmodel.worlds import get_world, start_images, world_names

ObsType = Literal["frame", "clip"]
"""Observations: the last frame of a round, or all its frames."""
StartFn = Callable[[np.random.Generator], Mapping[str, Any]]
"""Samples the start of an episode, as options of `reset`."""
RewardFn = Callable[[Frames, Action], float]
"""Reward of a round, from its frames and the action that led to them."""
TerminationFn = Callable[[Frames, Action], bool]
"""Whether the episode ends with a round, from the same arguments."""
RENDER_MODES = ["rgb_array", "rgb_array_list"]


@dataclass(frozen=True)
class WorldSpec:
    """Frame format and actions of a world."""

    image_size: ImageSize
    """Height and width of a frame in pixels, or the side of a square."""
    chunk_frames: int
    """Frames of one round."""
    fps: float
    action: ActionConfig

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_size", height_width(self.image_size))

    @classmethod
    def from_world(cls, world: Any) -> "WorldSpec":
        """Read the specification of a model, a session, or a world of the serving client.

        Raises:
            ConfigError: the world does not publish one; pass `world_spec=`.
        """
        if isinstance(world, Session):
            world = world.model
        if isinstance(world, WorldModel):
            config = world.config
            return cls(config.codec.image_size, config.chunk_frames, config.fps, config.action)
        try:  # by attributes, because the library cannot import the serving client
            info = world.info
            width, height = map(int, info.size.split("x"))
            return cls(
                (height, width), info.chunk_frames, info.fps, parse_action_schema(dict(info.action_schema))
            )
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ConfigError(
                f"{type(world).__name__} does not publish its frame size and actions; "
                "pass world_spec=WorldSpec(...)."
            ) from None


@runtime_checkable
class SessionLike(Protocol):
    """Anything with `reset` and `step`, as a `worldmodel.Session` or a world of the serving client has."""

    def reset(self, observation: Any = None, /, *, text: str | None = None) -> Frames:
        """Restart from an image, a clip or a caption; return the first observation."""
        ...

    def step(self, action: Action, /) -> StepResult:
        """Run one round and return its frames and outcome."""
        ...


class WorldEnv(gymnasium.Env[np.ndarray, Any]):
    """An environment of one world; a step is one round.

    Equal seeds, options and actions give equal frames. `reset(options={"observation": image or clip})` or
    `reset(options={"text": caption})` overrides `start`. Only the newest round is kept, so that memory does
    not grow with the episode; record episodes with `render`.

    Args:
        world: A model, the name of a shipped model, or a model folder; or an open session (`SessionLike`),
            which keeps its seed and settings and is not closed with the environment.
        start: Start of episodes: a function from the environment's random generator to options of `reset`,
            fixed options for all episodes, or the name of a world with random starts (`"shapes"`). By default
            one of the model's start images, if it has any.
        actions: `"keys"` (`MultiBinary`, in the order of the model's keys), `"key"` (`Discrete`: exactly one
            of them), `"vector"`, `"mouse"` or `"camera"` (`Box`), `"text"` (`Text`), or several of them
            (`Dict`), or spaces of kinds of your own. By default the first type that the model supports. Of a
            model with several actions in a round, the space is the batched one of so many: for keys
            `MultiDiscrete` and `Box` `[n, keys]`.
        obs_type: `"frame"`: the newest frame `[h, w, 3]`; `"clip"`: all frames of the round `[t, h, w, 3]`,
            where a shorter start is padded in front with its first frame.
        reward_fn: Reward of a round, from its frames and action; by default the one that the model predicts,
            or 0 if it predicts none.
        termination_fn: Whether the episode ends with a round, from its frames and action; by default where
            the model predicts it, or never.
        render_mode: `"rgb_array"`: the newest frame; `"rgb_array_list"`: all frames since the last call.
        num_inference_steps: Denoising steps; by default the model's.
        guidance_scale: Classifier-free guidance scale; by default the model's.
        world_spec: Frame format and actions of an open session that does not publish them.

    Raises:
        ConfigError: the settings do not fit the world, or contradict each other.
        ModelError: there is no such model.
    """

    metadata: dict[str, Any] = {"render_modes": RENDER_MODES, "render_fps": 8}  # noqa: RUF012 -- as gymnasium.Env declares it

    def __init__(
        self,
        world: WorldModel | str | Path | SessionLike,
        *,
        start: StartFn | Mapping[str, Any] | str | None = None,
        actions: ActionType | Sequence[ActionType] | None = None,
        obs_type: ObsType = "frame",
        reward_fn: RewardFn | None = None,
        termination_fn: TerminationFn | None = None,
        render_mode: str | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        world_spec: WorldSpec | None = None,
    ) -> None:
        check_choice("obs_type", obs_type, get_args(ObsType))
        check_choice("render_mode", render_mode, [None, *RENDER_MODES])
        if isinstance(world, str | Path):
            world = WorldModel.from_pretrained(world)
        if isinstance(world, SessionLike):
            if num_inference_steps is not None or guidance_scale is not None:
                raise ConfigError(
                    "An open session has fixed num_inference_steps and guidance_scale; pass a model instead."
                )
            self.model, self.world = None, world
        elif isinstance(world, WorldModel):
            self.model = world
            self._settings = (num_inference_steps, guidance_scale)
            self.world = Session(world, 0, *self._settings)
        else:
            raise ConfigError(
                f"world is a {type(world).__name__}; pass a model, its name or an open session."
            )
        self.world_spec = known = world_spec or WorldSpec.from_world(self.world)
        self.action_types: ActionTypes = resolve_action_types(actions, known.action)
        self.action_space = action_space(self.action_types, known.action)
        shape = (*height_width(known.image_size), 3)
        shape = shape if obs_type == "frame" else (known.chunk_frames, *shape)
        self.observation_space = spaces.Box(0, 255, shape, np.uint8)
        self.render_mode, self._obs_type = render_mode, obs_type
        # A recording at this rate runs in real time.
        shown = 1 if render_mode == "rgb_array" else known.chunk_frames
        self.metadata = {**self.metadata, "render_fps": known.fps * shown / known.chunk_frames}
        self._start, self._reward_fn, self._termination_fn = _start_fn(start), reward_fn, termination_fn
        self.engine: LocalEngine | None = None
        self._pending: list[np.ndarray] = []
        """Frames to render: the newest, or all since the last call, by `render_mode`."""

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode; `info["world_seed"]` is the seed of its session.

        Raises:
            InputError: an option is unknown, or the observation cannot be read.
        """
        super().reset(seed=seed)
        world_seed = int(self.np_random.integers(2**31))
        beginning: dict[str, Any] = _read_options(options)
        if not beginning and self._start:
            beginning = dict(self._start(self.np_random))
        if not beginning and self.model is not None and (images := start_images(self.model)):
            beginning = {"observation": images[int(self.np_random.integers(len(images)))].image}
        if not beginning:
            raise InputError(
                "The environment has no start; create it with start=, or pass options={'observation': image} "
                "or {'text': caption} to reset()."
            )
        world = (
            self.world
            if self.model is None
            else Session(self.model, world_seed, *self._settings, self.engine)
        )
        frames = world.reset(beginning.get("observation"), text=beginning.get("text"))
        self.world, self._pending = world, []
        info = {} if self.model is None else {"world_seed": world_seed}
        return self._observe(frames), info

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Run one round.

        Raises:
            InputError: `reset` was not called, or the action is not in the action space.
        """
        parsed = self.to_action(action)
        return self.transition(parsed, self.world.step(parsed))

    def render(self) -> Any:
        """Return the newest frame, or the list of frames since the last call or reset.

        Raises:
            InputError: the environment was not reset.
        """
        if self.render_mode is None:
            return None
        if self.render_mode == "rgb_array_list":
            frames, self._pending = self._pending, []
            return frames
        if not self._pending:
            raise InputError("render() was called before reset(); call reset() first.")
        return self._pending[-1].copy()

    # ---- the parts of a step, for the vector environment ---------------------------------------------

    def to_action(self, action: Any) -> Action:
        """Convert an element of the action space."""
        return to_action(self.action_types, action, self.world_spec.action)

    def transition(
        self, action: Action, result: StepResult
    ) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Return what `step` returns for a round and its action."""
        frames, outcome = result.frames, result.outcome or Outcome(0.0, False)
        observation = self._observe(frames)
        reward = self._reward_fn(frames, action) if self._reward_fn else outcome.reward
        ended = self._termination_fn(frames, action) if self._termination_fn else outcome.ended
        return observation, float(reward), bool(ended), False, {}

    def _observe(self, frames: Frames) -> np.ndarray:
        size, length = self.world_spec.image_size, self.world_spec.chunk_frames
        if frames.shape[1:] != (*height_width(size), 3):
            raise ConfigError(
                f"Frames have shape {frames.shape[1:]}, but world_spec.image_size is {size}; "
                "pass the size of the frames."
            )
        if self.model is not None and isinstance(self.world, Session):
            self.world.forget_recording()
        if self.render_mode == "rgb_array_list":
            self._pending += [frame.copy() for frame in frames]
        elif self.render_mode:
            self._pending = [frames[-1].copy()]
        if self._obs_type == "frame":
            return np.array(frames[-1])
        padding = np.repeat(frames[:1], max(0, length - len(frames)), axis=0)
        return np.concatenate([padding, frames[-length:]])


def _start_fn(start: StartFn | Mapping[str, Any] | str | None) -> StartFn | None:
    if isinstance(start, str):
        check_choice("start", start, world_names())
        return get_world(start).start
    if isinstance(start, Mapping):
        options = _read_options(start)
        return lambda rng: options
    if start is not None and not callable(start):
        raise ConfigError(
            f"start is a {type(start).__name__}; pass options of reset, for example {{'observation': image}}."
        )
    return start


def _read_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    read = dict(options or {})
    unknown = sorted(map(str, set(read) - {"observation", "text"}))
    if unknown:
        raise InputError(f"reset() has no option {unknown[0]!r}; use observation or text.")
    return {name: value for name, value in read.items() if value is not None}


def check_choice(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Raise ConfigError unless a setting has one of the allowed values."""
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; use {' or '.join(map(repr, allowed))}.")
