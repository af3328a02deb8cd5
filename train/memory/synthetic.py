"""Synthetic episodes of the size of a config's own, to measure steps without data."""

import numpy as np

from worldmodel.actions import Action
from worldmodel.actions.text import TextSettings
from worldmodel.config import TrainConfig, WorldModelConfig, height_width
from worldmodel.data.loader import Batch
from worldmodel.episodes import DESCRIBE, WHAT_HAPPENED, EncodedObservations, Episode
from worldmodel.rollout.state import observed_frames

TEXT_CHARACTERS = 200
"""Length of texts: a video caption's."""


def batch(config: TrainConfig, name: str, task: str, rows: int, encoded: bool = False) -> Batch:
    """Return a microbatch of a stage.

    Args:
        config: The run.
        name: The stage.
        task: The task of the episodes.
        rows: Number of episodes.
        encoded: Whether episodes of the task rounds have latents that were computed before.
    """
    episode = synthetic_episode(config.model, task, config.stages[name].rounds, encoded)
    return Batch(0, task, tuple(range(rows)), [episode] * rows)


def synthetic_episode(model: WorldModelConfig, task: str, rounds: int, encoded: bool) -> Episode:
    """Return an episode of noise: of `rounds` rounds for the task rounds, of one for others."""
    rng = np.random.default_rng(0)

    def clip(frames: int) -> np.ndarray:
        size = (frames, *height_width(model.codec.image_size), 3)
        return rng.integers(0, 256, size, dtype=np.uint8)

    first = clip(observed_frames(model))
    text = "a ball moves to the right. "
    # A tokenizer of bytes may add one in front.
    longest = max(1, (model.action.text or TextSettings()).max_tokens - 1)
    text = (text * TEXT_CHARACTERS)[: min(TEXT_CHARACTERS, longest)]
    action = Action(text=text) if model.action.text else Action()
    if task == "rounds":
        clips = tuple(clip(model.chunk_frames) for _ in range(rounds))
        before, after = (rounds, model.context_latents), (rounds, model.chunk_latents)
        shape = model.latent_shape[1:]
        context, target = (np.zeros((*each, *shape), np.float32) for each in (before, after))
        return Episode(
            "synthetic",
            (first, *clips),
            (action,) * rounds,
            encoded=EncodedObservations(context, target) if encoded else None,
        )
    if task == "imagine":
        return Episode("synthetic", (first[:0], clip(model.chunk_frames)), (action,))
    if task == "document":
        return Episode("synthetic", answer=text)
    observations = (first, clip(model.chunk_frames)) if task == "inverse" else (first,)
    prompt = WHAT_HAPPENED if task == "inverse" else DESCRIBE
    return Episode("synthetic", observations, prompt=prompt, answer=text)
