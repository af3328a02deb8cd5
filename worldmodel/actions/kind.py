"""What a kind of action is: everything that the rest of the package asks of one."""

import json
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from worldmodel.actions.numbers import MAX_NUMBER, NumberSpec, check_numbers, parse_numbers
from worldmodel.actions.track import Track
from worldmodel.errors import ConfigError, InputError

if TYPE_CHECKING:
    from gymnasium import spaces

Schema = Mapping[str, Any]
"""A JSON schema: of a string, a number, a boolean, an array of these, or an object with `required` fields."""


@dataclass(frozen=True)
class Words:
    """Embedding of a text, by the backbone's own table: a position for each of up to `max_tokens` tokens."""

    max_tokens: int

    @property
    def max_positions(self) -> int:
        """Most positions in the backbone's sequence."""
        return self.max_tokens


@dataclass(frozen=True)
class Rows:
    """Embedding of a set of names: a position for each, from a table with a learned row per name."""

    names: tuple[str, ...]

    @property
    def max_positions(self) -> int:
        """Most positions in the backbone's sequence."""
        return len(self.names)


@dataclass(frozen=True)
class Numbers:
    """Embedding of `size` numbers: one position, from a small network."""

    size: int
    names: tuple[str, ...] = ()
    """Names of the numbers, by which weights of another model are taken over; empty: by position, if the
    sizes are equal."""
    waves: int = 0
    """How many of the numbers, the first ones, are at most about 1 in size, such as places in the picture.
    The network gets waves of them, too: by the numbers alone it cannot tell near ones apart (Tancik et al.
    2020, arXiv:2006.10739)."""
    max_positions: ClassVar[int] = 1


Embedding = Words | Rows | Numbers


