"""The interface of a video generator, the same for our transformer and for generators of diffusers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from worldmodel.batch import take
from worldmodel.config import WorldModelConfig
from worldmodel.diffusion.solver import Solver
from worldmodel.errors import ConfigError
from worldmodel.models.conditioning import Condition
from worldmodel.models.layers.attention import KeyValue
from worldmodel.parallel.agreement import Agreement
from worldmodel.parallel.layout import Layout
from worldmodel.parallel.mesh import SequenceGroup
from worldmodel.parallel.tensor_parallel import Part

Latents = Float[Tensor, "b t c h w"]
"""Latent frames of a chunk."""
Context = Float[Tensor, "b s c h w"]
"""Latent frames before a chunk."""
PerFrame = Float[Tensor, "b t"]
"""A sigma or a timestep of every frame."""


@dataclass(frozen=True)
class KVCache:
    """The inputs that a generator keeps of the frames before a chunk; batch first in every tensor.

    A generator fills the fields that it uses: keys and values, or the context and inputs derived from it.
    """

    layers: tuple[KeyValue, ...] = ()
    """Keys and values of every transformer block."""
    context: Float[Tensor, "b s c h w"] | None = None
    """Latents of the context frames."""
    noise: Float[Tensor, "b s c h w"] | None = None
    """Noise added to them at each step, where they are part of the noisy input."""
    channels: Float[Tensor, "b n m h w"] | None = None
    """Channels concatenated to the noisy input."""
    image_features: Float[Tensor, "b l e"] | None = None
    """Features of the first context frame, from an image encoder."""


@dataclass(frozen=True)
class LossOutput:
    """Error of a prediction at one noise level."""

    error: Float[Tensor, "b t h w"]
    """Squared error of the prediction, averaged over channels."""
    clean: Float[Tensor, "b t c h w"]
    """The clean latents that the prediction implies."""


class VideoGenerator(nn.Module, ABC):
    """Generates the latents of a chunk that continues context frames, under a condition.

    `timestep` is in the units of the generator's own `solver`, which also takes its predictions.
    """

    token_width: int
    """Width of `Condition.tokens`."""
    width: int
    """Width of its hidden states."""
    num_heads: int
    """Heads of its self-attention."""
    cells_per_token: int = 1
    """Latent cells that share a token."""
    layers: nn.ModuleList
    """Its transformer blocks."""
    chunkwise: bool = False
    """Whether a chunk can continue one that is still noisy (`prefill_chunk`), as `sampler: swin` needs."""
    sequence: SequenceGroup = SequenceGroup()
    """Processes that share a clip."""
    agreement: Agreement = Agreement()
    """The processes that train it."""
    text_states: Mapping[str, Float[Tensor, "_ e"]] = MappingProxyType({})
    """Texts that need no encoding: their embeddings, without zeros at the end, on the CPU."""

    @property
    def networks(self) -> list[nn.Module]:
        """Modules that compute, each of which is sharded as a whole."""
        return [self]

    def resize(self, config: WorldModelConfig) -> None:
        """Generate frames of the size of a config.

        Raises:
            ConfigError: it cannot.
        """

    def compile_layers(self) -> None:
        """Compile the transformer blocks (torch.compile), each when it first meets a shape."""
        for layer in self.layers:
            layer.compile()

    def divide(self, part: Part) -> None:
        """Keep a part of the weights of the blocks, in place; calls become collectives of all processes.

        Raises:
            ConfigError: heads or channels cannot be divided evenly.
        """
        raise NotImplementedError

    @abstractmethod
    def prefill(self, context: Context, condition: Condition) -> KVCache:
        """Return the cache of context frames, which end where the chunk begins."""

    def prefill_chunk(
        self,
        context: Context,
        latents: Latents,
        timestep: PerFrame,
        condition: Condition,
        keep: bool = True,
    ) -> tuple[Latents, KVCache]:
        """Predict a noisy chunk after its context; return also the cache of both, for the chunk after it.

        Without `keep` the cache is empty.
        """
        raise NotImplementedError

    def sigma_at(self, position: Float[Tensor, "b r"]) -> Float[Tensor, "b r"]:
        """Return the sigma at a position of the schedule, from 1 (pure noise) towards 0."""
        raise NotImplementedError

    def predict_windows(
        self,
        context: Context,
        latents: Latents,
        timestep: PerFrame,
        condition: Condition,
        continues_previous: Bool[Tensor, " b"],
    ) -> Latents:
        """Predict chunks of which some continue the noisy chunk in the row before.

        Such a row attends to that chunk and its context in place of its own, as in `diffusion.swin`.
        """
        front, back = ((~continues_previous).nonzero()[:, 0], continues_previous.nonzero()[:, 0])
        if not len(back):  # see parallel.agreement; the row is overwritten below
            back = back.new_zeros(1)
        predicted, cache = self.prefill_chunk(
            context[front], latents[front], timestep[front], take(condition, front)
        )
        cache = take(cache, torch.searchsorted(front, back - 1))
        after = self(latents[back], timestep[back], take(condition, back), cache)
        return predicted.new_zeros(latents.shape).index_copy(0, back, after).index_copy(0, front, predicted)

    @abstractmethod
    def forward(self, latents: Latents, timestep: PerFrame, condition: Condition, cache: KVCache) -> Latents:
        """Predict at one timestep per frame; a model without that uses the first frame's for all."""

    @abstractmethod
    def solver(self, num_inference_steps: int) -> Solver:
        """Return a solver for one chunk."""

    def step_sigmas(self, num_inference_steps: int) -> list[float]:
        """Return the sigmas at which the steps of `solver` begin: its timesteps, unless it has others."""
        solver = self.solver(num_inference_steps)
        return [solver.timestep(step) for step in range(solver.num_steps)]

    @abstractmethod
    def training_loss(
        self,
        clean: Latents,
        noise: Latents,
        sigma: PerFrame,
        condition: Condition,
        context: Context,
        continues_previous: Bool[Tensor, " b"] | None = None,
    ) -> LossOutput:
        """Compare the prediction with the target at noise levels in [0, 1] (1: pure noise).

        `continues_previous` marks chunks that continue the noisy one in the row before (`predict_windows`).
        """

    def add_text_encoder(self) -> None:
        """Hold the text encoder that the model was trained with, as a part of it.

        Raises:
            ConfigError: there is none.
        """
        raise ConfigError("This generator has no text encoder; use one of diffusers that has.")

    def encode_text(self, texts: Sequence[str]) -> Float[Tensor, "b m e"] | None:
        """Embed texts as in the training of the model; None if it takes no text."""
        return None

    @torch.no_grad()
    def encode_distinct(self, texts: Sequence[str]) -> Float[Tensor, "b m e"] | None:
        """Embed texts, equal ones once and those in `text_states` not at all.

        A text encoder can be larger than all other parts. Processes that share a clip divide the texts.
        """
        unknown = [text for text in dict.fromkeys(texts) if text not in self.text_states]
        (most,) = self.agreement.most(len(unknown))
        encoded = self._encode_divided(unknown or texts[:1]) if most else None
        if not self.text_states:
            return None if encoded is None else encoded[[unknown.index(text) for text in texts]]
        rows = {text: self.pad_text(self.text_states[text]) for text in set(texts).difference(unknown)}
        if encoded is not None:
            rows |= dict(zip(unknown, encoded, strict=False))
        return torch.stack([rows[text] for text in texts])

    def _encode_divided(self, texts: Sequence[str]) -> Float[Tensor, "b m e"] | None:
        """Embed texts, each of the processes that share a clip some of them."""
        layout = Layout.items(len(texts), self.sequence)
        own: list[int] = layout.take(torch.arange(len(texts)), dim=0).tolist()
        encoded = self.encode_text([texts[index] for index in own])
        return None if encoded is None else layout.gather(encoded, dim=0)

    @torch.no_grad()
    def compute_text_states(self, texts: Sequence[str]) -> dict[str, Float[Tensor, "_ e"]]:
        """Embed texts for `text_states`; there are none if the generator takes no text."""
        embeds = self.encode_text(texts)
        states: dict[str, Tensor] = {}
        for text, state in zip(texts, () if embeds is None else embeds, strict=embeds is not None):
            used = (state != 0).any(dim=1).nonzero()
            states[text] = state[: int(used.max()) + 1 if len(used) else 0]
        return states

    def pad_text(self, state: Float[Tensor, "n e"]) -> Float[Tensor, "m e"]:
        """Return one of `text_states` as `encode_text` does.

        Raises:
            ConfigError: it is not of this generator's text encoder.
        """
        raise ConfigError("This generator takes no text; set precomputed: false for the source.")
