"""Malicious uploads: each is refused with an `InputError`, and the server decodes the next one.

The attacks are those on other model servers, with their CVE numbers.
"""

import asyncio
import contextlib
import errno
import io
import os
import re
import select
import struct
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from worldmodel.errors import InputError
from worldmodel.serving.errors import ApiError, RateLimitError, TooLargeError, UnsupportedFormatError
from worldmodel.serving.media import decoding, system_calls
from worldmodel.serving.media.decode_child import RESPONSE, DecodeRequest, UploadLimits
from worldmodel.serving.media.decoding import close_decoder, decode_upload

LEAKS = re.compile(
    r"/|\\|0x[0-9a-f]{6}|Traceback|Error|object at|libav|ffmpeg|PIL|Errno|\bline \d", re.IGNORECASE
)


@pytest.fixture(scope="module", autouse=True)
def _no_process_stays() -> Iterator[None]:
    yield
    close_decoder()


def limits_with(**values: Any) -> UploadLimits:
    """The server's limits with some of them replaced."""
    media = {name: values.pop(name) for name in list(values) if hasattr(UploadLimits.media, name)}
    return UploadLimits(replace(UploadLimits.media, **media), **values)


def decode(data: bytes, fps: float = 8, max_frames: int = 16, **limits: float) -> np.ndarray:
    coroutine = decode_upload(data, size=16, fps=fps, max_frames=max_frames, limits=limits_with(**limits))
    return asyncio.run(coroutine)


def refusal(data: bytes, fps: float = 8, max_frames: int = 16, **limits: float) -> str:
    """Have an upload refused; check that the text is advice and leaks nothing, and that decoding goes on."""
    with pytest.raises(InputError) as caught:
        decode(data, fps, max_frames, **limits)
    text = str(caught.value)
    assert re.fullmatch(r"[^\n]{1,300}\.", text) and not LEAKS.search(text), text
    assert decode(png(16, 16)).shape == (1, 16, 16, 3)
    return text


def png(width: int, height: int, *extra: bytes) -> bytes:
    """A black PNG of any size, made without holding its pixels."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack("!I", len(body)) + name + body + struct.pack("!I", zlib.crc32(name + body))

    packer = zlib.compressobj(1)
    row = bytes(1 + 3 * width)
    body = b"".join(packer.compress(row) for _ in range(min(height, 8192))) + packer.flush()
    header = struct.pack("!IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (chunk(b"IHDR", header), *extra, chunk(b"IDAT", body), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def mp4(
    frames: np.ndarray, codec: str = "libx264", pixels: str = "yuv420p", seconds_a_frame: float = 0.125
) -> bytes:
    buffer = io.BytesIO()
    step = Fraction(seconds_a_frame).limit_denominator(1000)
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], pixels
        stream.codec_context.time_base = Fraction(1, 1000)
        if codec == "libx264":
            stream.options = {"preset": "ultrafast"}
        stream.codec_context.thread_count = 1
        for index, frame in enumerate(frames):
            image = av.VideoFrame.from_ndarray(frame, format="rgb24")
            image.pts, image.time_base = round(1000 * index * step), Fraction(1, 1000)
            container.mux(stream.encode(image))
        container.mux(stream.encode(None))
    return buffer.getvalue()


def noise(num_frames: int, side: int = 64) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (num_frames, side, side, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def video() -> bytes:
    return mp4(noise(12))


@pytest.fixture(scope="module")
def slow_video() -> bytes:
    """A video that takes many seconds to decode and little time to make: one keyframe, again and again."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=60, options={"preset": "ultrafast", "crf": "51"})
        stream.width, stream.height, stream.pix_fmt = 2048, 2048, "yuv420p"
        grain = noise(1, 128)[0].repeat(16, 0).repeat(16, 1)
        packet = [*stream.encode(av.VideoFrame.from_ndarray(grain, format="rgb24")), *stream.encode(None)][0]
        tick = round(1 / (60 * packet.time_base))
        for index in range(660):
            again = av.Packet(bytes(packet))
            again.stream, again.time_base, again.is_keyframe = stream, packet.time_base, True
            again.pts = again.dts = index * tick
            container.mux(again)
    return buffer.getvalue()


# Formats by their first bytes

