"""CogVideoX image-to-video as a video generator; context enters in added channels.

Its text-to-video models have no input for context frames and are not supported.

Source: CogVideoX (arXiv:2408.06072).
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from diffusers.models.autoencoders.autoencoder_kl_cogvideox import AutoencoderKLCogVideoX
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from diffusers.models.transformers.cogvideox_transformer_3d import CogVideoXTransformer3DModel
from diffusers.pipelines.cogvideo.pipeline_cogvideox import (
    CogVideoXPipeline,
    get_resize_crop_region_for_grid,
)
from diffusers.schedulers.scheduling_ddim_cogvideox import CogVideoXDDIMScheduler
from diffusers.schedulers.scheduling_dpm_cogvideox import CogVideoXDPMScheduler
from jaxtyping import Float
from torch import Tensor, nn

from worldmodel.errors import ConfigError
from worldmodel.models.codec.diffusers import DiffusersCodec
from worldmodel.models.conditioning import Condition
from worldmodel.models.generator.base import Context, KVCache, Latents, PerFrame
from worldmodel.models.generator.diffusers.base import Clip, DiffusersGenerator
from worldmodel.models.generator.diffusers.scheduler import Scheduler, VariancePath, fixed_noise
from worldmodel.models.generator.diffusers.self_attention import (
    Processor,
    Rotary,
    TokenAttention,
    forward_hooks,
    rotate_pairs,
)
from worldmodel.models.generator.diffusers.state_cross_attention import FreshStream, StateStream
from worldmodel.parallel.layout import Layout


class CogVideoXProcessor(Processor):
    """Attention of CogVideoX's blocks over text and video: norms head by head, rotary positions of the video.

    The rotary table is empty where the transformer has none.
    """

    def run(self, attn: Any, x: Tensor, text: Tensor | None, rotary: Rotary) -> Any:
        """Return the output of the video and that of the text."""
        assert text is not None, "blocks of CogVideoX pass the text"
        out, words = super().run(attn, torch.cat([text, x], dim=1), None, rotary), text.shape[1]
        return out[:, words:], out[:, :words]

    def project(self, attn: Any, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of text and video."""
        query, key, value = (
            linear(x).unflatten(2, (attn.heads, -1)).transpose(1, 2)
            for linear in (attn.to_q, attn.to_k, attn.to_v)
        )
        query, key = (
            part if norm is None else norm(part) for part, norm in ((query, attn.norm_q), (key, attn.norm_k))
        )
        if rotary:
            words = x.shape[1] - rotary[0].shape[0]
            cosines, sines = (part[:, 0::2] for part in rotary)
            query, key = (
                torch.cat([part[:, :, :words], rotate_pairs(part[:, :, words:], cosines, sines)], dim=2)
                for part in (query, key)
            )
        return query, key, value


