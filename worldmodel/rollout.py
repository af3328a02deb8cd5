"""Session: a live rollout of a world, with its caches; it can be snapshotted, restored, forked and saved."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from worldmodel.config import WorldModelConfig
from worldmodel.data import media, sheet
from worldmodel.data.transforms import to_frames, to_tensor
from worldmodel.errors import ConfigError, InputError
from worldmodel.models.prefix import History, PrefixCache
from worldmodel.models.world_model import WorldModel
from worldmodel.types import DESCRIBE, WHAT_HAPPENED, Action


@dataclass(frozen=True)
class Snapshot:
    """Everything a world needs to go on from one moment: never changed, cheap to keep, safe to share."""

    context: Float[Tensor, "1 c h w"]
    """Latent frame that the next round starts from."""
    observation: Float[Tensor, "1 t c h w"]
    """Latents of the newest observation."""
    clips: tuple[np.ndarray, ...]
    """The first observation, then one clip per round."""
    before: Float[Tensor, "1 1 c h w"] | None = None
    """Last latent frame before the newest observation."""
    history: History = ()
    """The rounds that the backbone looks back on."""
    round: int = 0
    actions: tuple[Action, ...] = ()


def memory_latents(config: WorldModelConfig) -> int:
    """Return how many latent frames of an observation count; one place is left for the frame before it."""
    return max(1, config.vision.max_frames - 1)


def memory_frames(config: WorldModelConfig) -> int:
    """Return how many of an observation's newest frames count."""
    return memory_latents(config) * config.codec.temporal_factor


def begin(model: WorldModel, latents: Float[Tensor, "1 t c h w"], frames: np.ndarray) -> Snapshot:
    """Return the moment at which a world has been seen for the first time."""
    observation = latents[:, -memory_latents(model.config) :]
    return Snapshot(context=latents[:, -1], observation=observation, clips=(frames,))


def look(model: WorldModel, now: Snapshot, action: Action) -> History:
    """Return the history with the coming round at its end.

    When it is `history_rounds` long the window starts anew, so that a round costs the same for ever.

    Raises:
        InputError: an action the model does not take.
    """
    kept = now.history if len(now.history) < model.config.history_rounds else ()
    return (*kept, model.round_embeds(now.context, [action])[0])


def advance(
    now: Snapshot, action: Action, history: History, latents: Float[Tensor, "1 t c h w"], frames: np.ndarray
) -> Snapshot:
    """Return the moment after a round that made these latents and frames."""
    return Snapshot(
        context=latents[:, -1],
        before=now.context[:, None],
        observation=latents,
        history=history,
        round=now.round + 1,
        clips=(*now.clips, frames),
        actions=(*now.actions, action),
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


def both(now: Snapshot) -> Float[Tensor, "1 t c h w"]:
    """Return the last two observations, between which an action happened.

    Raises:
        InputError: there is only one observation so far.
    """
    if now.before is None:
        raise InputError(
            "There is one observation so far; call step() first, or pass a second one to observe()."
        )
    return torch.cat([now.before, now.observation], dim=1)


def noise_of_round(seed: int, index: int, shape: Sequence[int]) -> Float[Tensor, "t c h w"]:
    """Return the noise that a session of this seed draws in round `index`; -1 is an imagined start."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + index + 1) % 2**63)
    return torch.randn(tuple(shape), generator=generator)


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
        latents = self.model.codec.encode(to_tensor([frames]).to(self.model.unseen.device))
        self._now = begin(self.model, latents, frames)
        return frames

    @torch.no_grad()
    def step(self, action: "str | Action | Mapping[str, Any] | None" = None) -> np.ndarray:
        """Play one round and return its frames, uint8 `[t, h, w, 3]`; None lets time pass.

        Raises:
            InputError: the session was not reset, or the model does not take such an action.
        """
        now, act = self._current(), Action.of(action)
        history = look(self.model, now, act)
        latents = self._generate(history, now.context, now.round)
        frames = to_frames(self.model.decode(latents)[0])
        self._now = advance(now, act, history, latents, frames)
        return frames

    def describe(self, question: str | None = None) -> str:
        """Say what is seen now, or answer a question about it ("how many things are there")."""
        return self.model.read(self._current().observation, prompt(question))[0]

    def infer_action(self) -> str:
        """Say in words which action led from the observation before to the one seen now.

        Raises:
            InputError: there is only one observation so far.
        """
        return self.model.read(both(self._current()), WHAT_HAPPENED)[0]

    @torch.no_grad()
    def observe(self, observation: Any) -> np.ndarray:
        """Take a real observation as what came next, in place of a generated one."""
        now = self._current()
        fork = self.fork()
        frames = fork.reset(observation)
        seen = fork._current()
        self._now = replace(
            seen,
            before=now.context[:, None],
            round=now.round + 1,
            clips=(*now.clips, frames),
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
            sheet.write_image(sheet.contact_sheet(list(self.clips), titles), path)
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
        unseen = self.model.unseen[None]
        latents = self._generate((self.model.round_embeds(unseen, [action])[0],), unseen, -1)[:, -1:]
        frames = to_frames(self.model.decode(latents)[0])
        self._now = begin(self.model, latents, frames)
        return frames

    def _generate(self, history: History, context: Tensor, index: int) -> Tensor:
        states = self.cache.states([history], self.model.config.num_queries)[0]
        condition = self.model.condition(states[None], context)
        noise = noise_of_round(self.seed, index, condition.forecast.shape[1:])[None].to(context)
        return self.model.denoise(condition, context, noise, self.num_inference_steps, self.guidance_scale)