class ActionKind(ABC):
    """A kind of action; `register_action_kind` makes it known to the whole package.

    A *value* is the immutable, hashable object in the field of `Action` that has the kind's name. *Settings*
    say what a model takes of the kind: the value of the setting `model.action.NAME`, parsed. A model does not
    take the kind if its settings are false (None, (), False). Methods of the kinds have docstrings where they
    say more than these.
    """

    name: str
    """Field of `Action` and of its JSON, setting in `model.action`, and column of a data source."""
    setting: str
    """What can be set in `model.action`, in one sentence for `worldmodel config` and the docs."""
    default: Any = None
    """Setting of a model whose config does not mention the kind."""
    untaken: Any = None
    """Settings of a model that does not take the kind."""
    is_language: bool = False
    """Whether a value is a sentence, which can also be a caption of a whole clip; others are controls."""
    spec_kind: str = ""
    """`kind` of the numbers in an action spec, if the kind has any (see `ActionSpec`)."""
    schema: Schema
    """JSON schema of a value, with limits of its size; what a server checks before `parse`."""
    merge: str = "newest"
    """How a page combines values that are held at once: newest, union (of lists) or sum (of numbers)."""

    # ---- settings --------------------------------------------------------------------------------------

    @abstractmethod
    def configure(self, setting: Any) -> Any:
        """Return the settings for the value of `model.action.NAME`, or for settings that are parsed already.

        Raises:
            ConfigError: it is something else.
        """

    def setting_of(self, settings: Any) -> Any:
        """Return settings as plain values, the inverse of `configure`; names and numbers as a list."""
        return list(settings) if isinstance(settings, tuple) else settings

    def describe(self, settings: Any) -> str | list[str]:
        """Describe what a model takes, for `worldmodel info`."""
        return "yes"

    # ---- values ----------------------------------------------------------------------------------------

    def is_absent(self, value: Any) -> bool:
        """Return whether a value stands for nothing of this kind."""
        return value is None

    @abstractmethod
    def parse(self, value: Any) -> Any:
        """Return the value for its JSON or Python form; what `is_absent` for an empty one.

        Raises:
            InputError: it has another form.
        """

    @abstractmethod
    def check(self, value: Any, settings: Any) -> None:
        """Check that a model takes a value.

        Raises:
            InputError: it does not.
        """

    def plain(self, value: Any) -> Any:
        """Return the JSON form of a value, which `parse` reads; names and numbers as a list."""
        return list(value) if isinstance(value, tuple) else value

    @abstractmethod
    def label(self, value: Any) -> str:
        """Return a short form of a value for logs and captions."""

    @abstractmethod
    def example(self, settings: Any) -> Any:
        """Return the JSON form of a value that a model takes, for documentation and hints."""

    def argument(self, settings: Any) -> str:
        """Return the example as it is written on the command line, which `parse_argument` reads."""
        return f"{self.name}:{json.dumps(self.example(settings))}"

    # ---- words -----------------------------------------------------------------------------------------

    def say(self, value: Any) -> str:
        """Return a value in words, without the kind's name; empty if there is nothing to say."""
        return self.label(value)

    @abstractmethod
    def understand(self, words: str, settings: Any) -> Any:
        """Return the value that generated words stand for, which the model takes; None if there is none."""

    def parse_argument(self, text: str, whole: str) -> Any:
        """Parse what follows `NAME:` on the command line.

        Args:
            text: the part after the colon.
            whole: all of it, for messages.

        Raises:
            InputError: it cannot be read.
        """
        try:
            return self.parse(json.loads(text))
        except (ValueError, RecursionError) as error:
            reason = str(error) if isinstance(error, InputError) else "it is not valid JSON."
            raise InputError(f"The action {whole!r} cannot be parsed: {reason}") from None

    # ---- data ------------------------------------------------------------------------------------------

    @property
    def is_list(self) -> bool:
        """Whether one value is itself a list."""
        return self.schema.get("type") == "array"

    @property
    def is_object(self) -> bool:
        """Whether one value is a JSON object."""
        return self.schema.get("type") == "object"

    def parse_cell(self, cell: Any) -> Any:
        """Return the value in a cell of a table, which may be text.

        Raises:
            InputError: it cannot be read.
        """
        return self.parse(cell)

    def check_track(self, track: Track) -> None:  # noqa: B027 -- most kinds have nothing to check
        """Check values along a clip together.

        Raises:
            InputError: they do not fit each other; the message ends a sentence about a row.
        """

    def is_divisible(self, track: Track) -> bool:
        """Return whether a clip with these values can be divided into parts that keep their meaning."""
        return not track.per_action

    def during(self, track: Track, index: int, start: float, end: float, action_s: float) -> Any:
        """Return the value of action `index` of a clip, which lasts from second `start` to `end`.

        Args:
            track: the values along the clip.
            index: number of the action.
            start: its first second.
            end: its last second.
            action_s: seconds of an entry, where a track has one per action.
        """
        return track.during(index, start, end)

    def numbers(self, value: Any, specs: Sequence[NumberSpec]) -> list[float]:
        """Return a value, or None, as one number for each of the kind's specs."""
        raise NotImplementedError(f"actions of the kind {self.name} have no numbers")

    def of_numbers(self, specs: Sequence[NumberSpec], numbers: Sequence[float]) -> Any:
        """Return the value that numbers stand for, one for each of the kind's specs."""
        raise NotImplementedError(f"actions of the kind {self.name} have no numbers")

    def fits(self, value: Any, specs: Sequence[NumberSpec]) -> bool:
        """Return whether a value, or None, has a number for each of the kind's specs, and no other."""
        return value is not None

    def setting_of_specs(self, specs: Sequence[NumberSpec]) -> Any:
        """Return the setting with which a model takes the numbers of these specs."""
        return True

    def setting_of_values(self, values: Sequence[Any]) -> Any:
        """Return the setting with which a model takes these values."""
        return True

    def check_specs(  # noqa: B027 -- most kinds have nothing to check
        self, key: str, specs: Sequence[NumberSpec], settings: Any
    ) -> None:
        """Check that a model takes the numbers of a dataset.

        Raises:
            ConfigError: it does not; the message begins with `key` and has the settings with which it does.
        """

    def arranged(self, value: Any, names: Sequence[str], settings: Any) -> Any:
        """Return a value whose numbers have these names as one that a model takes; '' leaves one out.

        Raises:
            InputError: it has another number of numbers.
        """
        return value

    def effects(self, value: Any, specs: Sequence[NumberSpec]) -> list[str]:
        """Return names of what a value, or None, does, by which `worldmodel data check` counts effects."""
        return [] if value is None else [f"{self.name} {self.label(value)}"]

    def all_effects(self) -> Sequence[str]:
        """Return the names that `effects` should give at least once in a useful dataset."""
        return ()

    def is_unseen(self, numbers: np.ndarray) -> bool:
        """Return whether one number of all actions of a dataset, `[n]`, says that it was never used."""
        return not numbers.any() or np.ptp(numbers) == 0

    # ---- environments ----------------------------------------------------------------------------------

    def spaces(self, settings: Any) -> "dict[str, spaces.Space]":
        """Return the Gymnasium spaces in which a model's actions of the kind can be given, by name.

        The first is the default. The model accepts every sample.
        """
        return {}

    def of_element(self, space: str, element: Any, settings: Any) -> Any:
        """Return the value for an element of one of `spaces`; None for nothing.

        Raises:
            InputError: it is not in the space.
        """
        raise NotImplementedError(f"actions of the kind {self.name} have no space")

    # ---- model -----------------------------------------------------------------------------------------

    @abstractmethod
    def embedding(self, settings: Any) -> Embedding:
        """Return how values enter the backbone's sequence."""

    def features(self, value: Any, settings: Any) -> Sequence[float]:
        """Return a value as input of its embedding: numbers, or indices of rows; texts have no features."""
        return value

    def vector_of(self, value: Any) -> Sequence[float]:
        """Return the numbers by which values are compared; empty where names tell them apart."""
        return ()

    def names_of(self, value: Any) -> Sequence[str]:
        """Return the names and words in a value by which two values are told apart."""
        return ()

    # ---- pages -----------------------------------------------------------------------------------------

    def widget(self, settings: Any) -> dict[str, Any]:
        """Return the widget with which a page offers the kind: its `type` and what that type needs.

        text: a field for a sentence. keys: a button for each of `names`. sliders: one for each of `sliders`
        (name, low, high), whose numbers are sent as a list. drag: motion on the picture, as a list of two
        numbers, with `pressed` after the place where it begins. buttons: one for each of `buttons` (name,
        sign, value).
        """
        return {"type": "none"}


