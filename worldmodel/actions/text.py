"""Actions in words."""

import reprlib
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from worldmodel.actions.kind import ActionKind, Embedding, Words, describe_value
from worldmodel.errors import ConfigError, InputError, did_you_mean

if TYPE_CHECKING:
    from gymnasium import spaces

CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " "
"""Characters of the texts that an environment samples."""


@dataclass(frozen=True)
class TextSettings:
    """What a model takes of texts."""

    max_tokens: int = 96
    """Longest text, in tokens."""

    def __post_init__(self) -> None:
        if not isinstance(self.max_tokens, int) or isinstance(self.max_tokens, bool) or self.max_tokens < 1:
            raise ConfigError(
                f"model.action.text.max_tokens is {self.max_tokens!r}; use a number of tokens, 1 or more."
            )


class TextKind(ActionKind):
    """A sentence, which the backbone reads as it reads every text."""

    name = "text"
    setting = "true for actions in words; {max_tokens: N} for another longest text than 96 tokens."
    default = True
    untaken = False
    is_language = True
    schema = {"type": "string", "maxLength": 4000}  # noqa: RUF012 -- constant

    def configure(self, setting: Any) -> TextSettings | None:
        if setting is None or setting is False:
            return None
        if setting is True:
            return TextSettings()
        if isinstance(setting, TextSettings):
            return setting
        if not isinstance(setting, Mapping):
            raise ConfigError(
                f"model.action.text is {reprlib.repr(setting)}; use true, false or {{max_tokens: N}}."
            )
        for name in setting:
            if name != "max_tokens":
                raise ConfigError(
                    f"model.action.text.{name} is not a setting{did_you_mean(name, ['max_tokens'])}; use "
                    "max_tokens."
                )
        return TextSettings(**setting)

    def setting_of(self, settings: TextSettings) -> Any:
        return True if settings == TextSettings() else {"max_tokens": settings.max_tokens}

    def describe(self, settings: TextSettings) -> str:
        return f"up to {settings.max_tokens} tokens"

    def parse(self, value: Any) -> str | None:
        if value is not None and not isinstance(value, str):
            raise InputError(f"The text of an action is {reprlib.repr(value)}; pass a sentence.")
        return (value or "").strip() or None

    def check(self, value: str, settings: TextSettings) -> None:
        """Do nothing: only the backbone's tokenizer knows the length of a text."""

    def label(self, value: str) -> str:
        return value

    def example(self, settings: TextSettings) -> str:
        return "an action"

    def understand(self, words: str, settings: TextSettings) -> str | None:
        return words or None

    def spaces(self, settings: TextSettings) -> "dict[str, spaces.Space]":
        from gymnasium import spaces

        # One character is at most one token, and some tokenizers prepend a space.
        length = max(1, settings.max_tokens - 1)
        return {"text": spaces.Text(max_length=length, min_length=0, charset=CHARACTERS)}

    def of_element(self, space: str, element: Any, settings: TextSettings) -> str | None:
        """Return a text; a blank one is nothing, and it may be as long as the model allows."""
        if not isinstance(element, str):
            raise InputError(f"An action of this environment is a sentence, not {describe_value(element)}.")
        return element.strip() or None

    def setting_of_values(self, values: Sequence[str]) -> bool:
        """Return whether texts differ; one text for all clips says nothing."""
        return len(values) > 1

    def embedding(self, settings: TextSettings) -> Embedding:
        return Words(settings.max_tokens)

    def names_of(self, value: str) -> Sequence[str]:
        return "".join(sign if sign.isalnum() else " " for sign in value.lower()).split()

    def effects(self, value: Any, specs: Any) -> list[str]:
        """Return nothing: texts are counted one by one."""
        return []

    def widget(self, settings: TextSettings) -> dict[str, Any]:
        return {"type": "text"}
