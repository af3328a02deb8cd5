"""A process of its own that decodes uploads: one fork per upload, under limits, which then ends.

    server ──a socket per upload──► forker ──fork──► child: limits, decode, answer, end

The forker (`python -m worldmodel.serving.media.decode_child`) has the decoders loaded and never sees a byte
of an upload, so every child starts clean within milliseconds. A child first hands the server a descriptor of
itself, by which the server can kill it and nothing else; then it reads its order and the upload, gives up
everything it does not need (files, sockets, memory, processor time, new processes), and only then decodes.
Orders and answers are fixed binary headers followed by raw bytes.
"""

import gc
import os
import resource
import signal
import socket
import struct
import sys
from importlib import import_module
from typing import NamedTuple

import numpy as np
from PIL import Image

from worldmodel.errors import InputError
from worldmodel.media import files as media

PICTURES = ("png", "jpeg", "webp")
VIDEOS = ("mp4",)
VIDEO_CODECS = ("h264",)
"""What is decoded. The library reads more; each format more is a parser more for strangers' bytes."""

MAX_TEXT = 300
FRAMES, REFUSED, FAILED = range(3)
"""What an answer holds: frames, a sentence of `worldmodel.media.files`, or nothing."""
ORDER = struct.Struct("!4sHHdIQQdIQIdQ")
ANSWER = struct.Struct("!4sBIHHQ")
ORDER_MARK, ANSWER_MARK = b"wmo1", b"wma1"
ORDER_S = 10.0
"""How long a child waits for its order."""


class Order(NamedTuple):
    """What a child is to do, and the limits it does it under."""

    height: int
    width: int
    fps: float
    max_frames: int
    max_image_pixels: int
    max_video_pixels: int
    max_seconds: float
    max_decoded_frames: int
    memory_bytes: int
    cpu_s: int
    timeout_s: float
    num_bytes: int

    def to_bytes(self) -> bytes:
        """Return the header that precedes the upload."""
        return ORDER.pack(ORDER_MARK, *self)

    @classmethod
    def from_bytes(cls, header: bytes) -> "Order":
        """Read the header that precedes the upload."""
        mark, *values = ORDER.unpack(header)
        if mark != ORDER_MARK:
            raise ValueError("not an order")
        return cls(*values)


def main() -> None:
    """Fork a child for every socket that arrives on standard input; end when the server closes it."""
    num_children = int(sys.argv[1])
    control = socket.socket(fileno=0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would hold somebody's upload
    _load_decoders()
    gc.collect()
    gc.freeze()  # children then leave these pages shared
    running: set[int] = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        running = {pid for pid in running if os.waitpid(pid, os.WNOHANG) == (0, 0)}
        if len(running) >= num_children:
            running.discard(os.wait()[0])
        pid = os.fork()
        if pid == 0:
            _be_child(descriptors[0])
        running.add(pid)
        os.close(descriptors[0])


def _load_decoders() -> None:
    """Import what Pillow and PyAV import when first used: a child cannot open files."""
    Image.preinit()
    for name in ("PIL.MpoImagePlugin", "PIL.TiffImagePlugin", "PIL.WebPImagePlugin", "av.subtitles.stream"):
        import_module(name)


def _be_child(descriptor: int) -> None:
    """Serve one upload and end the process, whatever happens."""
    try:
        os.dup2(descriptor, 0)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        signal.setitimer(signal.ITIMER_REAL, ORDER_S)
        server = socket.socket(fileno=0)
        itself = os.pidfd_open(os.getpid())
        socket.send_fds(server, [b"\0"], [itself])
        os.close(itself)
        order = Order.from_bytes(_receive(server, ORDER.size))
        upload = _receive(server, order.num_bytes)
        restrict(order)
        for part in _answer(order, upload):
            server.sendall(part)
    finally:
        os._exit(0)


def _receive(server: socket.socket, num_bytes: int) -> bytes:
    received = bytearray(num_bytes)
    view = memoryview(received)
    while view:
        count = server.recv_into(view)
        if not count:
            raise EOFError("the server went away")
        view = view[count:]
    return bytes(received)


def restrict(order: Order) -> None:
    """Give up, for good, all that decoding does not need; beyond time or processor time the kernel kills."""
    signal.setitimer(signal.ITIMER_REAL, order.timeout_s + 1)  # if the server is no longer there to do it
    with open("/proc/self/statm", encoding="ascii") as file:
        in_use = int(file.read().split()[0]) * resource.getpagesize()
    for limit, value in (
        (resource.RLIMIT_AS, in_use + order.memory_bytes),
        (resource.RLIMIT_CPU, order.cpu_s),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 0),  # no file, socket or pipe can be opened any more
    ):
        resource.setrlimit(limit, (value, value))


def _answer(order: Order, upload: bytes) -> tuple[bytes, bytes | memoryview]:
    """Decode, with the library's own checks set to the order's limits; return header and body."""
    media.PICTURES = {name: media.PICTURES[name] for name in PICTURES}
    media.CONTAINERS = {name: media.CONTAINERS[name] for name in VIDEOS}
    media.VIDEO_CODECS = set(VIDEO_CODECS)
    media.MAX_IMAGE_PIXELS = order.max_image_pixels
    media.MAX_VIDEO_PIXELS = order.max_video_pixels
    media.MAX_VIDEO_SECONDS = order.max_seconds
    media.MAX_DECODED_FRAMES = order.max_decoded_frames
    try:
        frames = media.read_observation(upload, (order.height, order.width), order.fps, order.max_frames)
    except InputError as refusal:  # its text is the library's; a decoder's text is never in it
        text = str(refusal).encode("ascii", "replace")[:MAX_TEXT]
        return ANSWER.pack(ANSWER_MARK, REFUSED, 0, 0, 0, len(text)), text
    except Exception:
        return ANSWER.pack(ANSWER_MARK, FAILED, 0, 0, 0, 0), b""
    header = ANSWER.pack(ANSWER_MARK, FRAMES, *frames.shape[:3], frames.nbytes)
    return header, np.ascontiguousarray(frames).data.cast("B")


if __name__ == "__main__":
    main()
