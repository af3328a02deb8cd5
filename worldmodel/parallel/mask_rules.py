"""Kinds of tokens, and what each kind may attend to in its document."""

from collections.abc import Sequence
from enum import IntEnum

Segment = tuple["Kind", int]
"""Consecutive tokens of one kind: the kind and their number. Each frame is a segment."""


class Kind(IntEnum):
    """What a token may attend to in its document; never padding."""

    PAD = 0
    """Padding: only itself, so that no softmax is empty."""
    TEXT = 1
    """All positions up to its own."""
    FRAME = 2
    """All blocks up to its own: causal between frames, full within a frame."""
    FULL = 3
    """The whole document."""


def mask_area(document: Sequence[Segment]) -> int:
    """Return the exact number of visible pairs in a document, in which every segment is a block.

    The forward pass of attention costs 4 x area x heads x head width FLOPs.
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
