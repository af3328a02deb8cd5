"""Pictures and films of a server: where strangers' bytes are decoded, and where answers are encoded.

Decoded are PNG, JPEG and WebP pictures and MP4 films in H.264, told by their first bytes; nothing else
reaches a decoder, and neither addresses nor paths are followed. The number of bytes is checked here; pixels,
frames and seconds are checked in a child process (`serving.media.decode_child`) from the header, before
decoding, and again while frames appear, for headers can lie. The child can neither outlive its time nor open
anything. Encoders run in the calling thread; give large clips to a worker thread.
"""

import asyncio
import atexit
import io
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image

from worldmodel.config import ImageSize, height_width
from worldmodel.errors import InputError, OutputError
from worldmodel.media import sniff
from worldmodel.media.files import MIN_SHORT_SIDE, Frames, Picture, write_video
from worldmodel.serving.errors import TooLarge, TooManyRequests, Unavailable, UnsupportedFormat
from worldmodel.serving.media import decode_child
from worldmodel.serving.media.decode_child import ANSWER, FRAMES, MAX_TEXT, PICTURES, REFUSED, VIDEOS, Order

LOG = logging.getLogger(__name__)

NUM_CHILDREN = 4
"""Uploads that are decoded at once; the others wait."""
WAIT_S = 30.0
"""How long an upload waits for its child: for others to end, or the first time for the forker to start."""
MAX_SIZE = 4096

FORMATS = "use a PNG, JPEG or WebP picture or an MP4 (H.264) video"
DAMAGED = f"The upload cannot be decoded; {FORMATS} and check that it opens elsewhere."
EXHAUSTED = "The upload needs more memory or time to decode than is allowed; send a smaller or shorter one."
BUSY = "No decoder is free; send the upload again in a few seconds."


@dataclass(frozen=True)
class MediaLimits:
    """What an upload may be and what decoding it may cost; time and memory are per upload."""

    max_image_bytes: int = 20 * 2**20
    max_video_bytes: int = 64 * 2**20
    max_image_pixels: int = 24_000_000
    max_video_pixels: int = 4096 * 2304
    max_seconds: float = 60.0
    max_decoded_frames: int = 3600
    max_frames: int = 512
    """Most frames that one call may ask for."""
    memory_bytes: int = 768 * 2**20
    """Beyond what an idle decoder has mapped."""
    cpu_s: int = 10
    timeout_s: float = 10.0


# Decoding


async def decode_upload(
    data: bytes, *, size: ImageSize, fps: float, max_frames: int, limits: MediaLimits | None = None
) -> Frames:
    """Decode an uploaded picture (one frame) or film as RGB, each frame's centre, `size` pixels large.

    Frame `i` of a film is what it shows `i / fps` seconds after its start; what comes after `max_frames` is
    not decoded. When the caller is cancelled, the child is killed.

    Raises:
        TooLarge: the upload has too many bytes.
        UnsupportedFormat: the upload is neither PNG, JPEG, WebP nor MP4.
        InputError: the upload is empty, damaged, too costly to decode, or has too many pixels, frames or
            seconds.
        TooManyRequests: too many uploads wait to be decoded.
        Unavailable: no decoder could be started in time.
    """
    limits = limits or MediaLimits()
    _check_upload(data, limits)
    if not 1 <= max_frames <= limits.max_frames:
        raise InputError(f"max_frames is {max_frames}; use 1 to {limits.max_frames}.")
    height, width = height_width(size)
    if not (1 <= height <= MAX_SIZE and 1 <= width <= MAX_SIZE):
        raise InputError(f"size is {size}; use 1 to {MAX_SIZE}.")
    order = Order(
        height=height,
        width=width,
        fps=fps,
        max_frames=max_frames,
        max_image_pixels=limits.max_image_pixels,
        max_video_pixels=limits.max_video_pixels,
        max_seconds=limits.max_seconds,
        max_decoded_frames=limits.max_decoded_frames,
        memory_bytes=limits.memory_bytes,
        cpu_s=limits.cpu_s,
        timeout_s=limits.timeout_s,
        num_bytes=len(data),
    )
    with _FORKER.open_child() as child:
        pidfd = await _meet(child)
        try:
            async with asyncio.timeout(limits.timeout_s):
                return await _converse(child, order, data)
        except (TimeoutError, EOFError, ConnectionError):
            raise InputError(EXHAUSTED) from None
        finally:
            with suppress(ProcessLookupError):  # it has ended by itself
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)


def close_decoder() -> None:
    """End the process that forks decoders; a later upload starts it again."""
    _FORKER.close()


