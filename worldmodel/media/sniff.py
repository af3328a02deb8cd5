"""Detection of image and video formats by their bytes, without decoding them."""

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
MAX_BOXES = 100_000
MATROSKA_HEADER, MATROSKA_SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"


def detect_format(data: bytes) -> str:
    """Return the format that the first bytes announce, or an empty string."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    if data.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    if data.startswith(b"RIFF"):
        return {b"WEBP": "webp", b"AVI ": "avi"}.get(data[8:12], "")
    if data.startswith(MATROSKA_HEADER):
        return "matroska"
    if data[4:8] == b"ftyp":
        return "heif" if data[8:12] in {b"heic", b"heix", b"mif1", b"msf1", b"avif", b"avis"} else "mp4"
    return ""


def describe(kind: str, data: bytes) -> str:
    """Describe a format for a message about a file."""
    if kind == "heif":
        return "a HEIC or AVIF image"
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
    at = 0  # MP4: boxes of size and type up to the end
    for _ in range(MAX_BOXES):
        size, name = int.from_bytes(data[at : at + 4]), data[at + 4 : at + 8]
        size = int.from_bytes(data[at + 8 : at + 16]) if size == 1 else size
        if size < 8 or name not in MP4_BOXES:
            break
        at += size
    return at


def _ebml_size(data: bytes, at: int) -> tuple[int, int]:
    """Return the offset after a size field of 1 to 8 bytes, and the size; an unknown size (all ones) is 0."""
    # The leading zeros of the first byte count the bytes after it.
    length = 9 - data[at].bit_length() if at < len(data) else 9
    bits = 7 * length
    size = int.from_bytes(data[at : at + length]) & ((1 << bits) - 1)
    return at + length, 0 if size == (1 << bits) - 1 else size
