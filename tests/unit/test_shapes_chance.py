"""The shipped world whose futures are uncertain: its generator makes one of them, and the forecast none."""

import numpy as np
import pytest

from worldmodel import WorldModel
from worldmodel.eval.goals import measured
from worldmodel.eval.runner import ModelSubject
from worldmodel.eval.uncertainty import matching_outcome, uncertain_futures
from worldmodel.shapes.evaluation.cases import chance_cases, judge_frame
from worldmodel.shapes.evaluation.goals import GOALS

SEED = 99
"""Not that of the published figures."""


@pytest.fixture(scope="module")
def model() -> WorldModel:
    return WorldModel.from_pretrained("shapes-chance")


@pytest.mark.slow
def test_the_generator_makes_lawful_futures_and_the_forecast_does_not(model: WorldModel) -> None:
    cases = chance_cases(SEED, 0, 48)
    figures = uncertain_futures(ModelSubject(model), cases, [], judge_frame, SEED, steps=(0, 8))
    sampled, forecast = (figures[f"{steps} steps"]["valid"]["value"] for steps in (8, 0))
    assert sampled > 0.45
    assert forecast < 0.35
    shown = [row.path[1:] for row in measured(GOALS, {"chance": figures})]
    assert shown == [("0 steps", "valid"), ("8 steps", "valid")]


def test_seeds_lead_to_different_futures(model: WorldModel) -> None:
    case = next(case for case in chance_cases(SEED, 0, 48) if case.kind == "resize")
    worlds = ModelSubject(model).open(np.stack([case.start] * 12), range(12))
    ends = {matching_outcome(case, clip, judge_frame)[0] for clip in worlds.step([case.action] * 12)}
    assert {0, 1} <= ends, "it grows or shrinks"
