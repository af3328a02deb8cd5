"""The end of a run: the first process exports the model while the others leave."""

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
    """Runs in each process: the first one exports only after the other has left."""
    config = configs.build(TrainConfig, json.loads((folder / "config.json").read_text()))
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


def test_no_process_waits_for_the_export(make_model: Callable[..., WorldModel], tmp_path: Path) -> None:
    model = make_model(image_size=64, world="shapes")
    start = model.save_pretrained(tmp_path / "start")
    stage = StageConfig(
        "alignment", steps=1, batch_size=2, tasks={"rounds": 1.0}, train={"vision": TrainedConfig()}
    )
    config = TrainConfig(
        model=model.config,
        stages={"only": replace(stage, rounds=1)},
        data=DataConfig({"shapes": SourceConfig("shapes")}),
        init_from=str(start),
        run_dir=str(tmp_path / "run"),
        precision="fp32",
    )
    (tmp_path / "config.json").write_text(json.dumps(configs.to_dict(config)))
    torchrun(__file__, 2, tmp_path)
    assert (tmp_path / "run" / "model" / "config.json").is_file()


if __name__ == "__main__":
    work(Path(sys.argv[1]))
