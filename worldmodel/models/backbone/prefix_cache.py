"""Keys and values of prefixes that the backbone has computed, found by their content.

A history is a tuple of parts (the embeddings of its rounds). Histories that share their first parts share
keys and values: the next round of a session, a fork, a restored snapshot, the same world of another user.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache

from worldmodel.models.backbone.causal_lm import Backbone

History = tuple[Float[Tensor, "_ d"], ...]
"""Embeddings of the rounds in the backbone's context, the newest last."""


def remembered(history: History, rounds: int) -> History:
    """Return the rounds of a history that the next round is appended to: `rounds` to twice as many.

    Dropping the oldest rounds changes the positions of the others, whose keys and values are then computed
    again. Dropping several at once makes that rare: over `rounds + 1` rounds, `2 * rounds + 1` are computed.
    """
    return history if len(history) <= 2 * rounds else history[len(history) - rounds :]


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


@dataclass(frozen=True)
class Group:
    """Histories of one batch: the embeddings that are new, and the cache of those before them."""

    rows: list[int]
    digests: list[bytes]
    embeds: Float[Tensor, "b n d"]
    cache: DynamicCache


class PrefixCache:
    """Prefixes by content; the least recently used ones are dropped above `max_bytes`. Thread-safe."""

    def __init__(self, backbone: Backbone, max_bytes: int = 2**28) -> None:
        self.backbone, self.max_bytes = backbone, max_bytes
        self._known: OrderedDict[bytes, Prefix] = OrderedDict()
        self._held = 0
        self._lock = Lock()

    @property
    def num_bytes(self) -> int:
        """Memory of the cached prefixes."""
        with self._lock:
            return self._held

    def groups(self, histories: Sequence[History]) -> Iterator[Group]:
        """Yield histories as batches of equal cached and new lengths, for the backbone to run."""
        digests = [_digests(history) for history in histories]
        found = [self._longest(each) for each in digests]
        # Only equal lengths can be stacked: padding a cache would change positions, and with them results.
        groups: dict[tuple[int, int], list[int]] = {}
        for row, (history, (parts, prefix)) in enumerate(zip(histories, found, strict=True)):
            known = prefix.length if prefix else 0
            new = sum(len(part) for part in history[parts:])
            groups.setdefault((known, new), []).append(row)
        for rows in groups.values():
            embeds = torch.stack([torch.cat(histories[row][found[row][0] :]) for row in rows])
            cache = self._stack([found[row][1] for row in rows])
            yield Group(rows, [digests[row][-1] for row in rows], embeds, cache)

    def store(self, group: Group) -> None:
        """Keep the keys and values of a batch that the backbone has run."""
        for row, digest in enumerate(group.digests):
            rows = slice(row, row + 1)
            layers: list[Any] = group.cache.layers  # filled by the backbone
            # Cloned: a view of one row would keep the keys and values of the whole batch in memory.
            prefix = Prefix(tuple((layer.keys[rows].clone(), layer.values[rows].clone()) for layer in layers))
            with self._lock:
                replaced = self._known.pop(digest, None)
                self._known[digest] = prefix
                self._held += prefix.num_bytes - (replaced.num_bytes if replaced else 0)
                # The newest prefix stays even if it is above the limit alone, or its session would compute
                # all rounds anew.
                while self._held > self.max_bytes and len(self._known) > 1:
                    self._held -= self._known.popitem(last=False)[1].num_bytes

    def _longest(self, digests: list[bytes]) -> tuple[int, Prefix | None]:
        """Return the longest cached proper prefix: how many parts it covers, and its keys and values."""
        with self._lock:
            # Proper prefixes only: the last part must run, since its hidden states are what is asked for.
            for parts in range(len(digests) - 1, 0, -1):
                prefix = self._known.get(digests[parts - 1])
                if prefix is not None:
                    self._known.move_to_end(digests[parts - 1])
                    return parts, prefix
        return 0, None

    def _stack(self, prefixes: Sequence[Prefix | None]) -> DynamicCache:
        """Copy prefixes of equal length into one cache, which the backbone extends."""
        known = [prefix.layers for prefix in prefixes if prefix is not None]
        if not known:
            return self.backbone.new_cache()
        pairs = [
            (torch.cat([layer[0] for layer in layers]), torch.cat([layer[1] for layer in layers]))
            for layers in zip(*known, strict=True)
        ]
        return DynamicCache(pairs)


def _digests(history: History) -> list[bytes]:
    """Return a digest of every prefix of a history, of the content of its parts."""
    digests, digest = [], hashlib.blake2b(digest_size=32)
    for part in history:
        # With dtype and shape, equal bytes of parts that are divided differently have different digests.
        # Copying the digest after each part gives the digests of all prefixes in one pass.
        digest.update(str((part.dtype, tuple(part.shape))).encode())
        digest.update(part.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        digests.append(digest.copy().digest())
    return digests
