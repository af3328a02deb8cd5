"""Wan as a video generator: text-to-video, TI2V and image-to-video models.

Models with as many input as output channels (T2V, TI2V) take context frames as frames at timestep 0 before
the chunk; every token gets the timestep of its frame. Where they are causal, context frames do not attend to
the chunk, so that all its steps reuse their keys and values. Image-to-video models take context in added
channels: a mask of the known frames, and the latents of a clip in which all other frames are grey. Those of
Wan 2.1 also read CLIP features of the first context frame, as decoded by the codec.

Sources: Wan (arXiv:2503.20314); CausVid (arXiv:2412.07772) and Self Forcing (arXiv:2506.08009) for causal
ones in few steps.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from diffusers.pipelines.wan.pipeline_wan import WanPipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from worldmodel.batch import to_device
from worldmodel.errors import ConfigError, ModelError
from worldmodel.models.conditioning import Condition
from worldmodel.models.generator.base import Context, KVCache, Latents, PerFrame
from worldmodel.models.generator.diffusers.base import Clip, DiffusersGenerator
from worldmodel.models.generator.diffusers.network import Network
from worldmodel.models.generator.diffusers.scheduler import FlowPath, Scheduler, fixed_noise
from worldmodel.models.generator.diffusers.self_attention import (
    Processor,
    Rotary,
    TokenAttention,
    forward_hooks,
    install,
    rotate_pairs,
)
from worldmodel.models.generator.diffusers.state_cross_attention import CopiedStream, StateStream
from worldmodel.models.layers.attention import KeyValue
from worldmodel.models.loading import pipeline_folder
from worldmodel.parallel.layout import Layout


class WanProcessor(Processor):
    """Self-attention of Wan's blocks: norms over all heads, rotary tables `[1, n, 1, d]`."""

    def project(self, attn: Any, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values."""
        cosines, sines = rotary[0][..., 0::2], rotary[1][..., 1::2]
        query, key = (
            rotate_pairs(norm(linear(x)).unflatten(2, (attn.heads, -1)), cosines, sines).transpose(1, 2)
            for norm, linear in ((attn.norm_q, attn.to_q), (attn.norm_k, attn.to_k))
        )
        return query, key, attn.to_v(x).unflatten(2, (attn.heads, -1)).transpose(1, 2)


class WholeClips:
    """Attention processor of blocks whose batch may be parts of clips: whole clips for the processor inside.

    Blocks modulate a batch, not its tokens, so frames of unlike noise levels pass through them as a batch of
    frames, or of pieces of them where processes share a clip (`Layout.pieces`). Only attention mixes them,
    and it tells their number from its other inputs, so that a block which is recomputed after the pass does
    it again.
    """

    def __init__(self, own: Any) -> None:
        self.own = own

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Any = None,
    ) -> Tensor:
        clips = hidden_states
        if encoder_hidden_states is not None:
            clips = clips.reshape(len(encoder_hidden_states), -1, clips.shape[2])
        elif rotary_emb is not None:
            clips = clips.reshape(-1, rotary_emb[0].shape[1], clips.shape[2])
        made = self.own(attn, clips, encoder_hidden_states, attention_mask, rotary_emb)
        return made.reshape(hidden_states.shape)


def see_whole_clips(transformer: Any) -> None:
    """Put `WholeClips` in front of the processors of every block."""
    for block in transformer.blocks:
        for attention in (block.attn1, block.attn2):
            attention.set_processor(WholeClips(attention.processor))


def after(
    context: Context, latents: Latents, timestep: PerFrame
) -> tuple[Float[Tensor, "b n c h w"], Float[Tensor, "b n"]]:
    """Return the frames of a chunk behind those of its context, which are clean, and their timesteps."""
    clean = timestep.new_zeros(context.shape[:2])
    return torch.cat([context, latents], dim=1), torch.cat([clean, timestep], dim=1)


@contextmanager
def through(transformer: Any, attention: TokenAttention | None) -> Iterator[None]:
    """Run the transformer's self-attention with `attention` inside; None changes nothing.

    Tokens are divided behind the patch embedding and gathered behind the last layer.
    """
    if attention is None:
        yield
        return
    layout = attention.layout

    def mark(rope: nn.Module, inputs: tuple[Tensor], table: tuple[Tensor, Tensor]) -> Rotary:
        x, tokens = inputs[0], table[0].shape[1]
        if attention.past:  # frames are numbered from the first cached one
            earlier = attention.past[0][0].shape[2] // (tokens // x.shape[2])
            whole = rope.forward(x.new_empty(1, 1, earlier + x.shape[2], *x.shape[3:]))
            table = (whole[0][:, -tokens:], whole[1][:, -tokens:])
        return Rotary.of((layout.take(part) for part in table), attention)

    def divide(embed: nn.Module, inputs: Any, x: Float[Tensor, "b d t h w"]) -> Float[Tensor, "b d n"]:
        return layout.take(x.flatten(2), 2)

    def gather(project: nn.Module, inputs: Any, x: Float[Tensor, "_ n d"]) -> Float[Tensor, "b m d"]:
        return layout.gather(x.reshape(-1, len(layout.own), x.shape[2]))

    hooks = [(transformer.rope, mark)]
    if layout.shards is not None:
        hooks += [(transformer.patch_embedding, divide), (transformer.proj_out, gather)]
    with forward_hooks(*hooks):
        yield


class WanGenerator(DiffusersGenerator):
    """Wan 2.1 and 2.2."""

    transformer_class = WanTransformer3DModel
    processor_class = WanProcessor
    stack = "blocks"
    scheduler_classes = (UniPCMultistepScheduler, FlowMatchEulerDiscreteScheduler)
    scheduler_default: ClassVar[dict[str, Any]] = {
        "_class_name": "UniPCMultistepScheduler",
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
        "flow_shift": 3.0,
    }
    max_text_tokens = 512

    def __init__(
        self, transformer: WanTransformer3DModel, scheduler: Scheduler, clip: Clip, *args: Any, **kwargs: Any
    ) -> None:
        config: Any = transformer.config
        if config.pos_embed_seq_len is not None:
            raise ConfigError(
                "This Wan transformer reads a clip's first and last image (pos_embed_seq_len), and the last "
                "one is not known in advance; use an image-to-video model."
            )
        super().__init__(transformer, scheduler, clip, *args, **kwargs)
        see_whole_clips(transformer)
        self.cells_per_token = config.patch_size[1] * config.patch_size[2]
        self.concatenates = config.in_channels != config.out_channels
        """Whether context enters as channels."""
        self.timestep_per_frame = not self.concatenates
        if self.image_encoder is not None:
            self.text_length = (
                self.max_text_tokens
            )  # its attentions separate image features from text by length
            if not self.concatenates:
                raise ConfigError(
                    "This Wan transformer reads image features (image_dim) and has no channels for the image "
                    "itself; use an image-to-video model."
                )
        expected = clip.temporal_factor + 2 * config.out_channels
        if self.concatenates and config.in_channels != expected:
            raise ConfigError(
                f"The transformer takes {config.in_channels} channels; an image-to-video model of "
                f"{config.out_channels} latent channels takes {expected}."
            )
        assert isinstance(scheduler, UniPCMultistepScheduler | FlowMatchEulerDiscreteScheduler)
        self.path = FlowPath(scheduler)
        self.network_2: Network | None = None
        self.boundary_ratio = 0.0
        """Share of the schedule below which `network_2` predicts (Wan 2.2 A14B)."""

    def check_size(self, config: Any, clip: Clip) -> None:
        if config.patch_size[0] != 1 or any(
            count % side for count, side in zip(clip.grid, config.patch_size[1:], strict=True)
        ):
            raise ConfigError(
                f"The transformer's patch_size is {list(config.patch_size)} and a frame has {clip.grid[0]} x "
                f"{clip.grid[1]} latent cells; use patches of one latent frame and a codec.image_size that "
                "they divide."
            )

    @property
    def text_width(self) -> int:
        """Width of the text embeddings."""
        return self.transformer.config.text_dim

    def patches(self, transformer: Any) -> tuple[nn.Module, tuple[int, int, int]]:
        """Return the patch embedding, a convolution, and the size of a patch."""
        return transformer.patch_embedding, tuple(transformer.config.patch_size)

    def new_stream(self, transformer: Any) -> StateStream:
        """Return a stream of copies of the blocks' cross-attentions to the text."""
        attentions = [block.attn2 for block in transformer.blocks]
        return CopiedStream(attentions, transformer.condition_embedder.text_embedder, self.width)

    def prefill(self, context: Context, condition: Condition) -> KVCache:
        """Keep the context frames, their keys if causal, or the added channels of an image-to-video model."""
        if self.causal and context.shape[1]:
            clean = context.new_zeros(context.shape[:2])
            # A context frame is known, so that it has no forecast.
            known = replace(condition, forecast=None)
            return self._frames(context, clean, clean[:, 0], known, keep=True)[1]
        if not self.concatenates:
            return KVCache(context=context)
        self.require_context(context)
        grey, features = self._encode_context(context)
        # In the noisy input, context frames are noised to the timestep of each step.
        return KVCache(
            context=context,
            noise=fixed_noise(context),
            channels=self.added_channels(context, grey),
            image_features=features,
        )

    def forward(
        self,
        latents: Latents,
        timestep: PerFrame,
        condition: Condition,
        cache: KVCache,
        blocks: Int[Tensor, " t"] | None = None,
    ) -> Latents:
        """Predict the velocity.

        With `blocks`, a frame attends to frames whose number is not above its own; context frames belong to
        the first frame's block.
        """
        first = timestep[:, 0]
        if cache.layers:
            attention = self._attention(latents, past=cache.layers)
            return self._predict(latents, timestep, first, condition, attention)
        context = cache.context
        assert context is not None
        count = context.shape[1]
        if cache.channels is not None and cache.noise is not None:
            noisy = self.path.add_noise(context, cache.noise, timestep[:, :1].expand(-1, count))
            x = torch.cat([torch.cat([noisy, latents], dim=1), cache.channels], dim=2)
            attention, image = self._attention(x), cache.image_features
            return self._predict(x, first, first, condition, attention, image)[:, count:]
        x, timesteps = after(context, latents, timestep)
        if blocks is not None:
            blocks = torch.cat([blocks[:1].expand(count), blocks])
        elif not count:  # one for all frames, as in the pipeline, so that bits are equal
            timesteps = first
        return self._frames(x, timesteps, first, condition, blocks)[0][:, count:]

    @property
    def networks(self) -> list[nn.Module]:
        """The transformer with what is added to it, and the second one."""
        return [*super().networks, *filter(None, [self.network_2])]

    def compile_layers(self) -> None:
        """Compile the blocks of both transformers."""
        super().compile_layers()
        if self.network_2 is not None:
            for layer in self.network_2.transformer.blocks:  # type: ignore[union-attr]
                layer.compile()

    @property
    def chunkwise(self) -> bool:  # type: ignore[override]
        """Whether a single transformer attends to all frames, each at its own noise level."""
        return not self.concatenates and self.network_2 is None

    def prefill_chunk(
        self,
        context: Context,
        latents: Latents,
        timestep: PerFrame,
        condition: Condition,
        keep: bool = True,
    ) -> tuple[Latents, KVCache]:
        """Return the velocity of a chunk, and keys and values of it and its context, block by block."""
        count = context.shape[1]
        # Context does not see the chunk, as in `prefill`, so both ways give equal features.
        blocks = torch.tensor([0] * count + [1] * latents.shape[1]) if self.causal and count else None
        frames, first = after(context, latents, timestep), timestep[:, 0]
        velocity, cache = self._frames(*frames, first, condition, blocks, keep)
        return velocity[:, count:], cache

    def _frames(
        self,
        x: Float[Tensor, "b t c h w"],
        timestep: Tensor,
        first: Float[Tensor, " b"],
        condition: Condition,
        blocks: Int[Tensor, " t"] | None = None,
        keep: bool = False,
    ) -> tuple[Latents, KVCache]:
        """Return the velocity of frames, and with `keep` their keys and values, block by block.

        Timesteps are those of `_predict`.
        """
        attention = self._attention(x, blocks, present=[(x[:0], x[:0])] * len(self.layers) if keep else None)
        velocity = self._predict(x, timestep, first, condition, attention)
        if attention is None or attention.present is None:
            return velocity, KVCache()
        present, attention.present = attention.present, None
        return velocity, KVCache(tuple(present))

    def sigma_at(self, position: Float[Tensor, "b r"]) -> Float[Tensor, "b r"]:
        """Return the sigma at a position of the scheduler's own schedule."""
        assert isinstance(self.path, FlowPath)
        count = self.path.count
        return self.path.sigmas.to(position)[((1 - position) * count).long().clamp(max=count - 1)]

    def timesteps(self, num_inference_steps: int) -> dict[str, Any]:
        """Return the pipeline's arguments; causal: even sigmas, at which models of few steps are trained."""
        if self.causal and isinstance(self.scheduler, FlowMatchEulerDiscreteScheduler):
            # Its own end near noise 0, where the last of a few steps would be wasted.
            return {"sigmas": np.linspace(1.0, 1 / num_inference_steps, num_inference_steps)}
        return super().timesteps(num_inference_steps)

    def added_channels(self, context: Context, grey: Latents) -> Float[Tensor, "b n m h w"]:
        """Return the added channels: a mask of the known frames, and latents.

        Args:
            context: latents of the known frames.
            grey: latents of the grey frames that follow them.
        """
        group, count = self.clip.temporal_factor, context.shape[1]
        known = context.new_zeros(len(context), count + grey.shape[1], group, *context.shape[3:])
        known[:, :count] = 1  # the first latent frame, a single frame, counts as a whole group
        return torch.cat([known, torch.cat([context, grey], dim=1)], dim=2)

    @torch.no_grad()
    def _encode_context(self, context: Context) -> tuple[Tensor, Tensor | None]:
        """Return latents of grey frames that follow the context, and image features of its first frame.

        Features are None without an image encoder.
        """
        (codec,) = self._codec
        assert codec is not None, "an image-to-video model needs the codec"
        frames = codec.decode(context)
        after = frames.new_zeros(
            len(frames), self.clip.chunk_latents * codec.temporal_factor, *frames.shape[2:]
        )
        grey = codec.encode(after, before=frames)
        if self.image_encoder is None:
            return grey, None
        shared = Layout.items(len(frames), self.sequence)
        features = self.image_encoder.everything(shared.take(frames[:, :1], 0).clamp(-1, 1))
        return grey, shared.gather(features, 0).flatten(1, 2)

    def _cells(self, x: Float[Tensor, "b t c h w"]) -> int:
        """Return the number of tokens of a frame."""
        return x.shape[3] * x.shape[4] // self.cells_per_token

    def _attention(
        self,
        x: Float[Tensor, "b t c h w"],
        blocks: Int[Tensor, " t"] | None = None,
        past: tuple[KeyValue, ...] = (),
        present: list[KeyValue] | None = None,
    ) -> TokenAttention | None:
        """Return the inputs of the self-attention, or None where the transformer's own does."""
        if blocks is not None:
            layout = Layout.frames(blocks, self._cells(x)).shard(self.sequence, balance=True)
        else:
            layout = Layout.unmasked(x.shape[1] * self._cells(x)).shard(self.sequence)
        needed = layout.masked or layout.shards is not None or past or present is not None
        return TokenAttention(layout, past, present) if needed else None

    def _predict(
        self,
        x: Float[Tensor, "b t c h w"],
        timestep: Tensor,
        first: Float[Tensor, " b"],
        condition: Condition,
        attention: TokenAttention | None,
        image_features: Tensor | None = None,
    ) -> Tensor:
        """Call the transformer that serves each sample's `first` timestep.

        `timestep` is one per sample, `[b]`, or one per frame, `[b, t]`.
        """
        x = rearrange(x, "b t c h w -> b c t h w").contiguous()
        inputs, states = [x, timestep, self.prompt(condition)], self.states(condition)
        channels = self.channels(condition, x.shape[2])
        if image_features is not None:
            inputs.append(image_features)
        if self.network_2 is None:
            out = self._call(self.network, inputs, states, channels, attention)
        else:
            high = first >= self.boundary_ratio * self.scheduler.config.num_train_timesteps
            out = torch.empty_like(x[:, : self.transformer.config.out_channels])
            chosen = [high.nonzero()[:, 0], (~high).nonzero()[:, 0]]
            needed = self.agreement.most(*map(len, chosen))
            for network, rows, most in zip((self.network, self.network_2), chosen, needed, strict=True):
                if not most:
                    continue
                called = rows if len(rows) else rows.new_zeros(1)
                given, placed = (None if each is None else each[called] for each in (states, channels))
                made = self._call(network, [each[called] for each in inputs], given, placed, attention)
                out[rows] = made[: len(rows)]
        return rearrange(out, "b c t h w -> b t c h w")

    def _call(
        self,
        network: Network,
        inputs: list[Tensor],
        states: Tensor | None,
        channels: Tensor | None,
        attention: TokenAttention | None,
    ) -> Tensor:
        x, timestep, text, *features = inputs
        transformer: Any = network.transformer
        dtype = transformer.dtype
        hooks = []
        if timestep.dim() == 2:
            if attention is not None and attention.layout.shards is not None:
                frames = attention.layout.pieces(self._cells(x))
                timestep = timestep[:, to_device(frames, timestep.device)]
            count, timestep = timestep.shape[1], timestep.flatten()

            def as_batch(embed: nn.Module, inputs: Any, x: Tensor) -> Float[Tensor, "_ d n"]:
                return rearrange(x.flatten(2), "b d (p n) -> (b p) d n", p=count)

            hooks.append((transformer.patch_embedding, as_batch))

        def add(embedded: Float[Tensor, "b d t h w"], tokens: Float[Tensor, "b n d"]) -> Tensor:
            return embedded + tokens.transpose(1, 2).unflatten(2, embedded.shape[2:])

        with through(transformer, attention), forward_hooks(*hooks):
            made = network(
                None if states is None else states.to(dtype),
                channels,
                add,
                hidden_states=x.to(dtype),
                timestep=timestep,
                encoder_hidden_states=text.to(dtype),
                encoder_hidden_states_image=features[0].to(dtype) if features else None,
            )
        return made.to(x.dtype)

    def embed_text(self, texts: list[str]) -> Float[Tensor, "b m e"]:
        """Embed texts as WanPipeline does."""
        pipeline = WanPipeline(self.tokenizer, self.text_encoder, None, self.scheduler)  # type: ignore[arg-type]
        return pipeline.encode_prompt(
            texts,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_text_tokens,
            device=self.text_encoder.device,  # type: ignore[union-attr]
        )[0]

    # ---- two transformers ----------------------------------------------------------------------------

    def add_second(self, source: pipeline_folder.Source) -> None:
        """Load the transformer for low noise levels, if the folder has one."""
        if source.transformer_2 is None:
            return
        if not isinstance(source.boundary_ratio, float):
            raise ModelError(f"{source.transformer_2} has no boundary_ratio; download the model again.")
        dtype = self.transformer.dtype
        transformer = pipeline_folder.load_model(source.transformer_2, [WanTransformer3DModel], dtype)
        self.set_second(transformer, source.boundary_ratio)  # type: ignore[arg-type]
        assert self.network_2 is not None
        self.network_2.load_added(source.transformer_2)

    def set_second(self, transformer: WanTransformer3DModel, boundary_ratio: float) -> None:
        """Use another transformer below a share of the schedule."""
        install(transformer.blocks, self.processor_class)
        stream = None if self.network.stream is None else self.build_stream(transformer)
        self.network_2, self.boundary_ratio = Network(transformer, stream), boundary_ratio
        if self.state_channels:
            self.network_2.channels = self.build_channels(transformer)
        see_whole_clips(transformer)

    def save_pretrained(self, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write the generator, with its second transformer in `transformer_2`."""
        super().save_pretrained(folder, dtype)
        if self.network_2 is not None:
            second = Path(folder) / "transformer_2"
            self.network_2.save_pretrained(second, dtype)
            values = {"boundary_ratio": self.boundary_ratio}
            (second / pipeline_folder.BOUNDARY).write_text(json.dumps(values) + "\n", encoding="utf-8")
