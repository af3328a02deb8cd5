"""Rate at which one core samples, simulates and judges clips of the shapes world, as JSON."""

import json
import sys
import time
from collections.abc import Callable

from worldmodel.worlds.shapes import judge, sample_clip, simulate

NUM_CLIPS = 1000


def rate(work: Callable[[int], object]) -> int:
    """Return how many times per second `work` runs."""
    start = time.perf_counter()
    for index in range(NUM_CLIPS):
        work(index)
    return round(NUM_CLIPS / (time.perf_counter() - start))


def main() -> None:
    """Fill the sprite caches, then measure."""
    clips = [sample_clip("train", 0, index).clip for index in range(NUM_CLIPS)]
    rates = {
        "sampled_clips_per_s": rate(lambda index: sample_clip("train", 1, index)),
        "simulated_clips_per_s": rate(lambda index: simulate(clips[index].before, clips[index].plan)),
        "judged_frames_per_s": rate(lambda index: judge(clips[index].frames[-1], clips[index].after)),
    }
    sys.stdout.write(json.dumps(rates) + "\n")


if __name__ == "__main__":
    main()
