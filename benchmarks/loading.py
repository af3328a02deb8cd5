"""Comparison of data loaders with the same clips, decoder, batches and number of workers.

Clips are recorded (H.264, 256 x 256, 17 frames) and converted to the format of each loader. Every run is a
new process that makes one shuffled pass in batches of 8; worldmodel.media decodes all frames of a clip to 64
x 64 pixels. The other loaders are optional: `pip install . litdata webdataset datasets`, in a separate
environment; those that are not installed are left out.

Columns:
    first s    seconds from opening the loader to the first batch
    clips/s    rate after the first batch
    slowdown   time of pure Python work between batches with one worker, relative to the same work without
               loading
    resume     the state is saved after a third of the pass with one worker and loaded again: clips of the
               pass that are lost and clips that are repeated, or `refused` for an error
"""

import argparse
import copy
import importlib.metadata
import importlib.util
import io
import itertools
import json
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from worldmodel import media
from worldmodel.config import ActionConfig, DataConfig, SourceConfig, StageConfig, WorldModelConfig
from worldmodel.data import loader
from worldmodel.shapes.source import KEYS
from worldmodel.worlds import get_world

BATCH, SIZE, FPS, FRAMES, NUM_SHARDS, WINDOW = 8, 64, 8, 17, 4, 32
MODEL = WorldModelConfig(action=ActionConfig(keys=KEYS))
Opened = tuple[Iterator[list[str]], Callable[[], Any]]
"""Names of the clips of every batch, and a function that returns the state of the loader."""


def decode_all(rows: list[dict[str, Any]]) -> list[tuple[str, np.ndarray]]:
    """Decode a batch in the worker of another loader."""
    videos = (media.read_video(bytes(row["mp4"]), SIZE, FPS, FRAMES) for row in rows)
    return [(row.get("name") or row["__key__"], video) for row, video in zip(rows, videos, strict=True)]


def named(batches: Any) -> Iterator[list[str]]:
    """Reduce batches to the names of their clips."""
    return ([name for name, _ in batch] for batch in batches)


# Formats


def clips(folder: Path) -> list[Path]:
    """Return the recorded clips."""
    return sorted(folder.glob("*.mp4"))


def packed(clip: Path) -> dict[str, Any]:
    """Return a clip as a row."""
    return {"name": clip.name, "mp4": clip.read_bytes()}


