"""The evaluation of a model by the suite of its world."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
from tqdm import tqdm

from worldmodel.config import WorldModelConfig
from worldmodel.errors import InputError
from worldmodel.eval.examples import Album
from worldmodel.eval.goals import Goal
from worldmodel.eval.runner import ModelSubject, Subject
from worldmodel.eval.speed import machine, speed
from worldmodel.media import Frame
from worldmodel.models.world_model import WorldModel
from worldmodel.types import Action
from worldmodel.worlds import get_world

FORMAT = 1


@dataclass(frozen=True, slots=True)
class EvalSettings:
    """Settings of an evaluation; equal settings measure on equal samples.

    Attributes:
        split: Split of the suite for action following alone; None for all figures.
        num_samples: Samples of every figure; the sweep over denoising steps takes a quarter.
        rounds: Rounds of a rollout.
        seed: Seed of the samples and of the noise.
        num_inference_steps: Denoising steps; None takes the model's own number.
    """

    split: str | None = None
    num_samples: int = 400
    rounds: int = 10
    seed: int = 1234
    num_inference_steps: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("num_samples", 1), ("rounds", 1), ("num_inference_steps", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"{name} is {value}; use {least} or more.")


@dataclass(frozen=True, slots=True)
class Part:
    """One figure of a suite.

    Attributes:
        name: Keys that lead to it in the results, joined by `/`.
        work: Samples that it plays, for the progress bar.
        measure: Computes it.
    """

    name: str
    work: int
    measure: Callable[[Subject], Any]


@dataclass(frozen=True, slots=True)
class CardText:
    """Sections of a model card that depend on the world, in markdown.

    Attributes:
        about: Description of models of this world.
        usage: Example code; `{name}` is replaced by the name of the model.
        data: Origin of the training data.
        judging: How frames are judged.
        limits: Limits of every model of this world.
        dataset: Name of the world, as data set of the figures in the metadata.
        license_name: Identifier of the license on the Hub; None if not stated.
    """

    about: str
    usage: str
    data: str
    judging: str
    limits: Sequence[str]
    dataset: str
    license_name: str | None = None


@runtime_checkable
class EvalSuite(Protocol):
    """The measurements of models of a world; returned by `World.eval_suite`."""

    goals: Sequence[Goal]
    """The published table: figures and their targets."""
    splits: Mapping[str, str]
    """Titles of the splits of action following, by name."""
    card: CardText

    def check(self, config: WorldModelConfig) -> None:
        """Check that the suite can evaluate such a model.

        Raises:
            InputError: It cannot, for example because the frames have another size.
        """
        ...

    def parts(self, settings: EvalSettings, config: WorldModelConfig | None, album: Album) -> list[Part]:
        """Return the figures to measure.

        Args:
            settings: Settings of the evaluation.
            config: Config of the model; None for another subject, which can do everything.
            album: Where examples are kept.
        """
        ...

    def session_inputs(self, rng: np.random.Generator, count: int) -> tuple[Frame, list[Action]]:
        """Return a first frame and actions for measuring speed."""
        ...


def suite_of(config: WorldModelConfig) -> EvalSuite:
    """Return the suite of a model's world.

    Raises:
        InputError: The model names no world, or its world cannot evaluate it.
        ConfigError: There is no world of this name.
    """
    suite = get_world(config.world).eval_suite() if config.world else None
    if suite is None:
        raise InputError(
            f"model.world is {config.world}, which has no evaluation suite; pass recorded episodes "
            "(worldmodel eval MODEL --data SOURCE)."
        )
    suite.check(config)
    return suite


def check_split(suite: EvalSuite, split: str | None) -> None:
    """Check the name of a split.

    Raises:
        InputError: The suite has no such split.
    """
    if split is not None and split not in suite.splits:
        raise InputError(f"There is no split {split!r}; use one of: {', '.join(suite.splits)}.")


def evaluate(
    model: WorldModel | Subject,
    settings: EvalSettings | None = None,
    suite: EvalSuite | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Measure a model.

    Args:
        model: The model, or anything that implements `Subject`; only a model's speed is measured.
        settings: Settings; the defaults measure all figures.
        suite: The suite; by default that of the model's world.
        progress: Whether to show a progress bar.

    Returns:
        Plain values for JSON: `figures` (every rate as value, low, high, n), `examples` with images as data
        URIs, `settings`, `machine`.

    Raises:
        InputError: The model names no world, or the split is unknown.
    """
    settings = settings or EvalSettings()
    if suite is None:
        if not isinstance(model, WorldModel):
            raise InputError(f"A {type(model).__name__} has no world; pass a suite.")
        suite = suite_of(model.config)
    check_split(suite, settings.split)
    album, figures, steps = Album(), {}, settings.num_inference_steps
    bar = tqdm(desc="evaluating", unit="sample", disable=not progress, smoothing=0.05)
    if isinstance(model, WorldModel):
        subject: Subject = ModelSubject(model, steps, lambda samples: _advance(bar, samples))
        parts = suite.parts(settings, model.config, album)
        if settings.split is None:
            timing = partial(speed, model, 3, settings.seed, steps, suite.session_inputs)
            parts.append(Part("speed", 0, lambda _: timing()))
        made_in = model.config.num_inference_steps if steps is None else steps
        settings = replace(settings, num_inference_steps=made_in)
    else:
        subject = model if steps is None else model.with_steps(steps)
        parts = suite.parts(settings, None, album)
    bar.reset(total=sum(part.work for part in parts))
    with bar:
        for part in parts:
            bar.set_description(part.name.replace("/", ": ").replace("_", " "))
            *groups, name = part.name.split("/")
            group = figures
            for each in groups:
                group = group.setdefault(each, {})
            group[name] = part.measure(subject)
    return {
        "format": FORMAT,
        "settings": asdict(settings),
        "machine": machine(),
        "figures": figures,
        "examples": album.entries(),
    }


def _advance(bar: tqdm, samples: int) -> None:
    bar.update(samples)
