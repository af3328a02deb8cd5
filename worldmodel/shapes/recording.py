"""Episodes of the shapes world for the recorder."""

import numpy as np
from PIL import Image

from worldmodel import shapes
from worldmodel.config import ActionSpec, ImageSize
from worldmodel.errors import InputError
from worldmodel.media import crop_and_resize
from worldmodel.recording.episode import RecordedEpisode, RecordingFormat
from worldmodel.shapes.source import KEYS, ShapesSource

FPS = 8
"""Frames per second of the recordings."""


class ShapesEpisodes:
    """Episodes of the training split, with actions in words or keys.

    Raises:
        InputError: `rounds` is below 1.
    """

    def __init__(self, seed: int, rounds: int, size: ImageSize | None = None) -> None:
        if rounds < 1:
            raise InputError(f"rounds is {rounds}; use 1 or more.")
        self.seed, self.rounds, self.size, self.source = seed, rounds, size, ShapesSource()
        rate = FPS / shapes.FRAMES_PER_CLIP
        specs = tuple(ActionSpec(key, "key", low=0, high=1, rate=rate) for key in KEYS)
        settings = {
            "world": "shapes",
            "seed": seed,
            "rounds": rounds,
            "size": list(size) if isinstance(size, tuple) else size,
        }
        self.format = RecordingFormat(FPS, specs, settings, shapes.FRAMES_PER_CLIP)

    def episode(self, index: int) -> RecordedEpisode:
        """Return an episode."""
        episode = self.source.episode("rounds", self.seed, index, self.rounds)
        held = [[float(key in action.keys) for key in KEYS] for action in episode.actions]
        frames = np.concatenate(episode.observations)
        if self.size is not None:
            frames = np.stack([crop_and_resize(Image.fromarray(frame), self.size) for frame in frames])
        return RecordedEpisode(
            {"render": frames},
            episode.actions,
            np.array(held, np.float32),
            np.zeros(len(held), np.float32),
            truncated=True,
            seed=self.seed,
        )
