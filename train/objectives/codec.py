"""Training of our own codec."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float
from torch import Tensor

from worldmodel.data.loader import Batch
from worldmodel.errors import ConfigError
from worldmodel.media.tensors import to_tensor
from worldmodel.models.codec.autoencoder import Codec
from worldmodel.models.world_model import WorldModel
from worldmodel.train.objectives.base import Counts, Losses, Objective, Reduce, SampleRng, StageBatch

MOVED = 0.25
"""Difference of a pixel in [-1, 1] from which it moved: 32 of 255 grey levels."""


class CodecObjective(Objective):
    """Reconstruction of pairs of frames, weighted so that small objects survive (`worldmodel eval`)."""

    weights: Mapping[str, float] = {"pixel": 1.0, "moving": 0.2, "kl": 3e-4}
    tasks = ("rounds", "imagine", "describe", "ask", "inverse")

    @staticmethod
    def codec(model: WorldModel) -> Codec:
        """Return the codec, if it can be trained.

        Raises:
            ConfigError: it is one of diffusers.
        """
        if not isinstance(model.codec, Codec):
            raise ConfigError(
                "The objective codec trains our own codec; remove the stage for a pretrained one."
            )
        return model.codec

    def prepare(self, model: WorldModel, batch: Batch, rng: SampleRng) -> StageBatch:
        groups = self.frame_groups(batch, model.codec.temporal_factor)
        frames = to_tensor(groups, model.device).to(model.dtype)
        rows = float(len(frames))
        counts: Counts = {"pixel": rows, "kl": rows, "moving": moving(frames).sum()}
        return StageBatch(batch, rng, counts, frames)

    def forward(self, model: WorldModel, inputs: StageBatch) -> Losses:
        frames = inputs.content
        codec = self.codec(model)
        mean, log_variance = codec.posterior(frames)
        noise = inputs.rng.normal(2, *mean.shape[1:]).flatten(0, 1)
        decoded = codec.reconstruct(mean + (0.5 * log_variance).exp() * noise.to(mean))
        kl = 0.5 * (mean.pow(2) + log_variance.exp() - 1 - log_variance)
        error = pixel_errors(decoded, frames)
        return {
            "pixel": error.flatten(1).mean(dim=1).sum(),
            "moving": (error * moving(frames)).sum(),
            "kl": kl.flatten(1).mean(dim=1).sum(),
        }

    @staticmethod
    def frame_groups(batch: Batch, size: int) -> list[np.ndarray]:
        """Take two groups of `size` frames of every episode, some of them a repeated still image.

        They are different ones unless the episode has only one, as with rounds of one group.
        """
        clips = []
        for index, episode in zip(batch.indices, batch.episodes, strict=True):
            if not episode.observations:
                raise ConfigError(
                    f"{episode.name} has latents instead of frames, on which the objective codec trains; set "
                    "precomputed: false for its source."
                )
            groups = [
                clip[start : start + size]
                for clip in episode.observations
                for start in range(0, len(clip) - size + 1, size)
            ]
            if not groups:
                raise ConfigError(
                    f"{episode.name} has no {size} frames in a row for the objective codec in the task "
                    f"{batch.task}; use the task rounds."
                )
            rng = np.random.default_rng((index, 11))
            for chosen in rng.choice(len(groups), size=2, replace=len(groups) < 2):
                group = groups[chosen]
                clips.append(np.repeat(group[:1], size, axis=0) if rng.random() < 0.15 else group)
        return clips

    def preview(self, model: WorldModel, inputs: StageBatch) -> tuple[Tensor, Tensor]:
        mean, _ = self.codec(model).posterior(inputs.content)
        return inputs.content, self.codec(model).reconstruct(mean).clamp(-1, 1)

    def finish(self, model: WorldModel, batches: Sequence[Batch], reduce: Reduce) -> None:
        """Set the mean and standard deviation by which latents are normalised, from the clips of a step."""
        codec = self.codec(model)
        moments = torch.zeros(3, codec.latent_channels, dtype=torch.float64)
        for batch in batches:
            clips = to_tensor([episode.observations[-1] for episode in batch.episodes], model.device)
            mean, _ = codec.posterior(clips.to(model.dtype))
            values = rearrange(mean, "b t c h w -> c (b t h w)").double().cpu()
            moments += torch.stack(
                [torch.full_like(values[:, 0], values.shape[1]), values.sum(1), values.pow(2).sum(1)]
            )
        count, total, square = reduce(moments)
        average = total / count
        deviation = ((square - total * average) / (count - 1)).sqrt()
        codec.set_scale(average.float(), deviation.float())


def pixel_error(
    model: WorldModel,
    target: Float[Tensor, "b t c h w"],
    clean: Float[Tensor, "b t c h w"],
    rng: SampleRng,
) -> Float[Tensor, " b"]:
    """Compare one random latent frame of every clip after decoding, by the loss of the codec."""
    rows = torch.arange(target.shape[0], device=target.device)
    frame = rng.integers(target.shape[1], target.shape[0] // len(rng.streams)).flatten()
    with torch.no_grad():
        truth = model.codec.decode(target[rows, frame][:, None])
    return reconstruction_error(model.codec.decode(clean[rows, frame][:, None]), truth)


def reconstruction_error(
    made: Float[Tensor, "b t 3 h w"], truth: Float[Tensor, "b t 3 h w"]
) -> Float[Tensor, " b"]:
    """Return the pixel error of each clip, with more weight on rare colours (`rarity_weight`)."""
    return pixel_errors(made, truth).flatten(1).mean(dim=1)


def pixel_errors(
    made: Float[Tensor, "b t 3 h w"], truth: Float[Tensor, "b t 3 h w"]
) -> Float[Tensor, "b t 1 h w"]:
    """Return the same of each pixel, averaged over colours."""
    error = made - truth
    return (rarity_weight(truth) * (error.abs() + 2 * error.pow(2))).mean(dim=2, keepdim=True)


def moving(frames: Float[Tensor, "b t 3 h w"]) -> Bool[Tensor, "b t 1 h w"]:
    """Return which pixels differ between the two clips of every episode (`frame_groups`), by 32 grey levels.

    They are what moves, and what actions change is among them: often so few of them that a codec loses them
    without a loss of their own.
    """
    one, other = rearrange(frames, "(b p) t c h w -> p b t c h w", p=2)
    differs = (one - other).abs().amax(dim=2, keepdim=True) >= MOVED
    return repeat(differs, "b t c h w -> (b p) t c h w", p=2)


def rarity_weight(frames: Float[Tensor, "b t 3 h w"]) -> Float[Tensor, "b t 1 h w"]:
    """Weigh each pixel by the rarity of its colour in its frame: 1 / sqrt(share), at most 10.

    Without it, a codec loses a key of twelve pixels at 33 dB. The pixels of an outline are mixtures of
    colours and hence rare, too. Colours are compared in steps of an eighth of the range of each channel.
    """
    level = ((frames + 1) * 4).long().clamp(0, 7)
    colour = (level[:, :, 0] * 64 + level[:, :, 1] * 8 + level[:, :, 2]).flatten(2)
    counts = colour.new_zeros(*colour.shape[:2], 512).scatter_add_(2, colour, torch.ones_like(colour))
    share = counts.gather(2, colour).to(frames.dtype) / colour.shape[2]
    return share.rsqrt().clamp(max=10).reshape(frames[:, :, :1].shape)