class CogVideoXGenerator(DiffusersGenerator):
    """CogVideoX 1.0 and 1.5."""

    transformer_class = CogVideoXTransformer3DModel
    processor_class = CogVideoXProcessor
    stack = "transformer_blocks"
    scheduler_classes = (CogVideoXDDIMScheduler, CogVideoXDPMScheduler)
    scheduler_default: ClassVar[dict[str, Any]] = {
        "_class_name": "CogVideoXDDIMScheduler",
        "beta_schedule": "scaled_linear",
        "clip_sample": False,
        "prediction_type": "v_prediction",
        "rescale_betas_zero_snr": True,
        "snr_shift_scale": 1.0,
        "timestep_spacing": "trailing",
    }
    timestep_per_frame = False

    def __init__(
        self,
        transformer: CogVideoXTransformer3DModel,
        scheduler: Scheduler,
        clip: Clip,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        config: Any = transformer.config
        super().__init__(transformer, scheduler, clip, *args, **kwargs)
        self.cells_per_token = config.patch_size**2 * (config.patch_size_t or 1)
        assert isinstance(scheduler, CogVideoXDDIMScheduler | CogVideoXDPMScheduler)
        self.path = VariancePath(scheduler)
        self.text_length = self.max_text_tokens = config.max_text_seq_length
        (codec,) = self._codec
        self.context_scale = 1.0
        """Factor from context latents to the scale that the transformer was trained with."""
        if isinstance(codec, DiffusersCodec) and isinstance(codec.vae, AutoencoderKLCogVideoX):
            vae: Any = codec.vae.config
            if vae.invert_scale_latents:  # CogVideoX 1.5 was trained with images divided by it
                self.context_scale = vae.scaling_factor**-2

    def check_size(self, config: Any, clip: Clip) -> None:
        if clip.context_latents and config.in_channels != 2 * config.out_channels:
            raise ConfigError(
                "This CogVideoX transformer is text-to-video and cannot continue frames; use an "
                "image-to-video one (CogVideoX-5b-I2V, CogVideoX1.5-5B-I2V)."
            )
        patch = config.patch_size_t or 1
        if clip.latents % patch:
            raise ConfigError(
                f"Context and chunk are {clip.latents} latent frames, which is not a multiple of this "
                f"transformer's patches of {patch}; change chunk_frames or context_latents."
            )
        rows, columns = clip.grid
        if rows % config.patch_size or columns % config.patch_size:
            raise ConfigError(
                f"A frame has {rows} x {columns} latent cells, which are not multiples of this transformer's "
                f"patches of {config.patch_size}; change codec.image_size."
            )
        known = (config.sample_height, config.sample_width)
        if config.use_learned_positional_embeddings and known != clip.grid:
            raise ConfigError(
                f"This transformer has learned positions for {known[0]} x {known[1]} latent cells, and a "
                f"frame has {rows} x {columns}; change codec.image_size or use a CogVideoX 1.5 model."
            )

    @property
    def text_width(self) -> int:
        """Width of the text embeddings."""
        return self.transformer.config.text_embed_dim

    def patches(self, transformer: Any) -> tuple[nn.Module, tuple[int, int, int]]:
        """Return the embedding of text and patches, and the size of a patch."""
        config = transformer.config
        return transformer.patch_embed, (config.patch_size_t or 1, config.patch_size, config.patch_size)

    def new_stream(self, transformer: Any) -> StateStream:
        """Return a stream of new attentions: text and video share one, so there is none to copy."""
        return FreshStream([block.attn1 for block in transformer.transformer_blocks], self.width)

    def prefill(self, context: Context, condition: Condition) -> KVCache:
        """Compute the added channels, and noise for the context frames in the noisy input."""
        if self.transformer.config.in_channels != self.transformer.config.out_channels:
            self.require_context(context)
        # In the noisy input they are noised to the timestep of each step.
        return KVCache(context=context, noise=fixed_noise(context), channels=self.added_channels(context))

    def added_channels(self, context: Context) -> Float[Tensor, "b n c h w"]:
        """Return the added channels: latents of the context frames, then zeros."""
        unknown = context.new_zeros(len(context), self.clip.chunk_latents, *context.shape[2:])
        return torch.cat([self.context_scale * context, unknown], dim=1)

    def forward(self, latents: Latents, timestep: PerFrame, condition: Condition, cache: KVCache) -> Latents:
        """Predict v at the first frame's timestep."""
        context, noise, channels = cache.context, cache.noise, cache.channels
        assert context is not None and noise is not None and channels is not None
        config, count = self.transformer.config, context.shape[1]
        x = latents
        if count:
            noisy = self.path.add_noise(context, noise, timestep[:, :1].expand(-1, count))
            x = torch.cat([noisy, latents], dim=1)
        if config.in_channels != config.out_channels:
            x = torch.cat([x, channels], dim=2)
        dtype, states, text = self.transformer.dtype, self.states(condition), self.prompt(condition)
        tokens = text.shape[1] + math.prod(x.shape[1:]) // (x.shape[2] * self.cells_per_token)
        layout = Layout.unmasked(tokens).shard(self.sequence)
        words = text.shape[1]

        def add(embedded: Float[Tensor, "b n d"], tokens: Float[Tensor, "b m d"]) -> Tensor:
            return torch.cat([embedded[:, :words], embedded[:, words:] + tokens], dim=1)

        with through(self.transformer, layout, self._rotary(x), words) as rotary:
            prediction = self.network(
                None if states is None else states.to(dtype),
                self.channels(condition, x.shape[1]),
                add,
                hidden_states=x.to(dtype),
                encoder_hidden_states=text.to(dtype),
                timestep=timestep[:, 0].long(),
                ofs=None if config.ofs_embed_dim is None else x.new_full((1,), 2.0),
                image_rotary_emb=rotary,
            )
        return prediction.float()[:, count:]

    def _rotary(self, x: Float[Tensor, "b n c h w"]) -> Any:
        """Return the rotary cosines and sines of all patches; None for learned positions."""
        config = self.transformer.config
        if not config.use_rotary_positional_embeddings:
            return None
        frames, _, height, width = x.shape[1:]
        patch, heads = config.patch_size, config.attention_head_dim
        grid = (height // patch, width // patch)
        base = (config.sample_height // patch, config.sample_width // patch)
        if config.patch_size_t is None:  # 1.0 stretches the grid to the one it was trained with
            region = get_resize_crop_region_for_grid(grid, base[1], base[0])
            return get_3d_rotary_pos_embed(heads, region, grid, frames, device=x.device)
        count = frames // config.patch_size_t  # 1.5 takes a slice of it
        return get_3d_rotary_pos_embed(
            heads, None, grid, count, grid_type="slice", max_size=base, device=x.device
        )

    def embed_text(self, texts: list[str]) -> Float[Tensor, "b m e"]:
        """Embed texts as CogVideoXPipeline does."""
        pipeline = CogVideoXPipeline(self.tokenizer, self.text_encoder, None, None, self.scheduler)  # type: ignore[arg-type]
        return pipeline.encode_prompt(
            texts,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_text_tokens,
            device=self.text_encoder.device,  # type: ignore[union-attr]
        )[0]


@contextmanager
def through(
    transformer: Any, layout: Layout, table: tuple[Tensor, Tensor] | None, words: int
) -> Iterator[tuple[Tensor, ...] | None]:
    """Run the transformer on this process's tokens inside, and yield the rotary table that it takes.

    Tokens of text and video together are divided in front of the first block, and those of the video are
    gathered behind the last layer. A layout that is not divided changes nothing.
    """
    if layout.shards is None:
        yield table
        return
    text, video = layout.split(words)

    def divide(block: nn.Module, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        states, embeds = video.take(inputs["hidden_states"]), text.take(inputs["encoder_hidden_states"])
        return args, inputs | {"hidden_states": states, "encoder_hidden_states": embeds}

    def gather(project: nn.Module, inputs: Any, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b m d"]:
        return video.gather(x)

    handle = transformer.transformer_blocks[0].register_forward_pre_hook(divide, with_kwargs=True)
    try:
        with forward_hooks((transformer.proj_out, gather)):
            yield Rotary.of((video.take(part, 0) for part in table or ()), TokenAttention(layout))
    finally:
        handle.remove()
