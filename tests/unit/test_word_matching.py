"""The benchmark of word matching, on few scenes, with the pretrained base."""

import runpy
from pathlib import Path

import pytest
import torch

BENCHMARK = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "word_matching.py"))


def test_area_under_the_curve() -> None:
    scores, truth = torch.tensor([0.1, 0.4, 0.4, 0.9]), torch.tensor([False, True, False, True])
    assert BENCHMARK["area_under_curve"](scores, truth) == 3.5 / 4


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2")
def test_pretrained_weights_match_a_query_with_the_word_in_the_sentence() -> None:
    areas = {title: layers[-1] for title, layers in BENCHMARK["rows"]("shapes_smol", 24, 1).items()}
    assert areas["the word for the colour"] > 0.75
    assert areas["the word for the colour, random weights"] < 0.65
    assert areas["features of the vision adapter"] < 0.65
