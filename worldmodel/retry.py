"""Attempts at what fails for a while: how many there are, and the pauses between them."""

import random
import re
import time
from email.utils import parsedate_to_datetime

SECONDS = re.compile(r"[0-9]{1,18}(\.[0-9]{1,18})?")


class Backoff:
    """The pauses between attempts at one thing.

    Each is up to twice as long as the one before, and a random part of it is left out: callers that failed
    together do not come back together.

    Args:
        first_s: Longest first pause.
        longest_s: Longest pause of all.
        retries: Attempts after the first one; None does not limit them.
        timeout_s: Seconds from now on in which a failed attempt is followed by another one; None does not
            limit them.
    """

    def __init__(
        self, first_s: float, longest_s: float, retries: int | None = None, timeout_s: float | None = None
    ) -> None:
        self._next_s, self._longest_s, self._retries = first_s, longest_s, retries
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s

    def pause_s(self, asked_s: float = 0.0) -> float | None:
        """Return the seconds before the next attempt, after one that failed; None if there is to be none.

        Args:
            asked_s: Seconds that the other side asks to wait.
        """
        if self._retries is not None:
            if self._retries <= 0:
                return None
            self._retries -= 1
        if self._deadline is not None and time.monotonic() > self._deadline:
            return None
        pause_s = self._next_s * random.uniform(0.5, 1.0)
        self._next_s = min(2 * self._next_s, self._longest_s)
        return min(max(pause_s, asked_s), self._longest_s)


def retry_after(header: str, default: float = 0.0) -> float:
    """Return the seconds that a header Retry-After asks to wait; `default` if it is absent or wrong."""
    if SECONDS.fullmatch(header.strip()):
        return float(header)
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return default
