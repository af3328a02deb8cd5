"""Learning-rate schedules of a stage: the factor on the peak learning rates in each step."""

import math
from collections.abc import Callable
from typing import cast

from worldmodel.config import StageConfig
from worldmodel.config.imports import check_arguments, find_extension
from worldmodel.errors import ConfigError
from worldmodel.train.optim.optimizers import Optimizers


def warmup_stable_decay(step: int, stage: StageConfig) -> float:
    """Return the factor on the peak learning rate: linear warm-up, constant, linear decay to 1 %."""
    if step < stage.warmup_steps:
        return (step + 1) / stage.warmup_steps
    flat = max(stage.warmup_steps, stage.constant_fraction * stage.steps)
    if step <= flat:
        return 1.0
    return 1.0 - 0.99 * (step - flat) / max(stage.steps - flat, 1)


def cosine(step: int, stage: StageConfig) -> float:
    """Return the factor on the peak learning rate: linear warm-up, then half a cosine to 1 %."""
    if step < stage.warmup_steps:
        return (step + 1) / stage.warmup_steps
    share = (step - stage.warmup_steps) / max(stage.steps - stage.warmup_steps, 1)
    return 0.505 + 0.495 * math.cos(math.pi * share)


SCHEDULES: dict[str, Callable[..., float]] = {"warmup_stable_decay": warmup_stable_decay, "cosine": cosine}


def schedule_of(stage: StageConfig) -> Callable[..., float]:
    """Return the schedule of a stage: one of `SCHEDULES`, of an entry point, or of MODULE:NAME.

    Raises:
        ConfigError: it cannot be imported or called, or does not take `schedule_args`.
    """
    found = find_extension("schedule", stage.schedule, "worldmodel.schedules", SCHEDULES)
    if not callable(found):
        raise ConfigError(
            f"schedule is {stage.schedule!r}, which cannot be called; give a function of the step and the "
            "stage that returns the factor on the learning rate."
        )
    check_arguments("schedule_args", found, 2, stage.schedule_args)
    return cast("Callable[..., float]", found)


def set_learning_rates(optimizers: Optimizers, stage: StageConfig, step: int) -> None:
    """Set the learning rate of every parameter group for a step, counted from 0."""
    factor = schedule_of(stage)(step, stage, **stage.schedule_args)
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = factor * group["peak"]
