"""Kinds of tokens and their attention rules."""

from collections.abc import Sequence
from enum import IntEnum

Segment = tuple["Kind", int]
"""Consecutive tokens of one kind: the kind and their number. Each frame is a segment."""


class Kind(IntEnum):
    """Kinds of tokens, by the tokens of their document that they attend to; padding is never attended to."""

    PAD = 0
    """Padding: attends to itself only, so that no softmax is empty."""
    TEXT = 1
    """Causal text: attends to all positions up to its own."""
    FRAME = 2
    """Token of a frame: attends to all blocks up to its own, so causally between frames and fully within
    one."""
    FULL = 3
    """Attends to the whole document."""


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
