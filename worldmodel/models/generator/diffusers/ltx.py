"""LTX-Video as a video generator; context frames precede the chunk at timestep 0.

Source: LTX-Video (arXiv:2501.00103).
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from diffusers.models.transformers.transformer_ltx import LTXVideoTransformer3DModel
from diffusers.pipelines.ltx.pipeline_ltx import LTXPipeline, calculate_shift
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from worldmodel.errors import ConfigError
from worldmodel.models.conditioning import Condition
from worldmodel.models.generator.base import Context, KVCache, Latents, PerFrame
from worldmodel.models.generator.diffusers.base import Clip, DiffusersGenerator
from worldmodel.models.generator.diffusers.scheduler import FlowPath, Scheduler
from worldmodel.models.generator.diffusers.self_attention import (
    Processor,
    Rotary,
    TokenAttention,
    forward_hooks,
    rotate_pairs,
)
from worldmodel.models.generator.diffusers.state_cross_attention import CopiedStream, StateStream
from worldmodel.parallel.layout import Layout
from worldmodel.parallel.tensor_parallel import Part


class LTXProcessor(Processor):
    """Self-attention of LTX's blocks: norms and rotary tables `[b, n, k * d]` over all heads."""

    def project(self, attn: Any, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values."""
        cosines, sines = (part[..., 0::2] for part in rotary)
        query, key = (
            rotate_pairs(norm(linear(x)), cosines, sines)
            for norm, linear in ((attn.norm_q, attn.to_q), (attn.norm_k, attn.to_k))
        )
        query, key, value = (
            part.unflatten(2, (attn.heads, -1)).transpose(1, 2) for part in (query, key, attn.to_v(x))
        )
        return query, key, value


class LTXGenerator(DiffusersGenerator):
    """LTX-Video 0.9."""

    transformer_class = LTXVideoTransformer3DModel
    processor_class = LTXProcessor
    stack = "transformer_blocks"
    scheduler_classes = (FlowMatchEulerDiscreteScheduler,)
    scheduler_default: ClassVar[dict[str, Any]] = {
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "use_dynamic_shifting": True,
        "base_shift": 0.95,
        "max_shift": 2.05,
        "base_image_seq_len": 1024,
        "max_image_seq_len": 4096,
        "shift_terminal": 0.1,
    }
    timestep_per_frame = True
    max_text_tokens = 128

    def __init__(
        self,
        transformer: LTXVideoTransformer3DModel,
        scheduler: Scheduler,
        clip: Clip,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        config: Any = transformer.config
        if (config.patch_size, config.patch_size_t) != (1, 1):
            raise ConfigError(
                f"The transformer's patches are {config.patch_size_t} x {config.patch_size}; only LTX models "
                "whose patches are single latent cells are supported."
            )
        super().__init__(transformer, scheduler, clip, *args, **kwargs)
        assert isinstance(scheduler, FlowMatchEulerDiscreteScheduler)
        self.path = FlowPath(scheduler)

    @property
    def text_width(self) -> int:
        """Width of the text embeddings."""
        return self.transformer.config.caption_channels

    def patches(self, transformer: Any) -> tuple[nn.Module, tuple[int, int, int]]:
        """Return the first layer, which reads single latent cells."""
        return transformer.proj_in, (1, 1, 1)

    def new_stream(self, transformer: Any) -> StateStream:
        """Return a stream of copies of the blocks' cross-attentions to the text."""
        attentions = [block.attn2 for block in transformer.transformer_blocks]
        return CopiedStream(attentions, transformer.caption_projection, self.width)

    def divide(self, part: Part) -> None:
        """Keep a part of the weights of every block, and of the rotary table, which spans all heads."""
        super().divide(part)
        own = part.index(self.width)

        def keep(rope: nn.Module, inputs: Any, table: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
            return tuple(each[..., own[0] : own[-1] + 1] for each in table)

        self.transformer.rope.register_forward_hook(keep)

    def timesteps(self, num_inference_steps: int) -> dict[str, Any]:
        """Return sigmas that are shifted towards noise by the number of tokens, as LTXPipeline does."""
        config: Any = self.scheduler.config
        shift = calculate_shift(
            self.clip.latents * math.prod(self.clip.grid),
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.15),
        )
        return {"sigmas": np.linspace(1.0, 1 / num_inference_steps, num_inference_steps), "mu": shift}

    def prefill(self, context: Context, condition: Condition) -> KVCache:
        """Keep the context frames, which the transformer processes again at every step."""
        return KVCache(context=context)

    def forward(self, latents: Latents, timestep: PerFrame, condition: Condition, cache: KVCache) -> Latents:
        """Predict the velocity."""
        context = cache.context
        assert context is not None
        x, count = torch.cat([context, latents], dim=1), context.shape[1]
        frames, height, width = x.shape[1], x.shape[3], x.shape[4]
        per_token = timestep[:, 0]
        if count:
            per_frame = torch.cat([timestep.new_zeros(len(timestep), count), timestep], dim=1)
            per_token = per_frame.repeat_interleave(height * width, dim=1)
        tokens = rearrange(x, "b t c h w -> b (t h w) c")
        layout = Layout.unmasked(tokens.shape[1]).shard(self.sequence)
        text, mask = self._masked(condition)
        dtype, states = self.transformer.dtype, self.states(condition)

        def add(embedded: Float[Tensor, "b n d"], tokens: Float[Tensor, "b m d"]) -> Tensor:
            return embedded + layout.take(tokens)

        with through(self.transformer, layout):
            prediction = self.network(
                None if states is None else states.to(dtype),
                self.channels(condition, frames),
                add,
                hidden_states=layout.take(tokens).to(dtype),
                encoder_hidden_states=text.to(dtype),
                timestep=layout.take(per_token) if count else per_token,
                encoder_attention_mask=mask,
                num_frames=frames,
                height=height,
                width=width,
                rope_interpolation_scale=(
                    self.clip.temporal_factor / self.clip.fps,
                    self.clip.spatial_factor,
                    self.clip.spatial_factor,
                ),
            )
        made = layout.gather(prediction.float())
        return rearrange(made, "b (t h w) c -> b t c h w", h=height, w=width)[:, count:]

    def _masked(self, condition: Condition) -> tuple[Float[Tensor, "b l e"], Float[Tensor, "b l"]]:
        """Return the prompt and its attention mask, which excludes the padding of texts."""
        prompt, text = self.prompt(condition), condition.text
        mask = torch.ones_like(prompt[..., 0])
        if text is not None:
            mask[:, : text.shape[1]] = (text != 0).any(dim=-1).to(mask.dtype)
        return prompt, mask

    def embed_text(self, texts: list[str]) -> Float[Tensor, "b m e"]:
        """Embed texts as LTXPipeline does; padding, which the attention mask excludes, becomes zeros."""
        pipeline = LTXPipeline(self.scheduler, None, self.text_encoder, self.tokenizer, None)  # type: ignore[arg-type]
        encoded: Any = pipeline.encode_prompt(
            texts,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_text_tokens,
            device=self.text_encoder.device,  # type: ignore[union-attr]
        )
        embeds, mask, *_ = encoded
        return embeds * mask[..., None].to(embeds.dtype)


@contextmanager
def through(transformer: Any, layout: Layout) -> Iterator[None]:
    """Run the transformer on this process's tokens inside; a layout that is not divided changes nothing."""
    if layout.shards is None:
        yield
        return

    def mark(rope: nn.Module, inputs: Any, table: tuple[Tensor, Tensor]) -> Rotary:
        return Rotary.of((layout.take(part) for part in table), TokenAttention(layout))

    with forward_hooks((transformer.rope, mark)):
        yield
