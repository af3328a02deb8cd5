"""Training in buckets on two processes is the training of one: each step has one size on both."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import bucketed
import pytest
import torch
from processes import torchrun
from runs import WHOLE, short_run

from worldmodel import config as configs
from worldmodel.config import MeshConfig, TrainConfig, build
from worldmodel.models.world_model import WorldModel
from worldmodel.train import distributed, finetune

pytestmark = pytest.mark.slow
MESHES = {"dp": MeshConfig(dp_shard=2), "sp": MeshConfig(sp=2), "cp": MeshConfig(cp=2)}


def work(config_file: Path) -> None:
    """Run in each process."""
    config = build(TrainConfig, json.loads(config_file.read_text()))
    torch.set_num_threads(1)
    for name, mesh in MESHES.items():
        finetune.train(replace(config, mesh=mesh, run_dir=f"{config.run_dir}-{name}"))


def losses(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: each for name, each in line.items() if "/" in name} for line in lines if line["step"]]


def test_two_processes_are_one(
    make_model: Callable[..., WorldModel], tokenizer_folder: str, tmp_path: Path
) -> None:
    config = short_run(make_model(image_size=64).config, tokenizer_folder, tmp_path / "alone")
    stage = replace(config.stages["state"], objective="joint", train=WHOLE)
    config = replace(config, stages={"state": stage}, sample_every=0)
    config = bucketed.run_of(config, bucketed.write_clips(tmp_path))
    finetune.train(config)
    two = replace(config, run_dir=str(tmp_path / "two"))
    (tmp_path / "run.json").write_text(json.dumps(configs.to_dict(two)))
    torchrun(__file__, 2, tmp_path / "run.json")
    expected = losses(tmp_path / "alone")
    assert len(expected) == 6
    for name in MESHES:
        found = losses(tmp_path / f"two-{name}")
        for one, two in zip(expected, found, strict=True):
            assert two == pytest.approx({key: one[key] for key in two}, rel=1e-4), name


if __name__ == "__main__":
    work(Path(sys.argv[1]))
    distributed.leave()
