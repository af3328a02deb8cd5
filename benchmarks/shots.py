"""Detectors of shots on a joined film with known cuts: precision and recall of each.

python -m benchmarks shots clips/*.mp4 photos/*.jpg --dissolves 0.3

The pieces of a film must have no cut in them. A photo is shown as by a camera that pans and zooms over it.
"""

import argparse
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from PIL import Image

from worldmodel import media
from worldmodel.flow.stages.shots import THRESHOLDS, make_detector
from worldmodel.media.limits import IMAGE_SUFFIXES

FPS, SIZE = 25.0, (144, 256)
TOLERANCE = 2
"""Frames by which a cut may be found beside its place."""


def piece(path: Path, rng: np.random.Generator, length: int) -> np.ndarray:
    """Return frames of a film from a random place on, or of a camera that moves over a photo."""
    if path.suffix.lower() not in IMAGE_SUFFIXES:
        duration = media.probe(path, decode=False).duration_s
        start = float(rng.uniform(0, max(0.0, duration - length / FPS - 0.2)))
        return media.read_video(path, SIZE, FPS, length, start)
    photo = Image.fromarray(media.read_image(path, (2 * SIZE[0], 2 * SIZE[1])))
    (x, y, zoom), (x2, y2, zoom2) = rng.uniform((0, 0, 0.5), (1, 1, 0.9), (2, 3))
    frames = []
    for share in np.linspace(0, 1, length):
        wide = photo.width * (zoom + share * (zoom2 - zoom))
        high = photo.height * (zoom + share * (zoom2 - zoom))
        left = (photo.width - wide) * (x + share * (x2 - x))
        top = (photo.height - high) * (y + share * (y2 - y))
        box = (left, top, left + wide, top + high)
        frames.append(np.asarray(photo.resize((SIZE[1], SIZE[0]), Image.Resampling.BILINEAR, box)))
    return np.stack(frames)


def joined(
    paths: Sequence[Path], count: int, dissolves: float, seed: int
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Return a film of `count` pieces, and the first and the last frame of each transition between them."""
    rng = np.random.default_rng(seed)
    frames, transitions, before = [], [], None
    for _ in range(count):
        others = [path for path in paths if path != before] or list(paths)
        before = others[int(rng.integers(len(others)))]
        next_ = piece(before, rng, int(rng.integers(25, 90))).astype(np.float32)
        at = sum(map(len, frames))
        blended = int(rng.integers(8, 20)) if frames and rng.random() < dissolves else 0
        blended = min(blended, len(next_) // 2, len(frames[-1]) // 2 if frames else 0)
        if blended:
            shares = np.linspace(0, 1, blended + 2)[1:-1, None, None, None]
            frames[-1][-blended:] = (1 - shares) * frames[-1][-blended:] + shares * next_[:blended]
            next_ = next_[blended:]
        if frames:
            transitions.append((at - blended, at))
        frames.append(next_)
    return np.concatenate(frames).round().astype(np.uint8), transitions


def found_of(name: str, film: np.ndarray) -> tuple[list[tuple[int, int]], float]:
    """Return the transitions that a detector finds, as frames, and its CPU seconds."""
    detector, start = make_detector(name, None, "cpu"), time.process_time()  # type: ignore[arg-type]
    shots = detector.shots(((index / FPS, frame) for index, frame in enumerate(film)), FPS)
    places = [(round(end * FPS), round(begin * FPS)) for (_, end), (begin, _) in pairwise(shots)]
    return places, time.process_time() - start


def matches(found: Sequence[tuple[int, int]], known: Sequence[tuple[int, int]]) -> int:
    """Count the transitions that were found, each once: the two overlap, or are two frames apart."""
    left, count = list(known), 0
    for first, last in found:
        for one in left:
            if first <= one[1] + TOLERANCE and last >= one[0] - TOLERANCE:
                left.remove(one)
                count += 1
                break
    return count


def main() -> None:
    """Print a row of each detector for cuts alone, and one for cuts and dissolves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path, help="films without cuts, and photos")
    parser.add_argument("--pieces", type=int, default=60)
    parser.add_argument(
        "--dissolves", type=float, default=0.3, help="share of transitions in the second film"
    )
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args()
    for share in (0.0, parsed.dissolves):
        film, known = joined(parsed.paths, parsed.pieces, share, parsed.seed)
        gradual = sum(last > first for first, last in known)
        print(f"{len(film)} frames, {len(known) - gradual} cuts, {gradual} dissolves")
        for name in THRESHOLDS:
            found, seconds = found_of(name, film)
            right = matches(found, known)
            precision, recall = right / max(1, len(found)), right / len(known)
            score = 2 * right / max(1, len(found) + len(known))
            print(
                f"  {name:12s} precision {precision:.3f} recall {recall:.3f} F1 {score:.3f} "
                f"({len(film) / seconds:.0f} frames per CPU second)"
            )


if __name__ == "__main__":
    main()
