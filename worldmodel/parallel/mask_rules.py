"""What a token may see of its document, by the token's kind."""

from collections.abc import Sequence
from enum import IntEnum

Segment = tuple["Kind", int]
"""A run of tokens of one kind, and its length; a frame is a segment of its own."""


class Kind(IntEnum):
    """The rule of a token: which tokens of its own document it sees, padding never."""

    PAD = 0
    """Itself only, so that no softmax is empty; no other token sees it."""
    TEXT = 1
    """Tokens up to its own position."""
    FRAME = 2
    """Tokens of blocks up to its own: frames are causal among each other and see all of themselves."""
    FULL = 3
    """Everything."""


def mask_area(document: Sequence[Segment]) -> int:
    """Count the visible pairs of one document; attention costs 4 x area x heads x head width FLOPs forward.

    Every segment is a block of its own; the count is exact and needs no tensors.
    """
    total = sum(length for kind, length in document if kind != Kind.PAD)
    area = before = 0
    for kind, length in document:
        if kind == Kind.PAD:
            area += length
            continue
        if kind == Kind.TEXT:
            area += length * before + length * (length + 1) // 2
        elif kind == Kind.FRAME:
            area += length * (before + length)
        else:
            area += length * total
        before += length
    return area
