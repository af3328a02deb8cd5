"""Worker processes that make episodes on request.

Every worker has a connection of its own and shares no lock with others, so a worker that is killed or hangs
affects no other: the trainer sees the connection close at once, or time out. A worker imports this module
only: the training script is not imported a second time, and notebooks work.
"""

import os
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
from typing import TypeVar

from worldmodel.config import DecoderName
from worldmodel.data.sources import Recipe
from worldmodel.errors import ConfigError, InputError, WorldModelError
from worldmodel.media import use_decoder
from worldmodel.messages import receive, send
from worldmodel.types import Episode

T = TypeVar("T")
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
MALLOC_OPTIONS = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20)}
"""Without these glibc returns the memory of every decoded frame to the kernel and requests it again."""


@dataclass(frozen=True)
class Request:
    """One episode to make."""

    recipe: Recipe
    task: str
    seed: int
    index: int
    rounds: int
    decoder: DecoderName = "pyav"


@dataclass(frozen=True)
class BadClip:
    """Reason why an episode cannot be made; another one replaces it."""

    reason: str


@dataclass(frozen=True)
class Failure:
    """An error that must end the run."""

    error: Exception


Result = Episode | BadClip | Failure


def make_episode(request: Request) -> Result:
    """Make an episode."""
    try:
        use_decoder(request.decoder)
        return request.recipe.episode(request.task, request.seed, request.index, request.rounds)
    except InputError as error:
        return BadClip(str(error))
    except WorldModelError as error:
        return Failure(error)
    except Exception:  # the trainer raises it: an error that ends this process would lose its traceback
        return Failure(RuntimeError(f"Making {request.recipe.name} failed:\n{traceback.format_exc()}"))


class Worker:
    """Handle of a worker process, which it starts.

    Args:
        timeout_s: how long one episode may take.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        here, there = socket.socketpair()
        limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            here.setsockopt(socket.SOL_SOCKET, option, limit)
        with there:
            self.process = subprocess.Popen(  # noqa: S603 -- this interpreter, and fixed code
                [sys.executable, "-P", "-c", f"from {__name__} import main; main({there.fileno()})"],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **ONE_THREAD, **MALLOC_OPTIONS, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        self.connection = here
        self.sending, self.receiving = threading.Lock(), threading.Lock()

    def make(self, request: Request) -> Result:
        """Make an episode in the process.

        A second thread may call this meanwhile, so that the process always has a next request. Returns a
        `Failure` when the process was killed or does not respond in time.
        """
        name = request.recipe.name
        try:
            with self.sending:
                send(self.connection, request)
                self.receiving.acquire()  # results arrive in the order of the requests
            try:
                return receive(self.connection)
            finally:
                self.receiving.release()
        except BlockingIOError:
            return Failure(
                ConfigError(
                    f"Data worker {self.process.pid} did not finish {name} within {self.timeout_s:g} s; "
                    "check that file, or raise data.timeout_s."
                )
            )
        except (EOFError, OSError):
            code = self.process.wait(self.timeout_s)
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            return Failure(
                ConfigError(
                    f"Data worker {self.process.pid} {how} while making {name}; "
                    "if memory ran out, lower data.num_workers or data.prefetch."
                )
            )

    def close(self) -> None:
        """Kill the process; a call of `make` in another thread then returns."""
        self.process.kill()
        self.process.wait()
        self.connection.close()


def with_timeout(items: Iterator[T], timeout_s: float, on_timeout: Callable[[], T]) -> Iterator[T]:
    """Yield the items of an iterator that runs in a thread; end with `on_timeout()` when one takes too long.

    The iterator must not raise: its error would be lost in the thread.
    """
    requested, closed = threading.Semaphore(0), threading.Event()
    produced: queue.SimpleQueue[tuple[T] | None] = queue.SimpleQueue()

    def produce() -> None:
        for item in items:
            produced.put((item,))
            requested.acquire()
            if closed.is_set():
                return
        produced.put(None)

    threading.Thread(target=produce, daemon=True).start()  # a thread that hangs must not block the exit
    try:
        while (item := produced.get(timeout=timeout_s)) is not None:
            yield item[0]
            requested.release()
    except queue.Empty:
        yield on_timeout()
    finally:
        closed.set()
        requested.release()


def main(descriptor: int) -> None:
    """Serve requests on an inherited connection until the other side closes it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the trainer
    with socket.socket(fileno=descriptor) as connection:
        while True:
            try:
                send(connection, make_episode(receive(connection)))
            except (EOFError, OSError):
                return
