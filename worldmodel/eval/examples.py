"""Examples that a reader can look at: what was true above, what the model made below."""

import base64
import io
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from worldmodel.media.files import Frames

GAP = 4
"""Pixels between the frames of a strip."""


@dataclass(frozen=True, slots=True)
class Example:
    """One sample of a figure.

    Attributes:
        figure: Name of the figure it belongs to.
        caption: What was asked.
        right: Whether it came out right.
        truth: What is true, or what was shown to the model.
        made: What the model made; None where it answered in words.
        note: What the model said, or what is wrong.
    """

    figure: str
    caption: str
    right: bool
    truth: Frames
    made: Frames | None = None
    note: str = ""

    def entry(self) -> dict[str, str | bool]:
        """Return the example for JSON, its picture as a data URI."""
        rows = [self.truth] if self.made is None else [self.truth, self.made]
        return {
            "figure": self.figure,
            "caption": self.caption,
            "right": self.right,
            "note": self.note,
            "picture": f"data:image/png;base64,{base64.b64encode(png(strips(rows))).decode()}",
        }


@dataclass(slots=True)
class Album:
    """Keeps the first few right and wrong examples of every figure, whatever comes first.

    Attributes:
        right: Most right examples kept of one figure.
        wrong: Most wrong ones.
    """

    right: int = 4
    wrong: int = 6
    examples: list[Example] = field(default_factory=list)

    def wants(self, figure: str, right: bool) -> bool:
        """Whether there is room for one more such example."""
        kept = sum(example.figure == figure and example.right == right for example in self.examples)
        return kept < (self.right if right else self.wrong)

    def add(self, example: Example) -> None:
        """Keep an example if there is room for it."""
        if self.wants(example.figure, example.right):
            self.examples.append(example)

    def entries(self) -> list[dict[str, str | bool]]:
        """Return the examples for JSON, figure by figure, the right ones first."""
        order = list(dict.fromkeys(example.figure for example in self.examples))
        ranked = sorted(self.examples, key=lambda each: (order.index(each.figure), not each.right))
        return [example.entry() for example in ranked]


def strips(rows: list[Frames]) -> np.ndarray:
    """Lay clips of one length below each other, frames side by side, on white: uint8 `[h, w, 3]`."""
    count, height, width = max(len(row) for row in rows), *rows[0].shape[1:3]
    tall, wide = len(rows) * (height + GAP) - GAP, count * (width + GAP) - GAP
    sheet = np.full((tall, wide, 3), 255, np.uint8)
    for index, row in enumerate(rows):
        for place, frame in enumerate(row):
            top, left = index * (height + GAP), place * (width + GAP)
            sheet[top : top + height, left : left + width] = frame
    return sheet


def png(picture: np.ndarray) -> bytes:
    """Encode a picture as PNG."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()
