"""A kind of action that the package does not know: a joystick with two axes and a button."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from worldmodel.actions import ActionKind, ActionSpec, Numbers
from worldmodel.actions.kind import flag, numbers_of_element, spoken_numbers
from worldmodel.errors import InputError

Value = tuple[float, float, bool]


class Joystick(ActionKind):
    """Two axes, -1 to 1 each, and a button: `{"axes": [x, y], "button": true}`."""

    name = "joystick"
    setting = "true for a joystick with two axes and a button."
    untaken = False
    spec_kind = "joystick"
    schema = {  # noqa: RUF012
        "type": "object",
        "title": "JoystickBody",
        "description": "A joystick.",
        "properties": {
            "axes": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
            "button": {"type": "boolean", "default": False},
        },
        "required": ["axes"],
    }

    def configure(self, setting: Any) -> bool:
        return flag(self.name, setting)

    def parse(self, value: Any) -> Value | None:
        if value is None:
            return None
        if isinstance(value, tuple):
            x, y, pressed = value
        elif isinstance(value, Mapping) and set(value) <= {"axes", "button"} and "axes" in value:
            (x, y), pressed = value["axes"], value.get("button", False)
        else:
            raise InputError(f"The joystick of an action is {value!r}; pass axes [x, y] and button.")
        return float(x), float(y), bool(pressed)

    def check(self, value: Value, settings: Any) -> None:
        if not all(-1 <= x <= 1 for x in value[:2]):
            raise InputError(f"The joystick of the action is at {list(value[:2])}; use axes of -1 to 1.")

    def plain(self, value: Value) -> dict[str, Any]:
        return {"axes": list(value[:2]), "button": value[2]}

    def label(self, value: Value) -> str:
        return f"stick {value[0]:g} {value[1]:g}{' pressed' * value[2]}"

    def example(self, settings: Any) -> dict[str, Any]:
        return {"axes": [0.5, 0.5]}

    def say(self, value: Value) -> str:
        return f"{value[0]:.3g} {value[1]:.3g} {value[2]:d}"

    def understand(self, words: str, settings: Any) -> Value | None:
        numbers = spoken_numbers(words, 3)
        if numbers is None:
            return None
        x, y = (min(max(each, -1.0), 1.0) for each in numbers[:2])
        return x, y, numbers[2] > 0.5

    def numbers(self, value: Value | None, specs: Sequence[ActionSpec]) -> list[float]:
        return list(map(float, value or (0, 0, 0)))

    def of_numbers(self, specs: Sequence[ActionSpec], numbers: Sequence[float]) -> Value:
        return float(numbers[0]), float(numbers[1]), numbers[2] > 0.5

    def spaces(self, settings: Any) -> dict[str, spaces.Space]:
        return {"joystick": spaces.Box(np.float32([-1, -1, 0]), np.float32([1, 1, 1]))}

    def of_element(self, space: str, element: Any, settings: Any) -> Value:
        x, y, pressed = numbers_of_element(element, 3).tolist()
        return x, y, pressed > 0.5

    def embedding(self, settings: Any) -> Numbers:
        return Numbers(3)

    def features(self, value: Value, settings: Any) -> Sequence[float]:
        return [float(each) for each in value]

    def widget(self, settings: Any) -> dict[str, Any]:
        value = {"axes": [0.0, 0.0], "button": True}
        return {"type": "buttons", "buttons": [{"name": "press", "sign": "●", "value": value}]}
