"""Loaders side by side: the same clips, the same decoder, the same batches, the same number of workers.

Real clips are recorded here (H.264, 256 x 256, 25 frames) and put into every loader's own format. Each run
is a fresh process: one pass, shuffled, in batches of 8; 17 frames of a clip are decoded to 64 x 64 pixels by
worldmodel.data.media. Rows: ours from a table of files and from tar shards, torchdata with threads,
WebDataset (tar), LitData (its chunks), Hugging Face datasets (parquet, streaming). Peers that are not
installed are left out: `pip install litdata webdataset datasets`.

`first s`: from opening to the first batch. `clips/s`: the whole pass, from opening on. `own work`: how much
longer a piece of pure Python takes between batches while one worker loads than before and after: what the
training loop feels.
"""

import argparse
import importlib.metadata
import importlib.util
import io
import json
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from worldmodel.config import ActionConfig, DataConfig, SourceConfig, StageConfig, WorldModelConfig
from worldmodel.data import loader, media
from worldmodel.data.sources import KEYS
from worldmodel.worlds import recorder

BATCH, SIZE, FPS, FRAMES, NUM_SHARDS = 8, 64, 8, 17, 4
MODEL = WorldModelConfig(action=ActionConfig(keys=KEYS))


def decode(data: bytes) -> np.ndarray:
    """Decode a clip, for all peers."""
    return media.read_video(data, SIZE, FPS, FRAMES)


def decode_all(rows: list[Any]) -> list[np.ndarray]:
    """Decode a peer's batch in its worker."""
    return [decode(bytes(row["mp4"] if isinstance(row, dict) else row)) for row in rows]


# Formats


def clips(folder: Path) -> list[Path]:
    """Return the recorded clips."""
    return sorted(folder.glob("*.mp4"))


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
        rows = [{"mp4": clip.read_bytes()} for clip in clips(folder)[number::NUM_SHARDS]]
        table = pyarrow.Table.from_pylist(rows)
        parquet.write_table(table, folder / "parquet" / f"train-{number}.parquet", row_group_size=16)


def write_chunks(folder: Path) -> None:
    """Write the clips as LitData's chunks."""
    import litdata

    litdata.optimize(
        fn=Path.read_bytes,
        inputs=clips(folder),
        output_dir=str(folder / "chunks"),
        chunk_bytes="4MB",
        num_workers=1,
        verbose=False,
    )


# Loaders


