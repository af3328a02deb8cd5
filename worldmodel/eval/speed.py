"""How fast one session goes, and whether it stays as fast."""

import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from worldmodel.eval.metrics import Figure
from worldmodel.models.world_model import WorldModel
from worldmodel.types import Action
from worldmodel.worlds import shapes

EARLY_ROUND, LATE_ROUND = 2, 50
WARM_UP_ROUNDS = 2


def speed(
    model: WorldModel, repeats: int = 3, seed: int = 1234, num_inference_steps: int | None = None
) -> dict[str, Any]:
    """Step a session of batch 1 past round 50, several times over.

    `fps`: frames of a round by its median time; `first_frame`: seconds from the action to pixels (a round's
    frames come together); `late_to_early`: median cost of rounds 50 and on against rounds 2 and on, over
    three whole windows of the backbone's history each, since cost follows the place in the window.
    Intervals are the middle 95 % of the rounds, not of the mean; the ratio's spans the repeats.
    """
    window = 3 * model.config.history_rounds
    last = LATE_ROUND - 1 + window
    runs = np.array(
        [_round_times(model, last, seed + repeat, num_inference_steps) for repeat in range(repeats)]
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
        "first_frame_p95_s": float(np.percentile(times, 95)),
        "late_to_early": _figure(float(np.median(ratios)), float(ratios.min()), float(ratios.max()), repeats),
        "round_s": [float(value) for value in np.median(runs, axis=0)],
    }


def machine() -> dict[str, Any]:
    """Say what the figures were measured on; speed means little without it."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _round_times(model: WorldModel, rounds: int, seed: int, num_inference_steps: int | None) -> list[float]:
    session = model.session(seed, num_inference_steps)
    rng = np.random.default_rng(seed)
    actions = _actions(rng, model, rounds + WARM_UP_ROUNDS)
    picture = shapes.render(shapes.random_scene(rng, 3))
    session.reset(picture)
    for action in actions[rounds:]:
        session.step(action)
    session.reset(picture)
    times: list[float] = []
    for action in actions[:rounds]:
        began = time.perf_counter()
        session.step(action)
        times.append(time.perf_counter() - began)
    return times


def _actions(rng: np.random.Generator, model: WorldModel, count: int) -> list[Action]:
    """Draw actions of about one length; whether they fit the scene does not matter to the clock."""
    if not model.config.action.text:
        return [Action()] * count
    scenes = [shapes.random_scene(rng) for _ in range(count)]
    return [Action(shapes.canonical_text(shapes.sample_plan(rng, scene, "held-out"))) for scene in scenes]


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _figure(value: float, low: float, high: float, count: int) -> Figure:
    return {"value": value, "low": low, "high": high, "n": count}
