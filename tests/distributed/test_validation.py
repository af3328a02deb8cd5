"""The loss on held-out episodes, and what the codec alone returns of them, are the same on any mesh."""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import torchrun

from worldmodel import config as configs
from worldmodel.config import (
    DataConfig,
    MeshConfig,
    SourceConfig,
    StageConfig,
    TrainConfig,
    TrainedConfig,
    ValidationConfig,
)
from worldmodel.models.world_model import WorldModel
from worldmodel.parallel.mesh import Mesh
from worldmodel.train.diagnostics import codec_ceiling
from worldmodel.train.trainer import Trainer
from worldmodel.train.validation import validate

pytestmark = pytest.mark.slow
STAGE = StageConfig(
    "joint",
    batch_size=5,
    microbatch_size=2,
    rounds=1,
    tasks={"rounds": 0.5, "describe": 0.5},
    train={"adapters": TrainedConfig()},
)
MESHES = {
    1: {"alone": MeshConfig()},
    2: {"shard": MeshConfig(dp_shard=2), "sp": MeshConfig(sp=2)},
}


def work(folder: Path) -> None:
    """Runs in each process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config = configs.build(TrainConfig, json.loads((folder / "config.json").read_text()))
    for name, mesh_config in MESHES[dist.get_world_size()].items():
        mesh = Mesh.build(mesh_config, torch.device("cpu"))
        trainer, _ = Trainer.start(dataclasses.replace(config, mesh=mesh_config), "joint", mesh, None)
        twice = [validate(trainer) for _ in range(2)]
        assert twice[0] == twice[1]
        data = codec_ceiling.frames_data(config)
        assert data is not None
        ceilings = [codec_ceiling.measure(trainer, data) for _ in range(2)]
        assert ceilings[0] == ceilings[1]
        assert (ceilings[0] is not None) == mesh.first
        codec = dataclasses.asdict(ceilings[0]) if ceilings[0] else {}
        (folder / f"{name}.{mesh.rank}.json").write_text(json.dumps({"losses": twice[0], "codec": codec}))
    dist.destroy_process_group()


def test_the_validation_loss_does_not_depend_on_the_mesh(
    make_model: Callable[..., WorldModel], tmp_path: Path
) -> None:
    start = make_model(image_size=64).save_pretrained(tmp_path / "start")
    config = TrainConfig(
        model=make_model(image_size=64).config,
        init_from=str(start),
        stages={"joint": STAGE},
        data=DataConfig(
            {"shapes": SourceConfig("shapes"), "held": SourceConfig("shapes", split="val", weight=0.0)}
        ),
        validation=ValidationConfig("held", batches=3, codec_frames=36),
        precision="fp32",
    )
    (tmp_path / "config.json").write_text(json.dumps(configs.to_dict(config)))
    for processes in MESHES:
        torchrun(__file__, processes, tmp_path)
    expected = json.loads((tmp_path / "alone.0.json").read_text())
    assert {"validation/loss", "validation/flow", "validation/nll"} <= expected["losses"].keys()
    assert expected["codec"]["num_frames"] == 36
    for name in MESHES[2]:
        for rank in range(2):
            found = json.loads((tmp_path / f"{name}.{rank}.json").read_text())
            assert found["losses"] == pytest.approx(expected["losses"], rel=2e-5)
            assert found["codec"] == (pytest.approx(expected["codec"], rel=1e-3) if rank == 0 else {})


if __name__ == "__main__":
    work(Path(sys.argv[1]))
