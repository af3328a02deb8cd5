"""The shipped world whose futures are uncertain: the code of its state decides between them."""

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


def test_samples_are_lawful(model: WorldModel) -> None:
    cases = chance_cases(SEED, 0, 48)
    figures = uncertain_futures(ModelSubject(model), cases, [], judge_frame, SEED, steps=(0,))
    assert figures["0 steps"]["valid"]["value"] > 0.6
    shown = [row.path[1:] for row in measured(GOALS, {"chance": figures})]
    assert shown == [("0 steps", "valid")]


def test_seeds_lead_to_different_futures(model: WorldModel) -> None:
    case = next(case for case in chance_cases(SEED, 0, 48) if case.kind == "resize")
    worlds = ModelSubject(model).open(np.stack([case.start] * 12), range(12))
    ends = {matching_outcome(case, clip, judge_frame)[0] for clip in worlds.step([case.action] * 12)}
    assert {0, 1} <= ends, "it grows or shrinks"


def test_futures_are_listed_with_their_probabilities(model: WorldModel) -> None:
    cases = [case for case in chance_cases(SEED, 0, 48) if case.kind in ("resize", "gamble")][:2]
    for case in cases:
        session = model.session(seed=1)
        session.reset(case.start)
        futures = session.futures(case.action, num_draws=96)
        shares = np.zeros(len(case.outcomes))
        for future in futures:
            found, _ = matching_outcome(case, future.frames, judge_frame)
            if found is not None:
                shares[found] += future.probability
        for share, outcome in zip(shares, case.outcomes, strict=True):
            assert share == pytest.approx(outcome.probability, abs=0.3), case.caption
