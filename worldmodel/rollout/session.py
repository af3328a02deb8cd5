"""Session: a live rollout of a world, with its caches; it can be snapshotted, restored, forked and saved."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from worldmodel.config import WorldModelConfig
from worldmodel.diffusion import swin
from worldmodel.diffusion.swin import Trail
from worldmodel.errors import ConfigError, InputError
from worldmodel.media import contact_sheet
from worldmodel.media import files as media
from worldmodel.media.tensors import to_frames, to_tensor
from worldmodel.models.backbone.prefix_cache import History, PrefixCache
from worldmodel.models.conditioning import Condition
from worldmodel.models.vision.adapter import Observation
from worldmodel.models.world_model import WorldModel
from worldmodel.types import DESCRIBE, WHAT_HAPPENED, Action, Pose


@dataclass(frozen=True)
class Snapshot:
    """Everything a world needs to go on from one moment: never changed, cheap to keep, safe to share."""

    context: Float[Tensor, "1 s c h w"]
    """Latent frames that the next round goes on from."""
    observation: Float[Tensor, "1 t c h w"]
    """Latents of the newest observation."""
    clips: tuple[np.ndarray, ...]
    """The first observation, then one clip per round."""
    before: Float[Tensor, "1 s c h w"] | None = None
    """Latent frames that the newest observation went on from."""
    history: History = ()
    """The rounds that the backbone looks back on."""
    round: int = 0
    actions: tuple[Action, ...] = ()
    camera: Pose = field(default_factory=Pose)
    """Where the actions have led the camera, seen from where it was when the world began."""
    trail: Trail[Condition] | None = None
    """What the next chunk follows, where chunks overlap (sampler: swin)."""


def memory_latents(config: WorldModelConfig) -> int:
    """Return how many latent frames of an observation count; one place is left for the frame before it."""
    return max(1, config.vision.max_frames - 1)


def memory_frames(config: WorldModelConfig) -> int:
    """Return how many of an observation's newest frames count."""
    return memory_latents(config) * config.codec.temporal_factor


def begin(model: WorldModel, latents: Float[Tensor, "1 t c h w"], frames: np.ndarray) -> Snapshot:
    """Return the moment at which a world has been seen for the first time."""
    observation = latents[:, -memory_latents(model.config) :]
    return Snapshot(_context(model, latents, frames), observation, clips=(frames,))


def imagined(model: WorldModel, latents: Float[Tensor, "1 t c h w"]) -> Snapshot:
    """Return the moment at which a world imagined from a text begins: with the last of what was made."""
    kept = latents if model.codec.causal else latents[:, -1:]
    return begin(model, kept, to_frames(model.decode(kept)[0]))


def _context(model: WorldModel, latents: Tensor, frames: np.ndarray) -> Float[Tensor, "1 s c h w"]:
    return model.context(latents, to_tensor([frames]).to(latents) if model.codec.causal else None)


def look(model: WorldModel, now: Snapshot, action: Action) -> History:
    """Return the history with the coming round at its end.

    When it is `history_rounds` long the window starts anew, so that a round costs the same for ever.

    Raises:
        InputError: an action the model does not take.
    """
    kept = now.history if len(now.history) < model.config.history_rounds else ()
    observation = seen(model, now.context, now.clips[-1:])
    return (*kept, model.round_embeds(observation, [action.seen_from(now.camera)])[0])


def seen(model: WorldModel, latents: Float[Tensor, "1 t c h w"], clips: Sequence[np.ndarray]) -> Observation:
    """Return latents as an observation, with the pixels of the clips if the model looks at those."""
    if not model.vision.needs_frames:
        return Observation(latents)
    return Observation(latents, model.look(to_tensor([np.concatenate(clips)]).to(latents)))


def advance(
    model: WorldModel,
    now: Snapshot,
    action: Action,
    history: History,
    latents: Float[Tensor, "1 t c h w"],
    frames: np.ndarray,
    trail: Trail[Condition] | None = None,
) -> Snapshot:
    """Return the moment after a round that made these latents and frames."""
    return Snapshot(
        context=_context(model, latents, frames),
        before=now.context,
        observation=latents,
        history=history,
        round=now.round + 1,
        clips=(*now.clips, frames),
        actions=(*now.actions, action),
        trail=trail,
        camera=action.moves(now.camera),
    )


