"""Our reader of LeRobot datasets against lerobot's own: clips a second of the same file, by the same decoder.

A clip is 17 consecutive frames with their actions, at a random place of a random episode, in one process and
on one thread. Both decode with PyAV. lerobot needs other versions of PyTorch and PyAV, so it has an
environment of its own:

    worldmodel record minigrid:MiniGrid-DoorKey-6x6-v0 --out recordings --episodes 200
    python benchmarks/lerobot_reader.py recordings
    python -m venv lerobot && lerobot/bin/pip install lerobot
    lerobot/bin/python benchmarks/lerobot_reader.py recordings --reader lerobot
"""

import argparse
import importlib.metadata
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROUNDS = 16
"""Actions of a clip, which has one frame more."""
WARM_UP = 256
"""Clips that are read before the time counts."""


def ours(folder: Path, rng: np.random.Generator) -> Callable[[], Any]:
    """Return a function that reads a clip with `worldmodel.data`."""
    from worldmodel.config import ActionConfig, CodecConfig, DataConfig, SourceConfig, WorldModelConfig
    from worldmodel.config.action_spec import spec_settings
    from worldmodel.config.files import build
    from worldmodel.data.lerobot import LeRobotDataset, LeRobotSource

    dataset = LeRobotDataset(str(folder))
    height, width, _ = dataset.info["features"][dataset.camera]["shape"]
    model = WorldModelConfig(
        codec=CodecConfig(image_size=(height, width), temporal_factor=1),
        action=build(ActionConfig, spec_settings(dataset.specs)),
        fps=round(dataset.fps),
        chunk_frames=1,
    )
    settings = DataConfig({"mine": SourceConfig("lerobot", str(folder), split="all")})
    source = LeRobotSource("mine", settings, model)
    long = [index for index, episode in enumerate(source.dataset.episodes) if episode.num_rows > ROUNDS]

    def read() -> Sequence[np.ndarray]:
        index, seed = long[rng.integers(len(long))], int(rng.integers(2**31))
        return source.at(index).episode("rounds", seed, index, ROUNDS).observations

    return read


def theirs(folder: Path, rng: np.random.Generator) -> Callable[[], Any]:
    """Return a function that reads a clip with lerobot."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset, LeRobotDatasetMetadata

    meta = LeRobotDatasetMetadata("benchmark/recordings", root=folder)
    times = [frame / meta.fps for frame in range(ROUNDS + 1)]
    (camera,) = meta.camera_keys
    dataset = LeRobotDataset(
        "benchmark/recordings",
        root=folder,
        delta_timestamps={camera: times, "action": times[:-1]},
        video_backend="pyav",
    )
    spans = [(row["dataset_from_index"], row["dataset_to_index"]) for row in meta.episodes]
    long = [(first, end) for first, end in spans if end - first > ROUNDS]

    def read() -> torch.Tensor:
        first, end = long[rng.integers(len(long))]
        return dataset[int(rng.integers(first, end - ROUNDS))][camera]

    return read


READERS = {"worldmodel": ours, "lerobot": theirs}


def main() -> None:
    """Measure one reader and print its rate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="a LeRobot dataset (v3.0)")
    parser.add_argument("--reader", choices=READERS, default="worldmodel")
    parser.add_argument("--num-samples", type=int, default=256, help="clips")
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()
    torch.set_num_threads(1)
    read = READERS[args.reader](args.folder, np.random.default_rng(args.seed))
    for _ in range(WARM_UP):
        assert len(read()) == ROUNDS + 1
    began, used = time.perf_counter(), time.process_time()
    for _ in range(args.num_samples):
        read()
    seconds, busy = time.perf_counter() - began, time.process_time() - used
    versions = (f"{name} {importlib.metadata.version(name)}" for name in (args.reader, "av", "torch"))
    print(", ".join(versions))
    print(
        f"{args.num_samples / seconds:.1f} clips/s, {1000 * busy / args.num_samples:.1f} ms of processor each"
    )


if __name__ == "__main__":
    main()
