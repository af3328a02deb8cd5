"""Time that training waits for data, and the speed-up of streaming over downloading first.

Clips are recorded (H.264, 256 x 256) and decoded. Two parts are simulated by sleeps: a slow disk, which takes
`--latency-ms` per clip on each of `--num-workers` connections, and the training step, which takes `--step-ms`
per clip and would keep a GPU busy.

The first table measures the share of time that training waits for a source that takes twice as long per batch
as a step, with increasing numbers of workers. The second part compares one pass over all clips in three
consecutive stages (download all, decode all to arrays on disk, train) with one streamed pass. Both use the
same number of connections and worker processes, start the workers once, and train on the same clips. The
upper bound of the speed-up is the sum of the stages divided by the longest one, which is decoding if there
are few cores.
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
class SlowClip:
    """A clip on a slow disk."""

    name: str
    recipe: Recipe
    latency_s: float

    def episode(self, task: str, seed: int, index: int, rounds: int) -> Episode:
        """Wait, then decode."""
        time.sleep(self.latency_s)
        return self.recipe.episode(task, seed, index, rounds)


class SlowSource:
    """A source with a latency per clip."""

    tasks, streams = ("rounds",), 0

    def __init__(self, source: Source, latency_s: float) -> None:
        self.source, self.latency_s, self.size = source, latency_s, source.size

    def at(self, index: int) -> Recipe:
        """Return the clip with the latency."""
        from streaming import SlowClip  # the name by which workers import it

        recipe = self.source.at(index)
        return SlowClip(recipe.name, recipe, self.latency_s)

    def cost(self, index: int, rounds: int) -> float:
        """Return a constant."""
        return rounds

    def close(self) -> None:
        """Close the source."""
        self.source.close()


def stream(table: Path, latency_s: float, num_steps: int, num_workers: int) -> "BatchLoader":
    """Open the clips for `num_steps` batches."""
    # Not at the top: workers import this module for `SlowClip`, and the loader imports torch.
    from worldmodel.data.loader import BatchLoader
    from worldmodel.worlds.shapes.source import KEYS

    model = WorldModelConfig(action=ActionConfig(keys=KEYS))
    config = SourceConfig(kind="clips", path=str(table), columns=COLUMNS)
    data = DataConfig({"slow": config}, num_workers=num_workers)
    stage = StageConfig(steps=num_steps, batch_size=BATCH, rounds=2, tasks={"rounds": 1.0})
    return BatchLoader({"slow": SlowSource(open_source("slow", data, model), latency_s)}, data, stage, seed=0)


def stalls(table: Path, step_s: float, num_steps: int) -> None:
    """Print the share of time that training waits, after the first steps."""
    latency_s = 2 * step_s / BATCH
    print(f"batch of {BATCH}: step {step_s:.2f} s; the slow disk takes {latency_s * BATCH:.2f} s")
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
    """Download all clips, decode all clips, then train; return the seconds of each stage."""
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
    """Print the times of one pass over the clips, in stages and streamed."""
    stages = staged(table, latency_s, step_s, num_steps, num_workers)
    began = time.perf_counter()
    first = 0.0
    with stream(table, latency_s, num_steps, num_workers) as batches:
        for step, _ in enumerate(batches):
            first = first if step else time.perf_counter() - began
            time.sleep(step_s)
    streamed = time.perf_counter() - began
    total, longest = sum(stages.values()), max(stages.values())
    print(f"one pass over {num_steps * BATCH} clips, {num_workers} connections, in stages:")
    print("  " + ", ".join(f"{name} {taken:.1f} s" for name, taken in stages.items()) + f" = {total:.1f} s")
    print(f"  first step after {stages['download'] + stages['decode']:.1f} s")
    print(f"streamed: {streamed:.1f} s, of which {first:.1f} s to the first batch")
    print(f"  {total / streamed:.2f} times as fast; upper bound without start-up {total / longest:.2f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-samples", type=int, default=320, help="clips of a pass")
    parser.add_argument("--num-workers", type=int, default=6, help="connections and decoders of a pass")
    parser.add_argument("--latency-ms", type=float, default=240, help="milliseconds per clip and connection")
    parser.add_argument("--step-ms", type=float, default=40, help="milliseconds of training per clip")
    parser.add_argument("--num-steps", type=int, default=20, help="steps over which waiting is measured")
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()
    from worldmodel.worlds import recorder  # not at the top, for the same reason

    with tempfile.TemporaryDirectory() as folder:
        num_steps = args.num_samples // BATCH
        began = time.perf_counter()
        table = recorder.record_world("shapes", folder, num_steps * BATCH, 2, args.seed, size=256)
        print(f"{num_steps * BATCH} clips recorded in {time.perf_counter() - began:.0f} s", flush=True)
        stalls(table, args.step_ms / 1e3 * BATCH, args.num_steps)
        one_pass(table, args.latency_ms / 1e3, args.step_ms / 1e3 * BATCH, num_steps, args.num_workers)


if __name__ == "__main__":
    main()
