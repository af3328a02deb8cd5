"""Detection of image and video formats by their bytes, without decoding them."""

from collections.abc import Callable

MP4_BOXES = {
    *(b"ftyp", b"styp", b"moov", b"mdat", b"moof", b"mfra", b"sidx"),
    *(b"free", b"skip", b"wide", b"uuid"),
}
"""Top-level boxes of an MP4; bytes after the last of them are ignored."""
NOT_MEDIA = {
    b"version https://git-lfs": "a pointer of Git LFS (run `git lfs pull` for the file)",
    b"<!doctype html": "a web page",
    b"<html": "a web page",
    b"<?xml": "an XML message of a server",
    b"<error": "an XML message of a server",
}
"""What comes in place of a file that was not downloaded, by its beginning."""
BEGINNINGS = {
    b"\x89PNG\r\n\x1a\n": "png",
    b"\xff\xd8\xff": "jpeg",
    b"GIF87a": "gif",
    b"GIF89a": "gif",
    b"II*\0": "tiff",
    b"MM\0*": "tiff",
    b"\x1a\x45\xdf\xa3": "matroska",
    b"FLV\x01": "flv",
    b"OggS": "ogg",
    b"\0\0\x01\xba": "mpeg",
    b"\x30\x26\xb2\x75\x8e\x66\xcf\x11": "asf",
}
HEIF_BRANDS = {b"heic", b"heix", b"mif1", b"msf1", b"avif", b"avis"}
OTHERS = {"heif": "a HEIC image", "asf": "a WMV or ASF file"}
"""Formats that are known and not read."""
BMP_HEADERS = {12, 40, 52, 56, 108, 124}
"""Sizes of the header after that of the file."""
PACKET, SYNC = 188, 0x47
"""Bytes of a packet of MPEG-TS, and the first of each."""
BEGINNING = 4096
"""Bytes after which a format can be told."""
MAX_BOXES = 100_000
MATROSKA_HEADER, MATROSKA_SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"


def detect_format(data: bytes) -> str:
    """Return the format that the first bytes announce, or an empty string."""
    for beginning, kind in BEGINNINGS.items():
        if data.startswith(beginning):
            return kind
    if data.startswith(b"RIFF"):
        return {b"WEBP": "webp", b"AVI ": "avi"}.get(data[8:12], "")
    if data.startswith(b"BM") and int.from_bytes(data[14:18], "little") in BMP_HEADERS:
        return "bmp"
    if data[4:8] == b"ftyp" and data[8:12] in HEIF_BRANDS:
        brands = data[8 : int.from_bytes(data[:4])]
        return "avif" if b"avif" in brands or b"avis" in brands else "heif"
    if data[4:8] in MP4_BOXES:  # QuickTime may begin without the box of its type
        return "mp4"
    # Of MPEG-TS every packet begins so; those of Blu-ray have four bytes of time before.
    for first, step in ((0, PACKET), (4, PACKET + 4)):
        if len(data) > first + step and not {*data[first : first + 3 * step : step]} - {SYNC}:
            return "mpegts"
    return ""


def describe(kind: str, data: bytes) -> str:
    """Describe a format for a message about a file."""
    if kind in OTHERS:
        return OTHERS[kind]
    start = data[:64].lstrip().lower()
    for beginning, what in NOT_MEDIA.items():
        if start.startswith(beginning):
            return what
    return f"of kind {kind}" if kind else f"of an unknown kind (it starts with {data[:8]!r})"


def announced_bytes(kind: str, data: bytes) -> int:
    """Return the number of bytes that a video file announces, or 0 if it announces none."""
    if kind == "gif":
        return 0 if data.rstrip(b"\0").endswith(b";") else len(data) + 1
    if kind == "avi":
        return 8 + int.from_bytes(data[4:8], "little")
    if kind == "matroska":  # an EBML header, then one segment: each an id, a size and a body
        at, size = _ebml_size(data, 4)
        segment = at + size
        if data[segment : segment + 4] != MATROSKA_SEGMENT:
            return 0
        at, size = _ebml_size(data, segment + 4)
        return at + size
    if kind in WALKS:
        return WALKS[kind](data)
    at = 0  # MP4: boxes of size and type up to the end
    for _ in range(MAX_BOXES):
        size, name = int.from_bytes(data[at : at + 4]), data[at + 4 : at + 8]
        size = int.from_bytes(data[at + 8 : at + 16]) if size == 1 else size
        if size < 8 or name not in MP4_BOXES:
            break
        at += size
    return at


def _packets_end(data: bytes) -> int:
    """Return where MPEG-TS ends: with a whole packet."""
    size = PACKET if data[0] == SYNC else PACKET + 4
    return -(-len(data) // size) * size


def _tags_end(data: bytes) -> int:
    """Return where FLV ends: tags, and the size of each after it."""
    at = int.from_bytes(data[5:9]) + 4
    while at < len(data):
        at += 11 + int.from_bytes(data[at + 1 : at + 4]) + 4
    return at


def _pages_end(data: bytes) -> int:
    """Return where Ogg ends: with a page of every stream that says so."""
    at, last = 0, dict[bytes, bool]()
    while at < len(data) and (len(data) < at + 27 or data[at : at + 4] == b"OggS"):
        if len(data) < at + 27:
            return at + 27
        last[data[at + 14 : at + 18]] = bool(data[at + 5] & 4)
        segments = data[at + 27 : at + 27 + data[at + 26]]
        at += 27 + data[at + 26] + sum(segments)
    return at if all(last.values()) else max(at, len(data) + 1)


def _stream_end(data: bytes) -> int:
    """Return where MPEG-PS ends: headers of packs, and packets with their sizes."""
    at = 0
    while data[at : at + 3] == b"\0\0\x01":
        code = data[at + 3] if at + 3 < len(data) else 0
        if code == 0xB9:  # the end
            return at + 4
        if code == 0xBA:
            mpeg2 = at + 4 < len(data) and data[at + 4] >> 6 == 1
            at += (14 + (data[at + 13] & 7 if at + 13 < len(data) else 0)) if mpeg2 else 12
        elif code > 0xBA:
            at += 6 + int.from_bytes(data[at + 4 : at + 6])
        else:
            break
    return at


WALKS: dict[str, Callable[[bytes], int]] = {
    "mpegts": _packets_end,
    "flv": _tags_end,
    "ogg": _pages_end,
    "mpeg": _stream_end,
}
"""Formats that state the size of their parts, but not of all."""


def _ebml_size(data: bytes, at: int) -> tuple[int, int]:
    """Return the offset after a size field of 1 to 8 bytes, and the size; an unknown size (all ones) is 0."""
    # The leading zeros of the first byte count the bytes after it.
    length = 9 - data[at].bit_length() if at < len(data) else 9
    bits = 7 * length
    size = int.from_bytes(data[at : at + length]) & ((1 << bits) - 1)
    return at + length, 0 if size == (1 << bits) - 1 else size
