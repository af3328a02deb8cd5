"""Memory estimates of training steps, without allocating weights."""

import json
from dataclasses import replace

import pytest
import torch
from scaled_presets import scaled

from worldmodel.cli import main
from worldmodel.models.world_model import WorldModel
from worldmodel.train import memory_estimate, memory_report
from worldmodel.train.memory_estimate import Step
from worldmodel.train.trainer import build_root

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def step() -> Step:
    return Step(scaled("pan", "full"), "stage", 1)


def test_states_are_those_of_the_weights(step: Step) -> None:
    config = scaled("pan", "full")
    root = build_root(replace(config, model=memory_estimate.without_weights(config.model)), "stage")
    assert isinstance(root.model, WorldModel)
    held = sum(each.nbytes for each in (*root.parameters(), *root.buffers()))
    trained = sum(each.nbytes for each in root.parameters() if each.requires_grad)
    found = step.estimate()
    assert found.weights == pytest.approx(held, rel=0.01)
    assert found.optimizer == pytest.approx(2 * trained, rel=0.01)
    assert found.ema == pytest.approx(trained, rel=0.05)  # without the heads of the objective
    eighth = step.estimate(8)
    assert (eighth.weights, eighth.optimizer) == (found.weights / 8, found.optimizer / 8)


def test_a_step_that_does_not_fit_is_told_what_would(step: Step) -> None:
    total = step.estimate().total
    memory = total * 0.8 / memory_report.USABLE / memory_report.GIB
    assert not memory_report.fits(step.estimate(), memory)
    found = list(memory_report.changes(scaled("pan", "full"), "stage", step, 1, memory))
    assert "2 GPUs (mesh.dp_shard)" in found
    assert "lora_rank 16 for generator.network" in found


def test_histories_and_worlds_need_memory() -> None:
    config = scaled("pan", "full")
    longer = replace(config, model=replace(config.model, history_rounds=2 * config.model.history_rounds))
    alone, longest, two = (memory_estimate.rollout(*args) for args in ((config,), (longer,), (config, 2)))
    assert alone.weights == longest.weights == two.weights
    assert alone.total < longest.total
    assert alone.total < two.total
    assert alone.optimizer == alone.gradients == 0


def test_the_command_line_prints_an_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--plan", "own_clips", "--gpus", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["gpus"] == 2
    assert all(row["total"] > 0 for row in told["memory_bytes"].values())
    assert not torch.cuda.is_available() or torch.cuda.memory_allocated() == 0
    assert main(["info", "shapes-tiny", "seed=1"]) == 2
    assert main(["info", "--plan", "own_clips", "--gpus", "0"]) == 2
