"""Encoding of episodes with the frozen codec, and pixels for vision encoders that read pixels."""

from collections.abc import Sequence

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from worldmodel.data.loader import Batch
from worldmodel.media.tensors import to_tensor
from worldmodel.models.codec.autoencoder import newest
from worldmodel.models.vision.adapter import Observation
from worldmodel.models.world_model import WorldModel
from worldmodel.parallel.layout import Layout
from worldmodel.train.objectives.base import Rounds


def encode_rounds(model: WorldModel, batch: Batch) -> Rounds:
    """Encode the observations of a batch whose episodes have actions."""
    columns = zip(*(episode.observations for episode in batch.episodes), strict=True)
    first, *clips = [to_tensor(list(column), model.device).to(model.dtype) for column in columns]
    contexts, targets, pixels = [], [], []
    latents = encode(model, first) if first.shape[1] else model.blank_observation(len(first)).latents
    if model.codec.causal and not first.shape[1]:  # the first chunk has fewer frames in as many latents
        clips[0] = clips[0][:, : model.codec.frames_before(model.config.chunk_latents)]
    for before, clip in zip([first, *clips[:-1]], clips, strict=True):
        contexts.append(
            model.codec.context(latents, before, model.config.context_latents) if before.shape[1] else latents
        )
        latents = encode(model, clip, before)
        targets.append(latents)
        pixels.append(model.vision.select_frames(before))
    context, target = torch.stack(contexts, dim=1), torch.stack(targets, dim=1)
    changed = (
        (target - context[:, :, -1:]).pow(2).mean(dim=3) > 0.1
        if context.shape[2]
        else (torch.ones_like(target[:, :, :, 0], dtype=torch.bool))
    )
    frames = [each for each in pixels if each is not None]
    return Rounds(context, target, changed, torch.stack(frames, dim=1) if frames else None)


def encode_observations(model: WorldModel, batch: Batch) -> list[Observation]:
    """Encode the concatenated clips of each episode, as batches of one."""
    observations = []
    columns = [
        encode_clips(model, list(column))
        for column in zip(*(episode.observations for episode in batch.episodes), strict=True)
    ]
    for episode, latents in zip(batch.episodes, zip(*columns, strict=True), strict=True):
        pixels = None
        if model.vision.needs_frames:
            pixels = model.vision.select_frames(
                to_tensor([np.concatenate(episode.observations)], model.device).to(model.dtype)
            )
        observations.append(Observation(torch.cat(latents)[None], pixels))
    return observations


def encode_clips(model: WorldModel, clips: Sequence[np.ndarray]) -> list[Float[Tensor, "_ c h w"]]:
    """Encode clips of different lengths, batching those of equal length."""
    rows: dict[int, Tensor] = {}
    for length in sorted({len(clip) for clip in clips}):
        chosen = [index for index, clip in enumerate(clips) if len(clip) == length]
        rows |= dict(
            zip(chosen, encode(model, to_tensor([clips[i] for i in chosen], model.device)), strict=True)
        )
    return [rows[index] for index in range(len(clips))]


def encode(
    model: WorldModel, frames: Float[Tensor, "b t 3 h w"], before: Float[Tensor, "b u 3 h w"] | None = None
) -> Float[Tensor, "b t2 c h2 w2"]:
    """Encode with the frozen codec, divided over the processes that share a sequence."""
    codec, frames = model.codec, frames.to(model.device, model.dtype)
    if codec.causal:
        if before is None or not before.shape[1]:
            return model.observe(frames).latents
        return codec.encode(frames, newest(before, codec.frames_before(model.config.context_latents)))
    group, batch = codec.temporal_factor, len(frames)
    if frames.shape[1] % group:
        return codec.encode(frames)
    pieces = rearrange(frames, "b (t g) c h w -> (b t) g c h w", g=group)
    layout = Layout.items(len(pieces), model.backbone.sequence)
    latents = layout.gather(codec.encode(layout.take(pieces, dim=0)), dim=0)
    return rearrange(latents, "(b t) 1 c h w -> b t c h w", b=batch)
