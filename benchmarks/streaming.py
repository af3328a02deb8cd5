"""Whether training waits for its data, and what streaming saves over downloading first.

Clips are real (recorded here, H.264, 256 x 256) and really decoded. Two things are slept: a far disk, which
takes `--latency-ms` a clip on each of `--num-workers` connections, and the training step, `--step-ms` a clip,
in which a GPU would be busy and this CPU idle.

The first table: a source that takes twice as long for a batch as a step takes, read by more and more workers.
The second: one pass over all clips, as three stages one after the other (download all, decode all into arrays
on disk, train) and as one stream. Both have the same connections, decode in the same number of the same
worker processes, start these once, and train on the same clips. The best that overlap can do is the sum of
the stages over the longest; decoding needs real cores, so on few of them it is the longest.
"""

import argparse
import itertools
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from worldmodel.config import ActionConfig, DataConfig, SourceConfig, StageConfig, WorldModelConfig
from worldmodel.data.sources import Recipe, Source, open_source
from worldmodel.types import Episode

if TYPE_CHECKING:
    from worldmodel.data.loader import BatchLoader

COLUMNS = {"video": "path", "text": "text", "keys": "keys"}
BATCH = 8


@dataclass(frozen=True)
class Fetched:
    """A clip behind a slow line."""

    name: str
    recipe: Recipe
    latency_s: float

    def episode(self, task: str, seed: int, index: int, rounds: int) -> Episode:
        """Wait for the line, then decode."""
        time.sleep(self.latency_s)
        return self.recipe.episode(task, seed, index, rounds)


class FarSource:
    """Clips on a far disk."""

    tasks, seekable = ("rounds",), True

    def __init__(self, near: Source, latency_s: float) -> None:
        self.near, self.latency_s, self.size = near, latency_s, near.size

    def at(self, index: int) -> Recipe:
        """Return the clip behind its line."""
        from streaming import Fetched  # by the name under which a worker finds it

        recipe = self.near.at(index)
        return Fetched(recipe.name, recipe, self.latency_s)

    def cost(self, index: int, rounds: int) -> float:
        """Return the same for all."""
        return rounds

    def close(self) -> None:
        """Close the near source."""
        self.near.close()


def stream(table: Path, latency_s: float, num_steps: int, num_workers: int) -> "BatchLoader":
    """Open the clips for `num_steps` batches."""
    from worldmodel.data.loader import (
        BatchLoader,
    )  # not at the top, which workers read to find `Fetched`: torch
    from worldmodel.worlds.shapes.source import KEYS

    model = WorldModelConfig(action=ActionConfig(keys=KEYS))
    config = SourceConfig(kind="clips", path=str(table), columns=COLUMNS)
    data = DataConfig({"far": config}, num_workers=num_workers)
    stage = StageConfig(steps=num_steps, batch_size=BATCH, rounds=2, tasks={"rounds": 1.0})
    return BatchLoader({"far": FarSource(open_source("far", data, model), latency_s)}, data, stage, seed=0)


def stalls(table: Path, step_s: float, num_steps: int) -> None:
    """Print the share of time that training waits, in its steady state."""
    latency_s = 2 * step_s / BATCH
    print(f"batch of {BATCH}: step {step_s:.2f} s; the far disk alone takes {latency_s * BATCH:.2f} s")
    print("workers  first batch s  step s  waiting")
    for num_workers in (0, 1, 2, 3, 4, 6):
        warm = 4
        with stream(table, latency_s, num_steps + warm, num_workers) as batches:
            began = time.perf_counter()
            next(batches)
            first = time.perf_counter() - began
            for _ in itertools.islice(batches, warm - 1):
                time.sleep(step_s)
            began, waited = time.perf_counter(), batches.stall_s
            for _ in batches:
                time.sleep(step_s)
            taken = time.perf_counter() - began
            share = (batches.stall_s - waited) / taken
        print(f"{num_workers:7d}  {first:13.2f}  {taken / num_steps:6.2f}  {share:7.2%}", flush=True)


def staged(
    table: Path, latency_s: float, step_s: float, num_steps: int, num_workers: int
) -> dict[str, float]:
    """Download everything, then decode everything, then train; return the seconds of each."""
    seconds, began = {}, time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        clips = sorted(table.parent.glob("*.mp4"))

        def download(clip: Path) -> None:
            time.sleep(latency_s)
            Path(folder, clip.name).write_bytes(clip.read_bytes())

        with ThreadPoolExecutor(num_workers) as pool:
            list(pool.map(download, clips))
        seconds["download"] = time.perf_counter() - began
        began = time.perf_counter()

        with stream(table, 0.0, num_steps, num_workers) as batches:
            for batch in itertools.chain.from_iterable(batches):
                for index, episode in zip(batch.indices, batch.episodes, strict=True):
                    np.concatenate(episode.observations).tofile(Path(folder, f"{index}.raw"))
        seconds["decode"] = time.perf_counter() - began
        began = time.perf_counter()
        for step in range(num_steps):
            for index in range(step * BATCH, (step + 1) * BATCH):
                np.fromfile(Path(folder, f"{index}.raw"), np.uint8)
            time.sleep(step_s)
        seconds["train"] = time.perf_counter() - began
    return seconds


def one_pass(table: Path, latency_s: float, step_s: float, num_steps: int, num_workers: int) -> None:
    """Print one pass over the clips, staged and streamed."""
    stages = staged(table, latency_s, step_s, num_steps, num_workers)
    began = time.perf_counter()
    first = 0.0
    with stream(table, latency_s, num_steps, num_workers) as batches:
        for step, _ in enumerate(batches):
            first = first if step else time.perf_counter() - began
            time.sleep(step_s)
    streamed = time.perf_counter() - began
    total, longest = sum(stages.values()), max(stages.values())
    print(f"one pass over {num_steps * BATCH} clips, {num_workers} connections, one after the other:")
    print("  " + ", ".join(f"{name} {taken:.1f} s" for name, taken in stages.items()) + f" = {total:.1f} s")
    print(f"  first step after {stages['download'] + stages['decode']:.1f} s")
    print(f"streamed: {streamed:.1f} s, of which {first:.1f} s to the first batch")
    print(f"  {total / streamed:.2f} times as fast; without start-up, overlap allows {total / longest:.2f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-samples", type=int, default=320, help="clips of the one pass")
    parser.add_argument("--num-workers", type=int, default=6, help="connections and decoders of the one pass")
    parser.add_argument("--latency-ms", type=float, default=240, help="a clip on one connection")
    parser.add_argument("--step-ms", type=float, default=40, help="training on one clip")
    parser.add_argument("--num-steps", type=int, default=20, help="steps in which waiting is measured")
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()
    from worldmodel.worlds import recorder  # nor this, the procedural world

    with tempfile.TemporaryDirectory() as folder:
        num_steps = args.num_samples // BATCH
        began = time.perf_counter()
        table = recorder.record(folder, num_steps * BATCH, rounds=2, seed=args.seed)
        print(f"{num_steps * BATCH} clips recorded in {time.perf_counter() - began:.0f} s", flush=True)
        stalls(table, args.step_ms / 1e3 * BATCH, args.num_steps)
        one_pass(table, args.latency_ms / 1e3, args.step_ms / 1e3 * BATCH, num_steps, args.num_workers)


if __name__ == "__main__":
    main()
