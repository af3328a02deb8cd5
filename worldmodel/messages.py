"""Objects that a process and those that it has started send each other, over a private socket pair."""

import pickle
import socket
import struct
from typing import Any


def send(connection: socket.socket, message: object) -> None:
    """Send an object, which `receive` returns on the other side; arrays are sent without a copy."""
    arrays: list[pickle.PickleBuffer] = []
    rest = pickle.dumps(message, protocol=5, buffer_callback=arrays.append)
    buffers = [array.raw() for array in arrays]
    sizes = [len(rest), *(buffer.nbytes for buffer in buffers)]
    connection.sendall(struct.pack(f"<{1 + len(sizes)}Q", len(sizes), *sizes) + rest)
    for buffer in buffers:
        connection.sendall(buffer)


def receive(connection: socket.socket) -> Any:
    """Return the next object that the other side, a process of the same program, sent.

    Raises:
        BlockingIOError: nothing arrived within the timeout of the connection.
        EOFError: the other side closed the connection.
    """
    (count,) = struct.unpack("<Q", _receive_bytes(connection, 8))
    sizes = struct.unpack(f"<{count}Q", _receive_bytes(connection, 8 * count))
    rest, *buffers = [_receive_bytes(connection, size) for size in sizes]
    # Only `send` writes these bytes, in a process or in one that it started: no other process has an end of
    # the socket pair. Data sets, model folders and requests are never unpickled.
    return pickle.loads(rest, buffers=buffers)  # noqa: S301


def _receive_bytes(connection: socket.socket, size: int) -> bytearray:
    """Receive exactly `size` bytes; waiting in the kernel avoids contention for the GIL."""
    data = bytearray(size)
    missing = memoryview(data)
    while missing:
        received = connection.recv_into(missing, flags=socket.MSG_WAITALL)
        if not received:
            raise EOFError
        missing = missing[received:]
    return data
