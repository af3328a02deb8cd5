"""Child process that decodes one upload under resource limits and then exits.

    server ──one socket per upload──► fork server ──fork──► child: limits, decode, respond, exit

The fork server (`python -m worldmodel.serving.media.decode_child`) has the decoders loaded and never reads a
byte of an upload, so every child starts clean within milliseconds. A child first sends the server a
descriptor of its own process, with which the server can kill it and nothing else. Then it reads its request
and the upload, gives up everything that it does not need (files, sockets, memory, processor time, new
processes), and only then decodes. A request is a length, JSON and the upload; a response is a fixed binary
header followed by raw bytes, which the server checks against its request.
"""

import gc
import json
import os
import resource
import signal
import socket
import struct
import sys
from dataclasses import asdict, dataclass
from importlib import import_module

import numpy as np
from PIL import Image

from worldmodel.errors import InputError
from worldmodel.media import MediaLimits, read_observation
from worldmodel.serving.media import system_calls

MAX_TEXT_BYTES = 300
FRAMES, REJECTED, FAILED = range(3)
"""Kinds of response: frames, the message of an `InputError`, or a failure without a message."""
LENGTH = struct.Struct("!I")
RESPONSE = struct.Struct("!4sBIHHQ")
RESPONSE_MAGIC = b"wma1"
REQUEST_TIMEOUT_S = 10.0
"""Time that a child waits for its request."""


@dataclass(frozen=True)
class UploadLimits:
    """Accepted formats and sizes of uploads, and limits on decoding one."""

    media: MediaLimits = MediaLimits(
        # Each further format is a further parser for untrusted bytes.
        image_formats=("png", "jpeg", "webp"),
        video_formats=("mp4",),
        video_codecs=("h264",),
        max_video_bytes=64 * 2**20,
        max_image_pixels=24_000_000,
        max_video_s=60.0,
        max_decoded_frames=3600,
    )
    max_frames: int = 512
    """Frames that one call may request."""
    memory_bytes: int = 768 * 2**20
    """Memory beyond what an idle decoder has mapped."""
    cpu_s: int = 10
    timeout_s: float = 10.0


@dataclass(frozen=True)
class DecodeRequest:
    """The size, rate and limits of one decoding."""

    height: int
    width: int
    fps: float
    max_frames: int
    newest: bool
    num_bytes: int
    limits: UploadLimits

    def to_bytes(self) -> bytes:
        """Return the length and the JSON that precede the upload."""
        values = json.dumps(asdict(self)).encode()
        return LENGTH.pack(len(values)) + values

    @classmethod
    def from_json(cls, values: bytes) -> "DecodeRequest":
        """Read the JSON that precedes the upload."""
        request = json.loads(values)
        limits = request.pop("limits")
        media = MediaLimits(**limits.pop("media"))
        return cls(**request, limits=UploadLimits(media, **limits))


def main() -> None:
    """Fork a child for every socket received on standard input; return when the server closes it."""
    num_children = int(sys.argv[1])
    control = socket.socket(fileno=0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would contain an upload
    _load_decoders()
    gc.collect()
    gc.freeze()  # keeps these pages shared with the children
    running: set[int] = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        running = {pid for pid in running if os.waitpid(pid, os.WNOHANG) == (0, 0)}
        if len(running) >= num_children:
            # Uploads wait in the control socket meanwhile, and the server refuses more when that is full.
            running.discard(os.wait()[0])
        pid = os.fork()
        if pid == 0:
            _run_child(descriptors[0])
        running.add(pid)
        os.close(descriptors[0])


def _load_decoders() -> None:
    """Import what Pillow and PyAV import on first use: a child cannot open files."""
    Image.preinit()
    for name in ("PIL.MpoImagePlugin", "PIL.TiffImagePlugin", "PIL.WebPImagePlugin", "av.subtitles.stream"):
        import_module(name)


def _run_child(descriptor: int) -> None:
    """Decode one upload and exit, also after any error."""
    try:
        # In place of the control socket, by which a decoder that is taken over could get other uploads.
        os.dup2(descriptor, 0)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        signal.setitimer(signal.ITIMER_REAL, REQUEST_TIMEOUT_S)  # nothing handles its signal: it kills
        server = socket.socket(fileno=0)
        # The server did not fork this process and cannot wait for it, so the number of a child that has
        # exited may be another process's by the time it is killed; a descriptor always means this one.
        pidfd = os.pidfd_open(os.getpid())
        socket.send_fds(server, [b"\0"], [pidfd])
        os.close(pidfd)
        (length,) = LENGTH.unpack(_receive(server, LENGTH.size))
        request = DecodeRequest.from_json(_receive(server, length))
        upload = _receive(server, request.num_bytes)
        restrict(request.limits)
        for part in _decode(request, upload):
            server.sendall(part)
    finally:
        # Not an exception that goes on: this is a copy of the fork server, whose loop it would enter, and
        # its message could carry a decoder's. The server takes a connection that ends early for a refusal.
        os._exit(0)


def _receive(server: socket.socket, num_bytes: int) -> bytes:
    received = bytearray(num_bytes)
    view = memoryview(received)
    while view:
        count = server.recv_into(view)
        if not count:
            raise EOFError("the server closed the connection")
        view = view[count:]
    return bytes(received)


def restrict(limits: UploadLimits) -> None:
    """Permanently drop all privileges that decoding does not need; the kernel enforces the time limits."""
    signal.setitimer(signal.ITIMER_REAL, limits.timeout_s + 1)  # in case the server has died
    # The limit counts all address space, and the libraries that are loaded already take most of it.
    with open("/proc/self/statm", encoding="ascii") as file:
        in_use = int(file.read().split()[0]) * resource.getpagesize()
    for limit, value in (
        (resource.RLIMIT_AS, in_use + limits.memory_bytes),
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 0),  # no file, socket or pipe can be opened from here on
    ):
        resource.setrlimit(limit, (value, value))  # the second is the hard limit, which cannot be raised
    # As the limits do not bind root: neither other processes and their memory nor any file can be reached.
    system_calls.allow_only_listed()


def _decode(request: DecodeRequest, upload: bytes) -> tuple[bytes, bytes | memoryview]:
    """Decode an upload; returns the header and the body of the response."""
    size = (request.height, request.width)
    try:
        frames = read_observation(
            upload, size, request.fps, request.max_frames, request.limits.media, request.newest
        )
    except InputError as error:  # its text is the library's and never contains a decoder's
        text = str(error).encode("ascii", "replace")[:MAX_TEXT_BYTES]
        return RESPONSE.pack(RESPONSE_MAGIC, REJECTED, 0, 0, 0, len(text)), text
    except Exception:  # hostile bytes can raise anything in a decoder, and its message is not for clients
        return RESPONSE.pack(RESPONSE_MAGIC, FAILED, 0, 0, 0, 0), b""
    header = RESPONSE.pack(RESPONSE_MAGIC, FRAMES, *frames.shape[:3], frames.nbytes)
    return header, np.ascontiguousarray(frames).data.cast("B")


if __name__ == "__main__":
    main()
