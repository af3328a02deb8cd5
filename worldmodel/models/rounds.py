"""Encoding of observations and rounds with a frozen codec, for training and to compute latents before it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from worldmodel.config import WorldModelConfig
from worldmodel.models.codec.autoencoder import VideoCodec, newest
from worldmodel.parallel.layout import Layout
from worldmodel.parallel.mesh import SequenceGroup

if TYPE_CHECKING:
    from worldmodel.models.world_model import WorldModel


@dataclass(frozen=True)
class RoundEncoder:
    """Encodes the clips of rounds: the context latents that a round continues, and those it leads to."""

    codec: VideoCodec
    context_latents: int
    chunk_latents: int
    chunk_frames: int
    sequence: SequenceGroup = field(default_factory=SequenceGroup)
    """Processes that have the same clips; each encodes some of the frames."""

    @classmethod
    def of(cls, model: "WorldModel") -> "RoundEncoder":
        """Return the encoder of a model in training."""
        return replace(cls.of_codec(model.codec, model.config), sequence=model.backbone.sequence)

    @classmethod
    def of_codec(cls, codec: VideoCodec, config: WorldModelConfig) -> "RoundEncoder":
        """Return the encoder of a codec for models of a config."""
        return cls(codec, config.context_latents, config.chunk_latents, config.chunk_frames)

    def encode(
        self, frames: Float[Tensor, "b t 3 h w"], before: Float[Tensor, "b u 3 h w"] | None = None
    ) -> Float[Tensor, "b t2 c h2 w2"]:
        """Encode a clip that follows `before`; without it, or if it is empty, a clip of its own."""
        codec = self.codec
        if codec.causal:
            if before is None or not before.shape[1]:
                return codec.encode(frames)
            return codec.encode(frames, newest(before, codec.frames_before(self.context_latents)))
        group, batch = codec.temporal_factor, len(frames)
        if frames.shape[1] % group:
            return codec.encode(frames)
        pieces = rearrange(frames, "b (t g) c h w -> (b t) g c h w", g=group)
        layout = Layout.items(len(pieces), self.sequence)
        latents = layout.gather(codec.encode(layout.take(pieces, dim=0)), dim=0)
        return rearrange(latents, "(b t) 1 c h w -> b t c h w", b=batch)

    def rounds(
        self,
        first: Float[Tensor, "b u 3 h w"],
        clips: Sequence[Float[Tensor, "b t 3 h w"]],
        blank: Float[Tensor, "b _ c h2 w2"] | None = None,
    ) -> tuple[Float[Tensor, "b r s c h2 w2"], Float[Tensor, "b r t2 c h2 w2"]]:
        """Encode an observation and the clips that follow it; return the context and target of every round.

        Args:
            first: The observation before the first round; it may be empty.
            clips: One clip per round.
            blank: Context of a round that an empty observation precedes.
        """
        clips = list(clips)
        if self._divides(first, clips):
            return self._divided_rounds(first, clips)
        if first.shape[1]:
            latents = self.encode(first)
        else:
            assert blank is not None
            latents = blank
            if self.codec.causal:  # the first chunk has fewer frames in as many latents
                clips[0] = clips[0][:, : self.codec.frames_before(self.chunk_latents)]
        contexts, targets = [], []
        for before, clip in zip([first, *clips[:-1]], clips, strict=True):
            following = contexts[-1] if contexts else None
            contexts.append(self.context(latents, before, following) if before.shape[1] else latents)
            latents = self.encode(clip, before)
            targets.append(latents)
        return torch.stack(contexts, dim=1), torch.stack(targets, dim=1)

    def _divides(self, first: Tensor, clips: Sequence[Tensor]) -> bool:
        """Return whether there is a round, all alike, for each of the processes that share a causal codec."""
        alike = first.shape[1] > 0 and len({clip.shape for clip in clips}) == 1
        return self.codec.causal and alike and len(first) * len(clips) >= self.sequence.size > 1

    def _divided_rounds(
        self, first: Float[Tensor, "b u 3 h w"], clips: Sequence[Float[Tensor, "b t 3 h w"]]
    ) -> tuple[Float[Tensor, "b r s c h2 w2"], Float[Tensor, "b r t2 c h2 w2"]]:
        """Encode rounds with a causal codec, each process some of them."""
        count = self.codec.frames_before(self.context_latents)
        before = torch.cat([newest(each, count) for each in (first, *clips[:-1])])
        layout = Layout.items(len(before), self.sequence)
        before, following = layout.take(before, dim=0), layout.take(torch.cat(list(clips)), dim=0)
        context, target = (
            rearrange(layout.gather(made, dim=0), "(r b) t c h w -> b r t c h w", r=len(clips))
            for made in (self.codec.encode(before), self.codec.encode(following, before))
        )
        return context, target

    def context(
        self,
        latents: Float[Tensor, "b t2 c h2 w2"],
        frames: Float[Tensor, "b t 3 h w"],
        before: Float[Tensor, "b s c h2 w2"] | None = None,
    ) -> Float[Tensor, "b s c h2 w2"]:
        """Return the latents of a clip that the next round continues."""
        return self.codec.context(latents, frames, self.context_latents, before)

    def chunks(
        self, frames: Float[Tensor, "b t 3 h w"], tasks: Sequence[str] = ("rounds",)
    ) -> dict[str, Float[Tensor, "b n _ c h2 w2"]]:
        """Encode all chunks after the first frame of a clip, for episodes that begin at any of them.

        Args:
            frames: 1 + n chunks of frames.
            tasks: Tasks of the episodes.

        Returns:
            `first_context` and `first_target` of the round that an episode begins with, `[b, n, ...]`. For a
            causal codec also: `context` and `target` of later rounds, in the chunks after the first
            (`[b, n - 1, ...]`); for the task imagine, `imagine`; for describe and ask, `observed`: a chunk
            as a clip of its own. For other codecs these are the same latents as the former.
        """
        batch, size = len(frames), self.chunk_frames
        clips = rearrange(frames[:, 1:], "b (n t) c h w -> b n t c h w", t=size)
        starts, own = frames[:, :-1:size].flatten(0, 1)[:, None], clips.flatten(0, 1)
        context, target = self.rounds(starts, [own])
        made = {"first_context": context[:, 0], "first_target": target[:, 0]}
        if self.codec.causal:
            if clips.shape[1] > 1:
                before, later = clips[:, :-1].flatten(0, 1), clips[:, 1:].flatten(0, 1)
                latents = target[:, 0].unflatten(0, (batch, -1))[:, :-1].flatten(0, 1)
                made["context"] = self.context(latents, before)
                made["target"] = self.encode(later, before)
            if "imagine" in tasks:
                _, made["imagine"] = (x[:, 0] for x in self.rounds(own[:, :0], [own], target[:, 0, :0]))
            if {"describe", "ask"} & set(tasks):
                made["observed"] = self.encode(own)
        return {name: rearrange(x, "(b n) t c h w -> b n t c h w", b=batch) for name, x in made.items()}
