"""Motion of the mouse."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from worldmodel.actions.kind import NumbersKind
from worldmodel.actions.numbers import NumberSpec, check_numbers
from worldmodel.errors import InputError

LEFT, RIGHT, UP, DOWN = "mouse left", "mouse right", "mouse up", "mouse down"


class MouseKind(NumbersKind):
    """Motion to the right and down, -1 to 1 each, as fractions of the width and height of the image."""

    name = "mouse"
    setting = "true for movements of the mouse: to the right and down, as fractions of the image, -1 to 1."
    untaken = False
    spec_kind = "mouse"
    schema = {  # noqa: RUF012 -- constant
        "type": "array",
        "items": {"type": "number"},
        "minItems": 2,
        "maxItems": 2,
        "description": "Motion to the right and down, as fractions of the image's width and height: -1 to 1 "
        "each.",
    }
    merge = "sum"

    def describe(self, settings: Any) -> str:
        """Return the meaning of the numbers."""
        return "right and down, -1 to 1, in units of the image size"

    def bounds(self, settings: Any) -> tuple[Sequence[float], Sequence[float]]:
        """Return -1 and 1, twice."""
        return (-1.0, -1.0), (1.0, 1.0)

    def check(self, value: tuple[float, ...], settings: Any) -> None:
        """Check that there are two fractions."""
        check_numbers("mouse", value, 2)
        if not all(-1 <= x <= 1 for x in value):
            raise InputError(
                f"The mouse of the action is {list(value)}; pass its motion to the right and down as "
                "fractions of the image, -1 to 1."
            )

    def example(self, settings: Any) -> list[float]:
        """Return a motion to the right and down."""
        return [0.5, 0.5]

    def effects(self, value: Any, specs: Sequence[NumberSpec]) -> list[str]:
        """Return the directions of the motion."""
        if not specs:
            return []
        right, down = value or (0.0, 0.0)
        moved = []
        if right:
            moved.append(RIGHT if right > 0 else LEFT)
        if down:
            moved.append(DOWN if down > 0 else UP)
        return moved or ["mouse still"]

    def all_effects(self) -> Sequence[str]:
        """Return the four directions."""
        return (LEFT, RIGHT, UP, DOWN)

    def is_unseen(self, numbers: np.ndarray) -> bool:
        """Return that it was used: `all_effects` tells the directions apart."""
        return False

    def widget(self, settings: Any) -> dict[str, Any]:
        """Return motion on the picture."""
        return {"type": "drag"}
