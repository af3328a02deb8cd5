"""Decoding of uploads: PNG, JPEG and WebP images and MP4 (H.264) videos, recognised by their first bytes.

Other formats do not reach a decoder, and no URL or path is followed. The number of bytes is checked here;
pixels, frames and seconds are checked in a child process (`serving.media.decode_child`) from the header,
before decoding, and again for every frame, because headers can lie. The child cannot outlive its timeout and
cannot open anything.
"""

import asyncio
import atexit
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress

import numpy as np

from worldmodel.config import ImageSize, WorldModelConfig, height_width
from worldmodel.errors import InputError
from worldmodel.media import Frames, MediaLimits, sniff
from worldmodel.processes import end
from worldmodel.rollout.state import film_frames
from worldmodel.serving.errors import RateLimitError, TooLargeError, UnavailableError, UnsupportedFormatError
from worldmodel.serving.media import decode_child
from worldmodel.serving.media.decode_child import UploadLimits

LOG = logging.getLogger(__name__)

NUM_CHILDREN = 4
"""Uploads that are decoded at once; others wait."""
CHILD_TIMEOUT_S = 30.0
"""Time that an upload waits for a child: until others exit, or the fork server has started."""
MAX_SIZE = 4096

FORMATS = "use a PNG, JPEG or WebP image or an MP4 (H.264) video"
DAMAGED = f"The upload cannot be decoded; {FORMATS} and check that it opens elsewhere."
EXHAUSTED = "The upload needs more memory or time to decode than is allowed; send a smaller or shorter one."
BUSY = "No decoder is free; send the upload again in a few seconds."


async def decode_upload(
    data: bytes,
    *,
    size: ImageSize,
    fps: float,
    max_frames: int,
    newest: bool = False,
    limits: UploadLimits = UploadLimits(),
) -> Frames:
    """Decode an uploaded image (one frame) or video as RGB, cropped around its centre to `size`.

    Frame `i` of a video is on screen `i / fps` seconds after its start. Of a longer video there are the first
    `max_frames` frames, or with `newest` the last. When the caller is cancelled, the child is killed.

    Raises:
        TooLargeError: the upload has too many bytes.
        UnsupportedFormatError: the upload is neither PNG, JPEG, WebP nor MP4.
        InputError: the upload is empty, damaged, too costly to decode, or has too many pixels, frames or
            seconds.
        RateLimitError: too many uploads are waiting.
        UnavailableError: no decoder could be started in time.
    """
    _check_upload(data, limits.media)
    if not 1 <= max_frames <= limits.max_frames:
        raise InputError(f"max_frames is {max_frames}; use 1 to {limits.max_frames}.")
    height, width = height_width(size)
    if not (1 <= height <= MAX_SIZE and 1 <= width <= MAX_SIZE):
        raise InputError(f"size is {size}; use 1 to {MAX_SIZE}.")
    request = decode_child.DecodeRequest(height, width, fps, max_frames, newest, len(data), limits)
    with _FORK_SERVER.open_child() as child:
        pidfd = await _receive_pidfd(child)
        try:
            async with asyncio.timeout(limits.timeout_s):
                return await _exchange(child, request, data)
        except (TimeoutError, EOFError, ConnectionError):
            raise InputError(EXHAUSTED) from None
        finally:
            # Always: also a child that has answered might go on, if its upload has taken it over.
            with suppress(ProcessLookupError):  # it has already exited
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)


async def decode_observation(data: bytes, config: WorldModelConfig) -> Frames:
    """Decode an upload to the frames that a world starts from, uint8 `[t, h, w, 3]`.

    Raises:
        ApiError, InputError: as `decode_upload`.
    """
    count = min(UploadLimits.max_frames, film_frames(config))  # a world continues from the end of a video
    return await decode_upload(
        data, size=config.codec.image_size, fps=config.fps, max_frames=count, newest=True
    )


async def decode_video(data: bytes, config: WorldModelConfig) -> Frames:
    """Decode all frames of an uploaded video, uint8 `[t, h, w, 3]`.

    Raises:
        ApiError, InputError: as `decode_upload`, or the upload is an image or too long.
    """
    if sniff.detect_format(data[:16]) in UploadLimits().media.image_formats:
        raise UnsupportedFormatError("The upload is an image, and a video is needed; send an MP4 (H.264).")
    most = UploadLimits.max_frames
    frames = await decode_upload(data, size=config.codec.image_size, fps=config.fps, max_frames=most)
    if len(frames) == most:
        raise InputError(
            f"The video has {most} frames or more at {config.fps} frames per second; send a shorter one."
        )
    return frames


def close_decoder() -> None:
    """Stop the fork server; the next upload starts it again."""
    _FORK_SERVER.close()


