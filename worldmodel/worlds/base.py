"""The protocol between the library and a world whose rules are known."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from worldmodel.config import DataConfig, WorldModelConfig
from worldmodel.errors import ConfigError

if TYPE_CHECKING:
    from worldmodel.data.sources import Source


class World:
    """An environment that models are trained and judged in, found by its name (`get_world`).

    Every method has a default, so a world implements only what it offers. Constructing one is cheap: whatever
    needs more than NumPy is imported inside its methods.

    Attributes:
        name: Name in the registry, in `model.world` and in `data.sources.NAME.kind`.
    """

    name: str

    def open_source(self, name: str, config: DataConfig, model: WorldModelConfig) -> "Source":
        """Open one of `data.sources` of this kind.

        Raises:
            ConfigError: The source does not fit the model, or the world generates no episodes.
        """
        raise ConfigError(
            f"data.sources.{name}: the world {self.name} generates no episodes; use another kind."
        )

    def documents(self, rng: np.random.Generator) -> Iterator[str]:
        """Yield texts for learning a tokenizer from nothing."""
        return iter(())

    def label_words(self) -> Mapping[str, Sequence[str]]:
        """Return the words behind the last axis of the label `words`, by kind.

        Episodes carry it as `Episode.labels["words"]`, `[rows, columns, words]`: 1 where a word holds on a
        latent cell of the first frame. `Episode.labels["named"]`, `[rows, columns]`, marks the objects that
        the first action names.
        """
        return {}

    def start(self, rng: np.random.Generator) -> Mapping[str, Any]:
        """Return the options of an environment's `reset`: a random observation or text to start from.

        Raises:
            ConfigError: The world has no random start.
        """
        raise ConfigError(f"The world {self.name} has no random start; pass an observation or a text.")
