"""Engines run the backbone for states and text: the protocol, and the engine of this process."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from worldmodel.errors import InputError
from worldmodel.models.adapters import Adapters
from worldmodel.models.backbone.causal_lm import Backbone
from worldmodel.models.backbone.prefix_cache import History
from worldmodel.models.text import TextSequence
from worldmodel.rollout import LocalEngine
from worldmodel.serving.engine.batching import DENOISE, PREDICT, Batcher, Compute
from worldmodel.serving.engine.completion import TextParams
from worldmodel.serving.engine.limits import check_length

LEAST_TEMPERATURE = 1e-6
"""Lower temperatures count as this one, as logits that are divided by them would overflow."""


class Engine(Protocol):
    """Runs the backbone for many worlds at once, each round computing only its new positions."""

    name: str
    """Name in responses: `in-process` or `vllm`."""
    likelihoods: bool
    """Whether it computes `log_likelihoods`."""

    @property
    def adapters(self) -> tuple[str, ...]:
        """Adapters that requests can select by name."""
        ...

    @property
    def alive(self) -> bool:
        """Whether it can still compute; a failed engine never recovers."""
        ...

    async def predict_states(
        self, history: History, num_queries: int, adapter: str | None = None
    ) -> Float[Tensor, "n d"]:
        """Return the hidden states at the query positions of a history's newest round."""
        ...

    def generate_tokens(
        self, prefix: Float[Tensor, "n d"], params: TextParams, adapter: str | None = None
    ) -> AsyncGenerator[int, None]:
        """Continue a prefix with text: yields up to `max_tokens` tokens, without the end token."""
        ...

    async def log_likelihoods(
        self, sequences: Sequence[TextSequence], adapter: str | None = None
    ) -> list[float]:
        """Return the mean log-likelihood of each sequence's labels, in nats per token."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Return statistics for the metrics, such as `kv_bytes`."""
        ...

    async def close(self) -> None:
        """Release the resources of the engine."""
        ...


class InProcessEngine:
    """The backbone in this process; pending requests are batched."""

    name = "in-process"
    likelihoods = True
    alive = True

    def __init__(
        self,
        backbone: Backbone,
        compute: Compute,
        adapters: Adapters | None = None,
        max_cache_bytes: int = 2**29,
        max_model_len: int | None = None,
    ) -> None:
        self.backbone, self._compute, self._max_model_len = backbone, compute, max_model_len
        self._adapters, self._max_cache_bytes = adapters or Adapters(backbone), max_cache_bytes
        self._using = self._adapters.using
        self._engines: dict[str | None, LocalEngine] = {}  # replaced as a whole, as another thread reads it
        self._states = Batcher(compute, self._predict, PREDICT, group=lambda request: request[1:])

    @property
    def adapters(self) -> tuple[str, ...]:
        """Adapters that requests can select by name."""
        return self._adapters.names

    async def predict_states(
        self, history: History, num_queries: int, adapter: str | None = None
    ) -> Float[Tensor, "n d"]:
        """Return the hidden states at the query positions of a history's newest round.

        Raises:
            InputError: there is no such adapter.
            UnavailableError: the history is longer than `max_model_len`.
        """
        check_length(sum(map(len, history)), self._max_model_len)
        return await self._states((history, num_queries, known(adapter, self.adapters)))

    async def generate_tokens(
        self, prefix: Float[Tensor, "n d"], params: TextParams, adapter: str | None = None
    ) -> AsyncGenerator[int, None]:
        """Continue a prefix with text; other work runs between two tokens."""
        known(adapter, self.adapters)
        generator = torch.Generator(prefix.device).manual_seed(params.seed)
        cache, embeds = self.backbone.new_cache(), prefix[None]
        for _ in range(params.max_tokens):
            token, embeds = await self._compute.run(
                self._next_token, embeds, cache, adapter, params.temperature, generator, stage=DENOISE
            )
            if token == self.backbone.end:
                return
            yield token

    async def log_likelihoods(
        self, sequences: Sequence[TextSequence], adapter: str | None = None
    ) -> list[float]:
        """Return the mean log-likelihood of each sequence's labels, in nats per token."""
        known(adapter, self.adapters)
        return await self._compute.run(self._likelihoods, sequences, adapter)

    def stats(self) -> Mapping[str, float]:
        """Return the size of the cached keys and values."""
        return {"kv_bytes": sum(engine.cache.num_bytes for engine in self._engines.values())}

    async def close(self) -> None:
        """Drop the keys and values."""
        self._engines = {}

    def _predict(self, requests: Sequence[tuple[History, int, str | None]]) -> list[Tensor]:
        """Predict states of one adapter, and of as many queries each."""
        _, num_queries, adapter = requests[0]
        with self._using(adapter):
            engine = self._engine(adapter)
            return list(engine.predict_states([each for each, *_ in requests], num_queries))

    def _engine(self, adapter: str | None) -> LocalEngine:
        """Return the engine of an adapter: keys and values depend on the weights, so each has its own cache.

        Engines are found by the digest of the weights, as another adapter may get the name of an earlier one.
        """
        digests = self._adapters.digests
        if set(self._engines) != {None, *digests.values()}:
            share = self._max_cache_bytes // (1 + len(digests))
            kept = {
                digest: self._engines.get(digest) or LocalEngine(self.backbone, share)
                for digest in (None, *digests.values())
            }
            for engine in kept.values():
                engine.cache.max_bytes = share
            self._engines = kept
        return self._engines[digests[adapter] if adapter is not None else None]

    def _next_token(
        self, embeds: Tensor, cache: Any, adapter: str | None, temperature: float, generator: torch.Generator
    ) -> tuple[int, Tensor]:
        """Return the token after a prefix, and its embedding."""
        with self._using(adapter):
            logits = self.backbone.logits(self.backbone(embeds, cache)[0, -1]).float()
            if temperature:
                scaled = logits / max(temperature, LEAST_TEMPERATURE)
                token = torch.multinomial(scaled.softmax(dim=-1), 1, generator=generator)
            else:
                token = logits.argmax(dim=-1, keepdim=True)
            return int(token), self.backbone.embed(token[None])

    def _likelihoods(self, sequences: Sequence[TextSequence], adapter: str | None) -> list[float]:
        with self._using(adapter):
            return self.backbone.log_likelihoods(sequences)


def known(adapter: str | None, adapters: Sequence[str]) -> str | None:
    """Return the adapter's name; raise `InputError` if no adapter has it."""
    if adapter is not None and adapter not in adapters:
        raise InputError(
            f"There is no adapter {adapter!r}; use one of {', '.join(adapters)}."
            if adapters
            else f"There is no adapter {adapter!r}: this server has none."
        )
    return adapter
