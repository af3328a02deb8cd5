"""The interface of a world with known rules."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from worldmodel.config import ImageSize
from worldmodel.episodes import StartImage
from worldmodel.errors import ConfigError
from worldmodel.media import Frame

if TYPE_CHECKING:
    from worldmodel.eval.suite import EvalSuite
    from worldmodel.recording import Format, Recordable

RGB = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Target:
    """An object that actions can name, with its colour for a swatch."""

    name: str
    colour: RGB | None = None


@dataclass(frozen=True, slots=True)
class SuggestedAction:
    """An action for a button: its label, its text, and a colour that it mentions."""

    label: str
    text: str
    colour: RGB | None = None


class World:
    """An environment that models are trained and judged in, found by its name (`get_world`).

    Every method has a default, so a world implements only what it offers. Constructing one is cheap: modules
    that need more than NumPy are imported inside its methods.

    Attributes:
        name: Name in the registry and in `model.world`. If it generates training data, `register_source`
            of `worldmodel.data.sources` makes it a kind of source.
    """

    name: str

    def recordable(self, seed: int, rounds: int, size: ImageSize | None = None) -> "Recordable":
        """Return episodes of `rounds` actions for the recorder, with frames of `size`.

        Raises:
            ConfigError: The world generates no episodes.
        """
        raise ConfigError(f"The world {self.name} generates no episodes; record another.")

    def record(
        self,
        folder: str | Path,
        num_episodes: int,
        rounds: int = 3,
        seed: int = 0,
        size: ImageSize | None = None,
        format: "Format" = "clips",
        progress: bool = False,
    ) -> Path:
        """Record episodes of `rounds` actions, as `worldmodel.recording.record_environment` does.

        Raises:
            ConfigError: The world generates no episodes.
            OutputError: The folder cannot be written or has a recording of other settings.
        """
        from worldmodel import recording

        episodes = self.recordable(seed, rounds, size)
        return recording.record(episodes, folder, num_episodes, format, progress=progress)

    def documents(self, rng: np.random.Generator) -> Iterator[str]:
        """Yield texts on which a tokenizer is learned."""
        return iter(())

    def label_words(self) -> Mapping[str, Sequence[str]]:
        """Return the words behind the last axis of the label `words`, by kind.

        Episodes have it as `Episode.labels["words"]`, `[rows, columns, words]`: 1 where a word holds on a
        latent cell of the first frame. `Episode.labels["next_words"]`, of the same shape, has those of the
        last frame of the first round on the cells where they changed, and zeros on the others.
        `Episode.labels["named"]`, `[rows, columns]`, marks the objects that the first action names.
        """
        return {}

    def start(self, rng: np.random.Generator) -> Mapping[str, Any]:
        """Return the options of an environment's `reset`: a random observation or text to start from.

        Raises:
            ConfigError: The world has no random start.
        """
        raise ConfigError(f"The world {self.name} has no random start; pass an observation or a text.")

    def eval_suite(self) -> "EvalSuite | None":
        """Return the evaluation suite of this world; None if it cannot judge frames."""
        return None

    def start_images(self) -> Sequence[StartImage]:
        """Return images to start from, for models that bring none of their own."""
        return ()

    def targets_in(self, frame: Frame) -> tuple[Target, ...]:
        """Return the objects in a frame that actions can name, most prominent first."""
        return ()

    def targets_named(self, text: str) -> tuple[Target, ...]:
        """Return the objects that a text names."""
        return ()

    def target_actions(self, targets: Sequence[Target]) -> list[list[SuggestedAction]]:
        """Return suggested actions for every target."""
        return [[] for _ in targets]

    def other_actions(self, targets: Sequence[Target], seed: int) -> list[SuggestedAction]:
        """Return suggested actions on none of the targets."""
        return []
