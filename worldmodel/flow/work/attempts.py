"""Attempts at clips: which are made alone, how many there are, and when the next one follows.

All executors decide by these functions. A delivery is a clip that an executor hands to a worker, which may
end before it begins with it.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from worldmodel.config.flow import FlowConfig

T = TypeVar("T")
MAX_DELAY_S = 600.0
"""The longest wait that a stage can ask for."""


def groups(items: Sequence[T], delivery: Callable[[T], int], size: int) -> list[list[T]]:
    """Divide items into the calls of a stage, given the number of the delivery of each, from 1.

    One that was delivered before comes alone, so that a clip that ends workers takes no other with it.
    """
    new = [item for item in items if delivery(item) == 1]
    calls = [new[first : first + size] for first in range(0, len(new), size)]
    return calls + [[item] for item in items if delivery(item) > 1]


def max_endings(config: FlowConfig) -> int:
    """Return the number of workers that may end at a clip before it is a dead letter.

    With one attempt at each clip, those of a batch whose worker ended have another alone.
    """
    return max(config.max_attempts, 2)


def delay_s(config: FlowConfig, delivery: int, asked_s: float = 0.0) -> float:
    """Return the seconds between a failed delivery and the next one; a stage may ask for more."""
    return max(config.retry_delay_s * 2 ** (delivery - 1), min(asked_s, MAX_DELAY_S))
