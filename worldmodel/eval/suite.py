"""All figures of a model in one call."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tqdm import tqdm

from worldmodel.errors import InputError
from worldmodel.eval.action_following import (
    STEPS,
    action_following,
    control,
    keys,
    null_action,
    steps_against_quality,
)
from worldmodel.eval.drift import rollouts
from worldmodel.eval.examples import Album
from worldmodel.eval.language import INVERSE_SPLITS, describe, inverse_dynamics, questions
from worldmodel.eval.pictures import codec, text_to_image
from worldmodel.eval.runner import ModelSubject, Subject
from worldmodel.eval.speed import machine, speed
from worldmodel.models.world_model import WorldModel
from worldmodel.worlds.shapes.source import KEYS

FORMAT = 1
SPLITS = ("val", "held-out", "compositions")
"""Splits that can be judged: known combinations, ones never trained on, two acts at once or in turn."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One figure: its name, how many samples it plays, and what measures it."""

    name: str
    work: int
    measure: Callable[[Subject], Any]


def evaluate(
    model: WorldModel | Subject,
    split: str | None = None,
    num_samples: int = 400,
    rounds: int = 10,
    seed: int = 1234,
    progress: bool = False,
    num_inference_steps: int | None = None,
) -> dict[str, Any]:
    """Measure a model against the procedural world; the same seed measures on the same samples.

    Args:
        model: The model, or anything that plays its part; speed is measured of models only.
        split: One of `SPLITS` for action following alone, None for every figure.
        num_samples: Samples of every figure; the sweep over denoising steps takes a quarter.
        rounds: Length of the rollouts.
        seed: Seed of the samples and of the noise.
        progress: Whether to show a progress bar.
        num_inference_steps: Denoising steps; None takes the model's own number.

    Returns:
        Plain values for JSON: `figures` (every rate as value, low, high, n), `examples` with pictures as
        data URIs, `settings`, `machine`.

    Raises:
        InputError: The split is unknown, or a number is below 1.
    """
    check_settings(split, num_samples, rounds, num_inference_steps)
    album = Album()
    bar = tqdm(desc="evaluating", unit="sample", disable=not progress, smoothing=0.05)
    subject = _subject(model, num_inference_steps, lambda samples: _advance(bar, samples))
    parts = _parts(subject, split, num_samples, rounds, seed, album)
    if isinstance(model, WorldModel) and split is None:
        parts.append(_Part("speed", 0, lambda _: speed(model, 3, seed, num_inference_steps)))
    bar.reset(total=sum(part.work for part in parts))
    figures: dict[str, Any] = {}
    with bar:
        for part in parts:
            bar.set_description(part.name.replace("/", ": ").replace("_", " "))
            _put(figures, part.name.split("/"), part.measure(subject))
    return {
        "format": FORMAT,
        "settings": {
            "split": split,
            "num_samples": num_samples,
            "rounds": rounds,
            "seed": seed,
            "num_inference_steps": num_inference_steps or _own_steps(model),
        },
        "machine": machine(),
        "figures": figures,
        "examples": album.entries(),
    }


def check_settings(split: str | None, num_samples: int, rounds: int, num_inference_steps: int | None) -> None:
    """Check an evaluation's settings before a model is loaded.

    Raises:
        InputError: The split is unknown, or a number is below 1.
    """
    if split is not None and split not in SPLITS:
        raise InputError(f"There is no split {split!r}; use one of: {', '.join(SPLITS)}.")
    for name, value in (
        ("num_samples", num_samples),
        ("rounds", rounds),
        ("num_inference_steps", num_inference_steps),
    ):
        if value is not None and value < 1:
            raise InputError(f"{name} is {value}; use 1 or more.")


def _subject(
    model: WorldModel | Subject, num_inference_steps: int | None, on_work: Callable[[int], None]
) -> Subject:
    if isinstance(model, WorldModel):
        return ModelSubject(model, num_inference_steps, on_work)
    return model if num_inference_steps is None else model.with_steps(num_inference_steps)


def _parts(
    subject: Subject, split: str | None, num_samples: int, rounds: int, seed: int, album: Album
) -> list[_Part]:
    """List the figures and how much each plays; the sweep over denoising steps takes a quarter."""
    following = [
        _Part(f"action_following/{each}", num_samples, partial(_following, each, num_samples, seed, album))
        for each in SPLITS
        if split in (None, each)
    ]
    if split is not None:
        return following
    quarter = -(-num_samples // 4)
    takes_keys = not isinstance(subject, ModelSubject) or set(KEYS) <= set(subject.model.config.action.keys)
    pressed = [_Part("keys", num_samples, lambda s: keys(s, num_samples, seed, album))] if takes_keys else []
    return [
        _Part("codec", 2 * num_samples, lambda s: codec(s, num_samples, seed, album)),
        *following,
        _Part("control", 2 * num_samples, lambda s: control(s, num_samples, seed)),
        _Part("null_action", 2 * num_samples, lambda s: null_action(s, num_samples, seed, album)),
        *pressed,
        _Part("rollouts", num_samples * rounds, lambda s: rollouts(s, num_samples, rounds, seed, album)),
        _Part("text_to_image", num_samples, lambda s: text_to_image(s, num_samples, seed, album)),
        _Part("describe", 2 * num_samples, lambda s: describe(s, num_samples, seed, album)),
        _Part("questions", num_samples, lambda s: questions(s, num_samples, seed, album)),
        _Part(
            "inverse",
            len(INVERSE_SPLITS) * num_samples,
            lambda s: inverse_dynamics(s, num_samples, seed, album),
        ),
        _Part("steps", len(STEPS) * quarter, lambda s: steps_against_quality(s, quarter, seed)),
    ]


def _following(split: str, num_samples: int, seed: int, album: Album, subject: Subject) -> Any:
    return action_following(subject, split, num_samples, seed, album)


def _advance(bar: tqdm, samples: int) -> None:
    bar.update(samples)


def _put(figures: dict[str, Any], path: list[str], value: Any) -> None:
    *folders, name = path
    for folder in folders:
        figures = figures.setdefault(folder, {})
    figures[name] = value


def _own_steps(model: WorldModel | Subject) -> int | None:
    return model.config.num_inference_steps if isinstance(model, WorldModel) else None
