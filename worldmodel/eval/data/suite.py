"""The evaluation suite of recorded episodes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np

from worldmodel.config import DataConfig, WorldModelConfig
from worldmodel.errors import InputError
from worldmodel.eval.data.counterfactuals import counterfactuals
from worldmodel.eval.data.episodes import EpisodeReader
from worldmodel.eval.data.horizon import horizon
from worldmodel.eval.data.inverse_dynamics import ActionRecognised, train_recogniser
from worldmodel.eval.data.measures import Judged, Measure, Perceptual, Psnr, Sharpness, Ssim
from worldmodel.eval.data.outcomes import outcomes
from worldmodel.eval.data.returns import parse_inverse, returns
from worldmodel.eval.examples import Album
from worldmodel.eval.frechet import FrameFeatures
from worldmodel.eval.goals import Goal, Unit
from worldmodel.eval.judge import Judge
from worldmodel.eval.perceptual import PerceptualDistance
from worldmodel.eval.runner import Subject
from worldmodel.eval.suite import CardText, EvalSettings, Part
from worldmodel.media import Frame
from worldmodel.types import Action

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
        self.steps = settings.inverse_dynamics_steps
        steps = settings.num_inference_steps
        steps = config.num_inference_steps if steps is None else steps
        self.forecasts = not config.least_inference_steps and steps > 0  # else it is the model's own row
        self.outcomes = config.outcomes
        self.inverses = [parse_inverse(pair, config.action) for pair in settings.inverse]
        self.measures: list[Measure] = [Psnr(), Ssim(), Sharpness()]
        if settings.perceptual is not None:
            self.measures.append(Perceptual(PerceptualDistance(settings.perceptual)))
        size = config.codec.image_size
        self.features = None if settings.features is None else FrameFeatures(settings.features, size)
        if judge is not None:
            self.measures.append(Judged(judge))
        self.goals: Sequence[Goal] = _goals(settings.rounds)
        self.card = _card(self.reader.name, config, settings.rounds)

    def check(self, config: WorldModelConfig) -> None:
        """Check that one episode can be read and fits the model; for errors see `EpisodeReader`."""
        for reader in (self.reader, self.training):
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
            measures = [*self.measures, *recogniser]
            return horizon(subject, self.reader, count, measures, self.forecasts, album, self.features)

        def swapped(subject: Subject) -> Any:
            return counterfactuals(subject, self.reader, quarter, self.forecasts, *recogniser)

        parts = [
            Part("horizon", rows * count * settings.rounds, played),
            Part("counterfactuals", 2 * (rows - 1) * quarter, swapped),
        ]
        if self.training is not None and self.steps:
            parts.insert(0, Part("inverse_dynamics", 0, inverse_dynamics))
        if self.outcomes:
            parts.append(Part("outcomes", count * settings.rounds, lambda s: outcomes(s, self.reader, count)))
        if self.inverses:
            work = 4 * (rows - 1) * len(self.inverses) * quarter
            there_and_back = partial(returns, inverses=self.inverses, forecasts=self.forecasts)
            parts.append(Part("returns", work, lambda s: there_and_back(s, self.reader, quarter)))
        return parts

    def session_inputs(self, rng: np.random.Generator, count: int) -> tuple[Frame, list[Action]]:
        episode = next(self.reader.read())
        return episode.start, list(islice(cycle(episode.actions), count))


def _goals(rounds: int) -> tuple[Goal, ...]:
    """Return the figures of the published table; those of rounds that no episode has are left out there."""
    ends = sorted({*(number for number in SHOWN_ROUNDS if number <= rounds), rounds})
    goals = [
        Goal(f"{title}, round {number}", ("horizon", measure, row, number - 1), unit)
        for number in ends
        for measure, row, title, unit in _FIGURES
    ]
    return (*goals, *_OTHERS)


_FIGURES: tuple[tuple[str, str, str, Unit], ...] = (
    ("psnr", "model", "PSNR", "dB"),
    ("psnr", "copy", "PSNR of a copy of the first frame", "dB"),
    ("psnr", "zero_steps", "PSNR of the forecast (0 denoising steps)", "dB"),
    ("psnr", "codec", "PSNR of the codec alone", "dB"),
    ("ssim", "model", "SSIM", ""),
    ("perceptual", "model", "Perceptual distance", ""),
    ("right", "model", "Right by the judge", "%"),
    ("action", "model", "Action recognised in the frames", "%"),
    ("action", "truth", "Action recognised in the recorded frames", "%"),
)
_OTHERS = (
    Goal("Another action, another picture", ("counterfactuals", "differ", "model")),
    Goal("Another action recognised in its picture", ("counterfactuals", "recognised", "model")),
    Goal("Own action nearer to the truth than another", ("counterfactuals", "own_nearer", "model")),
    Goal("Action and inverse: back at the start", ("returns", "returned", "model")),
    Goal("Rewards, F1", ("outcomes", "reward_f1", "model"), ""),
    Goal("Ends of episodes, F1", ("outcomes", "end_f1", "model"), ""),
    Goal("Speed of one session", ("speed", "fps"), "fps"),
    Goal("Action to first frame", ("speed", "first_frame"), "s"),
)


def _card(name: str, config: WorldModelConfig, rounds: int) -> CardText:
    takes = config.action
    action = "an action" if takes.text else {"keys": [*takes.keys[:1]]} if takes.keys else None
    action = {"vector": [*takes.vector_low] or [0.0] * takes.vector_size} if action is None else action
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
