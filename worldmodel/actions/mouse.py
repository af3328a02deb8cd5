"""Motion of the mouse."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from worldmodel.actions.kind import NumbersKind, flag
from worldmodel.actions.numbers import NumberSpec, check_numbers
from worldmodel.errors import ConfigError, InputError

DRAG: Literal["drag"] = "drag"
"""Setting of a model whose mouse is pressed at a place and moved from there."""
LEFT, RIGHT, UP, DOWN = "mouse left", "mouse right", "mouse up", "mouse down"


class MouseKind(NumbersKind):
    """Motion to the right and down, -1 to 1 each, as fractions of the width and height of the image.

    A model that takes drags also gets where the button is pressed: column and row, 0 to 1, as fractions of
    the image from its top left corner, before the motion.
    """

    name = "mouse"
    setting = (
        "true for movements of the mouse: to the right and down, as fractions of the image, -1 to 1; drag "
        "for movements with a button held, after the place where it is pressed: column and row, 0 to 1."
    )
    untaken = False
    spec_kind = "mouse"
    schema = {  # noqa: RUF012 -- constant
        "type": "array",
        "items": {"type": "number"},
        "minItems": 2,
        "maxItems": 4,
        "description": "Motion to the right and down, as fractions of the image's width and height: -1 to 1 "
        "each; for models that take drags, after the column and row where the button is pressed: 0 to 1.",
    }
    merge = "sum"

    def configure(self, setting: Any) -> bool | Literal["drag"]:
        if isinstance(setting, str) and setting != DRAG:
            raise ConfigError(f"model.action.mouse is {setting!r}; use true, drag or false.")
        return DRAG if setting == DRAG else flag(self.name, setting)

    def describe(self, settings: Any) -> str:
        way = "right and down, -1 to 1, in units of the image size"
        return f"column and row, 0 to 1, then {way}" if settings == DRAG else way

    def bounds(self, settings: Any) -> tuple[Sequence[float], Sequence[float]]:
        if settings == DRAG:
            return (0.0, 0.0, -1.0, -1.0), (1.0, 1.0, 1.0, 1.0)
        return (-1.0, -1.0), (1.0, 1.0)

    def check(self, value: tuple[float, ...], settings: Any) -> None:
        check_numbers("mouse", value, self.size(settings))
        if all(least <= x <= most for x, least, most in zip(value, *self.bounds(settings), strict=True)):
            return
        where = "where it is pressed (column and row, 0 to 1) and " if settings == DRAG else ""
        raise InputError(
            f"The mouse of the action is {list(value)}; pass {where}its motion to the right and down as "
            "fractions of the image, -1 to 1."
        )

    def example(self, settings: Any) -> list[float]:
        return [0.5, 0.5, 0.25, 0.25] if settings == DRAG else [0.5, 0.5]

    def number_names(self, settings: Any) -> tuple[str, ...]:
        return ("column", "row", "right", "down") if settings == DRAG else ("right", "down")

    def effects(self, value: Any, specs: Sequence[NumberSpec]) -> list[str]:
        if not specs:
            return []
        right, down = (value or (0.0, 0.0))[-2:]
        moved = []
        if right:
            moved.append(RIGHT if right > 0 else LEFT)
        if down:
            moved.append(DOWN if down > 0 else UP)
        return moved or ["mouse still"]

    def all_effects(self) -> Sequence[str]:
        return (LEFT, RIGHT, UP, DOWN)

    def is_unseen(self, numbers: np.ndarray) -> bool:
        """Return that it was used: `all_effects` tells the directions apart."""
        return False

    def widget(self, settings: Any) -> dict[str, Any]:
        if settings == DRAG:
            return {"type": "drag", "pressed": True, "merge": "newest"}
        return {"type": "drag"}
