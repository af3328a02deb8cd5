"""Episodes, the samples of training, and the results of a round."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from worldmodel.actions import Action

DESCRIBE = "describe"
"""Prompt for a description of the newest observation."""
WHAT_HAPPENED = "what happened"
"""Prompt for the action that led from the first observation to the second."""


@dataclass(frozen=True, slots=True)
class StartImage:
    """An image that a rollout can start from."""

    title: str
    image: np.ndarray
    """uint8 `[h, w, 3]`."""


@dataclass(frozen=True)
class EncodedObservations:
    """Latents of an episode's observations, computed before training.

    Arrays are float32, float16, or uint16 with the bits of bfloat16.
    """

    context: np.ndarray | None = None
    """Context latents of every round, `[r, s, c, h, w]`; None: nothing was observed before."""
    target: np.ndarray | None = None
    """Latents that every round leads to, `[r, t, c, h, w]`."""
    observed: np.ndarray | None = None
    """Latents of the observation that a text is about, `[t, c, h, w]`."""

    @property
    def shapes(self) -> tuple[tuple[int, ...] | None, ...]:
        """Shapes of the arrays; episodes can be stacked if they are equal."""
        arrays = (self.context, self.target, self.observed)
        return tuple(None if array is None else array.shape for array in arrays)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Reward and end of a round."""

    reward: float
    ended: bool
    """Whether the episode ends with the round."""


@dataclass(frozen=True, slots=True)
class PredictedState:
    """The predicted state of a round, as far as users see it."""

    features: np.ndarray
    """Mean of the features of the cells, float32 `[d]`."""
    code: tuple[int, ...] = ()
    """Which of the possible futures this is, a value per variable; empty for models without a code."""
    log_probability: float = 0.0
    """Log-probability of that code before it was drawn, in nats; 0 for models without one."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a round."""

    frames: np.ndarray
    """uint8 `[t, h, w, 3]`."""
    outcome: Outcome | None
    """Predicted reward and end; None for models without outcomes."""
    state: PredictedState | None = None
    """The predicted state; None for models without one, and for observed rounds."""

    def __repr__(self) -> str:
        count, height, width, _ = self.frames.shape
        told = "" if self.outcome is None else f", {self.outcome}"
        return f"StepResult({count} frames of {width} x {height} pixels{told})"


@dataclass(frozen=True)
class Episode:
    """One training sample: observations with the actions between them, and optionally a text about them.

    `observations` are uint8 clips `[t, h, w, 3]`; `actions[i]` leads from observation i to i + 1. An empty
    first clip (t = 0) means that nothing was observed before. `prompt` and `answer` are text about the
    observations. `labels` are labels of latent cells that a source provides (`World.label_words`).
    `outcomes` has one entry per action; it is empty if the source has no rewards. The first `observed` rounds
    were seen and not acted in: a model remembers them, and is not trained to predict them.

    With `encoded`, the codec does not run in the training step, and there are only those `observations` that
    a vision encoder reads. `text_states` are outputs of the generator's text encoder by text, `[l, e]` each,
    without zeros at the end; the encoder runs for all other texts.
    """

    name: str
    observations: tuple[np.ndarray, ...] = ()
    actions: tuple[Action, ...] = ()
    prompt: str | None = None
    answer: str | None = None
    labels: Mapping[str, np.ndarray] | None = None
    encoded: EncodedObservations | None = None
    text_states: Mapping[str, np.ndarray] | None = None
    outcomes: tuple[Outcome, ...] = ()
    observed: int = 0
