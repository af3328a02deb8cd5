"""Values along a clip."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Track:
    """Values along a clip: one for the whole clip, one per action, or one per interval of time."""

    values: tuple[Any, ...] = ()
    per_action: bool = False
    times: tuple[tuple[float, float], ...] = ()
    """Start and end of each value, in seconds after the clip's start."""

    @property
    def is_caption(self) -> bool:
        """Whether there is at most one value, for the whole clip."""
        return not (self.per_action or self.times)

    def during(self, index: int, start: float, end: float) -> Any:
        """Return the value of action `index` of the clip, which lasts from `start` to `end`, or None.

        Of several intervals, the one that covers most of the action counts.
        """
        if self.times:
            shares = [min(end, last) - max(start, first) for first, last in self.times]
            best = max(range(len(shares)), key=shares.__getitem__)
            return self.values[best] if shares[best] > 0 else None
        if self.per_action:
            return self.values[index] if index < len(self.values) else None
        return self.values[0] if self.values else None


NOTHING = Track()
"""No value at any time."""
