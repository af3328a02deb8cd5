"""Fréchet distance between the features of two sets of frames, over a network that the user gives.

It is comparable only among figures with the same network and the same number of frames, so the network's name
goes with it; with an Inception network and its preprocessing it would be the FID.

Source: Heusel et al. 2017, arXiv:1706.08500, eq. 6.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from jaxtyping import Float

from worldmodel.config import ImageSize, VisionConfig
from worldmodel.errors import InputError
from worldmodel.eval.figures import Figure
from worldmodel.eval.runner import Clips
from worldmodel.media.tensors import to_tensor
from worldmodel.models.vision.encoders import build_encoder

RESAMPLES = 100

Features = Float[np.ndarray, "n d"]


class FrameFeatures:
    """Features of frames by a vision encoder of transformers, averaged over its positions.

    Args:
        folder: Folder of the encoder (SigLIP, CLIP, DINOv2, DINOv3).
        image_size: Size of the frames.

    Raises:
        ModelError: The folder has no encoder of a supported family.
    """

    def __init__(self, folder: str, image_size: ImageSize) -> None:
        self.encoder = build_encoder(VisionConfig(encoder=folder), image_size)

    @torch.no_grad()
    def __call__(self, clips: Clips) -> Features:
        """Return the features of the last frame of every clip."""
        return self.encoder(to_tensor(list(clips[:, -1:]))).float().mean(dim=(1, 2)).numpy()


def frechet_distance(one: Features, other: Features) -> float:
    """Return the squared Fréchet distance between normal distributions fitted to two sets of features."""
    first, second = _covariance(one), _covariance(other)
    root = _root(first)
    mixed = np.linalg.eigvalsh(root @ second @ root)
    means = float(np.square(one.mean(axis=0) - other.mean(axis=0)).sum())
    return means + float(np.trace(first) + np.trace(second)) - 2 * float(np.sqrt(mixed.clip(min=0)).sum())


def frechet_figure(made: Sequence[Features], truth: Sequence[Features]) -> Figure:
    """Return the distance with its basic bootstrap interval at 95 %, for JSON.

    Episodes are drawn, predicted and recorded together: frames of one episode resemble each other. The basic
    interval, unlike the percentile interval, corrects that resampled sets are farther apart than the sets
    themselves.

    Args:
        made: Features of the predicted frames of every episode.
        truth: Features of the recorded frames.

    Raises:
        InputError: there is only one frame.
    """
    count = sum(map(len, made))
    if count < 2:
        raise InputError("A Fréchet distance needs two frames or more; raise --num-samples or --rounds.")

    def distance(rows: Iterable[int]) -> float:
        chosen = list(rows)
        return frechet_distance(*(np.concatenate([each[row] for row in chosen]) for each in (made, truth)))

    rng, value = np.random.default_rng(0), distance(range(len(made)))
    draws = [rng.integers(len(made), size=len(made)).tolist() for _ in range(RESAMPLES)]
    low, high = np.percentile([distance(rows) for rows in draws], (2.5, 97.5))
    return {"value": value, "low": max(0.0, 2 * value - high), "high": 2 * value - low, "n": count}


def _covariance(features: Features) -> Float[np.ndarray, "d d"]:
    return np.atleast_2d(np.cov(features.astype(np.float64), rowvar=False))


def _root(matrix: Float[np.ndarray, "d d"]) -> Float[np.ndarray, "d d"]:
    """Return the square root of a symmetric matrix without negative eigenvalues."""
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.sqrt(values.clip(min=0))) @ vectors.T
