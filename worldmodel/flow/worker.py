"""A worker process of the local executor.

It reports when it begins and ends a batch, so that whoever started it sees one that hangs. It ends with
whoever started it, and after its batch when it gets SIGTERM.
"""

import threading
from signal import SIGTERM

from worldmodel import signals
from worldmodel.config.flow import FlowConfig
from worldmodel.flow.work.loops import run_role
from worldmodel.processes import Connection

ENDED = "ended"
"""What it reports when it has nothing more to do."""


def work(executor: Connection, config: FlowConfig, role: str) -> None:
    """Run a worker in a process of its own."""
    stop = threading.Event()
    with signals.handled(lambda _: stop.set(), [SIGTERM]):
        run_role(config, role, stop, executor.send)
    executor.send(ENDED)
