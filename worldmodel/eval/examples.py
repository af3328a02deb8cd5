"""Examples in the report: true frames above, the model's frames below."""

import base64
from dataclasses import dataclass, field

import numpy as np

from worldmodel.media import Frames
from worldmodel.media.encoding import encode_png

GAP = 4
"""Pixels between the frames of a strip."""


@dataclass(frozen=True, slots=True)
class Example:
    """One sample of a figure.

    Attributes:
        figure: Name of its figure.
        caption: The input of the model in words.
        right: Whether the output is right; None where nothing judges it.
        truth: The true frames, or those shown to the model.
        made: The model's frames; None where it answered with text.
        note: The model's text, or a description of the errors.
    """

    figure: str
    caption: str
    right: bool | None
    truth: Frames
    made: Frames | None = None
    note: str = ""

    def entry(self) -> dict[str, str | bool | None]:
        """Return the example for JSON, its image as a data URI."""
        rows = [self.truth] if self.made is None else [self.truth, self.made]
        image = base64.b64encode(encode_png(strips(rows), optimize=True)).decode()
        return {
            "figure": self.figure,
            "caption": self.caption,
            "right": self.right,
            "note": self.note,
            "compared": self.made is not None,
            "still": len(self.truth) == 1,
            "image": f"data:image/png;base64,{image}",
        }


@dataclass(slots=True)
class Album:
    """Keeps the first few right and wrong examples of every figure.

    Attributes:
        right: Number of right examples kept of one figure.
        wrong: Number of wrong examples kept of one figure, and of those that nothing judges.
    """

    right: int = 4
    wrong: int = 6
    examples: list[Example] = field(default_factory=list)

    def wants(self, figure: str, right: bool | None) -> bool:
        """Return whether another example of this kind is kept."""
        kept = sum(example.figure == figure and example.right == right for example in self.examples)
        return kept < (self.right if right else self.wrong)

    def add(self, example: Example) -> None:
        """Keep an example unless there are enough of its kind."""
        if self.wants(example.figure, example.right):
            self.examples.append(example)

    def entries(self) -> list[dict[str, str | bool | None]]:
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
        for column, frame in enumerate(row):
            top, left = index * (height + GAP), column * (width + GAP)
            sheet[top : top + height, left : left + width] = frame
    return sheet
