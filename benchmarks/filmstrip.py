"""A strip of pictures: recorded frames, and below them those of a model that plays the same actions.

    python benchmarks/filmstrip.py runs/coinrun/model coinrun.yaml coinrun.png

The episode is one of those of `worldmodel eval MODEL --data CONFIG`, by the same seed.
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

from worldmodel import config as configs
from worldmodel.config import DataConfig
from worldmodel.eval.data.episodes import EpisodeReader
from worldmodel.models.world_model import WorldModel

ROUNDS = (0, 1, 2, 5, 10, 20, 30)
HEIGHT, GAP = 96, 4


def row(frames: list[np.ndarray]) -> np.ndarray:
    """Draw frames beside each other, each enlarged to `HEIGHT`."""
    drawn = []
    for frame in frames:
        width = round(frame.shape[1] * HEIGHT / frame.shape[0])
        image = Image.fromarray(frame).resize((width, HEIGHT), Image.Resampling.NEAREST)
        drawn += [np.asarray(image), np.full((HEIGHT, GAP, 3), 255, np.uint8)]
    return np.concatenate(drawn[:-1], axis=1)


def main() -> None:
    """Play a recorded episode and draw it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("config", help="config whose validation.source has the episodes")
    parser.add_argument("out", type=Path, help="the picture")
    parser.add_argument("--episode", type=int, default=0, help="which of the episodes that are long enough")
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()
    model = WorldModel.from_pretrained(args.model)
    config = configs.load(args.config)
    name = config.validation.source
    data = DataConfig({name: config.data.sources[name]})
    found = EpisodeReader(data, model.config, ROUNDS[-1], args.seed).read()
    long = (each for each in found if len(each.actions) == ROUNDS[-1])
    recorded = next(each for number, each in enumerate(long) if number == args.episode)
    session = model.session(seed=args.seed)
    session.reset(recorded.start)
    played = [recorded.start, *(session.step(action).frames[-1] for action in recorded.actions)]
    truth = [recorded.start, *(clip[-1] for clip in recorded.clips)]
    rows = [row([frames[number] for number in ROUNDS]) for frames in (truth, played)]
    gap = np.full((GAP, rows[0].shape[1], 3), 255, np.uint8)
    Image.fromarray(np.concatenate([rows[0], gap, rows[1]])).save(args.out, optimize=True)


if __name__ == "__main__":
    main()
