"""What a good model of the shapes world should reach: the one table of goals."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from worldmodel.eval.metrics import Figure


@dataclass(frozen=True, slots=True)
class Goal:
    """A published figure, where it is found in the results, and what it should be.

    Attributes:
        title: What a reader sees.
        path: Keys that lead to the figure from `results["figures"]`.
        unit: How the number is shown: a share as percent, decibels, frames per second, seconds, a ratio.
        at_least: The goal, where more is better.
        at_most: The goal, where less is better; a figure with neither is shown beside the others.
    """

    title: str
    path: tuple[str | int, ...]
    unit: Literal["%", "dB", "fps", "s", "x"] = "%"
    at_least: float | None = None
    at_most: float | None = None

    def find(self, results: Mapping[str, Any]) -> Figure | None:
        """Return the figure, or None where it was not measured."""
        value: Any = results["figures"]
        for key in self.path:
            try:
                value = value[key]
            except (KeyError, IndexError):
                return None
        return value

    def met(self, figure: Figure) -> bool | None:
        """Whether the measured value reaches the goal; None where there is no goal."""
        if self.at_least is not None:
            return figure["value"] >= self.at_least
        return figure["value"] <= self.at_most if self.at_most is not None else None

    @property
    def text(self) -> str:
        """The goal as a reader sees it."""
        if self.at_least is not None:
            return f"≥ {show(self.at_least, self.unit)}"
        return "" if self.at_most is None else f"≤ {show(self.at_most, self.unit)}"


def show(value: float, unit: str) -> str:
    """Write a number with its unit."""
    if unit == "%":
        return f"{100 * value:.1f} %".replace(".0 %", " %")
    if unit == "s":
        return f"{value:.3f} s"
    return f"{value:.2f} {unit}".strip() if unit in ("x", "") else f"{value:.1f} {unit}"


def interval(figure: Figure, unit: str) -> str:
    """Write a figure's 95 % interval, its unit once."""
    low, high = (show(figure[end], unit).removesuffix(f" {unit}") for end in ("low", "high"))
    return f"{low} to {high}"


_HELD_OUT = ("action_following", "held-out")
_COMPOSED = ("action_following", "compositions")

GOALS: tuple[Goal, ...] = (
    Goal("Codec alone: every object of a clip's last frame survives", ("codec", "last_frame"), at_least=0.98),
    Goal("Seen combinations: the named object is right", ("action_following", "val", "named")),
    Goal("Seen combinations: the whole last frame is right", ("action_following", "val", "strict")),
    Goal("Held-out combinations: the named object is right", (*_HELD_OUT, "named"), at_least=0.97),
    Goal("Held-out combinations: the whole last frame is right", (*_HELD_OUT, "strict"), at_least=0.92),
    Goal("Held-out combinations: every one of the 8 frames is right", (*_HELD_OUT, "every_frame")),
    Goal("Held-out combinations: a copy of the first frame would be right", (*_HELD_OUT, "copy_strict")),
    Goal("Held-out combinations: PSNR", (*_HELD_OUT, "psnr"), "dB", at_least=29.0),
    Goal("Two acts in one sentence: the whole last frame is right", (*_COMPOSED, "strict"), at_least=0.82),
    Goal("Control: the named object is right under another clip's text", ("control", "named"), at_most=0.05),
    Goal(
        "Rollout, one act a round, round 1: the whole last frame is right",
        ("rollouts", "strict", 0),
        at_least=0.92,
    ),
    Goal(
        "Rollout, one act a round, round 5: the whole last frame is right",
        ("rollouts", "strict", 4),
        at_least=0.80,
    ),
    Goal(
        "Rollout, one act a round, round 10: the whole last frame is right",
        ("rollouts", "strict", 9),
        at_least=0.65,
    ),
    Goal("Text to image: every object is right", ("text_to_image", "strict"), at_least=0.85),
    Goal("Describe: every object's colour, shape and place are right", ("describe", "scene"), at_least=0.90),
    Goal("Questions: the answer is exact", ("questions", "all")),
    Goal(
        "Inverse dynamics: verb and object of a single act are right",
        ("inverse", "val", "acts"),
        at_least=0.90,
    ),
    Goal("Inverse dynamics: held-out combinations", ("inverse", "held-out", "acts")),
    Goal("Inverse dynamics: two acts", ("inverse", "compositions", "acts")),
    Goal("No action: nothing changes", ("null_action", "none"), at_least=0.97),
    Goal("Keys instead of words: the named object is right", ("keys", "named")),
    Goal("Speed of one session", ("speed", "fps"), "fps", at_least=100.0),
    Goal("Action to first frame", ("speed", "first_frame"), "s", at_most=0.150),
    Goal("Cost of round 50 against round 2", ("speed", "late_to_early"), "x", at_most=1.1),
)