def ours(config: SourceConfig, num_workers: int, num_clips: int) -> Iterator[int]:
    """Load with this package."""
    stage = StageConfig(steps=num_clips // BATCH, batch_size=BATCH, rounds=2, tasks={"rounds": 1.0})
    data = DataConfig({"clips": config}, num_workers=num_workers, window=256)
    with loader.batches(data, MODEL, stage, seed=0) as stream:
        for batches in stream:
            yield sum(len(batch.episodes) for batch in batches)


def from_table(folder: Path, num_workers: int) -> Iterator[int]:
    """Load files that a table names."""
    columns = {"video": "path", "text": "text"}
    source = SourceConfig("clips", path=str(folder / "clips.csv"), columns=columns)
    return ours(source, num_workers, len(clips(folder)))


def from_tars(folder: Path, num_workers: int) -> Iterator[int]:
    """Load tar shards."""
    return ours(SourceConfig("webdataset", path=str(folder / "*.tar")), num_workers, len(clips(folder)))


def with_threads(folder: Path, num_workers: int) -> Iterator[int]:
    """Load files with torchdata's own threads."""
    from torchdata.nodes import Batcher, IterableWrapper, Loader, ParallelMapper, Prefetcher

    files = np.random.default_rng(0).permutation(np.array(clips(folder), dtype=object)).tolist()

    def read(path: Path) -> np.ndarray:
        return decode(path.read_bytes())

    mapped = ParallelMapper(IterableWrapper(files), read, num_workers=num_workers, method="thread")
    return map(len, Loader(Prefetcher(Batcher(mapped, BATCH), prefetch_factor=2)))


def torch_loader(dataset: Any, num_workers: int) -> Iterator[int]:
    """Load a peer's dataset with torch's DataLoader."""
    from torch.utils.data import DataLoader

    batches: Iterable[list[np.ndarray]] = DataLoader(
        dataset, batch_size=BATCH, num_workers=num_workers, collate_fn=decode_all
    )
    return map(len, batches)


def with_webdataset(folder: Path, num_workers: int) -> Iterator[int]:
    """Load tar shards with WebDataset."""
    import webdataset

    shards = [str(path) for path in sorted(folder.glob("*.tar"))]
    dataset = webdataset.WebDataset(shards, shardshuffle=NUM_SHARDS).shuffle(256)
    return torch_loader(dataset, num_workers)


def with_litdata(folder: Path, num_workers: int) -> Iterator[int]:
    """Load chunks with LitData."""
    import litdata

    dataset = litdata.StreamingDataset(str(folder / "chunks"), shuffle=True)
    batches = litdata.StreamingDataLoader(
        dataset, batch_size=BATCH, num_workers=num_workers, collate_fn=decode_all
    )
    return map(len, batches)


def with_huggingface(folder: Path, num_workers: int) -> Iterator[int]:
    """Load parquet files as a stream of Hugging Face datasets."""
    import datasets

    dataset = datasets.load_dataset(str(folder / "parquet"), split="train", streaming=True)
    return torch_loader(dataset.shuffle(seed=0, buffer_size=256), num_workers)


LOADERS: dict[str, tuple[str, Callable[[Path, int], Iterator[int]]]] = {
    "ours, files": ("worldmodel", from_table),
    "ours, tar": ("worldmodel", from_tars),
    "torchdata, threads": ("torchdata", with_threads),
    "WebDataset": ("webdataset", with_webdataset),
    "LitData": ("litdata", with_litdata),
    "Hugging Face": ("datasets", with_huggingface),
}


# Measuring


def work() -> float:
    """Do a piece of pure Python, about what a training step does between its kernels; return its seconds."""
    began = time.perf_counter()
    total = 0
    for number in range(300_000):
        total += number % 7
    return time.perf_counter() - began


def run(name: str, folder: Path, num_workers: int, busy: bool) -> dict[str, float]:
    """Make one pass."""
    package, open_loader = LOADERS[name]
    importlib.import_module(package)
    alone = [work() for _ in range(40)]
    began = time.perf_counter()
    batches = open_loader(folder, num_workers)
    count = next(batches)
    first = time.perf_counter() - began
    working = []
    for size in batches:
        count += size
        if busy:
            working.append(work())
    seconds = time.perf_counter() - began
    assert count == len(clips(folder)), f"{count} clips of {len(clips(folder))}"
    alone += [work() for _ in range(40)]
    slower = statistics.mean(working) / statistics.mean(alone) if busy else 0.0
    return {"first": first, "rate": count / seconds, "slower": slower}


def in_process(name: str, folder: Path, num_workers: int, busy: bool) -> dict[str, float]:
    """Make one pass in a fresh process."""
    command = [sys.executable, __file__, "--run", name, "--folder", str(folder)]
    command += ["--num-workers", str(num_workers)] + ["--busy"] * busy
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-samples", type=int, default=320, help="clips")
    parser.add_argument("--repeats", type=int, default=3, help="passes of each loader, in turn")
    parser.add_argument("--seed", type=int, default=1234)
    for internal in ("--run", "--folder"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    parser.add_argument("--num-workers", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--busy", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        print(json.dumps(run(args.run, Path(args.folder), args.num_workers, args.busy)))
        return
    installed = [name for name, (package, _) in LOADERS.items() if importlib.util.find_spec(package)]
    packages = {LOADERS[name][0] for name in installed}
    print(", ".join(f"{package} {importlib.metadata.version(package)}" for package in sorted(packages)))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        recorder.record(folder, args.num_samples // BATCH * BATCH, rounds=3, seed=args.seed)
        for name, write in (("tar", write_tars), ("parquet", write_parquet), ("chunks", write_chunks)):
            needs = {"tar": "worldmodel", "parquet": "datasets", "chunks": "litdata"}[name]
            if needs in packages:
                began = time.perf_counter()
                write(folder)
                print(f"written as {name} in {time.perf_counter() - began:.1f} s")
        measured: dict[tuple[str, int, bool], list[dict[str, float]]] = {}
        for _ in range(args.repeats):
            for num_workers, busy in ((1, False), (2, False), (1, True)):
                for name in installed:
                    found = in_process(name, folder, num_workers, busy)
                    measured.setdefault((name, num_workers, busy), []).append(found)

    def median(name: str, num_workers: int, busy: bool, figure: str) -> float:
        return statistics.median(found[figure] for found in measured[name, num_workers, busy])

    print("                      1 worker             2 workers            own work")
    print("                      first s  clips/s     first s  clips/s     1 worker")
    for name in installed:
        one, two = (
            f"{median(name, n, False, 'first'):7.2f}  {median(name, n, False, 'rate'):7.1f}" for n in (1, 2)
        )
        print(f"{name:20s}  {one}     {two}     x {median(name, 1, True, 'slower'):.2f}")


if __name__ == "__main__":
    main()
