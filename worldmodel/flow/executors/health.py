"""Supervision of the workers of a stage: one that ends is replaced, up to a limit."""

import logging
from dataclasses import dataclass

from worldmodel.flow.errors import StageError

MAX_DEATHS = 5
"""Workers of a stage that may end or hang in a row, without a batch in between, before the run fails."""

log = logging.getLogger(__name__)


@dataclass
class Health:
    """Whether the workers of a stage get on."""

    role: str
    deaths: int = 0
    """Workers that ended or hung since the last finished batch."""
    last: str = ""
    """How the last of them ended."""

    def died(self) -> None:
        """Count a worker that ended.

        Raises:
            StageError: too many have in a row.
        """
        self.deaths += 1
        log.warning("A worker of the stage %s %s; it is replaced.", self.role, self.last)
        if self.deaths >= MAX_DEATHS:
            raise StageError(
                f"The stage {self.role} does not get on: {self.deaths} workers in a row ended or hung; the "
                f"last {self.last}."
            )