def _check_upload(data: bytes, limits: MediaLimits) -> None:
    if not data:
        raise InputError(f"The upload is empty (0 bytes); {FORMATS}.")
    kind = sniff.detect_format(data[:16])
    if kind not in limits.image_formats + limits.video_formats:
        found = f"of kind {kind}" if kind else "of an unknown kind"
        raise UnsupportedFormatError(f"The upload is {found}; {FORMATS}.")
    most = limits.max_image_bytes if kind in limits.image_formats else limits.max_video_bytes
    if len(data) > most:
        raise TooLargeError(f"The upload is {len(data)} bytes long; a {kind} may have at most {most}.")


async def _receive_pidfd(child: socket.socket) -> int:
    """Wait for the child's first message: a descriptor of its own process."""
    # asyncio cannot receive descriptors, so it only waits until there is something to read.
    loop = asyncio.get_running_loop()
    arrived = loop.create_future()
    loop.add_reader(child, lambda: arrived.done() or arrived.set_result(None))
    try:
        async with asyncio.timeout(CHILD_TIMEOUT_S):
            await arrived
        _, descriptors, _, _ = socket.recv_fds(child, 1, 1)
    except (TimeoutError, ConnectionError):
        raise UnavailableError(BUSY) from None
    finally:
        loop.remove_reader(child)
    if not descriptors:
        raise UnavailableError(BUSY)
    return descriptors[0]


async def _exchange(child: socket.socket, request: decode_child.DecodeRequest, data: bytes) -> Frames:
    """Send a request and the upload, and read the response, which must fit the request."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(child, request.to_bytes())
    await loop.sock_sendall(child, data)
    header = await _receive(child, decode_child.RESPONSE.size)
    magic, status, num_frames, height, width, num_bytes = decode_child.RESPONSE.unpack(header)
    if magic != decode_child.RESPONSE_MAGIC:
        raise InputError(DAMAGED)
    if status == decode_child.REJECTED and num_bytes <= decode_child.MAX_TEXT_BYTES:
        text = (await _receive(child, num_bytes)).decode("ascii", "replace")
        raise InputError(text if text.isprintable() else DAMAGED)
    # The header may be an attacker's: nothing is allocated by it that the request does not allow.
    shape = (num_frames, height, width, 3)
    expected = 1 <= num_frames <= request.max_frames and (height, width) == (request.height, request.width)
    if status != decode_child.FRAMES or not expected or num_bytes != math.prod(shape):
        # Damaged bytes are rejected with a message, so this is a fault of a decoder or of ours.
        LOG.error("A decoding child failed (status %d) on an upload of %d bytes.", status, request.num_bytes)
        raise InputError(DAMAGED)
    return np.frombuffer(await _receive(child, num_bytes), np.uint8).reshape(shape)


async def _receive(child: socket.socket, num_bytes: int) -> bytearray:
    loop = asyncio.get_running_loop()
    received = bytearray(num_bytes)
    view = memoryview(received)
    while view:
        count = await loop.sock_recv_into(child, view)
        if not count:
            raise EOFError("the child exited early")
        view = view[count:]
    return received


class _ForkServer:
    """The process that forks a child for every upload; started by the first upload."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def open_child(self) -> socket.socket:
        """Request a child and return the server's end of its socket."""
        # From a process that was forked for it: a new interpreter would take a second per upload, and a fork
        # of the server itself would have its keys, its sockets and the locks that its threads hold.
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs, self._lock:
            try:
                if self._process is None or self._process.poll() is not None:
                    self._start()
                assert self._control is not None
                socket.send_fds(self._control, [b"\0"], [theirs.fileno()])
            except BlockingIOError:
                ours.close()
                raise RateLimitError(BUSY, retry_after=2.0) from None
            except OSError:
                ours.close()
                raise UnavailableError(BUSY) from None
        return ours

    def _start(self) -> None:
        self._stop()
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)  # its buffer is the queue: when it is full, uploads are refused
        # The environment of the server, which can hold keys, is not passed to a process that decodes uploads.
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PYTHONPATH") if name in os.environ}
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 -- our own module
                [sys.executable, "-P", "-s", "-m", decode_child.__name__, str(NUM_CHILDREN)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=kept | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
                cwd="/",
                start_new_session=True,  # Ctrl-C must only reach the server, which finishes running work
            )

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()  # the fork server exits at the end of the file
        if self._process is not None:
            end(self._process, timeout_s=2.0)
        self._control = self._process = None

    def close(self) -> None:
        with self._lock:
            self._stop()


_FORK_SERVER = _ForkServer()
atexit.register(_FORK_SERVER.close)
