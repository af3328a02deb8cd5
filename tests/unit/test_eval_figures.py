"""What is measured, and how figures are shown."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from worldmodel import media
from worldmodel.config import ActionConfig, CodecConfig, ConditionAdapterConfig, WorldModelConfig
from worldmodel.data.argument import read_source
from worldmodel.eval.data.episodes import EpisodeReader
from worldmodel.eval.data.horizon import by_round
from worldmodel.eval.data.inverse_dynamics import BATCH, EPOCHS, train_recogniser
from worldmodel.eval.data.measures import Judged, Played
from worldmodel.eval.data.outcomes import _f1
from worldmodel.eval.examples import Album
from worldmodel.eval.suite import EvalSettings
from worldmodel.eval.tables import unit_of
from worldmodel.types import Action
from worldmodel.worlds import shapes
from worldmodel.worlds.shapes.evaluation.suite import ShapesSuite


def test_the_interval_of_few_events_counts_none_as_unknown() -> None:
    hits = np.array([1, 1, *[0] * 10])
    assert _f1(hits, hits, hits) == {"value": 1, "low": 1, "high": 1, "n": 2}


def test_verdicts_of_numpy_are_rates() -> None:
    clip = np.zeros((1, 2, 32, 32, 3), np.uint8)
    judged = Judged(lambda made, true: SimpleNamespace(strict=(made == true).all()))  # type: ignore[arg-type]
    (found,) = judged(Played(clip[:, 0], clip, clip, [Action()]))
    assert found is True
    assert by_round([[found]] * 20)[0]["low"] == pytest.approx(0.839, abs=1e-3)  # Wilson


def test_units_are_those_of_the_measure() -> None:
    paths = {
        ("horizon", "trend", "psnr", "model"): "dB",
        ("returns", "psnr", "model"): "dB",
        ("horizon", "frechet", "frechet", "model"): "",
        ("outcomes", "reward_f1", "model"): "",
        ("counterfactuals", "differ", "copy"): "%",
        ("action_following", "held-out", "named"): "%",
        ("speed", "fps"): "fps",
    }
    assert {path: unit_of(path) for path in paths} == paths


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
