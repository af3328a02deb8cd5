"""Worker processes that make episodes on request.

Every worker has a connection of its own and shares no lock with others, so a worker that is killed or hangs
affects no other: the trainer sees the connection close at once, or time out.
"""

import queue
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from worldmodel.data.sources import Recipe
from worldmodel.episodes import Episode
from worldmodel.errors import ConfigError, InputError, WorldModelError
from worldmodel.processes import Child, ChildError, Connection

T = TypeVar("T")
# There are as many workers as cores to use: more threads in each would only take turns.
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
        self.child = Child(f"{__name__}:serve", environment={**ONE_THREAD, **MALLOC_OPTIONS})
        self.sending, self.receiving = threading.Lock(), threading.Lock()

    def make(self, request: Request) -> Result:
        """Make an episode in the process.

        A second thread may call this meanwhile, so that the process always has a next request. Returns a
        `Failure` when the process was killed or does not respond in time.
        """
        name = request.recipe.name
        try:
            with self.sending:
                self.child.send(request, self.timeout_s)
                # Taken before the other lock is left: results arrive in the order of the requests.
                self.receiving.acquire()
            try:
                return self.child.receive(self.timeout_s)
            finally:
                self.receiving.release()
        except TimeoutError:
            return Failure(
                ConfigError(
                    f"Data worker {self.child.pid} did not finish {name} within {self.timeout_s:g} s; "
                    "check that file, or raise data.timeout_s."
                )
            )
        except ChildError as error:
            return Failure(
                ConfigError(
                    f"Data worker {self.child.pid} {error} while making {name}; "
                    "if memory ran out, lower data.num_workers or data.prefetch."
                )
            )

    def close(self) -> None:
        """Kill the process; a call of `make` in another thread then returns."""
        self.child.close()


def with_timeout(items: Iterator[T], timeout_s: float, on_timeout: Callable[[], T]) -> Iterator[T]:
    """Yield the items of an iterator that runs in a thread; end with `on_timeout()` when one takes too long.

    The iterator must not raise: its error would be lost in the thread.
    """
    requested, closed = threading.Semaphore(0), threading.Event()
    produced: queue.SimpleQueue[tuple[T] | None] = queue.SimpleQueue()

    # One item at a time: the time limit then counts from when an item is asked for, and a source that hangs
    # is named by what is asked of it.
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


def serve(trainer: Connection) -> None:
    """Make the episodes that the trainer requests, in the worker's process."""
    while True:
        trainer.send(make_episode(trainer.receive()))
