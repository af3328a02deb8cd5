"""The video generator: a flow-matching diffusion transformer over latent frames.

Source: Peebles & Xie 2023 (arXiv:2212.09748) for adaLN-zero; Chen et al. 2024 (arXiv:2307.15818 and
PixArt, arXiv:2310.00426) for one modulation shared by the layers; Chen et al. 2024 (arXiv:2407.01392)
for a noise level per frame.
"""

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from worldmodel.config import GeneratorConfig, WorldModelConfig
from worldmodel.diffusion.loss import add_noise, velocity_error
from worldmodel.diffusion.schedule import shifted
from worldmodel.diffusion.solver import AncestralSolver, EulerSolver
from worldmodel.models.conditioning import Condition
from worldmodel.models.generator.base import (
    Context,
    KVCache,
    Latents,
    LossOutput,
    PerFrame,
    VideoGenerator,
)
from worldmodel.models.layers import attention
from worldmodel.models.layers.attention import KeyValue
from worldmodel.models.layers.norm import RMSNorm, upcast
from worldmodel.models.layers.spatial import LocalFeedForward, SelfAttention, rope_table
from worldmodel.parallel.layout import Layout
from worldmodel.parallel.mesh import SequenceGroup
from worldmodel.parallel.tensor_parallel import Part, keep_inputs, keep_outputs


