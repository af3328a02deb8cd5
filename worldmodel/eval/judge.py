"""The protocol by which a world judges a model: frames with a known truth, and verdicts on them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from worldmodel.actions import Action
from worldmodel.config.imports import import_callable
from worldmodel.media import Frame, Frames


@dataclass(frozen=True, slots=True)
class Verdict:
    """The comparison of a frame with its truth.

    Attributes:
        named: Whether everything that the action names is right.
        others: Whether everything else is right.
        strict: Whether the whole frame is right.
        note: Description of the errors, for the report.
    """

    named: bool
    others: bool
    strict: bool
    note: str = ""


class Judge(Protocol):
    """Compares the pixels of a frame with a truth of the world's own type."""

    def __call__(self, frame: Frame, truth: Any, /) -> Verdict:
        """Return the verdict on one frame, uint8 `[h, w, 3]`."""
        ...


def load_judge(name: str) -> Judge:
    """Return a judge, given as `module:Class`.

    Raises:
        InputError: There is no such module or class, or it takes arguments.
    """
    return cast(Judge, import_callable("judge", name))


@dataclass(frozen=True, slots=True)
class Case:
    """One round whose outcome is known.

    Attributes:
        caption: The action in words, for the report.
        action: The action of the round.
        start: Frame before the round.
        before: Truth of `start`.
        frames: True frames of the round.
        truths: Truth of every one of `frames`.
        verbs: Kinds of act in the action; rates are also reported by verb.
        kinds: Kinds of wording of the action; rates are also reported by kind where there are any.
    """

    caption: str
    action: Action
    start: Frame
    before: Any
    frames: Frames
    truths: Sequence[Any]
    verbs: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()


class Recogniser(Protocol):
    """Names what was asked for and what a model's frames show instead."""

    def __call__(self, case: Case, frames: Frames, /) -> tuple[str, str]:
        """Return the name of what the case asks for and of what the frames show."""
        ...
