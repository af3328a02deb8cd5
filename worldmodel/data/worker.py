"""A process that makes episodes: one end of a line asks, the other answers.

Every worker has a line of its own and no lock that others hold, so that one that is killed, or hangs, takes
nobody with it: the asking side sees the end of the line at once, and a silence after its patience. A worker
starts from this module alone: the training script is not imported a second time, and a notebook works.
"""

import os
import pickle
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from worldmodel.data.sources import Recipe
from worldmodel.errors import ConfigError, InputError, WorldModelError
from worldmodel.types import Episode

T = TypeVar("T")
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20)}
"""Else glibc gives the memory of every decoded frame back to the kernel, and asks for it again."""


@dataclass(frozen=True)
class Request:
    """One episode to make."""

    recipe: Recipe
    task: str
    seed: int
    index: int
    rounds: int


@dataclass(frozen=True)
class Bad:
    """Why an episode cannot be made; another takes its place."""

    reason: str


@dataclass(frozen=True)
class Failure:
    """An error that must end the run."""

    error: Exception


Answer = Episode | Bad | Failure


def answer(request: Request) -> Answer:
    """Make an episode."""
    try:
        return request.recipe.episode(request.task, request.seed, request.index, request.rounds)
    except InputError as error:
        return Bad(str(error))
    except WorldModelError as error:
        return Failure(error)
    except Exception:
        return Failure(RuntimeError(f"Making {request.recipe.name} failed:\n{traceback.format_exc()}"))


class Worker:
    """The asking side, which starts the process.

    Args:
        timeout_s: how long an answer may take.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        here, there = socket.socketpair()
        limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            here.setsockopt(socket.SOL_SOCKET, option, limit)
        with there:
            self.process = subprocess.Popen(  # noqa: S603 -- this interpreter, and a text of ours
                [sys.executable, "-P", "-c", f"from {__name__} import main; main({there.fileno()})"],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **ONE_THREAD, **KEPT_MEMORY, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        self.line = here
        self.sending, self.receiving = threading.Lock(), threading.Lock()

    def ask(self, request: Request) -> Answer:
        """Have an episode made; a second thread may ask meanwhile, so that the process never lacks work.

        Returns a `Failure` when the process was killed or does not answer in time: the caller then ends.
        """
        name = request.recipe.name
        try:
            with self.sending:
                send(self.line, request)
                self.receiving.acquire()  # in the order of the requests, as the answers come
            try:
                return receive(self.line)
            finally:
                self.receiving.release()
        except BlockingIOError:
            return Failure(
                ConfigError(
                    f"Data worker {self.process.pid} has been making {name} for more than "
                    f"{self.timeout_s:g} s; look at that file, or raise data.timeout_s."
                )
            )
        except (EOFError, OSError):
            code = self.process.wait(self.timeout_s)
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return Failure(
                ConfigError(
                    f"Data worker {self.process.pid} was {how} while making {name}; "
                    "if memory ran out, lower data.num_workers or data.prefetch."
                )
            )

    def close(self) -> None:
        """End the process, whatever it does; an `ask` under way in another thread returns."""
        self.process.kill()
        self.process.wait()
        self.line.close()


def patient(items: Iterator[T], timeout_s: float, late: Callable[[], T]) -> Iterator[T]:
    """Yield what an iterator gives, asked for in a thread; where one item takes too long, end with `late()`.

    The iterator must not raise: its error would be lost in the thread.
    """
    wanted, over = threading.Semaphore(0), threading.Event()
    given: queue.SimpleQueue[tuple[T] | None] = queue.SimpleQueue()

    def give() -> None:
        for item in items:
            given.put((item,))
            wanted.acquire()
            if over.is_set():
                return
        given.put(None)

    threading.Thread(target=give, daemon=True).start()  # one that hangs must not keep the process
    try:
        while (item := given.get(timeout=timeout_s)) is not None:
            yield item[0]
            wanted.release()
    except queue.Empty:
        yield late()
    finally:
        over.set()
        wanted.release()


def send(line: socket.socket, thing: object) -> None:
    """Send what `receive` gives on the other side; arrays go from where they lie, without a copy."""
    arrays: list[pickle.PickleBuffer] = []
    rest = pickle.dumps(thing, protocol=5, buffer_callback=arrays.append)
    pixels = [array.raw() for array in arrays]
    sizes = [len(rest), *(each.nbytes for each in pixels)]
    line.sendall(struct.pack(f"<{1 + len(sizes)}Q", len(sizes), *sizes) + rest)
    for each in pixels:
        line.sendall(each)


def receive(line: socket.socket) -> Any:
    """Return what the other side sent; both sides are this program.

    Raises:
        BlockingIOError: the line is silent for longer than its patience.
        EOFError: the other side is gone.
    """
    (count,) = struct.unpack("<Q", _bytes(line, 8))
    sizes = struct.unpack(f"<{count}Q", _bytes(line, 8 * count))
    rest, *pixels = [_bytes(line, size) for size in sizes]
    return pickle.loads(rest, buffers=pixels)  # noqa: S301 -- from a process of ours, over a line of its own


def _bytes(line: socket.socket, size: int) -> bytearray:
    """Wait for all of a part in the kernel: coming back for every piece would fight for the GIL."""
    data = bytearray(size)
    missing = memoryview(data)
    while missing:
        got = line.recv_into(missing, flags=socket.MSG_WAITALL)
        if not got:
            raise EOFError
        missing = missing[got:]
    return data


def main(line_number: int) -> None:
    """Answer on an inherited line until the asking side is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training to handle
    with socket.socket(fileno=line_number) as line:
        while True:
            try:
                send(line, answer(receive(line)))
            except (EOFError, OSError):
                return
