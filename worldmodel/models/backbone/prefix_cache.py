"""A backbone that remembers: keys and values of prefixes seen before are found again by their content.

A history is a tuple of parts (the embeddings of its rounds). Whoever shares the first parts shares their
keys and values: the next round of one session, a fork, a restored snapshot, another user's same world.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache

from worldmodel.models.backbone.causal_lm import Backbone

History = tuple[Float[Tensor, "_ d"], ...]
"""Embeddings of the rounds that the backbone looks back on, the newest last."""


@dataclass(frozen=True)
class Prefix:
    """Keys and values of the first positions of a sequence, `[1, g, n, e]` each, layer by layer."""

    layers: tuple[tuple[Tensor, Tensor], ...]

    @property
    def length(self) -> int:
        """Positions covered."""
        return self.layers[0][0].shape[2]

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return sum(keys.nbytes + values.nbytes for keys, values in self.layers)


class PrefixCache:
    """Predicts states of histories, each time computing only what is new.

    Histories whose known and new lengths agree run as one batch. The least recently used prefixes are
    forgotten above `max_bytes`; a forgotten one is computed again. Safe to share between threads.
    """

    def __init__(self, backbone: Backbone, max_bytes: int = 2**28) -> None:
        self.backbone, self.max_bytes = backbone, max_bytes
        self._known: OrderedDict[bytes, Prefix] = OrderedDict()
        self._lock = Lock()

    @property
    def num_bytes(self) -> int:
        """Memory that the known prefixes hold."""
        with self._lock:
            return sum(prefix.num_bytes for prefix in self._known.values())

    @torch.no_grad()
    def states(self, histories: Sequence[History], num_queries: int) -> list[Float[Tensor, "n d"]]:
        """Return the hidden states at the last `num_queries` positions of every history."""
        names = [_names(history) for history in histories]
        found = [self._longest(name) for name in names]
        groups: dict[tuple[int, int], list[int]] = {}
        for row, (history, (parts, prefix)) in enumerate(zip(histories, found, strict=True)):
            known = prefix.length if prefix else 0
            new = sum(len(part) for part in history[parts:])
            groups.setdefault((known, new), []).append(row)
        states: list[Tensor] = [torch.empty(0)] * len(histories)
        for rows in groups.values():
            embeds = torch.stack([torch.cat(histories[row][found[row][0] :]) for row in rows])
            cache = self._stacked([found[row][1] for row in rows])
            hidden = self.backbone(embeds, cache)[:, -num_queries:]
            for place, row in enumerate(rows):
                states[row] = hidden[place]
                self._remember(names[row][-1], cache, place)
        return states

    def _longest(self, names: list[bytes]) -> tuple[int, Prefix | None]:
        """Find the longest known proper prefix: how many parts it covers, and its keys and values."""
        with self._lock:
            for parts in range(len(names) - 1, 0, -1):
                prefix = self._known.get(names[parts - 1])
                if prefix is not None:
                    self._known.move_to_end(names[parts - 1])
                    return parts, prefix
        return 0, None

    def _stacked(self, prefixes: Sequence[Prefix | None]) -> DynamicCache:
        """Make one cache of prefixes of equal length; the prefixes themselves are not written to."""
        known = [prefix.layers for prefix in prefixes if prefix is not None]
        if not known:
            return self.backbone.new_cache()
        pairs = [
            (torch.cat([layer[0] for layer in layers]), torch.cat([layer[1] for layer in layers]))
            for layers in zip(*known, strict=True)
        ]
        return DynamicCache(pairs, config=self.backbone.model.config)

    def _remember(self, name: bytes, cache: DynamicCache, place: int) -> None:
        rows = slice(place, place + 1)
        layers: list[Any] = cache.layers  # plain layers, which all have keys and values by now
        prefix = Prefix(tuple((layer.keys[rows].clone(), layer.values[rows].clone()) for layer in layers))
        with self._lock:
            self._known[name] = prefix
            self._known.move_to_end(name)
            held = sum(each.num_bytes for each in self._known.values())
            while held > self.max_bytes and len(self._known) > 1:
                held -= self._known.popitem(last=False)[1].num_bytes


def _names(history: History) -> list[bytes]:
    """Name every prefix of a history by a digest of all its parts."""
    names, digest = [], hashlib.blake2b(digest_size=32)
    for part in history:
        digest.update(str((part.dtype, tuple(part.shape))).encode())
        digest.update(part.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        names.append(digest.copy().digest())
    return names
