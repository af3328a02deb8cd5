"""Which observations a model knows: what held-out frames are to it, and how unlike another one is."""

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from worldmodel.errors import ModelError

SHARE = 0.99
"""Share of the held-out frames that a model knows by definition: the least likely ones may be faulty."""
REFERENCE_SHARE = 0.75
"""Share of the frames whose states are kept to compare with; the others tell how far away known ones are."""
LEAST_ERROR, LEAST_DISTANCE = 0.5, 0.01
"""Least limits, in grey levels and relative to the norm of a state: of a world of few pictures all are known
exactly, and rounding would be unlike them."""
LEAST = 16
"""Fewer frames do not tell what a model knows."""


@dataclass(frozen=True, eq=False)
class KnownObservations:
    """Errors and states of frames that a model was not trained on, but of its own world.

    A codec returns what it was trained on with a smaller error than other pictures. Among pictures that it
    does return, the predicted state tells apart what the backbone knows: that of an unlike observation is far
    from all others (nearest neighbours: Sun et al. 2022, arXiv:2204.06507).
    """

    error: float
    """Error of the codec that 99 % of the frames do not exceed: mean difference in grey levels, 0 to 255."""
    distance: float
    """The same for the distance of a state to the nearest of `states`."""
    states: Float[Tensor, "n d"]
    """States of frames: the mean of the hidden states at the queries, without an action."""

    @classmethod
    def of(cls, errors: Float[Tensor, " n"], states: Float[Tensor, "n d"]) -> "KnownObservations | None":
        """Learn from frames in any order; None if they are too few (16)."""
        if len(errors) < LEAST:
            return None
        kept = int(REFERENCE_SHARE * len(states))
        # As in the file: a model that was loaded gives the same scores.
        states = states.bfloat16().float()
        distance = float(_distances(states[kept:], states[:kept]).quantile(SHARE))
        return cls(
            max(float(errors.quantile(SHARE)), LEAST_ERROR),
            max(distance, LEAST_DISTANCE * float(states.norm(dim=1).mean())),
            states[:kept],
        )

    def score(self, errors: Float[Tensor, " b"], states: Float[Tensor, "b d"]) -> Float[Tensor, " b"]:
        """Return how unlike observations are: 1 is the limit of 99 % of the held-out frames."""
        distances = _distances(states.to(self.states), self.states)
        return torch.maximum(errors.to(distances) / self.error, distances / self.distance)

    def write(self, file: Path) -> None:
        """Write a safetensors file."""
        limits = torch.tensor([self.error, self.distance], dtype=torch.float64)
        save_file({"limits": limits, "states": self.states.bfloat16()}, file)

    @classmethod
    def read(cls, file: Path, width: int) -> "KnownObservations | None":
        """Read what `write` wrote for a backbone of a width; None if there is no such file.

        Raises:
            ModelError: it is damaged, or of another model.
        """
        if not file.is_file():
            return None
        try:
            stored = load_file(file)
            error, distance = stored["limits"].tolist()
            states = stored["states"].float()
        except (OSError, SafetensorError, KeyError, ValueError):
            raise ModelError(f"{file} is damaged; download the model again, or delete the file.") from None
        positive = error > 0 and distance > 0 and bool(states.isfinite().all())
        if not positive or states.dim() != 2 or states.shape[1] != width or not len(states):
            raise ModelError(f"{file} is of another model; download the model again, or delete the file.")
        return cls(error, distance, states)


def _distances(states: Float[Tensor, "b d"], known: Float[Tensor, "n d"]) -> Float[Tensor, " b"]:
    return torch.cdist(states, known).amin(dim=1)
