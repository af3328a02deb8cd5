"""What the codec's figure in a run's log says about lost small objects: MiniGrid's DoorKey without its keys.

The keys are erased from recorded frames, or as much noise is added; and the shipped codec returns them. The
recording is that of `configs/doorkey.yaml`; 300 episodes suffice.
"""

import argparse

import numpy as np

from worldmodel.config import DataConfig, SourceConfig
from worldmodel.data.sources import open_source
from worldmodel.eval.codec import ceiling
from worldmodel.eval.minigrid import MiniGridJudge
from worldmodel.eval.runner import ModelSubject
from worldmodel.media import Frames
from worldmodel.models.world_model import WorldModel


def without_keys(frames: Frames, judge: MiniGridJudge) -> Frames:
    """Draw floor in place of the keys."""
    side, erased = judge.cell, frames.copy()
    names, drawings = judge.drawings
    for frame in erased:
        cells = judge.read(frame)
        for row, column in zip(*np.nonzero(np.char.find(cells, "key") >= 0), strict=True):
            floor = "floor in view" if "in view" in cells[row, column] else "floor"
            drawn = drawings[list(names).index(floor)].reshape(side, side, 3)
            frame[row * side :, column * side :][:side, :side] = drawn
    return erased


def main() -> None:
    """Print decibels, the share of details and the share of keys that come back."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="recordings", help="LeRobot dataset of the recorder")
    parser.add_argument("--num-frames", type=int, default=256)
    args = parser.parse_args()
    model, judge = WorldModel.from_pretrained("minigrid-doorkey"), MiniGridJudge()
    data = DataConfig({"recorded": SourceConfig("lerobot", args.data, split="all")})
    source = open_source("recorded", data, model.config)
    assert source.size is not None
    chosen = np.random.default_rng(0).integers(source.size, size=args.num_frames)
    episodes = [source.at(row).episode("rounds", 0, index, 1) for index, row in enumerate(chosen.tolist())]
    truth = np.concatenate([episode.observations[0] for episode in episodes])
    source.close()
    erased = without_keys(truth, judge)
    error = np.sqrt(np.square(truth.astype(float) - erased).mean())
    noise = np.random.default_rng(1).normal(0, error, truth.shape)
    rows = {
        "keys erased": erased,
        "as much noise": (truth + noise).round().clip(0, 255).astype(np.uint8),
        "minigrid-doorkey": ModelSubject(model).reconstruct(truth[:, None])[:, 0],
    }
    cells = np.stack([judge.read(frame) for frame in truth])
    keys = np.char.find(cells, "key") >= 0
    for name, frames in rows.items():
        right = (np.stack([judge.read(frame) for frame in frames]) == cells)[keys]
        found = ceiling(truth, frames)
        print(
            f"{name:18s} {found.psnr:5.1f} dB, details {found.num_kept} of {found.num_details}, "
            f"keys {right.sum()} of {len(right)}"
        )


if __name__ == "__main__":
    main()