def write_tars(folder: Path) -> None:
    """Write the clips as tar shards."""
    for number in range(NUM_SHARDS):
        with tarfile.open(folder / f"shard-{number}.tar", "w") as tar:
            for clip in clips(folder)[number::NUM_SHARDS]:
                for suffix, data in (("mp4", clip.read_bytes()), ("txt", b"something happens")):
                    info = tarfile.TarInfo(f"{clip.stem}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


def write_parquet(folder: Path) -> None:
    """Write the clips as parquet files."""
    import pyarrow
    from pyarrow import parquet

    (folder / "parquet").mkdir()
    for number in range(NUM_SHARDS):
        table = pyarrow.Table.from_pylist([packed(clip) for clip in clips(folder)[number::NUM_SHARDS]])
        parquet.write_table(table, folder / "parquet" / f"train-{number}.parquet", row_group_size=16)


def write_chunks(folder: Path) -> None:
    """Write the clips as LitData's chunks."""
    import litdata

    chunks = str(folder / "chunks")
    litdata.optimize(packed, clips(folder), chunks, chunk_bytes="4MB", num_workers=1, verbose=False)


FORMATS = {
    "tar": ("worldmodel", write_tars),
    "parquet": ("datasets", write_parquet),
    "chunks": ("litdata", write_chunks),
}


# Loaders


def ours(config: SourceConfig, folder: Path, num_workers: int, state: Any) -> Opened:
    """Load with `worldmodel.data`."""
    stage = StageConfig(steps=len(clips(folder)) // BATCH, batch_size=BATCH, rounds=2, tasks={"rounds": 1.0})
    data = DataConfig({"clips": config}, num_workers=num_workers, window=WINDOW)
    stream = loader.batches(data, MODEL, stage, seed=0, **(state or {}))
    names = ([one.name for batch in batches for one in batch.episodes] for batches in stream)
    return names, stream.state


def from_table(folder: Path, num_workers: int, state: Any) -> Opened:
    """Load the files of a table."""
    source = SourceConfig("clips", str(folder / "clips.jsonl"), columns={"video": "path", "text": "text"})
    return ours(source, folder, num_workers, state)


def from_tars(folder: Path, num_workers: int, state: Any) -> Opened:
    """Load tar shards."""
    return ours(SourceConfig("webdataset", path=str(folder / "*.tar")), folder, num_workers, state)


def with_threads(folder: Path, num_workers: int, state: Any) -> Opened:
    """Load files with the threads of torchdata."""
    from torchdata.nodes import Batcher, IterableWrapper, Loader, ParallelMapper, Prefetcher

    files = np.random.default_rng(0).permutation(np.array(clips(folder), dtype=object)).tolist()
    read = ParallelMapper(
        IterableWrapper(files), lambda path: decode_all([packed(path)])[0], num_workers, method="thread"
    )
    batches = Loader(Prefetcher(Batcher(read, BATCH), prefetch_factor=2))
    if state:
        batches.load_state_dict(state)
    return named(batches), batches.state_dict


def with_webdataset(folder: Path, num_workers: int, state: Any) -> Opened:
    """Load tar shards with WebDataset, which has no state and restarts."""
    import webdataset
    from torch.utils.data import DataLoader

    shards = [str(path) for path in sorted(folder.glob("*.tar"))]
    dataset: Any = webdataset.WebDataset(shards, shardshuffle=NUM_SHARDS).shuffle(WINDOW)
    return named(DataLoader(dataset, BATCH, num_workers=num_workers, collate_fn=decode_all)), lambda: None


def with_litdata(folder: Path, num_workers: int, state: Any) -> Opened:
    """Load chunks with LitData."""
    import litdata

    dataset = litdata.StreamingDataset(str(folder / "chunks"), shuffle=True)
    batches = litdata.StreamingDataLoader(
        dataset, batch_size=BATCH, num_workers=num_workers, collate_fn=decode_all
    )
    if state:
        batches.load_state_dict(state)
    return named(batches), batches.state_dict


def with_huggingface(folder: Path, num_workers: int, state: Any) -> Opened:
    """Load parquet files as a stream of Hugging Face datasets, with the loader that they recommend."""
    import datasets
    from torchdata.stateful_dataloader import StatefulDataLoader

    dataset: Any = datasets.load_dataset(str(folder / "parquet"), split="train", streaming=True)
    dataset = dataset.shuffle(seed=0, buffer_size=WINDOW)
    batches = StatefulDataLoader(dataset, BATCH, num_workers=num_workers, collate_fn=decode_all)
    if state:
        batches.load_state_dict(state)
    return named(batches), batches.state_dict


LOADERS: dict[str, tuple[str, Callable[[Path, int, Any], Opened]]] = {
    "ours, files": ("worldmodel", from_table),
    "ours, tar": ("worldmodel", from_tars),
    "torchdata, threads": ("torchdata", with_threads),
    "WebDataset": ("webdataset", with_webdataset),
    "LitData": ("litdata", with_litdata),
    "Hugging Face": ("datasets", with_huggingface),
}


# Measurements


def work() -> float:
    """Run pure Python for about as long as a training step does; return the seconds."""
    began = time.perf_counter()
    total = 0
    for number in range(300_000):
        total += number % 7
    return time.perf_counter() - began


def one_pass(name: str, folder: Path, num_workers: int, busy: bool) -> dict[str, float]:
    """Measure one pass."""
    package, open_loader = LOADERS[name]
    importlib.import_module(package)
    alone = [work() for _ in range(40 * busy)]
    began = time.perf_counter()
    batches, _ = open_loader(folder, num_workers, None)
    early = count = len(next(batches))
    first = time.perf_counter() - began
    working = []
    for names in batches:
        count += len(names)
        if busy:
            working.append(work())
    seconds = time.perf_counter() - began - first
    assert count == len(clips(folder)), f"{count} clips of {len(clips(folder))}"
    alone += [work() for _ in range(40 * busy)]
    slower = statistics.mean(working) / statistics.mean(alone) if busy else 0.0
    return {"first": first, "rate": (count - early) / seconds, "slower": slower}


def resume(name: str, folder: Path, num_workers: int) -> dict[str, str]:
    """Stop a pass after a third, with one worker, and resume it with `num_workers`."""
    open_loader, total = LOADERS[name][1], len(clips(folder))
    batches, state = open_loader(folder, 1, None)
    seen = [*itertools.chain.from_iterable(itertools.islice(batches, total // BATCH // 3))]
    saved = copy.deepcopy(state())
    try:
        seen += itertools.chain.from_iterable(open_loader(folder, num_workers, saved)[0])
    except (AssertionError, RuntimeError, ValueError) as error:
        print(f"{name}, {num_workers} workers: {error!r}", file=sys.stderr)
        return {"resumed": "refused"}
    return {"resumed": f"{total - len(set(seen)):4d} {len(seen) - len(set(seen)):5d}"}


def in_process(task: str, name: str, folder: Path, num_workers: int, busy: bool = False) -> dict[str, Any]:
    """Run a task in a new process."""
    command = [sys.executable, __file__, "--task", task, "--name", name, "--folder", str(folder)]
    command += ["--num-workers", str(num_workers)] + ["--busy"] * busy
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(folder: Path, names: list[str], repeats: int) -> None:
    """Measure all loaders and print a table."""
    measured: dict[tuple[str, int, bool], list[dict[str, float]]] = {}
    for repeat in range(repeats):
        for num_workers, busy in ((1, False), (2, False), (1, True))[: 3 if repeat == 0 else 2]:
            for name in names:
                found = in_process("pass", name, folder, num_workers, busy)
                measured.setdefault((name, num_workers, busy), []).append(found)

    def median(name: str, num_workers: int, busy: bool, figure: str) -> float:
        return statistics.median(found[figure] for found in measured[name, num_workers, busy])

    print("                    1 worker          2 workers         slowdown  resume        with 2 workers")
    print("                    first s  clips/s  first s  clips/s  1 worker  lost repeated lost repeated")
    for name in names:
        rates = "".join(
            f"{median(name, n, False, 'first'):9.2f}{median(name, n, False, 'rate'):9.1f}" for n in (1, 2)
        )
        resumed = [in_process("resume", name, folder, n)["resumed"] for n in (1, 2)]
        slower = median(name, 1, True, "slower")
        print(f"{name:18s}{rates}    x {slower:4.2f}  {resumed[0]:13s} {resumed[1]}", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-samples", type=int, default=128, help="clips")
    parser.add_argument("--repeats", type=int, default=2, help="passes of each loader, alternating")
    parser.add_argument("--seed", type=int, default=1234)
    for internal in ("--task", "--name", "--folder"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    parser.add_argument("--num-workers", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--busy", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.task:
        given = args.name, Path(args.folder), args.num_workers
        print(json.dumps(resume(*given) if args.task == "resume" else one_pass(*given, args.busy)))
        return
    installed = [name for name, (package, _) in LOADERS.items() if importlib.util.find_spec(package)]
    packages = {LOADERS[name][0] for name in installed}
    print(", ".join(f"{package} {importlib.metadata.version(package)}" for package in sorted(packages)))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        get_world("shapes").record(folder, args.num_samples // BATCH * BATCH, 2, args.seed, size=256)
        for name, (package, write) in FORMATS.items():
            if package in packages:
                began = time.perf_counter()
                write(folder)
                print(f"written as {name} in {time.perf_counter() - began:.1f} s", flush=True)
        measure(folder, installed, args.repeats)


if __name__ == "__main__":
    main()
