"""The benchmark of a GPU, on small models of a CPU."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from worldmodel.config import TrainConfig
from worldmodel.models.loading import deferred
from worldmodel.train.distributed import Root
from worldmodel.train.trainer import build_root

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def benchmark() -> dict[str, Any]:
    return runpy.run_path(str(BENCHMARK))


def on_meta(config: TrainConfig) -> Root:
    """Build the model of a benchmark without memory for its weights."""
    with deferred.empty_parameters():
        return build_root(config, "joint")


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.5),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("AMD EPYC", None),
    ],
)
def test_peaks_are_found_by_the_name_of_the_device(
    benchmark: dict[str, Any], name: str, peak: float | None
) -> None:
    assert benchmark["dense_peak"](name) == peak


@pytest.mark.slow
def test_models_have_the_sizes_in_their_names(benchmark: dict[str, Any]) -> None:
    def billions(module: Any) -> float:
        return sum(parameter.numel() for parameter in module.parameters()) / 1e9

    small, large, pretrained = (on_meta(case.config).model for case in benchmark["cases"](False))
    assert billions(small.generator) == pytest.approx(0.3, rel=0.05)
    assert billions(large.generator) == pytest.approx(1.0, rel=0.05)
    assert billions(pretrained.backbone) == pytest.approx(7.6, rel=0.01)
    assert billions(pretrained.generator.get_submodule("network.transformer")) == pytest.approx(1.4, rel=0.05)


@pytest.mark.slow
def test_a_lora_checkpoint_of_a_7b_model_is_below_a_gigabyte(benchmark: dict[str, Any]) -> None:
    """It holds the trained weights and two moments of each (tests/unit/test_start.py)."""
    config = benchmark["cases"](False)[-1].config
    model = on_meta(config).model
    assert 3 * sum(each.nbytes for each in model.parameters() if each.requires_grad) <= 1e9


@pytest.mark.slow
def test_every_figure_is_measured_and_written(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARK), "--tiny", "--device", "cpu", "--out", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONSAFEPATH": "1"}, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "gpu.json").read_text())
    figures = found["figures"]
    assert found["tiny"]
    assert {each["unit"] for each in figures} == {"s", "TFLOP/s", "GiB", "frames/s"}
    assert all(each["value"] > 0 for each in figures if each["unit"] != "GiB")  # a CPU counts no peak
    references = {each["against"] for each in figures if each["reference"]}
    assert references == {"measured product", "info --plan", "flash of torch, causal"}
    rows = (tmp_path / "gpu.md").read_text().splitlines()
    assert sum(row.startswith("| ") for row in rows) == len(figures) + 2
