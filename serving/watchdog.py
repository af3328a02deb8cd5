"""Notices that the model computes no more: calls that fail, and calls that do not return."""

import asyncio
import faulthandler
import logging
import sys
from collections.abc import Awaitable, Callable
from typing import Literal

from worldmodel.serving.worlds.service import WorldService

LOG = logging.getLogger(__name__)

Fault = Literal["failed", "failing", "stuck"]
"""Processes of the engine or the generator have ended; rounds fail; a call does not return."""

MAX_FAILURES = 3
"""Rounds of its own in a row that a server may fail."""
INTERVAL_S = 0.25


class Watchdog:
    """Decides whether the model still computes; a fault is final, since none of them passes.

    A call that fails says little, as its input may be at fault. So after one the watchdog plays rounds of its
    own, and the server is failing if all of them fail, too.

    Args:
        service: the model.
        deadline_s: time limit of a single call to the model.
    """

    def __init__(self, service: WorldService, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._service = service
        self._fault: Fault | None = None
        self._num_seen = 0
        self._test: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def fault(self) -> Fault | None:
        """Why the model computes no more; None while it does."""
        if self._fault is None and not self._service.alive:
            self._fault = "failed"
        return self._fault

    def start(self, on_fault: Callable[[], Awaitable[None]]) -> None:
        """Watch from now on; `on_fault` is called once."""
        self._watching = asyncio.create_task(self._watch(on_fault))

    async def close(self) -> None:
        """Watch no longer."""
        tasks = [task for task in (self._watching, self._test) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def examine(self) -> bool:
        """After a call that failed, return whether the server is at fault, and not the call's input."""
        if self.fault is None:
            if self._test is None or self._test.done():
                self._test = asyncio.create_task(self._play_rounds())
            await asyncio.wait({self._test})
        return self.fault is not None

    async def _watch(self, on_fault: Callable[[], Awaitable[None]]) -> None:
        compute = self._service.compute
        while self.fault is None:
            if compute.running_s > self.deadline_s:
                self._fault = "stuck"
            elif compute.num_failed != self._num_seen and (self._test is None or self._test.done()):
                self._test = asyncio.create_task(self._play_rounds())
            await asyncio.sleep(INTERVAL_S)
        LOG.error("The model computes no more (%s): its work is left to other servers.", self.fault)
        try:
            await on_fault()
        except Exception:  # the server ends all the same, and its lease with it
            LOG.exception("The work of this server cannot be left to others.")

    async def _play_rounds(self) -> None:
        for _ in range(MAX_FAILURES):
            try:
                async with asyncio.timeout(self.deadline_s):
                    await self._service.play_test_round()
                break
            except TimeoutError:
                LOG.warning("The server is too busy to find out why a call failed.")
                break
            except Exception:
                LOG.exception("A round of the server's own failed.")
        else:
            self._fault = self._fault or "failing"
        self._num_seen = self._service.compute.num_failed


def end_process_in(seconds: float) -> None:
    """End this process with code 1 after a time, and print where each thread is; a later call replaces it.

    The timer is a thread that needs neither the event loop nor the interpreter's lock, so no call that hangs
    can keep it from ending the process.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or sys.stderr)


def keep_process() -> None:
    """Cancel `end_process_in`."""
    faulthandler.cancel_dump_traceback_later()
