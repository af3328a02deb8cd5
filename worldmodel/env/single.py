"""One world as an environment."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import gymnasium
import numpy as np
from gymnasium import spaces

from worldmodel.config import ActionConfig, ImageSize, height_width
from worldmodel.env.actions import Kind, Kinds, action_space, choose_kind, read_action, read_schema
from worldmodel.errors import ConfigError, InputError
from worldmodel.media.files import Frames
from worldmodel.models.backbone.prefix_cache import PrefixCache
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout import Session
from worldmodel.types import Action
from worldmodel.worlds import shapes

Observe = Literal["frame", "clip"]
"""What an agent sees after a round: its last frame, or all its frames."""
Start = Callable[[np.random.Generator], Mapping[str, Any]]
"""Draws how an episode starts, as the options of `reset`."""
RewardFn = Callable[[Frames, Action], float]
"""Judges the frames of a round and the action that led to them."""
DoneFn = Callable[[Frames, Action], bool]
"""Says from the same whether the episode ends."""
RENDER_MODES = ["rgb_array", "rgb_array_list"]


@dataclass(frozen=True)
class Interface:
    """What a world shows and takes."""

    image_size: ImageSize
    """Height and width of a frame in pixels, or the side of a square."""
    chunk_frames: int
    """Frames of one round."""
    fps: float
    action: ActionConfig

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_size", height_width(self.image_size))

    @classmethod
    def of(cls, world: Any) -> "Interface":
        """Ask a model, a session, or a world of the serving client.

        Raises:
            ConfigError: the world does not say.
        """
        if isinstance(world, Session):
            world = world.model
        if isinstance(world, WorldModel):
            config = world.config
            return cls(config.codec.image_size, config.chunk_frames, config.fps, config.action)
        try:  # of the client's worlds only this is known here: the server, too, is a floor above
            info, takes = world.info, world.info.action_schema
            width, height = map(int, info.size.split("x"))
            return cls((height, width), info.chunk_frames, info.fps, read_schema(takes))
        except (AttributeError, ConfigError):
            raise ConfigError(
                "What this world shows and takes is not known; say it with interface=Interface(...)."
            ) from None


@runtime_checkable
class Steps(Protocol):
    """A live world: a `worldmodel.Session`, a world of the serving client, or what steps like them."""

    def reset(self, observation: Any = None, /, *, text: str | None = None) -> Frames:
        """Start anew from an image, a clip or a caption; return the first observation."""
        ...

    def step(self, action: Action, /) -> Frames:
        """Play one round and return its frames."""
        ...


def shapes_scene(rng: np.random.Generator) -> Mapping[str, Any]:
    """Start from a random scene of the procedural shapes world."""
    return {"observation": shapes.render(shapes.random_scene(rng))}


STARTS: dict[str, Start] = {"shapes": shapes_scene}
"""Starts that have a name, so that a spec that names one can be written as JSON."""


class WorldEnv(gymnasium.Env[np.ndarray, Any]):
    """One world as an environment; a step is one round of the world.

    Equal seeds, options and actions make equal frames. `reset(options={"observation": image or clip})` or
    `reset(options={"text": caption})` starts from something else than `start`. What came before the newest
    round is forgotten, so that an episode can go on for ever: record it with `render`.

    Args:
        world: A model, the name of a shipped one, a model folder; or a live world (`Steps`), which keeps the
            seed and settings that it was opened with and is not closed.
        start: How episodes start: a function of the environment's random generator that returns such
            options, one set of options for all episodes, or the name of a start (`"shapes"`).
        actions: `"keys"` (`MultiBinary`, in the order of the model's keys), `"vector"` (`Box`) or `"text"`
            (`Text`), `"mouse"` or `"camera"` (`Box`), or several of them together (`Dict`). By default the
            first that the model takes.
        observe: `"frame"`: the newest frame `[h, w, 3]`; `"clip"`: all frames of the round `[t, h, w, 3]`,
            where a shorter start is led in by its own first frame.
        reward_fn: Reward of a round, from its frames and action; 0 without it.
        done_fn: Whether the episode ends with a round, from its frames and action; never without it.
        render_mode: `"rgb_array"`: the newest frame; `"rgb_array_list"`: all frames since the last call.
        num_inference_steps: Denoising steps; the model's own number by default.
        guidance_scale: Strength of guidance; the model's own by default.
        interface: What the world shows and takes, where it is a live one that does not say so itself.

    Raises:
        ConfigError: the settings do not fit the world or each other.
        ModelError: there is no such model.
    """

    metadata: dict[str, Any] = {"render_modes": RENDER_MODES, "render_fps": 8}  # noqa: RUF012 -- gymnasium's own

    def __init__(
        self,
        world: WorldModel | str | Path | Steps,
        *,
        start: Start | Mapping[str, Any] | str | None = None,
        actions: Kind | Sequence[Kind] | None = None,
        observe: Observe = "frame",
        reward_fn: RewardFn | None = None,
        done_fn: DoneFn | None = None,
        render_mode: str | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        interface: Interface | None = None,
    ) -> None:
        check("observe", observe, get_args(Observe))
        check("render_mode", render_mode, [None, *RENDER_MODES])
        if isinstance(world, str | Path):
            world = WorldModel.from_pretrained(world)
        if isinstance(world, Steps):
            if num_inference_steps is not None or guidance_scale is not None:
                raise ConfigError("A live world has its settings already; set them where it is opened.")
            self.model, self.world = None, world
        elif isinstance(world, WorldModel):
            self.model = world
            self._settings = (num_inference_steps, guidance_scale)
            self.world = Session(world, 0, *self._settings)
        else:
            raise ConfigError(f"world is a {type(world).__name__}; pass a model, its name or a live world.")
        self.interface = known = interface or Interface.of(self.world)
        self.kind: Kinds = choose_kind(actions, known.action)
        self.action_space = action_space(self.kind, known.action)
        shape = (*height_width(known.image_size), 3)
        shape = shape if observe == "frame" else (known.chunk_frames, *shape)
        self.observation_space = spaces.Box(0, 255, shape, np.uint8)
        self.render_mode, self._observe = render_mode, observe
        shown = 1 if render_mode == "rgb_array" else known.chunk_frames
        # At this rate a recording runs as fast as the world.
        self.metadata = {**self.metadata, "render_fps": known.fps * shown / known.chunk_frames}
        self._start, self._reward_fn, self._done_fn = _start_of(start), reward_fn, done_fn
        self.cache: PrefixCache | None = None
        self._unseen: list[np.ndarray] = []
        """Frames to render: the newest one, or all since the last call, as `render_mode` says."""

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode; `info["world_seed"]` is the seed of its session.

        Raises:
            InputError: the options, or what they start from, cannot be used.
        """
        super().reset(seed=seed)
        world_seed = int(self.np_random.integers(2**31))
        beginning = _read_options(options) or dict(self._start(self.np_random) if self._start else {})
        if not beginning:
            raise InputError(
                "This environment has no start; make it with start=, or pass options={'observation': image} "
                "or {'text': caption} to reset()."
            )
        world = (
            self.world if self.model is None else Session(self.model, world_seed, *self._settings, self.cache)
        )
        frames = world.reset(beginning.get("observation"), text=beginning.get("text"))
        self.world, self._unseen = world, []
        info = {} if self.model is None else {"world_seed": world_seed}
        return self._see(frames), info

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Play one round.

        Raises:
            InputError: there was no reset yet, or the world does not take such an action.
        """
        act = self.read(action)
        return self.judge(act, self.world.step(act))

    def render(self) -> Any:
        """Return the newest frame, or the list of frames since the last call or reset."""
        if self.render_mode is None:
            return None
        if self.render_mode == "rgb_array_list":
            frames, self._unseen = self._unseen, []
            return frames
        if not self._unseen:
            raise InputError("There is nothing to render yet; call reset() first.")
        return self._unseen[-1].copy()

    # ---- parts of a step, which the vector environment takes one by one ------------------------------

    def read(self, action: Any) -> Action:
        """Read an element of the action space."""
        return read_action(self.kind, action, self.interface.action)

    def judge(self, action: Action, frames: Frames) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Return what a step returns after a round that made these frames."""
        observation = self._see(frames)
        reward = float(self._reward_fn(frames, action)) if self._reward_fn else 0.0
        return observation, reward, bool(self._done_fn and self._done_fn(frames, action)), False, {}

    def _see(self, frames: Frames) -> np.ndarray:
        size, length = self.interface.image_size, self.interface.chunk_frames
        if frames.shape[1:] != (*height_width(size), 3):
            raise ConfigError(
                f"The world made frames of shape {frames.shape[1:]} where interface.image_size is {size}; "
                "pass the size of its frames."
            )
        if self.model is not None and isinstance(self.world, Session):
            now = self.world.snapshot()
            self.world.restore(replace(now, clips=now.clips[-1:], actions=()))
        if self.render_mode == "rgb_array_list":
            self._unseen += [frame.copy() for frame in frames]
        elif self.render_mode:
            self._unseen = [frames[-1].copy()]
        if self._observe == "frame":
            return np.array(frames[-1])
        lead = np.repeat(frames[:1], max(0, length - len(frames)), axis=0)
        return np.concatenate([lead, frames[-length:]])


def _start_of(start: Start | Mapping[str, Any] | str | None) -> Start | None:
    if isinstance(start, str):
        check("start", start, list(STARTS))
        return STARTS[start]
    if isinstance(start, Mapping):
        always = _read_options(start)
        return lambda rng: always
    if start is not None and not callable(start):
        raise ConfigError(
            f"start is a {type(start).__name__}; pass options of reset, as {{'observation': image}}."
        )
    return start


def _read_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    read = dict(options or {})
    unknown = sorted(map(str, set(read) - {"observation", "text"}))
    if unknown:
        raise InputError(f"reset() has no option {unknown[0]!r}; use observation or text.")
    return {name: value for name, value in read.items() if value is not None}


def check(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Raise the ConfigError of a setting that is none of the allowed values."""
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; use {' or '.join(map(repr, allowed))}.")
