"""Child processes, and the messages that they and the process that started them send each other.

    parent: Child("module:function", …) ──private socket pair──► child: function(connection, …)

A message is a pickled object, with large arrays beside it as raw bytes. It may be pickled, because nobody but
the two processes has an end of the socket pair, and both run the same program: episodes, chunks, settings and
errors need no format of their own. Bytes of clients, data sets and model folders never take this way; the
process that decodes uploads, which an upload might take over, answers in a fixed binary format instead
(`worldmodel.serving.media.decode_child`).
"""

import importlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from worldmodel.errors import WorldModelError

HEADER = struct.Struct("<4sI")
"""Before each message: a constant, and the number of sizes that follow it, of 8 bytes each."""
MAGIC = b"wmm1"
ORPHAN_S = 35.0
"""Time limit for a program whose parent has ended: torchrun gives its processes 30 s after SIGTERM."""
EXIT_S = 10.0
"""Time limit for a child that has closed its connection to exit and free its memory."""


class ChildError(Exception):
    """A child cannot be reached any more; the message is how it ended, such as `was killed by SIGKILL`."""


class ClosedError(EOFError):
    """The other side closed the connection, or has ended."""


class Connection:
    """One end of the private connection between a process and one that it started.

    One thread may send while another receives.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self.on_close: Callable[[], None] = lambda: os._exit(1)
        """Called in the child when the parent closes its end; ends it, also in the middle of its work."""

    def send(self, message: object, timeout_s: float | None = None) -> None:
        """Send an object, which `receive` returns on the other side; arrays are sent without a copy.

        Raises:
            ClosedError: the other side closed the connection.
            TimeoutError: it did not read all within the time; nothing more can be sent.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        arrays: list[pickle.PickleBuffer] = []
        rest = pickle.dumps(message, protocol=5, buffer_callback=arrays.append)
        buffers = [array.raw() for array in arrays]
        sizes = [len(rest), *(buffer.nbytes for buffer in buffers)]
        header = HEADER.pack(MAGIC, len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes)
        for data in (header + rest, *buffers):
            left = memoryview(data)
            while left:
                self._limit(socket.SO_SNDTIMEO, deadline)
                try:
                    left = left[self._socket.send(left) :]
                except BlockingIOError:
                    raise TimeoutError from None
                except (BrokenPipeError, ConnectionResetError):
                    raise ClosedError from None

    def receive(self, timeout_s: float | None = None) -> Any:
        """Return the next object that the other side sent.

        Raises:
            ClosedError: the other side closed the connection.
            ConnectionError: it sent something else than a message.
            TimeoutError: no whole message arrived within the time; nothing more can be received.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        magic, count = HEADER.unpack(self._receive_bytes(HEADER.size, deadline))
        if magic != MAGIC:
            raise ConnectionError
        sizes = struct.unpack(f"<{count}Q", self._receive_bytes(8 * count, deadline))
        rest, *buffers = [self._receive_bytes(size, deadline) for size in sizes]
        # Only `send` writes these bytes, see the top of this file.
        return pickle.loads(rest, buffers=buffers)  # noqa: S301

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _receive_bytes(self, size: int, deadline: float | None) -> bytearray:
        data = bytearray(size)
        missing = memoryview(data)
        while missing:
            self._limit(socket.SO_RCVTIMEO, deadline)
            try:
                # A wait in the kernel, for all of it: Python's own timeouts would wake this thread for every
                # 200 KB of a large array, and each time it would wait for the GIL.
                received = self._socket.recv_into(missing, flags=socket.MSG_WAITALL)
            except BlockingIOError:
                raise TimeoutError from None
            except ConnectionResetError:
                raise ClosedError from None
            if not received:
                raise ClosedError
            missing = missing[received:]
        return data

    def _limit(self, direction: int, deadline: float | None) -> None:
        """Let the next call wait in the kernel until the deadline."""
        seconds = 0.0  # no limit
        if deadline is not None:
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                raise TimeoutError
        microseconds = 0 if deadline is None else max(1, int(seconds * 1e6))
        limit = struct.pack("ll", *divmod(microseconds, 10**6))
        self._socket.setsockopt(socket.SOL_SOCKET, direction, limit)


class Child:
    """A process that runs a function of this program, and the connection to it.

    It ends with this process, also if this one is killed, and leaves Ctrl-C, which reaches both, to this one.
    It imports the module of the function only: a script that starts it is not run again, and notebooks work.

    Args:
        target: `module:function`; called with the child's end of the connection and the arguments.
        arguments: Further arguments; they are pickled.
        environment: Variables that are added to those of this process, or replace them.
        stdout: As of `subprocess.Popen`.
    """

    def __init__(
        self,
        target: str,
        *arguments: object,
        environment: Mapping[str, str] | None = None,
        stdout: int | IO[Any] | None = None,
    ) -> None:
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours)
        code = f"from {__name__} import run_child; run_child({target!r}, {theirs.fileno()})"
        # Until `run_child` ignores it, Ctrl-C must not end the child while it imports what it needs.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))  # children inherit the mask
        try:
            with theirs:
                self.process = subprocess.Popen(  # noqa: S603 -- this interpreter, and fixed code
                    [sys.executable, "-P", "-c", code],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    env={**os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join(sys.path)},
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        with suppress(ClosedError):  # it has ended already, as `receive` will say
            self.connection.send(arguments)

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self.process.pid

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    def send(self, message: object, timeout_s: float | None = None) -> None:
        """Send the child an object.

        Raises:
            ChildError: the child has ended.
            TimeoutError: it did not read all within the time; it must be closed.
        """
        try:
            self.connection.send(message, timeout_s)
        except TimeoutError:
            raise
        except (ClosedError, OSError):  # closed by the child, or here by another thread
            raise ChildError(self.ending()) from None

    def receive(self, timeout_s: float | None = None) -> Any:
        """Return the next object that the child sent.

        Raises:
            ChildError: the child has ended, or sent something else than a message.
            TimeoutError: nothing arrived within the time; it must be closed.
            WorldModelError: the child's function raised it.
        """
        try:
            message = self.connection.receive(timeout_s)
        except TimeoutError:
            raise
        except ConnectionError:
            end(self.process)
            raise ChildError("sent something else than a message") from None
        except (ClosedError, OSError):  # closed by the child, or here by another thread
            raise ChildError(self.ending()) from None
        if isinstance(message, _Raised):
            raise message.error
        return message

    def ending(self) -> str:
        """Return how the child ended; one that closed its connection and goes on is killed."""
        try:
            code = self.process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            end(self.process)
            return "closed its connection"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def close(self, timeout_s: float = 0.0) -> None:
        """End the child: at once, or by SIGTERM and after `timeout_s` at once.

        A call of `receive` in another thread then raises.
        """
        end(self.process, timeout_s)
        self.connection.close()


def end(process: "subprocess.Popen[Any]", timeout_s: float = 0.0) -> None:
    """End a process at once, or by SIGTERM and after `timeout_s` at once; it leaves no zombie."""
    if timeout_s > 0:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
    process.kill()  # does nothing to one that has been waited for
    process.wait()


def run_main(parent: Connection, target: str, arguments: Sequence[str]) -> None:
    """Run the `main` of a program in a child, as `module:function`, which gets the arguments.

    It stays a program that SIGTERM asks to stop, for example to write a checkpoint first. Its parent's end
    does so, too, and a while later ends it.
    """

    def end_later() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_S)
        os._exit(1)

    parent.on_close = end_later
    module, _, name = target.partition(":")
    sys.argv = [module, *arguments]
    sys.exit(getattr(importlib.import_module(module), name)(list(arguments)))


class _Raised:
    """The error that ended the function of a child."""

    def __init__(self, error: WorldModelError) -> None:
        self.error = error


def run_child(target: str, descriptor: int) -> None:
    """Call the function of a child process; the connection is inherited."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # also drops one that is pending
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
    module, _, name = target.partition(":")
    end_of_pair = socket.socket(fileno=descriptor)
    connection = Connection(end_of_pair)

    def wait_for_close() -> None:
        poll = select.poll()
        poll.register(end_of_pair, select.POLLHUP)
        poll.poll()
        connection.on_close()

    threading.Thread(target=wait_for_close, daemon=True).start()
    try:
        arguments = connection.receive()
        getattr(importlib.import_module(module), name)(connection, *arguments)
    except ClosedError:
        pass
    except WorldModelError as error:
        connection.send(_Raised(error))
        sys.exit(2)