def _check_upload(data: bytes, limits: MediaLimits) -> None:
    if not data:
        raise InputError(f"The upload is empty (0 bytes); {FORMATS}.")
    kind = sniff.recognise(data[:16])
    if kind not in PICTURES + VIDEOS:
        found = f"of kind {kind}" if kind else "of an unknown kind"
        raise UnsupportedFormat(f"The upload is {found}; {FORMATS}.")
    most = limits.max_image_bytes if kind in PICTURES else limits.max_video_bytes
    if len(data) > most:
        raise TooLarge(f"The upload is {len(data)} bytes long; a {kind} may have at most {most}.")


async def _meet(child: socket.socket) -> int:
    """Wait for the child's first byte, with which it sends a descriptor of its own process."""
    loop = asyncio.get_running_loop()
    arrived = loop.create_future()
    loop.add_reader(child, lambda: arrived.done() or arrived.set_result(None))
    try:
        async with asyncio.timeout(WAIT_S):
            await arrived
        _, descriptors, _, _ = socket.recv_fds(child, 1, 1)
    except (TimeoutError, ConnectionError):
        raise Unavailable(BUSY) from None
    finally:
        loop.remove_reader(child)
    if not descriptors:
        raise Unavailable(BUSY)
    return descriptors[0]


async def _converse(child: socket.socket, order: Order, data: bytes) -> Frames:
    """Send order and upload, read the answer, and believe no more of it than the order allows."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(child, order.to_bytes())
    await loop.sock_sendall(child, data)
    header = await _receive(child, ANSWER.size)
    mark, status, num_frames, height, width, num_bytes = ANSWER.unpack(header)
    if mark != decode_child.ANSWER_MARK:
        raise InputError(DAMAGED)
    if status == REFUSED and num_bytes <= MAX_TEXT:
        text = (await _receive(child, num_bytes)).decode("ascii", "replace")
        raise InputError(text if text.isprintable() else DAMAGED)
    shape = (num_frames, height, width, 3)
    whole = 1 <= num_frames <= order.max_frames and (height, width) == (order.height, order.width)
    if status != FRAMES or not whole or num_bytes != math.prod(shape):
        # The library refuses damaged bytes with a sentence, so this is a decoder gone wrong, or ourselves.
        LOG.error("A decoding child failed (answer %d) on an upload of %d bytes.", status, order.num_bytes)
        raise InputError(DAMAGED)
    return np.frombuffer(await _receive(child, num_bytes), np.uint8).reshape(shape)


async def _receive(child: socket.socket, num_bytes: int) -> bytearray:
    loop = asyncio.get_running_loop()
    received = bytearray(num_bytes)
    view = memoryview(received)
    while view:
        count = await loop.sock_recv_into(child, view)
        if not count:
            raise EOFError("the child ended early")
        view = view[count:]
    return received


class _Forker:
    """The process from which a child is forked for every upload; started when first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def open_child(self) -> socket.socket:
        """Ask for a child and return the server's end of its socket."""
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
                raise TooManyRequests(BUSY, retry_after=2.0) from None
            except OSError:
                ours.close()
                raise Unavailable(BUSY) from None
        return ours

    def _start(self) -> None:
        self._stop()
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        # Nothing of the server's environment, keys least of all, goes where strangers' bytes are decoded.
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PYTHONPATH") if name in os.environ}
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 -- our own module
                [sys.executable, "-P", "-s", "-m", decode_child.__name__, str(NUM_CHILDREN)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=kept | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
                cwd="/",
                start_new_session=True,  # Ctrl-C reaches the server, which lets running work end
            )

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()  # its end of file is the sign to end
        if self._process is not None:
            try:
                self._process.wait(timeout=2)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._control = self._process = None

    def close(self) -> None:
        with self._lock:
            self._stop()


_FORKER = _Forker()
atexit.register(_FORKER.close)


# Encoding


def encode_mp4(frames: Frames, fps: float, scale: int | None = None) -> bytes:
    """Encode a clip as MP4 (H.264); `scale` as in `worldmodel.media.files.write_video`.

    Raises:
        OutputError: there are no frames, or `fps` is not from 1 to 240.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        write_video(frames, path, fps, scale)
        return path.read_bytes()


def encode_jpeg(frame: Picture, quality: int = 85) -> bytes:
    """Encode one frame as JPEG; `quality` from 1 to 95."""
    return _encode_picture(frame, "JPEG", quality=quality)


def encode_png(frame: Picture) -> bytes:
    """Encode one frame as PNG, which loses nothing."""
    return _encode_picture(frame, "PNG")


def encode_png_frames(frames: Frames) -> bytes:
    """Encode a clip as a ZIP of PNGs called 00000.png, 00001.png, ...; equal frames give equal bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for index, frame in enumerate(frames):
            archive.writestr(zipfile.ZipInfo(f"{index:05d}.png"), encode_png(frame))
    return buffer.getvalue()


