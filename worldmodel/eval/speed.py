"""Speed of a session, early and after many rounds."""

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from worldmodel.actions import Action
from worldmodel.config import height_width
from worldmodel.eval.figures import Figure
from worldmodel.eval.table import Unit
from worldmodel.media import Frame
from worldmodel.models.world_model import WorldModel

EARLY_ROUND, LATE_ROUND = 2, 50
WARM_UP_ROUNDS = 2
UNITS: dict[str, Unit] = {"fps": "fps", "first_frame": "s", "late_to_early": "x"}
"""Units of the figures."""

SessionInputs = Callable[[np.random.Generator, int], tuple[Frame, list[Action]]]
"""Draws a first frame and a number of actions."""


def speed(
    model: WorldModel,
    repeats: int = 3,
    seed: int = 1234,
    num_inference_steps: int | None = None,
    inputs: SessionInputs | None = None,
) -> dict[str, Any]:
    """Step a session past round 50, `repeats` times.

    `fps`: frames of a round by its median time; `first_frame`: seconds from the action to pixels (the frames
    of a round are decoded together), with their mean and percentiles; `late_to_early`: median time of rounds
    50 and later relative to rounds 2 and later, over three whole windows of the backbone's history each,
    since the time of a round depends on its index in the window. Intervals cover the middle 95 % of the
    rounds; the interval of the ratio spans the repeats.

    Args:
        model: The model.
        repeats: Number of sessions.
        seed: Seed of the sessions and inputs.
        num_inference_steps: Denoising steps; None takes the model's own number.
        inputs: First frames and actions; by default a grey image and no actions.
    """
    inputs = inputs or _grey(model)
    window = 3 * (model.config.history_rounds + 1)
    last = LATE_ROUND - 1 + window
    runs = np.array(
        [_round_times(model, last, seed + repeat, num_inference_steps, inputs) for repeat in range(repeats)]
    )
    times = runs.ravel()
    median, low, high = (float(np.percentile(times, share)) for share in (50, 2.5, 97.5))
    frames = model.config.chunk_frames
    early = np.median(runs[:, EARLY_ROUND - 1 : EARLY_ROUND - 1 + window], axis=1)
    late = np.median(runs[:, LATE_ROUND - 1 : LATE_ROUND - 1 + window], axis=1)
    ratios = late / early
    return {
        "fps": _figure(frames / median, frames / high, frames / low, times.size),
        "first_frame": _figure(median, low, high, times.size),
        "first_frame_mean_s": float(times.mean()),
        "first_frame_p95_s": float(np.percentile(times, 95)),
        "first_frame_p99_s": float(np.percentile(times, 99)),
        "late_to_early": _figure(float(np.median(ratios)), float(ratios.min()), float(ratios.max()), repeats),
        "round_s": [float(value) for value in np.median(runs, axis=0)],
    }


def machine() -> dict[str, Any]:
    """Return the hardware and software that the figures were measured on."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _round_times(
    model: WorldModel, rounds: int, seed: int, num_inference_steps: int | None, inputs: SessionInputs
) -> list[float]:
    session = model.session(seed, num_inference_steps)
    image, actions = inputs(np.random.default_rng(seed), rounds + WARM_UP_ROUNDS)
    if not model.config.action.text:
        actions = [Action()] * len(actions)
    session.reset(image)
    for action in actions[rounds:]:
        session.step(action)
    session.reset(image)
    times: list[float] = []
    for action in actions[:rounds]:
        began = time.perf_counter()
        session.step(action)
        times.append(time.perf_counter() - began)
    return times


def _grey(model: WorldModel) -> SessionInputs:
    image = np.full((*height_width(model.config.codec.image_size), 3), 128, np.uint8)
    return lambda rng, count: (image, [Action()] * count)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _figure(value: float, low: float, high: float, count: int) -> Figure:
    return {"value": value, "low": low, "high": high, "n": count}
