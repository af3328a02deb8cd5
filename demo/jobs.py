"""Jobs of a visitor: one runs, the others wait in a queue and are shown meanwhile."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

_NUMBERS = count(1)


@dataclass(eq=False)
class Job:
    """One thing that was asked for."""

    label: str
    """Description, in the visitor's words."""
    number: int = field(default_factory=lambda: next(_NUMBERS))
    began: float | None = None
    """Time at which its turn came; None while it waits."""
    progress: int | None = None
    """Percentage of its denoising steps, if known."""
    world: str | None = None
    """The world whose round it plays, if any."""
    task: "asyncio.Task[Any] | None" = None

    @property
    def elapsed_s(self) -> float:
        """Seconds since its turn came."""
        return 0.0 if self.began is None else time.monotonic() - self.began

    def cancel(self) -> None:
        """Give it up, whether it runs or waits."""
        if self.task is not None:
            self.task.cancel()


@dataclass(eq=False)
class JobQueue:
    """The jobs of one open page, in the order in which they were asked for."""

    jobs: list[Job] = field(default_factory=list)
    note: str = ""
    """The last error, in a sentence."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def add(self, label: str, call: Callable[[], Awaitable[Any]]) -> Job:
        """Append a job that makes a call when its turn comes; its task has the result."""

        async def take_turn() -> Any:
            async with self._lock:
                job.began = time.monotonic()
                return await call()

        job = Job(label)
        job.task = asyncio.create_task(take_turn())
        self.jobs.append(job)
        self.note = ""
        return job

    def cancel(self, number: int) -> None:
        """Give up the job with this number, if it is still there."""
        for job in self.jobs:
            if job.number == number:
                job.cancel()