def sigma_embedding(sigma: PerFrame, width: int) -> Float[Tensor, "b t d"]:
    """Sinusoidal features of the noise level."""
    frequencies = torch.exp(-math.log(1000) * torch.arange(width // 2, device=sigma.device) / (width // 2))
    angle = 1000 * upcast(sigma)[..., None] * frequencies
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


class Block(nn.Module):
    """Self-attention over space and time, attention to the condition, a feed-forward mixing neighbours."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention = SelfAttention(width, num_heads)
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * width, bias=False)
        self.cross_out = nn.Linear(width, width, bias=False)
        self.cross_norm = RMSNorm(width)
        self.feed_forward = LocalFeedForward(width)
        self.modulation = nn.Parameter(torch.zeros(6, width))
        # Attention to the condition begins without effect; gradients decide what to add.
        nn.init.zeros_(self.cross_out.weight)

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        modulation: Float[Tensor, "b t 6 d"],
        tokens: Float[Tensor, "b m d"],
        rope: Float[Tensor, "2 n e"],
        layout: Layout,
        past: KeyValue | None,
        grid: tuple[int, int],
        frame: Int[Tensor, " n"] | None = None,
    ) -> tuple[Float[Tensor, "b n d"], KeyValue]:
        """Return new features, and the keys and values of the self-attention.

        `frame` is the frame of each token; None: all frames are here, one after the other.
        """
        # One modulation from noise level and state for all layers, and a learned offset in each (PixArt's
        # adaLN-single): most of adaLN's parameters for a small table.
        parts = modulation + self.modulation
        if frame is None:
            parts = parts.repeat_interleave(x.shape[1] // modulation.shape[1], dim=1)
        else:
            parts = parts.index_select(1, frame)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts.unbind(dim=2)
        mixed, present = self.attention(normalise(x) * (1 + scale1) + shift1, rope, layout, past)
        x = x + gate1 * mixed
        q = rearrange(self.query(self.cross_norm(x)), "b n (k d) -> b k n d", k=self.num_heads)
        k, v = rearrange(self.key_value(tokens), "b n (p k d) -> p b k n d", p=2, k=self.num_heads)
        x = x + self.cross_out(rearrange(attention.attend(q, k, v), "b k n d -> b n (k d)"))
        return x + gate2 * self.feed_forward(normalise(x) * (1 + scale2) + shift2, grid, layout), present

    def divide(self, part: Part) -> None:
        """Keep the heads and the hidden channels of a part, in place."""
        self.num_heads = part.share(self.num_heads, "attention heads")
        self.attention.divide(part)
        keep_outputs(self.query, part)
        keep_outputs(self.key_value, part, groups=2)
        keep_inputs(self.cross_out, part)
        self.feed_forward.divide(part)


def normalise(x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
    """Layer norm without learned scale and shift, which the modulation provides."""
    return F.layer_norm(x, x.shape[-1:], eps=1e-6)


class DiT(VideoGenerator):
    """Predicts the flow-matching velocity of latent frames, each at its own noise level.

    Context frames are frames at noise 0 in front of the chunk. Attention is causal over blocks of
    frames and full inside a block, so keys and values of context frames are computed once per chunk
    (`prefill`) and reused by every denoising step.
    """

    chunkwise = True

    def __init__(
        self, config: GeneratorConfig, latent_channels: int, grid: tuple[int, int], residual: bool = True
    ) -> None:
        """Build the transformer.

        Args:
            config: Its sizes.
            latent_channels: Channels of a latent cell.
            grid: Rows and columns of latent cells in a frame.
            residual: Predict a correction to the condition's forecast; otherwise the velocity, and the
                forecast is not read.
        """
        super().__init__()
        self.config, self.grid, self.residual = config, grid, residual
        self.sequence = SequenceGroup()
        """Processes that share a clip, each some of its tokens."""
        self.width = self.token_width = width = config.width
        self.num_heads = config.num_heads
        self.embed = nn.Linear((2 if residual else 1) * latent_channels, width)
        self.embed_sigma = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.modulation = nn.Linear(width, 6 * width)
        self.layers = nn.ModuleList(Block(width, config.num_heads) for _ in range(config.num_layers))
        self.project = nn.Linear(width, latent_channels)
        nn.init.zeros_(self.modulation.weight)
        with torch.no_grad():  # gates start at 1/2: branches contribute, and their sum stays small
            bias = self.modulation.bias.zero_().view(6, width)
            bias[2].fill_(0.5)
            bias[5].fill_(0.5)
        nn.init.zeros_(self.project.weight)

    def resize(self, config: WorldModelConfig) -> None:
        self.grid = config.codec.grid

    def divide(self, part: Part) -> None:
        """Keep a part of the weights of every block."""
        for layer in self.layers:
            layer.divide(part)  # type: ignore[operator]

    def prefill(self, context: Context, condition: Condition) -> KVCache:
        """Return keys and values of the context frames, layer by layer."""
        sigma = context.new_zeros(context.shape[:2])
        # A context frame is known: its forecast is the frame itself, and sigma 0 marks it as clean.
        forecast = context if self.residual else None
        # Frame indices count from the chunk: it begins at 0, and context frames end at -1. So a chunk has
        # equal positions in every round.
        first_frame = -context.shape[1]
        return self.velocity(context, sigma, forecast, condition, first_frame=first_frame, keep=True)[1]

    def prefill_chunk(
        self,
        context: Context,
        latents: Latents,
        timestep: PerFrame,
        condition: Condition,
        keep: bool = True,
    ) -> tuple[Latents, KVCache]:
        """Return the velocity of a chunk, and keys and values of it and of its context frames.

        All frames pass together, each at its own noise level.
        """
        past, frames = context.shape[1], latents.shape[1]
        forecast = self._forecast(condition)
        velocity, cache = self.velocity(
            torch.cat([context, latents], dim=1),
            torch.cat([timestep.new_zeros(len(timestep), past), timestep], dim=1),
            None if forecast is None else torch.cat([context, forecast], dim=1),
            condition,
            # Block-causal: context does not see the chunk, as in `prefill`, so both ways give equal features.
            blocks=torch.tensor([0] * past + [1] * frames),
            first_frame=-(past + frames),
            keep=keep,
        )
        return velocity[:, past:], cache

    def sigma_at(self, position: Float[Tensor, "b r"]) -> Float[Tensor, "b r"]:
        """Return the sigma at a position of the shifted schedule."""
        return shifted(position)

    def forward(self, latents: Latents, timestep: PerFrame, condition: Condition, cache: KVCache) -> Latents:
        """Return the velocity of a chunk's frames; timesteps are sigmas."""
        return self.velocity(latents, timestep, self._forecast(condition), condition, cache=cache)[0]

    def solver(self, num_inference_steps: int) -> EulerSolver:
        """Return Euler's method, or ancestral sampling, on the shifted schedule."""
        solver = AncestralSolver if self.config.stochastic_sampling else EulerSolver
        return solver.of(num_inference_steps)

    def training_loss(
        self,
        clean: Latents,
        noise: Latents,
        sigma: PerFrame,
        condition: Condition,
        context: Context,
        continues_previous: Bool[Tensor, " b"] | None = None,
    ) -> LossOutput:
        """Compare velocities."""
        noisy = add_noise(clean, noise, sigma)
        if continues_previous is None:
            velocity, _ = self.prefill_chunk(context, noisy, sigma, condition, keep=False)
        else:
            velocity = self.predict_windows(context, noisy, sigma, condition, continues_previous)
        if self.residual:
            error = velocity_error(velocity, noisy, clean, sigma)
        else:
            error = (velocity - (noise - clean)).pow(2).mean(dim=2)
        return LossOutput(error, noisy - sigma[:, :, None, None, None] * velocity)

    def _forecast(self, condition: Condition) -> Float[Tensor, "b t c h w"] | None:
        if not self.residual:
            return None
        assert condition.forecast is not None, "the grid adapter makes one"
        return condition.forecast

    def velocity(
        self,
        latents: Latents,
        sigma: PerFrame,
        forecast: Latents | None,
        condition: Condition,
        blocks: Int[Tensor, " t"] | None = None,
        first_frame: int = 0,
        cache: KVCache | None = None,
        keep: bool = False,
    ) -> tuple[Latents, KVCache]:
        """Return the velocity of every frame, and with `keep` the keys and values of every layer.

        `forecast` is the regressed clean frame (for a context frame, the frame itself), which the network's
        output corrects; without one, the output is the velocity. A frame attends to frames whose number in
        `blocks` is not above its own (None: to all frames). `cache` holds keys and values of earlier frames;
        `first_frame` is the index of the first frame given here (context frames are negative).
        """
        assert condition.cells is not None and condition.pooled is not None, "our adapters make both"
        assert condition.tokens is not None, "and tokens"
        frames, cells = latents.shape[1], math.prod(self.grid)
        layout = Layout.unmasked(frames * cells) if blocks is None else Layout.frames(blocks, cells)
        # Without a mask all tokens cost the same, and contiguous pieces are balanced already.
        layout = layout.shard(self.sequence, balance=layout.masked)
        inputs = latents if forecast is None else torch.cat([latents, forecast], dim=2)
        x = self.embed(layout.take(rearrange(inputs, "b t c h w -> b (t h w) c")))
        x = x + layout.take(condition.cells.repeat(1, frames, 1))
        level = self.embed_sigma(sigma_embedding(sigma, self.config.width)) + condition.pooled[:, None]
        modulation = rearrange(self.modulation(F.silu(level)), "b t (m d) -> b t m d", m=6)
        frame = None
        if layout.shards is not None:
            # A process has pieces of frames then, so the modulation of each token is looked up by its frame.
            frame = layout.take(torch.arange(frames, device=x.device).repeat_interleave(cells), 0)
        indices = torch.arange(first_frame, first_frame + frames, device=latents.device)
        rope = layout.take(rope_table(indices, self.grid, self.config.width // self.config.num_heads))
        present: list[KeyValue] = []
        for index, layer in enumerate(self.layers):
            past = cache.layers[index] if cache is not None else None
            x, key_value = layer(x, modulation, condition.tokens, rope, layout, past, self.grid, frame)
            if keep:
                present.append(key_value)
        output = layout.gather(self.project(normalise(x)))
        output = upcast(rearrange(output, "b (t h w) c -> b t c h w", t=frames, h=self.grid[0]))
        if forecast is not None:
            # x = (1 - sigma) clean + sigma noise, so the velocity noise - clean is (x - clean) / sigma. The
            # network's output corrects the forecast of the clean frame; the clamp keeps context frames (sigma
            # 0) finite, whose velocity nobody reads.
            output = (latents - (forecast + output)) / sigma.clamp(min=1e-3)[:, :, None, None, None]
        return output, KVCache(tuple(present))