FOREIGN = {
    "jpeg 2000 (CVE-2026-22778)": b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(64),
    "jpeg 2000 codestream": b"\xff\x4f\xff\x51" + bytes(64),
    "fits (CVE-2026-40192)": b"SIMPLE  =                    T" + bytes(2880),
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
    "xml": b'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/passwd">]><x>&e;</x>',
    "playlist": b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",
    "ffconcat": b"ffconcat version 1.0\nfile /etc/passwd\n",
    "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n(/etc/passwd) run\n",
    "pdf": b"%PDF-1.7\n",
    "tiff": b"II*\0" + bytes(64),
    "psd": b"8BPS\0\1" + bytes(64),
    "bmp": b"BM" + bytes(64),
    "ico": b"\0\0\1\0\1\0" + bytes(64),
    "gif": b"GIF89a" + bytes(64),
    "avi": b"RIFF\x40\0\0\0AVI LIST" + bytes(64),
    "wav": b"RIFF\x40\0\0\0WAVEfmt " + bytes(64),
    "matroska": b"\x1a\x45\xdf\xa3" + bytes(64),
    "heif": b"\0\0\0\x18ftypheic" + bytes(64),
    "avif": b"\0\0\0\x18ftypavif" + bytes(64),
    "pickle": b"\x80\x04\x95\x10\0\0\0\0\0\0\0\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    "old pickle": b"cposix\nsystem\n(S'true'\ntR.",
    "numpy": b"\x93NUMPY\1\0v\0{'descr': '|O'}",
    "safetensors": b"\x02\0\0\0\0\0\0\0{}",
    "gzip": b"\x1f\x8b\x08" + bytes(64),
    "program": b"\x7fELF" + bytes(64),
    "script": b"#!/bin/sh\ntrue\n",
    "address": b"http://169.254.169.254/latest/meta-data",
    "path": b"/etc/passwd",
    "hello": b"hello",
    "one byte": b"\x89",
}


@pytest.mark.parametrize("data", FOREIGN.values(), ids=FOREIGN)
def test_other_formats_reach_no_decoder(data: bytes) -> None:
    close_decoder()
    with pytest.raises(UnsupportedFormatError, match="PNG") as caught:
        decode(data)
    assert not LEAKS.search(str(caught.value))
    assert decoding._FORK_SERVER._process is None


def test_archives_and_tensors_are_refused() -> None:
    """CVE-2025-62164: tensors from clients; a torch file is a ZIP."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", FOREIGN["pickle"])
    with pytest.raises(UnsupportedFormatError):
        decode(buffer.getvalue())


def test_bytes_after_an_image_are_ignored() -> None:
    frames = decode(png(16, 16) + b"PK\x03\x04" + FOREIGN["pickle"])
    assert not frames.any()


@pytest.mark.parametrize(
    ("codec", "pixels"),
    [("mpeg4", "yuv420p"), ("mjpeg", "yuvj420p"), ("png", "rgb24"), ("jpeg2000", "yuv420p")],
)
def test_other_codecs_in_an_mp4_are_refused(codec: str, pixels: str) -> None:
    """CVE-2026-22778: a JPEG 2000 track in a video."""
    assert "MP4 (H.264)" in refusal(mp4(noise(2), codec, pixels))


# Bytes, pixels, frames, seconds


def test_too_many_bytes_are_refused_before_a_process_starts() -> None:
    close_decoder()
    for data, limits in (
        (png(64, 64), {"max_image_bytes": 100}),
        (b"\0\0\0\x18ftypisom" + bytes(200), {"max_video_bytes": 100}),
    ):
        with pytest.raises(TooLargeError, match="100"):
            decode(data, **limits)
    assert decoding._FORK_SERVER._process is None


@pytest.mark.parametrize(("width", "height"), [(50_000, 50_000), (2**31 - 1, 2**31 - 1), (30_000, 1000)])
def test_a_decompression_bomb_is_refused_by_its_header(width: int, height: int) -> None:
    data = png(8, 8)
    header = struct.pack("!IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = data[:16] + header + struct.pack("!I", zlib.crc32(b"IHDR" + header)) + data[33:]
    started = time.monotonic()
    assert re.search("pixels", refusal(data))
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(("width", "height"), [(0, 0), (1, 100_000), (100_000, 1)])
def test_slivers_are_refused(width: int, height: int) -> None:
    assert refusal(png(width, height))


@pytest.mark.parametrize("name", [b"zTXt", b"iCCP", b"iTXt"])
def test_a_bomb_in_metadata_is_harmless(name: bytes) -> None:
    """A comment or profile of a few kilobytes that inflates to 64 MiB."""
    packed = zlib.compress(bytes(2**26), 9)
    body = {b"zTXt": b"k\0\0", b"iCCP": b"k\0\0", b"iTXt": b"k\0\1\0\0\0"}[name] + packed
    bomb = struct.pack("!I", len(body)) + name + body + struct.pack("!I", zlib.crc32(name + body))
    with contextlib.suppress(InputError):  # refusing it and ignoring the comment are both right
        assert decode(png(16, 16, bomb)).shape == (1, 16, 16, 3)
    assert decode(png(16, 16)).shape == (1, 16, 16, 3)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_only_the_first_frame_of_an_animation_is_read(kind: str) -> None:
    """CVE-2026-34755: a "image" of unbounded frames."""
    first, *rest = [Image.fromarray(frame) for frame in noise(200, 16)]
    buffer = io.BytesIO()
    first.save(buffer, kind, save_all=True, append_images=rest, duration=10)
    assert decode(buffer.getvalue(), max_frames=512).shape == (1, 16, 16, 3)


def test_too_many_seconds_are_refused(video: bytes) -> None:
    assert " 60 " in refusal(mp4(noise(3), seconds_a_frame=500))
    assert " 1 " in refusal(video, max_video_s=1)


def test_too_many_frames_are_refused_while_they_are_counted(video: bytes) -> None:
    assert " 5 " in refusal(video, fps=1, max_frames=8, max_decoded_frames=5)


def test_no_more_frames_than_requested_are_decoded(video: bytes) -> None:
    assert decode(video, fps=1000, max_frames=40).shape == (40, 16, 16, 3)


def test_a_video_of_excessive_size_is_refused(video: bytes) -> None:
    assert "4096x2320 pixels; shrink" in refusal(mp4(np.zeros((1, 2320, 4096, 3), np.uint8)))
    assert "pixels; shrink" in refusal(video, max_video_pixels=1000)


def patched(data: bytes, box: bytes, offset: int, value: bytes) -> bytes:
    at = data.index(box) + 4 + offset
    return data[:at] + value + data[at + len(value) :]


@pytest.mark.parametrize(
    ("box", "offset", "value"),
    [
        (b"mdat", -8, b"\xff\xff\xff\xff"),
        (b"moov", -8, b"\x7f\xff\xff\xff"),
        (b"mvhd", 16, b"\xff\xff\xff\xfe"),
        (b"mdhd", 16, b"\xff\xff\xff\xfe"),
        (b"stts", 8, b"\xff\xff\xff\xff"),
        (b"stts", 4, b"\xff\xff\xff\xff"),
        (b"stsz", 8, b"\xff\xff\xff\xff"),
        (b"stsz", 4, b"\x7f\xff\xff\xff"),
        (b"stco", 4, b"\xff\xff\xff\xff"),
        (b"stsc", 4, b"\x0f\xff\xff\xff"),
        (b"avc1", 24, b"\xff\xff\xff\xff"),
        (b"tkhd", 76, b"\xff\xff\xff\xff\xff\xff\xff\xff"),
    ],
)
def test_a_video_with_a_false_header_costs_little(
    video: bytes, box: bytes, offset: int, value: bytes
) -> None:
    """Counts, sizes, durations and dimensions of billions: refused, or decoded to no more than was asked."""
    started = time.monotonic()
    try:
        assert 1 <= len(decode(patched(video, box, offset, value))) <= 16
    except InputError as error:
        assert not LEAKS.search(str(error))  # noqa: PT017 -- refusing is one of two right answers
    assert time.monotonic() - started < 15
    assert len(decode(video)) == 12


# Damage


def test_cut_files_are_refused(video: bytes) -> None:
    samples = [video]
    for kind in ("PNG", "JPEG", "WEBP"):
        buffer = io.BytesIO()
        Image.fromarray(noise(1)[0]).save(buffer, kind)
        samples.append(buffer.getvalue())
    for sample in samples:
        for length in (4, 12, 20, len(sample) // 2, len(sample) * 9 // 10):
            with pytest.raises(InputError) as caught:
                decode(sample[:length])
            assert not LEAKS.search(str(caught.value))
    with pytest.raises(InputError, match="empty"):
        decode(b"")


@given(draw=st.data())
def test_mutated_files_are_decoded_or_refused(video: bytes, draw: st.DataObject) -> None:
    sample = draw.draw(st.sampled_from([png(24, 24), video]))
    damaged = bytearray(sample[: draw.draw(st.integers(1, len(sample)))])
    for _ in range(draw.draw(st.integers(0, 8))):
        damaged[draw.draw(st.integers(0, len(damaged) - 1))] = draw.draw(st.integers(0, 255))
    try:
        frames = decode(bytes(damaged))
    except InputError as error:
        assert not LEAKS.search(str(error)), str(error)  # noqa: PT017 -- one of two right answers
    else:
        assert frames.shape[1:] == (16, 16, 3) and 1 <= len(frames) <= 16


# Time and memory


def children() -> list[int]:
    """Processes forked by the decoder that still run."""
    assert decoding._FORK_SERVER._process is not None
    forker, found = str(decoding._FORK_SERVER._process.pid), []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            if int(entry.name) and parent == forker and state != "Z":
                found.append(int(entry.name))
    return found


def assert_no_child_stays() -> None:
    deadline = time.monotonic() + 5
    while children() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert children() == []


def test_a_decoder_that_takes_too_long_is_killed(slow_video: bytes) -> None:
    decode(png(16, 16))
    started = time.monotonic()
    with pytest.raises(InputError, match=decoding.EXHAUSTED):
        decode(slow_video, fps=1, timeout_s=0.5)
    assert time.monotonic() - started < 5
    assert_no_child_stays()
    assert decode(png(16, 16)).shape == (1, 16, 16, 3)


def test_a_decoder_that_uses_too_much_processor_time_is_killed(slow_video: bytes) -> None:
    assert refusal(slow_video, fps=1, cpu_s=1, timeout_s=120) == decoding.EXHAUSTED


def test_a_caller_who_leaves_ends_the_decoder(slow_video: bytes) -> None:
    async def leave() -> None:
        wish = asyncio.create_task(decode_upload(slow_video, size=16, fps=1, max_frames=8))
        while not children():
            assert not wish.done()
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        wish.cancel()
        with pytest.raises(asyncio.CancelledError):
            await wish

    decode(png(16, 16))
    assert_no_child_stays()
    asyncio.run(leave())
    assert_no_child_stays()


def test_a_child_ends_by_itself_when_its_server_is_gone(slow_video: bytes) -> None:
    async def begin() -> int:
        loop = asyncio.get_running_loop()
        with decoding._FORK_SERVER.open_child() as child:
            pidfd = await decoding._receive_pidfd(child)
            limits = limits_with(memory_bytes=2**30, cpu_s=60, timeout_s=0.2)
            request = DecodeRequest(16, 16, 1.0, 8, False, len(slow_video), limits)
            await loop.sock_sendall(child, request.to_bytes() + slow_video)
        return pidfd

    pidfd = asyncio.run(begin())
    ended, _, _ = select.select([pidfd], [], [], 10)
    os.close(pidfd)
    assert ended


def test_a_memory_bomb_ends_at_the_limit() -> None:
    bomb = png(4800, 4800)  # 70 kB that become 92 MB
    assert len(bomb) < 500_000
    assert decode(bomb).shape == (1, 16, 16, 3)
    assert refusal(bomb, memory_bytes=32 * 2**20)


def test_uploads_wait_for_decoders_and_too_many_are_rejected(slow_video: bytes) -> None:
    """A flood: each is answered, decoded or refused, and none is forgotten."""

    async def flood() -> list:
        wishes = [decode_upload(png(16, 16), size=16, fps=8, max_frames=1) for _ in range(40)]
        return await asyncio.gather(*wishes, return_exceptions=True)

    answers = asyncio.run(flood())
    assert len(answers) == 40
    assert all(isinstance(answer, np.ndarray | RateLimitError) for answer in answers)
    assert sum(isinstance(answer, np.ndarray) for answer in answers) >= 20
    assert_no_child_stays()


# Privileges of the child


def test_the_child_can_open_nothing() -> None:
    code = """
import os, socket
from worldmodel.serving.media.decode_child import restrict
from worldmodel.serving.media.decode_child import UploadLimits
restrict(UploadLimits(memory_bytes=2**28, cpu_s=5, timeout_s=5.0))
def tried(action):
    try:
        action()
    except (OSError, MemoryError) as error:
        return type(error).__name__
    return "done"
print(tried(lambda: open("/etc/hostname")), tried(socket.socket), tried(os.pipe), tried(lambda: os.dup(1)))
print(tried(lambda: bytearray(2**30)))
"""
    out = subprocess.check_output([sys.executable, "-P", "-c", code], text=True, timeout=60)
    *calls, memory = out.split()
    assert set(calls) <= {"OSError", "PermissionError"}
    assert memory == "MemoryError"


@pytest.mark.skipif(not system_calls.supported(), reason="the kernel cannot filter system calls")
def test_the_child_reaches_no_other_process_even_as_root() -> None:
    """Limits on files and processes do not bind root, which could read and write the server's memory."""
    code = """
import ctypes, os
from worldmodel.serving.media.decode_child import restrict
from worldmodel.serving.media.decode_child import UploadLimits
libc, parent = ctypes.CDLL(None, use_errno=True), os.getppid()
def readv(): return libc.process_vm_readv(parent, None, 0, None, 0, 0)
def writev(): return libc.process_vm_writev(parent, None, 0, None, 0, 0)
def ptrace(): return libc.ptrace(16, parent, 0, 0)
restrict(UploadLimits())
for call in (readv, writev, ptrace):
    ctypes.set_errno(0)
    print(call(), ctypes.get_errno())
chmod, unlink = lambda: os.chmod("/tmp", 0o1777), lambda: os.unlink("/tmp/x")
for call in (os.fork, lambda: os.kill(parent, 0), chmod, unlink):
    try:
        print("done", call())
    except OSError as error:
        print(-1, error.errno)
"""
    out = subprocess.check_output([sys.executable, "-P", "-c", code], text=True, timeout=60)
    assert out.splitlines() == [f"-1 {errno.EPERM}"] * 7


def test_the_decoder_knows_no_secret_and_loads_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    close_decoder()
    monkeypatch.setenv("WORLDMODEL_API_KEYS", "a-secret-0123456789abcdef")
    secret, inside = os.pipe()
    os.set_inheritable(inside, True)
    decode(png(16, 16))
    assert decoding._FORK_SERVER._process is not None
    process = Path("/proc") / str(decoding._FORK_SERVER._process.pid)
    assert b"secret" not in (process / "environ").read_bytes()
    assert "torch" not in (process / "maps").read_text()
    assert len(list((process / "task").iterdir())) == 1  # a fork copies only one thread
    held = {os.readlink(entry) for entry in (process / "fd").iterdir()}
    assert not any(name.startswith("pipe:") for name in held)
    os.close(secret)
    os.close(inside)


def test_invalid_responses_of_a_decoder_are_refused() -> None:
    """A compromised child can send nothing but frames of the requested size or an error."""
    request = DecodeRequest(16, 32, 8.0, 4, False, 0, UploadLimits())
    answers = [
        b"",
        bytes(21),
        RESPONSE.pack(b"wma1", 0, 2**32 - 1, 16, 32, 2**63),
        RESPONSE.pack(b"wma1", 0, 5, 16, 32, 5 * 1536),
        RESPONSE.pack(b"wma1", 0, 1, 32, 16, 1536) + bytes(1536),
        RESPONSE.pack(b"wma1", 0, 1, 8, 8, 192) + bytes(192),
        RESPONSE.pack(b"wma1", 0, 1, 16, 32, 1536) + bytes(100),
        RESPONSE.pack(b"wma1", 0, 0, 16, 32, 0),
        RESPONSE.pack(b"wma1", 1, 0, 0, 0, 2**60),
        RESPONSE.pack(b"wma1", 1, 0, 0, 0, 20) + b"\x1b[2J\r\nSet-Cookie: a=b",
        RESPONSE.pack(b"wma1", 7, 0, 0, 0, 0),
    ]
    for answer in answers:
        ours, theirs = decoding.socket.socketpair()
        ours.setblocking(False)
        with ours, theirs:
            theirs.sendall(answer)
            theirs.shutdown(decoding.socket.SHUT_WR)
            with pytest.raises((InputError, EOFError)) as caught:
                asyncio.run(decoding._exchange(ours, request, b""))
            assert "Cookie" not in str(caught.value)


def test_errors_name_a_status() -> None:
    assert issubclass(TooLargeError, ApiError) and issubclass(TooLargeError, InputError)
    assert (TooLargeError.status, UnsupportedFormatError.status, RateLimitError.status) == (413, 415, 429)