def encode_npy(frames: Frames) -> bytes:
    """Encode a clip as NumPy's .npy: uint8 `[t, h, w, 3]`, read by `np.load(..., allow_pickle=False)`."""
    buffer = io.BytesIO()
    np.save(buffer, np.ascontiguousarray(frames), allow_pickle=False)
    return buffer.getvalue()


def _encode_picture(frame: Picture, name: str, **options: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(frame)).save(buffer, name, **options)
    return buffer.getvalue()


class FragmentedMp4:
    """Encodes a live film piece by piece: `init` first, then what `add` returns for each chunk.

    Every chunk is one fragment (`moof` and `mdat`) that begins with a keyframe and is complete when `add`
    returns, so a player shows it at once. The concatenation is an MP4 (H.264) file.
    """

    def __init__(self, height: int, width: int, fps: float, scale: int | None = None) -> None:
        """Prepare frames of `height` by `width` pixels; `scale` as in `write_video`.

        Raises:
            OutputError: `fps` is not from 1 to 240, or H.264 cannot be encoded on this machine.
        """
        if not 1 <= fps <= 240:
            raise OutputError(f"fps is {fps}; use 1 to 240.")
        if "libx264" not in av.codecs_available:
            raise OutputError("This machine's FFmpeg cannot encode H.264; ask for JPEG frames instead.")
        self.height, self.width, self.fps = height, width, Fraction(fps).limit_denominator(1001)
        self.scale = scale or max(1, -(-MIN_SHORT_SIDE // min(height, width)))
        self.num_frames = 0
        """Frames so far; the next chunk starts at this frame."""
        boxes = self._encode(np.zeros((1, height, width, 3), np.uint8))
        self.init = boxes[b"ftyp"] + boxes[b"moov"]
        """What a player needs before the first chunk."""
        profile = self.init.index(b"avcC") + 5  # profile, constraints and level: how codecs are named
        self.mime = f'video/mp4; codecs="avc1.{self.init[profile : profile + 3].hex()}"'
        """The type that a browser's MediaSource asks for."""

    def add(self, frames: Frames) -> bytes:
        """Encode the next chunk, which continues where the one before ended.

        Raises:
            OutputError: there are no frames, or they have another size than the film.
        """
        if not len(frames) or frames.shape[1:] != (self.height, self.width, 3):
            raise OutputError(
                f"Frames of shape {frames.shape} do not fit; pass some of {self.height}x{self.width} pixels."
            )
        boxes = self._encode(frames)
        self.num_frames += len(frames)
        return boxes[b"moof"] + boxes[b"mdat"]

    def _encode(self, frames: Frames) -> dict[bytes, bytes]:
        """Encode a chunk as a whole file of its own and return its boxes.

        A muxer that stays open would keep each fragment back until the next keyframe arrives. The same
        settings give the same codec header every time, so all chunks share `init`.
        """
        buffer = io.BytesIO()
        options = {
            "movflags": "empty_moov+default_base_moof+frag_keyframe+frag_discont+skip_trailer",
            "fragment_index": str(self.num_frames + 1),  # must grow from fragment to fragment
            "avoid_negative_ts": "disabled",  # or every chunk would start at time 0
        }
        # Zero latency: no frame waits for later ones. One keyframe: a second would begin a second fragment.
        encoder = {
            "preset": "veryfast",
            "tune": "zerolatency",
            "crf": "18",
            "g": "100000",
            "sc_threshold": "0",
        }
        with av.open(buffer, "w", format="mp4", options=options) as container:
            stream = container.add_stream("libx264", rate=self.fps, options=encoder)
            width, height = self.width * self.scale, self.height * self.scale
            stream.width, stream.height, stream.pix_fmt = width + width % 2, height + height % 2, "yuv420p"
            stream.codec_context.thread_count = 1
            for index, frame in enumerate(frames, start=self.num_frames):
                large = frame.repeat(self.scale, axis=0).repeat(self.scale, axis=1)
                pixels = np.pad(large, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
                picture = av.VideoFrame.from_ndarray(pixels, format="rgb24")
                picture.pts, picture.time_base = index, 1 / self.fps
                container.mux(stream.encode(picture))
            container.mux(stream.encode(None))
        return _boxes(buffer.getvalue())


def _boxes(data: bytes) -> dict[bytes, bytes]:
    """Split an MP4 into its top-level boxes, each with its header."""
    boxes, at = {}, 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4])
        boxes[data[at + 4 : at + 8]] = data[at : at + size]
        at += size
    return boxes
