"""Times, work and memory of steps: what is measured, and what is counted."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from worldmodel.actions import Action
from worldmodel.config import StageConfig, TrainedConfig
from worldmodel.data.loader import Batch
from worldmodel.episodes import Episode
from worldmodel.models import lora
from worldmodel.models.world_model import WorldModel
from worldmodel.train import distributed
from worldmodel.train.diagnostics import throughput, timing
from worldmodel.train.diagnostics.throughput import (
    Meter,
    Stack,
    Work,
    faster_precision,
    measured_tflops,
    stacks,
)
from worldmodel.train.diagnostics.timing import Phases, collective_seconds, computing
from worldmodel.train.objectives.base import Rounds, SampleRng, StageBatch
from worldmodel.train.objectives.registry import OBJECTIVES
from worldmodel.train.stage import shutdown_advice
from worldmodel.train.trainer import freeze

CPU = torch.device("cpu")
EVERYTHING = {name: TrainedConfig() for name in ("backbone", "adapters", "condition_adapter", "generator")}
STAGE = StageConfig("joint", batch_size=2, rounds=2, tasks={"rounds": 1.0}, train=EVERYTHING)


def test_a_process_that_waits_does_not_compute() -> None:
    with computing(CPU) as waited:
        time.sleep(0.3)
    with computing(CPU) as worked:
        while time.process_time() - worked.process_s < 0.1:
            pass
    assert waited.seconds() < 0.1 <= worked.seconds() < 0.3


def test_collectives_of_a_span_are_left_out() -> None:
    """A dump of NCCL's flight recorder: before the span, within it, and not yet complete."""
    entries = [
        {"profiling_name": "nccl:all_reduce", "time_created_ns": 5, "duration_ms": 900.0},
        {"profiling_name": "nccl:_all_gather_base", "time_created_ns": 10, "duration_ms": 250.0},
        {"profiling_name": "nccl:_reduce_scatter_base", "time_created_ns": 20, "duration_ms": 500.0},
        {"profiling_name": "nccl:all_reduce", "time_created_ns": 20, "duration_ms": None},
        {"profiling_name": "nccl:all_reduce", "time_created_ns": 20},
    ]
    assert collective_seconds({"version": "2.9", "entries": entries}, 10, 20) == 0.75
    assert collective_seconds({}, 10, 20) == 0


