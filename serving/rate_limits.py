"""Request limits: a token bucket, and limits on the rate and concurrency of each API key."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from worldmodel.serving.errors import RateLimitError


class TokenBucket:
    """Token bucket: `burst` tokens at most, refilled at `rate_per_s`."""

    def __init__(self, rate_per_s: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate_per_s, self.burst = rate_per_s, burst
        self._clock = clock
        self._tokens, self._updated_at = burst, clock()

    def take(self) -> float:
        """Take one token; return 0, or the seconds until the next one if the bucket is empty."""
        now = self._clock()
        refill = (now - self._updated_at) * self.rate_per_s
        self._tokens, self._updated_at = min(self.burst, self._tokens + refill), now
        if self._tokens < 1:
            return (1 - self._tokens) / self.rate_per_s
        self._tokens -= 1
        return 0.0


class RequestLimiter:
    """Limits the rate and the concurrency of every key's requests; not thread-safe.

    Args:
        of_key: Returns how many requests of a key may be in flight, and how many it may send per second.
        burst: Requests that may arrive at once after a pause.
        clock: Source of the time.
    """

    def __init__(
        self,
        of_key: Callable[[str], tuple[int, float]],
        burst: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._of_key, self._burst, self._clock = of_key, burst, clock
        self._num_concurrent: dict[str, int] = defaultdict(int)
        self._buckets: dict[str, TokenBucket] = {}

    @contextmanager
    def request(self, caller: str) -> Iterator[None]:
        """Count a request while the block runs.

        Raises:
            RateLimitError: the key has too many requests in flight, or sends them too fast.
        """
        max_concurrent, requests_per_s = self._of_key(caller)
        if self._num_concurrent[caller] >= max_concurrent:
            raise RateLimitError(
                f"This key has {self._num_concurrent[caller]} requests in flight; wait for one to finish.", 1
            )
        bucket = self._buckets.get(caller)
        if bucket is None or bucket.rate_per_s != requests_per_s:
            bucket = self._buckets[caller] = TokenBucket(requests_per_s, self._burst, self._clock)
        if wait_s := bucket.take():
            raise RateLimitError(f"This key sends requests too fast; wait {wait_s:.1f} s.", wait_s)
        self._num_concurrent[caller] += 1
        try:
            yield
        finally:
            self._num_concurrent[caller] -= 1
