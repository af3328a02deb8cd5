"""Synthetic episodes of the size of a config's own, to measure steps without data."""

import numpy as np

from worldmodel.config import TrainConfig, WorldModelConfig, height_width
from worldmodel.data.loader import Batch
from worldmodel.rollout.state import observed_frames
from worldmodel.types import DESCRIBE, WHAT_HAPPENED, Action, Episode

TEXT_CHARACTERS = 200
"""Length of texts: that of a caption of a video."""


def batch(config: TrainConfig, name: str, task: str, rows: int, step: int = 0) -> Batch:
    """Return a microbatch of a stage, with the most rounds that an episode has."""
    episode = synthetic_episode(config.model, task, config.stages[name].rounds)
    indices = tuple(range(step * rows, (step + 1) * rows))
    return Batch(step, task, indices, [episode] * rows)


def synthetic_episode(model: WorldModelConfig, task: str, rounds: int) -> Episode:
    """Return an episode of noise: of `rounds` rounds for the task rounds, of one for others."""
    rng = np.random.default_rng(0)

    def clip(frames: int) -> np.ndarray:
        size = (frames, *height_width(model.codec.image_size), 3)
        return rng.integers(0, 256, size, dtype=np.uint8)

    first, text = clip(observed_frames(model)), "a ball moves to the right. "
    text = (text * TEXT_CHARACTERS)[: min(TEXT_CHARACTERS, model.action.max_text_tokens)]
    action = Action(text=text) if model.action.text else Action()
    if task == "rounds":
        clips = tuple(clip(model.chunk_frames) for _ in range(rounds))
        return Episode("synthetic", (first, *clips), (action,) * rounds)
    if task == "imagine":
        return Episode("synthetic", (first[:0], clip(model.chunk_frames)), (action,))
    if task == "document":
        return Episode("synthetic", answer=text)
    observations = (first, clip(model.chunk_frames)) if task == "inverse" else (first,)
    prompt = WHAT_HAPPENED if task == "inverse" else DESCRIBE
    return Episode("synthetic", observations, prompt=prompt, answer=text)
