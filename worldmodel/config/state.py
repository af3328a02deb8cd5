"""Settings of the predicted state."""

from dataclasses import dataclass

from worldmodel.config.checks import check_numbers
from worldmodel.config.generator import check_heads


@dataclass(frozen=True)
class StateConfig:
    """The state head, which makes the predicted state of the hidden states at the query positions.

    A state has a feature per cell, the regressed latents of the next observation (the forecast), and
    optionally a code: a few categorical variables that choose between possible futures.
    """

    width: int = 256
    """Width of its transformer over cells."""
    num_layers: int = 3
    """Number of layers."""
    num_heads: int = 4
    """Number of attention heads."""
    merge: int = 1
    """Number of latent cells along each side that share one cell of the state, whose forecast is their mean
    latent: 1 forecasts every latent cell; with 2 or more the state decides coarsely, and the generator
    renders."""
    code_groups: int = 0
    """Number of categorical variables of the code; 0 leaves the code out, for worlds whose next observation
    is certain."""
    code_classes: int = 8
    """Number of values of each variable."""
    code_block: int = 0
    """Side of a square of state cells that has a code of its own, for pictures whose parts choose for
    themselves; 0 has one code for the whole picture."""

    @property
    def has_code(self) -> bool:
        """Whether the state contains a code."""
        return self.code_groups > 0

    def __post_init__(self) -> None:
        check_heads("state", self.width, self.num_heads)
        check_numbers(self, "num_layers", "merge", least=1, of=" of the state")
        check_numbers(self, "code_groups", "code_block", least=0, of=" of the state")
        check_numbers(self, "code_classes", least=2, of=" of the state")
