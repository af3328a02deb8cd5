"""The end of a run: the first process exports the model while the others leave, and all stop together."""

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from processes import torchrun

from worldmodel import config as configs
from worldmodel.config import DataConfig, SourceConfig, StageConfig, TrainConfig, TrainedConfig
from worldmodel.models.world_model import WorldModel
from worldmodel.train import finetune
from worldmodel.train.checkpoint import export

pytestmark = pytest.mark.slow
LONGEST_S = 60.0


def work(folder: Path) -> None:
    """Runs in each process: one test or the other."""
    config = configs.build(TrainConfig, json.loads((folder / "config.json").read_text()))
    if len(config.stages) == 1:
        export_alone(config, folder)
    else:
        stop_between_stages(config)


def stop_between_stages(config: TrainConfig) -> None:
    """Only the second process receives SIGTERM, after the only step of the first stage."""
    asked, rank = itertools.count(1), int(os.environ["RANK"])
    result = finetune.train(config, stop=lambda: rank == 1 and next(asked) == 2)
    assert result == Path(config.run_dir)


def export_alone(config: TrainConfig, folder: Path) -> None:
    """The first process exports only after the other has left."""
    load, left = export.load_model, folder / "left"

    def load_model(*args: object) -> WorldModel:
        deadline = time.monotonic() + LONGEST_S
        while not left.exists():
            assert time.monotonic() < deadline, "the other process waits for the export"
            time.sleep(0.05)
        assert not dist.is_initialized()
        return load(*args)  # type: ignore[arg-type]

    export.load_model = load_model
    rank = int(os.environ["RANK"])
    model = finetune.train(config)
    if rank:
        left.touch()
    assert rank or (model / "config.json").is_file()


def written(make_model: Callable[..., WorldModel], tmp_path: Path, *names: str) -> None:
    """Write the config of a run with stages of one step."""
    model = make_model(image_size=64, world="shapes")
    start = model.save_pretrained(tmp_path / "start")
    stage = StageConfig(
        "alignment", steps=1, batch_size=2, tasks={"rounds": 1.0}, train={"vision": TrainedConfig()}
    )
    config = TrainConfig(
        model=model.config,
        stages=dict.fromkeys(names, replace(stage, rounds=1)),
        data=DataConfig({"shapes": SourceConfig("shapes")}),
        init_from=str(start),
        run_dir=str(tmp_path / "run"),
        precision="fp32",
    )
    (tmp_path / "config.json").write_text(json.dumps(configs.to_dict(config)))


def test_no_process_waits_for_the_export(make_model: Callable[..., WorldModel], tmp_path: Path) -> None:
    written(make_model, tmp_path, "only")
    torchrun(__file__, 2, tmp_path)
    assert (tmp_path / "run" / "model" / "config.json").is_file()


def test_all_processes_stop_between_stages_if_one_is_asked_to(
    make_model: Callable[..., WorldModel], tmp_path: Path
) -> None:
    written(make_model, tmp_path, "first", "second")
    torchrun(__file__, 2, tmp_path)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["00001-first-1"]


if __name__ == "__main__":
    work(Path(sys.argv[1]))
