"""Contrast of the demo's theme."""

import itertools

import pytest

pytest.importorskip("gradio", reason="Gradio is not installed: openworldmodel[demo]")

from worldmodel.demo.theme import theme


def luminance(colour: str) -> float:
    """Return the relative luminance of `#rrggbb` (WCAG 2.2)."""
    parts = (int(colour[first : first + 2], 16) / 255 for first in (1, 3, 5))
    linear = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_quiet_text_has_enough_contrast() -> None:
    """WCAG AA asks for 4.5:1; text is on the page, on cards, and on buttons under the pointer."""
    made = theme()

    def colour(name: str) -> str:
        value = getattr(made, name)
        while value.startswith("*"):
            value = getattr(made, value[1:])
        return {"white": "#ffffff"}.get(value, value)

    texts = "body_text_color_subdued", "input_placeholder_color"
    grounds = "body_background_fill", "block_background_fill", "button_secondary_background_fill_hover"
    for dark, (text, ground) in itertools.product(("", "_dark"), itertools.product(texts, grounds)):
        first, second = sorted(luminance(colour(name + dark)) for name in (text, ground))
        assert (second + 0.05) / (first + 0.05) >= 4.5, (text + dark, ground)