class NumbersKind(ActionKind):
    """A kind whose value is a tuple of numbers; a base class for kinds of your own."""

    spec_kind = ""
    schema: Schema = {"type": "array", "items": {"type": "number"}, "maxItems": 1024}  # noqa: RUF012 -- constant

    def size(self, settings: Any) -> int:
        """Return how many numbers a value has."""
        return len(self.bounds(settings)[0])

    @abstractmethod
    def bounds(self, settings: Any) -> tuple[Sequence[float], Sequence[float]]:
        """Return the least and the greatest value of each number; empty if there are no bounds."""

    def number_names(self, settings: Any) -> Sequence[str]:
        """Return the name of each number, or nothing."""
        return ()

    def configure(self, setting: Any) -> Any:
        return flag(self.name, setting)

    def parse(self, value: Any) -> Any:
        return None if value is None else parse_numbers(self.name, value)

    def check(self, value: Any, settings: Any) -> None:
        check_numbers(self.name, value, self.size(settings))
        low, high = self.bounds(settings)
        names = self.number_names(settings)
        for index, (x, least, most) in enumerate(zip(value, low, high, strict=bool(low))):
            tolerance = 1e-6 * max(1.0, abs(least), abs(most))  # bounds rounded to float32 are allowed
            if not least - tolerance <= x <= most + tolerance:
                name = names[index] if names else f"number {index + 1}"
                raise InputError(f"The {name} of the action is {x:g}; use {least:g} to {most:g}.")

    def label(self, value: Any) -> str:
        return f"{self.name} {' '.join(f'{x:.4g}' for x in value)}"

    def example(self, settings: Any) -> Any:
        """Return the lowest numbers, or halves."""
        low, _ = self.bounds(settings)
        return [*low] or [0.5] * self.size(settings)

    def argument(self, settings: Any) -> str:
        return f"{self.name}:{','.join(f'{x:g}' for x in self.example(settings))}"

    def say(self, value: Any) -> str:
        return " ".join(f"{x:.3g}" for x in value)

    def understand(self, words: str, settings: Any) -> Any:
        numbers = spoken_numbers(words, self.size(settings))
        low, high = self.bounds(settings)
        if numbers is None or not low:
            return numbers
        limits = zip(numbers, low, high, strict=True)
        return tuple(min(max(x, least), most) for x, least, most in limits)

    def parse_argument(self, text: str, whole: str) -> Any:
        try:
            return self.parse([float(number) for number in text.split(",")])
        except InputError:
            raise
        except ValueError:
            raise InputError(
                f"The action {whole!r} is not a list of numbers; write it like {self.name}:0.1,-0.5."
            ) from None

    def numbers(self, value: Any, specs: Sequence[NumberSpec]) -> list[float]:
        given = list(value or ())[: len(specs)]
        return [*given, *[0.0] * (len(specs) - len(given))]

    def fits(self, value: Any, specs: Sequence[NumberSpec]) -> bool:
        return value is not None and len(value) == len(specs)

    def of_numbers(self, specs: Sequence[NumberSpec], numbers: Sequence[float]) -> Any:
        return tuple(map(float, numbers)) or None

    def spaces(self, settings: Any) -> "dict[str, spaces.Space]":
        """Return a box between the bounds, or between -1 and 1."""
        from gymnasium import spaces

        shape = (self.size(settings),)
        low, high = self.bounds(settings)
        least, most = (np.float32(np.broadcast_to(bound, shape)) for bound in (low or -1, high or 1))
        return {self.name: spaces.Box(least, most, shape, np.float32)}

    def of_element(self, space: str, element: Any, settings: Any) -> Any:
        return tuple(numbers_of_element(element, self.size(settings)).tolist())

    def embedding(self, settings: Any) -> Embedding:
        low, high = self.bounds(settings)
        small = bool(low) and all(-1 <= x <= 1 for x in (*low, *high))
        size = self.size(settings)
        return Numbers(size, tuple(self.number_names(settings)), waves=size if small else 0)

    def vector_of(self, value: Any) -> Sequence[float]:
        return value

    def widget(self, settings: Any) -> dict[str, Any]:
        size = self.size(settings)
        low, high = self.bounds(settings)
        names = self.number_names(settings) or [str(index + 1) for index in range(size)]
        limits = zip(names, low or [-1.0] * size, high or [1.0] * size, strict=True)
        sliders = [{"name": name, "low": least, "high": most} for name, least, most in limits]
        return {"type": "sliders", "sliders": sliders}


