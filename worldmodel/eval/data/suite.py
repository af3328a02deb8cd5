"""The evaluation suite of recorded episodes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np

from worldmodel.actions import Action, example_action
from worldmodel.config import DataConfig, WorldModelConfig
from worldmodel.errors import InputError
from worldmodel.eval.data.counterfactuals import counterfactual_tables, counterfactuals
from worldmodel.eval.data.episodes import EpisodeReader
from worldmodel.eval.data.horizon import horizon, horizon_charts, horizon_tables
from worldmodel.eval.data.inverse_dynamics import ActionRecognised, train_recogniser
from worldmodel.eval.data.outcomes import outcome_tables, outcomes
from worldmodel.eval.data.returns import parse_inverse, return_tables, returns
from worldmodel.eval.data.subjects import TITLES
from worldmodel.eval.data.twins import STEPS, read_twins, twin_figures, twin_reader, twin_tables
from worldmodel.eval.examples import Album
from worldmodel.eval.frechet import FrameFeatures
from worldmodel.eval.goals import Goal
from worldmodel.eval.judge import Judge
from worldmodel.eval.metrics import Metric, get_metrics
from worldmodel.eval.metrics.perceptual import Perceptual
from worldmodel.eval.runner import Subject
from worldmodel.eval.suite import CardText, EvalSettings, Part
from worldmodel.eval.table import Path, Unit
from worldmodel.media import Frame

SHOWN_ROUNDS = (1, 5, 10, 30, 50, 100, 200)
"""Rounds of the published table."""


@dataclass(frozen=True, slots=True)
class DataSettings(EvalSettings):
    """Settings of an evaluation on recorded episodes.

    Attributes:
        data: Name of the held-out data, for the report.
        train_data: Name of the data on which the inverse-dynamics model is trained; None trains none.
        inverse_dynamics_steps: Steps of its training.
        inverse: Pairs of actions that undo each other, such as `left=right`.
        judge: Name of the judge's class, for the report.
        perceptual: safetensors file of LPIPS; None measures no perceptual distance.
        features: Folder of the vision encoder over which a Fréchet distance is measured; None measures none.
    """

    data: str = ""
    train_data: str | None = None
    inverse_dynamics_steps: int = 500
    inverse: tuple[str, ...] = ()
    judge: str | None = None
    perceptual: str | None = None
    features: str | None = None

    def __post_init__(self) -> None:
        super(DataSettings, self).__post_init__()
        if self.inverse_dynamics_steps < 0:
            raise InputError(
                f"inverse_dynamics_steps is {self.inverse_dynamics_steps}; use 1 or more, or 0 for no model."
            )


class DataSuite:
    """The evaluation suite of recorded episodes (`worldmodel.eval.suite.EvalSuite`).

    Args:
        data: Config of the one source of held-out episodes.
        training: Config of the source on which the inverse-dynamics model is trained; None trains none.
        config: Config of the models to evaluate.
        settings: Settings of the evaluation.
        judge: Compares frames with recorded ones; by default none does.
    """

    splits: Mapping[str, str] = {}
    own_metrics = ("psnr", "ssim", "sharpness")
    """Metrics of every round, by name; a judge adds `right`."""

    def __init__(
        self,
        data: DataConfig,
        training: DataConfig | None,
        config: WorldModelConfig,
        settings: DataSettings,
        judge: Judge | None = None,
    ) -> None:
        self.reader = EpisodeReader(data, config, settings.rounds, settings.seed)
        self.training = training and EpisodeReader(training, config, settings.rounds, settings.seed)
        self.twins = twin_reader(data, config, settings.seed)
        self.steps = settings.inverse_dynamics_steps
        steps = settings.num_inference_steps
        steps = config.num_inference_steps if steps is None else steps
        self.forecasts = not config.least_inference_steps and steps > 0  # else it is the model's own row
        self.outcomes = config.outcomes
        self.inverses = [parse_inverse(pair, config.action) for pair in settings.inverse]
        self.judge = judge
        judged = () if judge is None else ("right",)
        self.metrics: list[Metric] = get_metrics((*self.own_metrics, *judged, *settings.metrics))
        if settings.perceptual is not None:
            self.metrics.append(Perceptual(settings.perceptual))
        size = config.codec.image_size
        self.features = None if settings.features is None else FrameFeatures(settings.features, size)
        self.goals: Sequence[Goal] = _goals(settings.rounds, self.twins is not None)
        self.card = _card(self.reader.name, config, settings.rounds)

    def check(self, config: WorldModelConfig) -> None:
        """Check that one episode can be read and fits the model; for errors see `EpisodeReader`."""
        for reader in (self.reader, self.training, self.twins):
            if reader is not None:
                next(reader.read())

    def parts(self, settings: EvalSettings, config: WorldModelConfig | None, album: Album) -> list[Part]:
        count, rows = settings.num_samples, 2 + self.forecasts
        quarter = -(-count // 4)
        recogniser: list[ActionRecognised] = []  # filled by the part that trains it

        def inverse_dynamics(_: Subject) -> Any:
            assert self.training is not None
            recogniser.append(train_recogniser(self.training, self.steps))
            return recogniser[0].summary

        def played(subject: Subject) -> Any:
            metrics = [*self.metrics, *recogniser]
            forecasts, features = self.forecasts, self.features
            return horizon(subject, self.reader, count, metrics, forecasts, album, features, self.judge)

        def swapped(subject: Subject) -> Any:
            return counterfactuals(subject, self.reader, quarter, self.forecasts, *recogniser)

        def obeyed(subject: Subject) -> Any:
            assert self.twins is not None
            pairs = list(read_twins(self.twins, count))
            return twin_figures(subject, pairs, settings.seed, STEPS, self.forecasts, album)

        parts: list[Part] = []
        if self.twins is not None:
            parts.append(Part("twins", 2 * rows * count * max(STEPS), obeyed, twin_tables))
        if self.training is not None and self.steps:
            parts.append(Part("inverse_dynamics", 0, inverse_dynamics))
        parts += [
            Part(
                "horizon",
                rows * count * settings.rounds,
                played,
                lambda found: horizon_tables(found, [*self.metrics, *recogniser]),
                lambda found: horizon_charts(found, [*self.metrics, *recogniser]),
            ),
            Part("counterfactuals", 2 * (rows - 1) * quarter, swapped, counterfactual_tables),
        ]
        if self.outcomes:
            work = count * settings.rounds
            parts.append(Part("outcomes", work, lambda s: outcomes(s, self.reader, count), outcome_tables))
        if self.inverses:
            work = 4 * (rows - 1) * len(self.inverses) * quarter
            there_and_back = partial(returns, inverses=self.inverses, forecasts=self.forecasts)
            parts.append(
                Part("returns", work, lambda s: there_and_back(s, self.reader, quarter), return_tables)
            )
        return parts

    def session_inputs(self, rng: np.random.Generator, count: int) -> tuple[Frame, list[Action]]:
        episode = next(self.reader.read())
        return episode.start, list(islice(cycle(episode.actions), count))


def _goals(rounds: int, has_twins: bool) -> tuple[Goal, ...]:
    """Return the figures of the published table; the table leaves out what was not measured.

    Whether the model obeys comes first: by twin futures, or where there are none by weaker tests.
    """
    goals: list[Goal] = []
    for measure, title, unit in _TWINS if has_twins else ():
        for step in STEPS:
            goals.append(
                _goal(f"{title}, {step} step{'s' * (step > 1)}", ("twins", measure, str(step)), unit)
            )
    for title, path, unit in () if has_twins else _WEAKER:
        goals.append(_goal(f"Weaker than obeyed: {title[0].lower()}{title[1:]}", path, unit))
    for title, path, unit in _NEXT:
        goals.append(_goal(title, path, unit))
    for number in sorted({*(number for number in SHOWN_ROUNDS if number <= rounds), rounds}):
        for metric, title, unit in _BY_ROUND:
            beside = {TITLES[row]: ("horizon", metric, row, number - 1) for row in TITLES if row != "model"}
            path = ("horizon", metric, "model", number - 1)
            goals.append(Goal(f"{title}, round {number}", path, unit, baselines=beside))
    for title, path, unit in (*_OTHERS, *(_WEAKER if has_twins else ())):
        goals.append(_goal(title, path, unit))
    goals.append(Goal("Speed of one session", ("speed", "fps"), "fps"))
    goals.append(Goal("Action to first frame", ("speed", "first_frame"), "s"))
    return tuple(goals)


def _goal(title: str, path: Path, unit: Unit) -> Goal:
    """Return the figure of the model at a path, beside the simpler predictions."""
    beside = {TITLES[row]: (*path, row) for row in TITLES if row != "model"}
    return Goal(title, (*path, "model"), unit, baselines=beside)


_TWINS: tuple[tuple[str, str, Unit], ...] = (
    ("obeyed", "Obeyed", "%"),
    ("contrast", "Contrast of two futures", ""),
    ("error_there", "Error where they differ, of a copy's", ""),
)
_WEAKER: tuple[tuple[str, Path, Unit], ...] = (
    ("Own action nearer to the truth than another", ("counterfactuals", "own_nearer"), "%"),
    ("Another action recognised by inverse dynamics", ("counterfactuals", "recognised"), "%"),
)
"""Weaker tests of obeying: a recorded round with another action has no truth of its own."""
_NEXT: tuple[tuple[str, Path, Unit], ...] = (
    ("Small things kept", ("horizon", "details"), "%"),
    ("Drift of PSNR per round", ("horizon", "trend", "psnr"), "dB"),
    ("Rewards, correlation", ("outcomes", "reward_correlation"), ""),
    ("Unusual rewards, F1", ("outcomes", "reward_f1"), ""),
    ("Sum of rewards, error", ("outcomes", "return_error"), ""),
    ("Ends of episodes, error in steps", ("outcomes", "end_steps"), ""),
)
_BY_ROUND: tuple[tuple[str, str, Unit], ...] = (
    ("psnr", "PSNR", "dB"),
    ("ssim", "SSIM", ""),
    ("perceptual", "Perceptual distance", ""),
    ("right", "Right by the judge", "%"),
    ("action", "Action recognised in the frames", "%"),
)
_OTHERS: tuple[tuple[str, Path, Unit], ...] = (
    ("Another action, another picture", ("counterfactuals", "differ"), "%"),
    ("Action and inverse: back at the start", ("returns", "returned"), "%"),
    ("Ends of episodes, F1", ("outcomes", "end_f1"), ""),
)


def _card(name: str, config: WorldModelConfig, rounds: int) -> CardText:
    action = example_action(config.action)
    return CardText(
        about="A world model that continues video round after round under actions.\n",
        usage="""```python
from worldmodel import WorldModel

session = WorldModel.from_pretrained("{name}").session(seed=0)
session.reset("first_frame.png")
frames = session.step({action}).frames
session.save("rollout.mp4")
```
""".replace("{action}", repr(action).replace("'", '"')),
        data=f"Evaluated on the recorded episodes `{name}`, which were held out of training.\n",
        judging=(
            f"Held-out episodes are played on the model's own frames, those of more than {rounds} rounds "
            "from a random step, and compared with the recorded ones."
        ),
        limits=("Figures hold for data like the held-out episodes.",),
        dataset=name,
    )
