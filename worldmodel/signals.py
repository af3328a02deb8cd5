"""Signals that ask a process to stop, inside a block."""

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

STOP = (signal.SIGTERM, signal.SIGINT)
"""Signals of service managers and schedulers, and of Ctrl-C."""


@contextmanager
def handled(handle: Callable[[int], None], signals: Iterable[int] = STOP) -> Iterator[None]:
    """Call a function with the number of every signal inside the block; then put back what was before.

    Only the main thread receives signals, so the block changes nothing in another one.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in signals}
    for number in before:
        signal.signal(number, lambda number, frame: handle(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def recorded() -> Iterator[list[int]]:
    """Only record SIGTERM and Ctrl-C inside the block; yields the list of those received so far."""
    received: list[int] = []
    with handled(received.append):
        yield received
