"""Functions that child processes run in the tests of `worldmodel.processes`."""

import os
import signal
import time
from pathlib import Path

import numpy as np

from worldmodel import signals
from worldmodel.errors import ConfigError
from worldmodel.processes import Child, Connection


def echo(parent: Connection, *arguments: object) -> None:
    """Send back the arguments, and then every message."""
    parent.send(arguments)
    while True:
        parent.send(parent.receive())


def kill_itself(parent: Connection) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave(parent: Connection, code: int) -> None:
    os._exit(code)


def hang(parent: Connection) -> None:
    time.sleep(600)


def ignore_sigterm(parent: Connection) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent.send("ready")
    time.sleep(600)


def stop_on_sigterm(parent: Connection, path: str) -> None:
    """Write a file when told to end."""

    def stop(*_: object) -> None:
        with open(path, "w", encoding="utf-8") as file:
            file.write("stopped")
        raise SystemExit(3)

    signal.signal(signal.SIGTERM, stop)
    parent.send("ready")
    time.sleep(600)


def begin_a_message(parent: Connection, pause_s: float) -> None:
    """Send a byte of a message now and then: never a whole one."""
    for _ in range(1000):
        parent._socket.send(b"w")
        time.sleep(pause_s)


def write_garbage(parent: Connection) -> None:
    parent._socket.send(b"\xff" * 4096)
    time.sleep(600)


def close_its_end(parent: Connection) -> None:
    parent._socket.shutdown(1)
    time.sleep(600)


def refuse(parent: Connection) -> None:
    raise ConfigError("size is 0; use 1 or more.")


def fail(parent: Connection) -> None:
    raise ZeroDivisionError("a bug")


def count(parent: Connection, array: np.ndarray) -> None:
    parent.send(int(array.sum()))


def start_another(parent: Connection, target: str) -> None:
    """Be the parent of another child, and send its number; be killed in the middle of its work."""
    child = Child(f"children:{target}")
    parent.send(child.pid)
    parent.receive()


def busy(parent: Connection) -> None:
    """Compute without looking at the connection."""
    while True:
        sum(range(1000))


def variables(parent: Connection, *names: str) -> None:
    parent.send([os.environ.get(name) for name in names])


def program(arguments: list[str]) -> int:
    """Be the `main` of a program that waits for SIGTERM, and writes into a file how far it is."""
    path, code = Path(arguments[0]), int(arguments[1])
    with signals.recorded() as received:
        path.write_text("ready")
        while not received:
            time.sleep(0.01)
    path.write_text(f"stopped by {signal.Signals(received[0]).name}")
    return code


def start_program(parent: Connection, path: str) -> None:
    """Be the parent of a program, and send its number; be killed meanwhile."""
    child = Child("worldmodel.processes:run_main", "children:program", [path, "3"])
    parent.send(child.pid)
    parent.receive()