def test_the_record_of_collectives_is_read_once_in_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is kept for few steps, and reading it stalls the process."""
    spans = []
    for number in range(20):
        with computing(CPU) as span:
            pass
        span.device, span.began, span.ended = torch.device("cuda"), 0.0, 1.0
        span.began_ns, span.ended_ns = 100 * number, 100 * number + 50
        spans.append(span)
    reads = []
    entries = [{"time_created_ns": 100 * number + 20, "duration_ms": 250.0} for number in range(16, 20)]

    def recorded() -> dict[str, Any]:
        reads.append(1)
        return {"entries": entries}

    monkeypatch.setattr(timing, "_recorded", recorded)
    assert timing.computation_seconds(spans) == [0.75] * 3  # the first of the four was cut off by the record
    assert len(reads) == 1
    entries[:] = [{"time_created_ns": 1930, "duration_ms": 250.0}]  # a step with more than are kept
    assert timing.computation_seconds(spans) == [0.75]
    entries.clear()
    assert timing.computation_seconds(spans) == [1.0] * 20


def test_phases_share_the_time() -> None:
    phases = Phases(CPU)
    meter = Meter(CPU, 2, 0.5, phases)
    for _ in range(2):
        phases.begin("forward")
        time.sleep(0.02)
        phases.begin("other")
        time.sleep(0.06)
        meter.step(2e9)
    phases.begin("forward")
    figures = meter.take()
    assert figures["forward_share"] + figures["other_share"] == pytest.approx(1, abs=1e-3)
    assert 0.1 < figures["forward_share"] < 0.4
    assert 0.08 <= figures["step_s"] < 0.3
    assert figures["tflops_per_s"] == pytest.approx(0.001 / figures["step_s"], rel=1e-3)  # of one of two
    assert figures["mfu"] == pytest.approx(figures["tflops_per_s"] / 0.5, rel=1e-3)
    assert figures["memory_gib"] > 0.05
    assert "mfu" not in meter.take()


def test_the_measured_peak_is_that_of_a_matrix_product() -> None:
    (peak,) = measured_tflops(CPU, (torch.float32,))
    left = torch.randn(512, 512)
    began = time.perf_counter()
    for _ in range(20):
        left @ left
    mean = 20 * 2 * 512**3 / (time.perf_counter() - began) / 1e12
    assert 0.3 * mean < peak < 30 * mean


@pytest.mark.parametrize("faster", ["bf16", "fp32"])
def test_the_faster_precision_is_that_of_the_faster_product(
    monkeypatch: pytest.MonkeyPatch, faster: str
) -> None:
    rates = {distributed.PRECISIONS[each]: 2.0 if each == faster else 1.0 for each in distributed.PRECISIONS}
    monkeypatch.setattr(throughput, "measured_tflops", lambda device, dtypes: list(map(rates.get, dtypes)))
    assert faster_precision(CPU) == faster


def rounds_batch(model: WorldModel, batch: int = 2, rounds: int = 2) -> StageBatch:
    context = torch.randn(batch, rounds, 1, *model.blank_latents.shape)
    target = torch.randn(batch, rounds, *model.config.latent_shape)
    changed = torch.ones_like(target[:, :, :, 0], dtype=torch.bool)
    episodes = [Episode(f"{index}", actions=(Action(),) * rounds) for index in range(batch)]
    keys = [(0, index) for index in range(batch)]
    content = Rounds(context, target, changed, torch.ones(context.shape[:2], dtype=torch.bool))
    return StageBatch(Batch(0, "imagine", tuple(range(batch)), episodes), SampleRng(keys), {}, content)


def test_work_matches_the_count_of_torch(make_model: Callable[..., WorldModel]) -> None:
    model = make_model()
    freeze(model, STAGE)
    inputs = rounds_batch(model)
    inputs = dataclasses.replace(inputs, batch=dataclasses.replace(inputs.batch, task="rounds"))
    objective = OBJECTIVES["joint"](model)
    with FlopCounterMode(display=False) as counter:
        sum(loss.sum() for loss in objective(model, inputs).values()).backward()
    counted = sum(
        sum(found.values())
        for name, found in counter.get_flop_counts().items()
        if name.endswith(("backbone.model.model.layers.0", "backbone.model.model.layers.1"))
        or name.endswith(("generator.layers.0", "generator.layers.1"))
    )
    assert counted / Work(model, STAGE).of(inputs) == pytest.approx(1, abs=0.35)


def test_work_counts_the_passes_that_gradients_need(make_model: Callable[..., WorldModel]) -> None:
    def passes(objective: str, **train: TrainedConfig) -> tuple[int, int]:
        model = make_model()
        stage = dataclasses.replace(STAGE, objective=objective, train=train)
        lora.add(model, train)
        freeze(model, stage)
        work = Work(model, stage)
        return work.backbone_passes, work.generator_passes

    whole, low = TrainedConfig(), TrainedConfig(lora_rank=2)
    assert passes("joint", **EVERYTHING) == (3, 3)
    assert passes("joint", backbone=low, adapters=whole, generator=low) == (2, 2)
    assert passes("generator", condition_adapter=whole, generator=whole) == (1, 3)
    assert passes("generator", condition_adapter=whole) == (1, 2)


def test_flops_of_a_stack() -> None:
    stack = Stack(matrices=100, layers=2, width=8, tokens=10, area=55)
    assert [stack.flops(passes) for passes in (1, 2, 3)] == [
        2 * 100 * 10 + 4 * 2 * 8 * 55,
        4 * 100 * 10 + 14 * 2 * 8 * 55,
        6 * 100 * 10 + 14 * 2 * 8 * 55,
    ]


def test_the_state_objective_does_not_run_the_generator(make_model: Callable[..., WorldModel]) -> None:
    model = make_model()
    freeze(model, STAGE)
    inputs = rounds_batch(model)
    backbone, generator = stacks(model, 2)
    state = dataclasses.replace(STAGE, objective="state")
    assert Work(model, state).of(inputs) == 2 * backbone.flops()
    assert Work(model, STAGE).of(inputs) == 2 * backbone.flops() + 4 * generator.flops()


def test_a_run_that_cannot_save_in_time_names_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    assert shutdown_advice(step_s=5.0, save_s=20.0) is None
    advice = shutdown_advice(step_s=5.0, save_s=40.0)
    assert advice is not None and "--shutdown-timeout 90" in advice
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "60")
    assert shutdown_advice(step_s=5.0, save_s=40.0) is None
