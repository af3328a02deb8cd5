"""The state of worlds between two rounds."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from worldmodel.actions import Pose
from worldmodel.config import WorldModelConfig, height_width
from worldmodel.diffusion.swin import ChunkTrace
from worldmodel.episodes import Outcome, PredictedState
from worldmodel.media.tensors import to_tensor
from worldmodel.models.backbone.prefix_cache import History, remembered
from worldmodel.models.conditioning import Condition
from worldmodel.models.vision.adapter import Observation
from worldmodel.models.world_model import WorldModel

Clips = UInt8[np.ndarray, "b t h w 3"]


@dataclass(frozen=True)
class WorldState:
    """A batch of worlds between two rounds: all that the next round needs, never changed in place.

    The worlds of one state started together and advance together. Worlds that started at different times are
    states of one world each; a round takes any number of states and runs them as one batch.
    """

    seeds: tuple[int, ...]
    context: Float[Tensor, "b s c h w"]
    """Latent frames that the next round continues."""
    latents: Float[Tensor, "b t c h w"]
    """Latents of the newest observation."""
    frames: Clips
    """Frames of the newest observation; none before the first one."""
    histories: tuple[History, ...]
    """Rounds in the backbone's context, per world."""
    cameras: tuple[Pose, ...]
    """Camera poses relative to the first frame."""
    round: int = 0
    previous_latents: Float[Tensor, "b 1 c h w"] | None = None
    """Last latent frame of the observation before the newest."""
    previous_frames: Clips | None = None
    """Last frame of the observation before the newest."""
    outcomes: tuple[Outcome, ...] = ()
    """Reward and end of the newest round, per world, if the model predicts them; none before the first."""
    code: Float[Tensor, "b v k"] | None = None
    """Code of the newest round, one-hot, if the model's states have one; None before the first round."""
    states: tuple[PredictedState, ...] = ()
    """Predicted state of the newest round, per world; none before it, and for models without one."""
    trace: ChunkTrace[Condition] | None = None
    """The chunk that the next one overlaps (sampler: swin)."""

    def __len__(self) -> int:
        """Return the number of worlds."""
        return len(self.seeds)

    @property
    def is_blank(self) -> bool:
        """Whether the first observation is still to come."""
        return self.round < 0

    @classmethod
    @torch.no_grad()
    def from_frames(cls, model: WorldModel, frames: Clips, seeds: tuple[int, ...]) -> "WorldState":
        """Start worlds from observed frames; the newest `observed_frames` of them count."""
        frames = frames[:, -observed_frames(model.config) :]
        count, group = frames.shape[1], model.codec.temporal_factor
        # Our codec repeats the last frame of an incomplete group, and a world continues from the last.
        skipped = count % group if count > group and not model.codec.causal else 0
        latents = model.observe(to_tensor(list(frames[:, skipped:]), model.device)).latents
        return cls.from_latents(model, latents, frames, seeds)

    @classmethod
    @torch.no_grad()
    def from_latents(
        cls, model: WorldModel, latents: Float[Tensor, "b t c h w"], frames: Clips, seeds: tuple[int, ...]
    ) -> "WorldState":
        """Start worlds from frames and their latents."""
        return cls(
            seeds=seeds,
            context=encode_context(model, latents, frames),
            latents=latents[:, -observed_latents(model.config) :],
            frames=frames,
            histories=((),) * len(seeds),
            cameras=(Pose(),) * len(seeds),
        )

    @classmethod
    def blank(cls, model: WorldModel, seeds: tuple[int, ...]) -> "WorldState":
        """Return worlds before their first observation, which a text action then makes."""
        latents = model.blank_observation(len(seeds)).latents.detach()
        frames = np.zeros((len(seeds), 0, *height_width(model.config.codec.image_size), 3), np.uint8)
        start = ((),) * len(seeds), (Pose(),) * len(seeds)
        return cls(seeds, latents, latents, frames, *start, round=-1)


def observed_latents(config: WorldModelConfig) -> int:
    """Return how many latent frames of a first observation count; one is reserved for the frame before it."""
    return max(1, config.vision.max_frames - 1)


def observed_frames(config: WorldModelConfig) -> int:
    """Return how many frames of a first observation count, the newest ones."""
    return observed_latents(config) * config.codec.temporal_factor


def film_frames(config: WorldModelConfig) -> int:
    """Return how many frames of a video that worlds start from count, the newest ones."""
    return observed_frames(config) + config.history_rounds * config.chunk_frames


def encode_context(
    model: WorldModel,
    latents: Float[Tensor, "b t c h w"],
    frames: Clips,
    before: Float[Tensor, "b s c h w"] | None = None,
) -> Float[Tensor, "b s c h w"]:
    """Return the latent frames that the next round continues; `before` is the context of the last one."""
    pixels = to_tensor(list(frames), latents.device).to(latents.dtype) if model.codec.causal else None
    return model.codec.context(latents, pixels, model.config.context_latents, before)


def observe(model: WorldModel, latents: Float[Tensor, "b t c h w"], frames: Clips) -> Observation:
    """Return latents as an observation, with frames where the vision encoder needs them."""
    if not model.vision.needs_frames:
        return Observation(latents)
    return Observation(
        latents, model.vision.select_frames(to_tensor(list(frames), latents.device).to(latents.dtype))
    )


def newest_observation(model: WorldModel, state: WorldState) -> Observation:
    """Return the newest observation, with the rounds before it where texts read these."""
    seen = observe(model, state.latents, state.frames)
    if not model.config.text_history or not state.histories[0]:
        return seen
    kept = (remembered(history, model.config.history_rounds) for history in state.histories)
    return replace(seen, before=tuple(torch.cat(rounds) for rounds in kept))


def last_transition(model: WorldModel, state: WorldState) -> Observation | None:
    """Return the last two observations as one, between which an action happened; None after the first."""
    if state.previous_latents is None or state.previous_frames is None:
        return None
    latents = torch.cat([state.previous_latents, state.latents], dim=1)
    return observe(model, latents, np.concatenate([state.previous_frames, state.frames], axis=1))
