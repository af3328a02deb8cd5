"""Clips of three shapes, and runs that train on them in two buckets."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch.nn.functional as F
from clip_tables import write_table
from transformers import PreTrainedTokenizerBase

from worldmodel.config import DataConfig, SourceConfig, TrainConfig
from worldmodel.media import write_video
from worldmodel.models.world_model import WorldModel
from worldmodel.train import finetune

BUCKETS = ((64, 64), (48, 80))
SHAPES = ((64, 64), (96, 160), (128, 128), (48, 80), (64, 72), (54, 96))
"""Height and width of clips: of every second one, the second bucket is nearer, but for one."""
NEAREST = (0, 1, 0, 1, 0, 1)


def write_clips(folder: Path, shapes: tuple[tuple[int, int], ...] = SHAPES) -> Path:
    """Write a clip of three rounds in each shape, and their table; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, (height, width) in enumerate(shapes):
        frames = np.zeros((25, height, width, 3), np.uint8)
        frames[..., number % 3] = 40 + 30 * number
        for time, frame in enumerate(frames):
            frame[height // 4 : height // 2, time : time + 12] = 230
        write_video(frames, folder / f"{number}.mp4", 8, scale=1)
        rows.append({"video": f"{number}.mp4", "text": f"the bar of clip {number} moves"})
    return write_table(folder, rows)


def write_parquet(folder: Path, path: Path) -> str:
    """Write the clips of `write_clips` with their bytes as a Hugging Face dataset; returns its folder."""
    import pyarrow as pa
    from pyarrow import parquet

    videos = [(folder / f"{number}.mp4").read_bytes() for number in range(len(SHAPES))]
    parquet.write_table(pa.table({"video": videos}), path)
    return str(path.parent)


def data(table: Path, num_workers: int = 0) -> DataConfig:
    """Return the settings of the clips in buckets."""
    source = SourceConfig("clips", str(table), columns={"video": "video", "text": "text"})
    return DataConfig({"mine": source}, buckets=list(BUCKETS), window=4, num_workers=num_workers)


def run_of(config: TrainConfig, table: Path) -> TrainConfig:
    """Return a run on the clips, with one step after the other in both buckets."""
    stages = {name: replace(stage, tasks={"rounds": 1.0}) for name, stage in config.stages.items()}
    return replace(config, data=data(table), stages=stages)


def built_for(model: WorldModel, size: tuple[int, int], tokenizer: PreTrainedTokenizerBase) -> WorldModel:
    """Build a model for frames of a size, with the weights of another whose positions are interpolated."""
    made = WorldModel.from_config(model.config.sized(size), tokenizer)
    (rows, columns), (tall, wide) = model.config.codec.grid, made.config.codec.grid
    wanted = made.state_dict()
    for name, weight in model.state_dict().items():
        if weight.shape == wanted[name].shape:
            wanted[name] = weight
            continue
        flat = weight.dim() == 2
        side = round((rows * columns / len(weight)) ** 0.5) if flat else rows // weight.shape[1]
        placed = weight.T.unflatten(1, (rows // side, columns // side)) if flat else weight
        placed = F.interpolate(placed[None], size=(tall // side, wide // side), mode="bilinear")[0]
        wanted[name] = placed.flatten(1).T if flat else placed
    made.load_state_dict(wanted)
    return made.eval().requires_grad_(False)


def played(model: WorldModel, size: tuple[int, int]) -> np.ndarray:
    """Play two rounds from a picture with a bar in it."""
    session = model.session(seed=3)
    frame = np.full((*size, 3), 90, np.uint8)
    frame[size[0] // 4 : size[0] // 2, 8:24] = 230
    session.reset(frame)
    return np.concatenate([session.step(text).frames for text in ("go left", "stop")])


def train_twice(config: TrainConfig, folder: Path) -> Path:
    """Train once as a whole and once stopped and resumed, and compare the weights bit by bit.

    Returns the finished model; `folder` is where the second run goes.
    """
    model = finetune.train(config)
    answers = iter([False, False, True])
    halves = replace(config, run_dir=str(folder))
    finetune.train(halves, stop=lambda: next(answers))
    finetune.train(halves)
    for file in model.rglob("*.safetensors"):
        assert file.read_bytes() == (folder / "model" / file.relative_to(model)).read_bytes()
    return model
