"""What is measured, and how figures are shown."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from worldmodel import media, shapes
from worldmodel.actions import Action
from worldmodel.config import ActionConfig, CodecConfig, ConditionAdapterConfig, WorldModelConfig
from worldmodel.data.argument import read_source
from worldmodel.episodes import Outcome
from worldmodel.eval.data.episodes import EpisodeReader, Recorded
from worldmodel.eval.data.horizon import by_round
from worldmodel.eval.data.inverse_dynamics import BATCH, EPOCHS, train_recogniser
from worldmodel.eval.data.outcomes import LATE, _f1, outcome_tables, outcomes
from worldmodel.eval.examples import Album
from worldmodel.eval.metrics import Played
from worldmodel.eval.metrics.verdicts import Right
from worldmodel.eval.suite import EvalSettings
from worldmodel.eval.table import flat_rows
from worldmodel.shapes.evaluation.suite import ShapesSuite


def test_the_interval_of_few_events_counts_none_as_unknown() -> None:
    hits = np.array([1, 1, *[0] * 10])
    assert _f1(hits, hits, hits) == {"value": 1, "low": 1, "high": 1, "n": 2}


def test_verdicts_of_numpy_are_rates() -> None:
    clip = np.zeros((1, 2, 32, 32, 3), np.uint8)
    judge: Any = lambda made, true: SimpleNamespace(strict=(made == true).all())  # noqa: E731
    (found,) = Right()(Played(clip[:, 0], clip, clip, [Action()], judge=judge))
    assert found is True
    assert by_round([[found]] * 20, Right())[0]["low"] == pytest.approx(0.839, abs=1e-3)  # Wilson


def test_every_figure_of_nested_results_has_its_unit() -> None:
    figure = {"value": 1.0, "low": 0.5, "high": 1.5, "n": 3}
    found = {"psnr": {"model": figure}, "named": figure, "steps": [figure], "round_s": 0.1}
    rows = {row.title: row.unit for row in flat_rows(found, {"psnr": "dB"})}
    assert rows == {"psnr · model": "dB", "named": "%"}


@pytest.mark.parametrize(
    ("part", "steps"),
    [
        ({"condition_adapter": ConditionAdapterConfig(forecast="none")}, {0, 1, 2, 4, 8, 16}),
        ({"condition_adapter": ConditionAdapterConfig(kind="text", forecast="none")}, {1, 2, 4, 8, 16}),
        ({"sampler": "swin", "num_inference_steps": 4}, {0, 2, 4, 8, 16}),
        ({"generator": None, "num_inference_steps": 0}, {0}),
    ],
)
def test_only_steps_that_the_model_takes_are_measured(part: dict[str, Any], steps: set[int]) -> None:
    taken: set[int] = set()

    class Still:
        """Repeats the first frame."""

        def open(self, images: np.ndarray, seeds: Sequence[int]) -> SimpleNamespace:
            frames = np.repeat(images[:, None], shapes.FRAMES_PER_CLIP, axis=1)
            return SimpleNamespace(step=lambda actions: frames)

        def with_steps(self, num_inference_steps: int) -> "Still":
            taken.add(num_inference_steps)
            return self

    config = WorldModelConfig(world="shapes", **part)
    for split in (None, "paraphrases", "chance"):
        for each in ShapesSuite().parts(EvalSettings(split, 4), config, Album()):
            if each.name in ("steps", "chance", "action_following/paraphrases"):
                each.measure(Still())  # type: ignore[arg-type]
    assert taken == steps


def test_actions_of_all_of_sorted_data_are_recognised(tmp_path: Path) -> None:
    clip = np.zeros((3, 32, 32, 3), np.uint8)
    media.write_video(clip, tmp_path / "clip.mp4", fps=4)
    rows = [f"clip.mp4,{key}" for key in ("left", "right") for _ in range(BATCH)]
    table = tmp_path / "clips.csv"
    table.write_text("\n".join(["path,keys", *rows]))
    config = WorldModelConfig(
        codec=CodecConfig(image_size=32),
        chunk_frames=2,
        action=ActionConfig(text=False, keys=("left", "right")),
    )
    reader = EpisodeReader(read_source(str(table)), config, 1, 0)
    recogniser = train_recogniser(reader, steps=EPOCHS // 2)  # reads half of the first half
    assert recogniser.summary["distinct_actions"] == 2


class Scored:
    """Worlds whose squares reach a wall, which ends the episode; some subjects see every second end only.

    Some say everything rounds late.
    """

    def __init__(self, episodes: Sequence[Recorded], share: int, late: int = 0) -> None:
        self.episodes, self.share, self.round, self.outcomes = episodes, share, -late, ()

    def step(self, actions: Sequence[Action]) -> np.ndarray:
        quiet = Outcome(0.0, False)
        said = [
            each.outcomes[self.round] if row % self.share == 0 and 0 <= self.round < 3 else quiet
            for row, each in enumerate(self.episodes)
        ]
        self.outcomes: tuple[Outcome, ...] = tuple(said)
        self.round += 1
        return np.zeros((len(actions), 2, 32, 32, 3), np.uint8)


class ScoredEpisodes:
    """Eight episodes of three rounds, of which six end with a reward of 2 in the last."""

    seed = 0

    def batches(self, count: int) -> Iterator[list[Recorded]]:
        frame, clip = np.zeros((32, 32, 3), np.uint8), np.zeros((2, 32, 32, 3), np.uint8)
        for first in (0, 4):
            ends = [Outcome(2.0, True) if first + row < 6 else Outcome(0.0, False) for row in range(4)]
            quiet = Outcome(0.0, False)
            self.now = [
                Recorded(frame, (Action(),) * 3, (clip,) * 3, (Outcome(0.1, False), quiet, end))
                for end in ends
            ]
            yield self.now


@pytest.mark.parametrize(("share", "recall", "f1"), [(1, 1.0, 1.0), (2, 0.5, 2 / 3)])
def test_rewards_and_ends_are_compared_round_by_round(share: int, recall: float, f1: float) -> None:
    reader = ScoredEpisodes()
    subject = SimpleNamespace(open=lambda images, seeds: Scored(reader.now, share))
    figures = outcomes(subject, reader, 8)  # type: ignore[arg-type]
    for name in ("reward", "end"):
        assert figures[f"{name}_f1"]["model"]["value"] == pytest.approx(f1)
        assert figures[f"{name}_f1"]["model"]["n"] == 6
        assert figures[f"{name}_recall"]["model"]["value"] == pytest.approx(recall)
        assert figures[f"{name}_precision"]["model"]["value"] == 1
        assert figures[f"{name}_f1"]["copy"]["value"] == figures[f"{name}_recall"]["copy"]["value"] == 0
    error, copied = (figures["reward_error"][row]["value"] for row in ("model", "copy"))
    assert copied == pytest.approx((6 * 1.9 + 10 * 0.1) / 24)  # always 0.1, the median
    assert error == pytest.approx(copied * (1 - recall) if share == 1 else (3 * 2.1 + 0.1) / 24)
    (table,) = outcome_tables(figures)
    rows = {row.title: row for row in table.rows}
    assert rows["unusual rewards, F1"].figure == figures["reward_f1"]["model"]
    assert rows["unusual rewards, F1"].baselines == {"copy": figures["reward_f1"]["copy"]}
    assert figures["end_steps"]["model"]["value"] == pytest.approx((LATE + 1) * (1 - recall))
    assert figures["end_steps"]["copy"]["value"] == LATE + 1 and figures["end_steps"]["model"]["n"] == 6
    assert figures["return_error"]["model"]["value"] == pytest.approx(3 * error)
    silent = SimpleNamespace(open=lambda images, seeds: SimpleNamespace(step=lambda actions: None))
    assert outcomes(silent, reader, 8) == {}  # type: ignore[arg-type]


def test_outcomes_that_are_a_round_late_are_seen_as_such() -> None:
    """The sum of the rewards, without the last one, F1 and the correlation tell; an end is one step late."""
    reader = ScoredEpisodes()

    def figures(late: int) -> dict[str, Any]:
        subject = SimpleNamespace(open=lambda images, seeds: Scored(reader.now, 1, late))
        return outcomes(subject, reader, 8)  # type: ignore[arg-type]

    right, off = figures(0), figures(1)
    assert right["reward_correlation"]["model"]["value"] == pytest.approx(1)
    assert right["return_error"]["model"]["value"] == right["end_steps"]["model"]["value"] == 0
    assert off["reward_correlation"]["model"]["value"] < 0
    assert off["end_steps"]["model"]["value"] == 1
    assert off["reward_f1"]["model"]["value"] == off["end_f1"]["model"]["value"] == 0
    assert off["return_error"]["model"]["value"] == pytest.approx(6 * 2 / 8)


class Rewarded(ScoredEpisodes):
    """Every step has a reward of 0.5, but one of 3 in the last of every second episode."""

    def batches(self, count: int) -> Iterator[list[Recorded]]:
        for self.now in super().batches(count):
            self.now = [
                replace(
                    each,
                    outcomes=tuple(Outcome(3.0 if (row % 2, i) == (0, 2) else 0.5, False) for i in range(3)),
                )
                for row, each in enumerate(self.now)
            ]
            yield self.now


def test_what_is_unusual_is_not_the_reward_of_every_step() -> None:
    reader = Rewarded()
    usual = Outcome(0.5, False)
    constant = SimpleNamespace(step=lambda actions: None, outcomes=(usual,) * 4)
    figures = outcomes(SimpleNamespace(open=lambda images, seeds: constant), reader, 8)  # type: ignore[arg-type]
    assert figures["reward_f1"]["model"] == figures["reward_f1"]["copy"]
    assert figures["reward_f1"]["model"]["value"] == 0 and figures["reward_f1"]["model"]["n"] == 4
    assert figures["reward_correlation"]["model"]["value"] == 0
    assert figures["reward_error"]["model"] == figures["reward_error"]["copy"]
    assert "end_steps" not in figures and "end_f1" not in figures
