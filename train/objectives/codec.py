"""Training of our own codec."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from worldmodel.data.loader import Batch
from worldmodel.errors import ConfigError
from worldmodel.media.tensors import to_tensor
from worldmodel.models.codec.autoencoder import Codec
from worldmodel.models.world_model import WorldModel
from worldmodel.train.objectives.base import Losses, Objective, Reduce, SampleRng, StageBatch


class CodecObjective(Objective):
    """Reconstruction of pairs of frames, weighted so that small objects survive (`worldmodel eval`)."""

    weights: Mapping[str, float] = {"pixel": 1.0, "kl": 3e-4}

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
        return StageBatch(batch, rng, {"pixel": rows, "kl": rows}, frames)

    def forward(self, model: WorldModel, inputs: StageBatch) -> Losses:
        frames, codec = inputs.content, self.codec(model)
        mean, log_variance = codec.posterior(frames)
        noise = inputs.rng.normal(2, *mean.shape[1:]).flatten(0, 1)
        decoded = codec.reconstruct(mean + (0.5 * log_variance).exp() * noise.to(mean))
        kl = 0.5 * (mean.pow(2) + log_variance.exp() - 1 - log_variance)
        return {
            "pixel": reconstruction_error(decoded, frames).sum(),
            "kl": kl.flatten(1).mean(dim=1).sum(),
        }

    @staticmethod
    def frame_groups(batch: Batch, size: int) -> list[np.ndarray]:
        """Take two groups of `size` frames of every episode, some of them a repeated still image."""
        clips = []
        for index, episode in zip(batch.indices, batch.episodes, strict=True):
            if not episode.observations:
                raise ConfigError(
                    f"{episode.name} has latents instead of frames, on which the objective codec trains; set "
                    "precomputed: false for its source."
                )
            clip = episode.observations[-1]
            rng = np.random.default_rng((index, 11))
            for start in rng.choice(len(clip) // size, size=2, replace=False) * size:
                group = clip[start : start + size]
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


def reconstruction_error(
    made: Float[Tensor, "b t 3 h w"], truth: Float[Tensor, "b t 3 h w"]
) -> Float[Tensor, " b"]:
    """Return the pixel error of each clip, with more weight on the foreground and its edges."""
    error = made - truth
    return (foreground_weight(truth) * (error.abs() + 2 * error.pow(2))).flatten(1).mean(dim=1)


def foreground_weight(frames: Float[Tensor, "b t 3 h w"]) -> Float[Tensor, "b t 1 h w"]:
    """Weigh pixels that differ from the frame's median colour by 5 and those on an outline by up to 10."""
    median = frames.flatten(3).median(dim=3).values[..., None, None]
    inside = ((frames - median).abs().amax(dim=2) > 0.3).to(frames.dtype)
    grown = F.max_pool2d(inside, 3, stride=1, padding=1)
    shrunk = 1 - F.max_pool2d(1 - inside, 3, stride=1, padding=1)
    return (1 + 4 * inside + 5 * (grown - shrunk))[:, :, None]
