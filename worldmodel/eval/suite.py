"""The evaluation of a model by a suite of measurements."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
from tqdm import tqdm

from worldmodel.actions import Action
from worldmodel.config import WorldModelConfig
from worldmodel.errors import InputError
from worldmodel.eval.charts import Chart
from worldmodel.eval.examples import Album
from worldmodel.eval.goals import Goal
from worldmodel.eval.goals import measured as measured_goals
from worldmodel.eval.metrics import get_metric, metric_names
from worldmodel.eval.runner import ModelSubject, Subject
from worldmodel.eval.speed import UNITS as SPEED_UNITS
from worldmodel.eval.speed import machine, speed
from worldmodel.eval.table import Table, Unit, flat_rows
from worldmodel.media import Frame
from worldmodel.models.world_model import WorldModel

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
        metrics: Metrics beside the suite's own, by name or as `module:Class`.
    """

    split: str | None = None
    num_samples: int = 400
    rounds: int = 10
    seed: int = 1234
    num_inference_steps: int | None = None
    metrics: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("num_samples", 1), ("rounds", 1), ("num_inference_steps", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"{name} is {value}; use {least} or more.")


@dataclass(frozen=True, slots=True)
class Part:
    """One measurement of a suite.

    Attributes:
        name: Keys that lead to it in the results, joined by `/`.
        work: Samples that it plays, for the progress bar.
        measure: Returns its figures, nested as plain values.
        tables: Returns the tables of these figures; by default one with every figure.
        charts: Returns the charts of these figures.
    """

    name: str
    work: int
    measure: Callable[[Subject], Any]
    tables: Callable[[Any], Sequence[Table]] | None = None
    charts: Callable[[Any], Sequence[Chart]] | None = None


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
        """Return the measurements.

        Args:
            settings: Settings of the evaluation.
            config: Config of the model; None for another subject, which can do everything.
            album: Where examples are kept.
        """
        ...

    def session_inputs(self, rng: np.random.Generator, count: int) -> tuple[Frame, list[Action]]:
        """Return a first frame and actions for measuring speed."""
        ...


def check_settings(suite: EvalSuite, settings: EvalSettings) -> None:
    """Check the names of the split and the metrics.

    Raises:
        InputError: The suite has no such split, or there is no such metric.
    """
    split = settings.split
    if split is not None and split not in suite.splits:
        raise InputError(f"There is no split {split!r}; use one of: {', '.join(suite.splits)}.")
    for name in settings.metrics:
        get_metric(name)


def evaluate(
    model: WorldModel | Subject,
    settings: EvalSettings,
    suite: EvalSuite,
    progress: bool = False,
    only: Callable[[str], bool] | None = None,
    measured: Callable[[str, dict[str, Any]], object] | None = None,
) -> dict[str, Any]:
    """Measure a model.

    Args:
        model: The model, or anything that implements `Subject`; only a model's speed is measured.
        settings: Settings; the defaults measure all figures.
        suite: The suite, such as the one of the model's world (`worldmodel.worlds.suite_of`).
        progress: Whether to show a progress bar.
        only: Chooses parts by their names; by default all.
        measured: Called after every part with its name and the results so far.

    Returns:
        Plain values for JSON: `figures` (every rate as value, low, high, n), `tables` and `charts` made from
        them, `examples` with images as data URIs, `settings`, `machine`.

    Raises:
        InputError: The split or a metric is unknown.
    """
    check_settings(suite, settings)
    album, steps = Album(), settings.num_inference_steps
    bar = tqdm(desc="evaluating", unit="sample", disable=not progress, smoothing=0.05)
    if isinstance(model, WorldModel):
        subject: Subject = ModelSubject(model, steps, bar.update)
        parts = suite.parts(settings, model.config, album)
        if settings.split is None:
            timing = partial(speed, model, 3, settings.seed, steps, suite.session_inputs)
            parts.append(Part("speed", 0, lambda _: timing()))
        made_in = model.config.num_inference_steps if steps is None else steps
        settings = replace(settings, num_inference_steps=made_in)
    else:
        subject = model if steps is None else model.with_steps(steps)
        parts = suite.parts(settings, None, album)
    parts = [part for part in parts if only is None or only(part.name)]
    bar.reset(total=sum(part.work for part in parts))
    figures: dict[str, Any] = {}
    tables: list[Table] = []
    charts: list[Chart] = []

    def results() -> dict[str, Any]:
        about = "Ranges are 95 % intervals."
        goals = Table("Figures and goals", measured_goals(suite.goals, figures), about)
        return {
            "format": FORMAT,
            "settings": asdict(settings),
            "machine": machine(),
            "figures": figures,
            "tables": [table.to_json() for table in (goals, *tables) if table.rows],
            "charts": [chart.to_json() for chart in charts],
            "examples": album.entries(),
        }

    with bar:
        for part in parts:
            bar.set_description(part.name.replace("/", ": ").replace("_", " "))
            found = part.measure(subject)
            *groups, name = part.name.split("/")
            group = figures
            for each in groups:
                group = group.setdefault(each, {})
            group[name] = found
            tables += _all_figures(part.name, found) if part.tables is None else part.tables(found)
            charts += [] if part.charts is None else part.charts(found)
            if measured is not None:
                measured(part.name, results())
    return results()


def _all_figures(name: str, found: Any) -> list[Table]:
    units: dict[str, Unit] = dict(SPEED_UNITS)
    for metric in metric_names():
        if metric != "perceptual":  # takes the file of its weights
            units[metric] = get_metric(metric).unit
    title = name.replace("/", ", ").replace("_", " ").capitalize()
    return [Table(title, list(flat_rows(found, units)), details=True)]