def prompt(question: str | None) -> str:
    """Return what the backbone is asked: the question, or for a description.

    Raises:
        InputError: the question is empty or too long.
    """
    if question is None:
        return DESCRIBE
    if not question.strip():
        raise InputError("The question is empty; ask something, or leave it out for a description.")
    if len(question) > 400:
        raise InputError(f"The question has {len(question)} characters; ask in one short sentence.")
    return question


def newest(model: WorldModel, now: Snapshot) -> Observation:
    """Return what is seen now."""
    return seen(model, now.observation, now.clips[-1:])


def both(model: WorldModel, now: Snapshot) -> Observation:
    """Return the last two observations, between which an action happened.

    Raises:
        InputError: there is only one observation so far.
    """
    if now.before is None:
        raise InputError(
            "There is one observation so far; call step() first, or pass a second one to observe()."
        )
    before = now.before[:, -1:]
    return seen(model, torch.cat([before, now.observation], dim=1), (now.clips[-2][-1:], now.clips[-1]))


def noise_of_round(seed: int, index: int, shape: Sequence[int]) -> Float[Tensor, "t c h w"]:
    """Return the noise that a session of this seed draws in round `index`; -1 is an imagined start."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + index + 1) % 2**63)
    return torch.randn(tuple(shape), generator=generator)


def generate(
    model: WorldModel,
    condition: Condition,
    context: Float[Tensor, "b s c h w"],
    draws: Sequence[tuple[int, int]],
    num_inference_steps: int,
    guidance_scale: float,
    trail: Trail[Condition] | None = None,
) -> tuple[Float[Tensor, "b t c h w"], Trail[Condition] | None]:
    """Generate the latents of a round of a batch of worlds.

    Each is made from the noise of its seed and of the round's number (`draws`). Where chunks overlap
    (sampler: swin), `trail` is what the round before left, and that of this round comes back.
    """

    def draw(shape: Sequence[int], draws: Sequence[tuple[int, int]]) -> Tensor:
        return torch.stack([noise_of_round(seed, index, shape) for seed, index in draws]).to(context)

    noise = draw(model.latent_shape, draws)
    if model.config.sampler == "chunk":
        return model.denoise(condition, context, noise, num_inference_steps, guidance_scale), None
    conditions = [condition] if guidance_scale == 1.0 else [condition, model.null_condition(context)]
    # The condition frame's noise has a stream of its own.
    seen = swin.renoise(context, draw(context.shape[1:], [(-1 - seed, index) for seed, index in draws]))
    solver = model.generator.solver(num_inference_steps)
    return swin.advance(model.generator, solver, conditions, seen, noise, guidance_scale, trail)


class Session:
    """A world that goes on round after round from one observation.

    Rounds are deterministic: the noise of a round depends on the seed and the round's number alone, so a
    fork that takes the same action makes the same frames. The backbone computes only a round's new positions
    (`PrefixCache`), and looks back on a bounded history, so a round costs the same however long the session
    is.
    """

    def __init__(
        self,
        model: WorldModel,
        seed: int = 0,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        cache: PrefixCache | None = None,
    ) -> None:
        config = model.config
        self.model = model
        self.cache = cache or PrefixCache(model.backbone)
        self.seed = seed
        self.num_inference_steps = (
            config.num_inference_steps if num_inference_steps is None else num_inference_steps
        )
        self.guidance_scale = config.guidance_scale if guidance_scale is None else guidance_scale
        if self.num_inference_steps < 1:
            raise ConfigError(f"num_inference_steps is {self.num_inference_steps}; use 1 or more.")
        if not math.isfinite(self.guidance_scale):
            raise ConfigError(
                f"guidance_scale is {self.guidance_scale}; use a finite number, 1 for no guidance."
            )
        self._now: Snapshot | None = None

    # ---- what a user does ----------------------------------------------------------------------------

    @torch.no_grad()
    def reset(self, observation: Any = None, *, text: str | None = None) -> np.ndarray:
        """Start a new world and return its first observation as uint8 frames `[t, h, w, 3]`.

        Args:
            observation: An image or a video: a path, encoded bytes, a PIL image, or uint8 frames
                `[h, w, 3]` or `[t, h, w, 3]`. The rollout continues its last frame.
            text: A description; the model makes the first observation itself.

        Raises:
            InputError: the observation or text cannot be used, or neither or both are given.
        """
        if (observation is None) == (text is None):
            raise InputError("A world starts from one thing: pass an image, a video, or text=.")
        if text is not None:
            return self._imagine(Action.of(text))
        config = self.model.config
        frames = media.read_observation(
            observation,
            size=config.codec.image_size,
            fps=config.fps,
            max_frames=int(media.MAX_VIDEO_SECONDS * config.fps),
        )[-memory_frames(config) :]
        pixels = to_tensor([frames]).to(self.model.unseen.device)
        self._now = begin(self.model, self.model.observe(pixels).latents, frames)
        return frames

    @torch.no_grad()
    def step(self, action: "str | Action | Mapping[str, Any] | None" = None) -> np.ndarray:
        """Play one round and return its frames, uint8 `[t, h, w, 3]`; None lets time pass.

        Raises:
            InputError: the session was not reset, or the model does not take such an action.
        """
        now, act = self._current(), Action.of(action)
        history = look(self.model, now, act)
        latents, trail = self._generate(history, now.context, act, now.round, now.trail)
        frames = to_frames(self.model.decode(latents, now.context)[0])
        self._now = advance(self.model, now, act, history, latents, frames, trail)
        return frames

    def describe(self, question: str | None = None) -> str:
        """Say what is seen now, or answer a question about it ("how many things are there")."""
        return self.model.read(newest(self.model, self._current()), prompt(question))[0]

    def infer_action(self) -> str:
        """Say in words which action led from the observation before to the one seen now.

        Raises:
            InputError: there is only one observation so far.
        """
        return self.model.read(both(self.model, self._current()), WHAT_HAPPENED)[0]

    @torch.no_grad()
    def observe(self, observation: Any) -> np.ndarray:
        """Take a real observation as what came next, in place of a generated one."""
        now = self._current()
        fork = self.fork()
        frames = fork.reset(observation)
        self._now = replace(
            fork._current(),
            before=now.context,
            round=now.round + 1,
            clips=(*now.clips, frames),
            camera=now.camera,
            actions=(*now.actions, Action()),  # nobody said which; clips and actions stay in step
        )
        return frames

    def snapshot(self) -> Snapshot:
        """Return the present moment, to `restore` as often as wanted."""
        return self._current()

    def restore(self, snapshot: Snapshot) -> None:
        """Go back (or across) to a snapshot of a session with the same model."""
        self._now = snapshot

    def fork(self) -> "Session":
        """Return a second session that goes its own way from here."""
        other = Session(self.model, self.seed, self.num_inference_steps, self.guidance_scale, self.cache)
        other.restore(self.snapshot())
        return other

    @property
    def frames(self) -> np.ndarray:
        """All frames so far, uint8 `[t, h, w, 3]`."""
        return np.concatenate(self._current().clips)

    @property
    def clips(self) -> tuple[np.ndarray, ...]:
        """The first observation, then one clip per round."""
        return self._current().clips

    @property
    def actions(self) -> tuple[Action, ...]:
        """The actions taken so far."""
        return self._current().actions

    def save(self, path: str | Path) -> Path:
        """Write the rollout as `.mp4`, `.gif`, or as a contact sheet `.png` with a row per round.

        Raises:
            OutputError: the place cannot be written, or the suffix is none of these.
        """
        path = Path(path)
        if path.suffix.lower() == ".png":
            titles = ["start", *(str(action) for action in self.actions)]
            contact_sheet.write_image(contact_sheet.contact_sheet(list(self.clips), titles), path)
        else:
            media.write_video(self.frames, path, fps=self.model.config.fps)
        return path

    # ---- how -----------------------------------------------------------------------------------------

    def _current(self) -> Snapshot:
        if self._now is None:
            raise InputError(
                "The session has no world yet; call reset() with an image, a video or text= first."
            )
        return self._now

    def _imagine(self, action: Action) -> np.ndarray:
        nothing = self.model.nothing(1)
        embeds = self.model.round_embeds(nothing, [action])
        latents, _ = self._generate((embeds[0],), nothing.latents, action, -1)
        self._now = imagined(self.model, latents)
        return self._now.clips[0]

    def _generate(
        self,
        history: History,
        context: Tensor,
        action: Action,
        index: int,
        trail: Trail[Condition] | None = None,
    ) -> tuple[Tensor, Trail[Condition] | None]:
        states = self.cache.states([history], self.model.config.num_queries)[0]
        condition = self.model.condition(states[None], context, [action])
        settings = self.num_inference_steps, self.guidance_scale
        return generate(self.model, condition, context, [(self.seed, index)], *settings, trail)
