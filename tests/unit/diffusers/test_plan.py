"""Memory estimates of training steps, without allocating weights."""

import json
from dataclasses import replace

import pytest
import torch
from scaled_presets import scaled

from worldmodel.cli import main
from worldmodel.config import MeshConfig
from worldmodel.errors import ConfigError
from worldmodel.train.memory import play, report
from worldmodel.train.memory.estimate import StepEstimator, microbatches
from worldmodel.train.memory.report import GIB, USABLE
from worldmodel.train.trainer import build_root

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def full() -> StepEstimator:
    return StepEstimator(scaled("pan", "full"), "stage")


def test_states_are_those_of_the_weights(full: StepEstimator) -> None:
    config = full.config
    root = build_root(replace(config, model=play.without_weights(config.model)), "stage")
    held = sum(each.nbytes for each in (*root.parameters(), *root.buffers()))
    trained = sum(each.nbytes for each in root.parameters() if each.requires_grad)
    found = full.estimate(1)
    assert (found.weights, found.optimizer, found.gradients) == (held, 2 * trained, trained)
    halves = full.estimate(2)
    assert (halves.weights, halves.optimizer) == (held / 2, trained)
    assert halves.gathered == found.gathered


def test_copies_on_a_mesh_are_whole(full: StepEstimator) -> None:
    copies = StepEstimator(replace(full.config, mesh=MeshConfig(dp_replicate=2)), "stage")
    copies.played = full.played
    assert copies.estimate(2).weights == full.estimate(1).weights
    with pytest.raises(ConfigError):
        copies.estimate(3)
    with pytest.raises(ConfigError):
        full.estimate(4)  # with two episodes a step


def test_microbatches_divide_the_episodes_of_a_process() -> None:
    stage = replace(scaled("pan", "full").stages["stage"], batch_size=10, microbatch_size=3)
    assert microbatches(stage, 1) == (3, 4)
    assert microbatches(stage, 5) == (2, 1)


def test_other_policies_need_less_than_keep(full: StepEstimator) -> None:
    def activations(policy: str, layers: int = 12) -> float:
        config = full.config
        deep = config.model.generator.architecture | {"num_layers": layers}
        generator = replace(config.model.generator, architecture=deep)
        config = replace(config, activations=policy, model=replace(config.model, generator=generator))  # type: ignore[arg-type]
        return StepEstimator(config, "stage").estimate(2).activations

    keep, selective, recompute, offload = map(activations, ("keep", "selective", "recompute", "offload"))
    assert keep > selective > recompute
    assert offload < keep
    assert activations("offload", 24) == offload


def test_a_step_that_does_not_fit_is_told_what_would(full: StepEstimator) -> None:
    lora = report.with_lora(full.config, "stage")
    assert lora is not None
    ways = {"stage": full, "stage by LoRA": StepEstimator(lora, "stage")}
    memory_gib = 0.9 * full.estimate(1).total / USABLE / GIB
    assert not report.fits(full.estimate(1), memory_gib)
    assert report.advise("stage", 1, ways, memory_gib) == ["2 GPUs", "lora_rank=16"]


def test_the_command_line_prints_an_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["stages.tune.batch_size=2", "stages.tune.tasks={rounds: 1.0}"]
    options = ["--gpus", "2", "--memory-gib", "100", "--json"]
    assert main(["info", "--plan", *options, "own_clips", *settings]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["memory_gib"] == 100
    assert set(told["parameters"]) >= {"backbone", "codec"}
    assert {row["gpus"] for row in told["memory_bytes"]} == {2}
    assert all(row["total"] > 0 and row["fits"] for row in told["memory_bytes"])
    assert not torch.cuda.is_available() or torch.cuda.memory_allocated() == 0
    assert main(["info", "shapes-tiny", "seed=1"]) == 2
    assert main(["info", "--plan", "own_clips", "--gpus", "0"]) == 2
    assert main(["info", "--plan", "own_clips", "--stage", "missing"]) == 2