def flag(name: str, setting: Any) -> bool:
    """Return the setting of a kind that a model takes or not, which is true or false."""
    if setting is None or isinstance(setting, bool):
        return bool(setting)
    raise ConfigError(f"model.action.{name} is {reprlib.repr(setting)}; use true or false.")


def spoken_numbers(words: str, count: int) -> tuple[float, ...] | None:
    """Return `count` finite numbers with spaces or commas between them; None for anything else."""
    try:
        numbers = tuple(float(word) for word in words.replace(",", " ").split())
    except ValueError:
        return None
    return numbers if len(numbers) == count and all(abs(x) <= MAX_NUMBER for x in numbers) else None


def numbers_of_element(element: Any, size: int) -> np.ndarray:
    """Return an element of a box space of `size` numbers as an array.

    Raises:
        InputError: it is something else.
    """
    numbers = as_array(element)
    if numbers.shape != (size,) or not np.isfinite(numbers).all():
        raise InputError(
            f"An action of this environment is {size} finite numbers, not {describe_value(element)}."
        )
    return numbers


def as_array(element: Any) -> np.ndarray:
    """Return an element of a space as an array; one of shape `[0, 0]` if it has no numbers."""
    try:
        return np.asarray(element, dtype=np.float64)
    except (TypeError, ValueError):
        return np.empty((0, 0))


def describe_value(value: Any) -> str:
    """Return a short form of a value for an error message."""
    if isinstance(value, np.ndarray) and value.size > 32:
        return f"an array of shape {value.shape}"
    text = repr(value)
    return text if len(text) <= 80 else f"a {type(value).__name__}"
