"""Layers compile together with every policy for activations, and share their graphs."""

import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import torchrun
from torch._dynamo.utils import counters

from worldmodel import config as configs
from worldmodel.config import StageConfig, TrainConfig, TrainedConfig, WorldModelConfig, build
from worldmodel.models.world_model import WorldModel
from worldmodel.train import distributed, tokenizer
from worldmodel.train.distributed import Root, full_tensor
from worldmodel.train.objectives.registry import OBJECTIVES
from worldmodel.train.trainer import freeze

pytestmark = [pytest.mark.slow, pytest.mark.gpu]
POLICIES = ("keep", "recompute", "selective", "offload")
STAGE = StageConfig("joint", tasks={"rounds": 1.0}, train={"backbone": TrainedConfig()})


def backward(model_config: WorldModelConfig, **settings: Any) -> tuple[torch.Tensor, int]:
    """Run the backbone; returns the gradients of its layers, and the number of graphs that were compiled."""
    torch.compiler.reset()
    counters.clear()
    config = TrainConfig(model=model_config, stages={"only": STAGE}, precision="fp32", **settings)
    mesh = distributed.init(config)
    try:
        torch.manual_seed(0)
        model = WorldModel.from_config(model_config, tokenizer.build_tokenizer(config))
        root = Root(model, OBJECTIVES["joint"](model))
        freeze(model, STAGE)
        distributed.parallelize(root, config, mesh)
        embeds = torch.randn(2, 16, model.backbone.width).to(mesh.device)
        root.gathered(lambda: model.backbone(embeds).square().sum()).backward()
        layers = model.backbone.model.base_model.layers
        gradients = [full_tensor(p.grad).flatten() for p in layers.parameters() if p.grad is not None]
        return torch.cat(gradients), counters["stats"]["unique_graphs"]
    finally:
        distributed.shutdown()


def work(folder: Path, config_file: Path) -> None:
    """Runs in a process of its own: functions wrapped by the tests' shape checks cannot be compiled."""
    tokenizer.NUM_DOCUMENTS = 400
    if not torch.cuda.is_available():  # a machine without a GPU may have no compiler
        torch.compile = functools.partial(torch.compile, backend="aot_eager")
    model = build(WorldModelConfig, json.loads(config_file.read_text()))
    compiled: dict[str, Any] = {}
    for depth in (2, 4):
        architecture = {**model.backbone.architecture, "num_hidden_layers": depth}
        backbone = dataclasses.replace(model.backbone, architecture=architecture)
        config = dataclasses.replace(model, backbone=backbone)
        wanted, graphs = backward(config)
        assert not graphs
        for policy in POLICIES:
            found, graphs = backward(config, compile=True, activations=policy)
            error = float((found - wanted).norm() / wanted.norm())
            compiled[f"{policy} {depth}"] = {"graphs": graphs, "error": error}
    (folder / "compiled.json").write_text(json.dumps(compiled))


@pytest.fixture(scope="module")
def compiled(
    tmp_path_factory: pytest.TempPathFactory, make_model: Callable[..., WorldModel]
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("compile")
    config_file = folder / "model.json"
    config_file.write_text(json.dumps(configs.to_dict(make_model(image_size=64).config)))
    torchrun(__file__, 1, folder, config_file)
    return json.loads((folder / "compiled.json").read_text())


@pytest.mark.parametrize("policy", POLICIES)
def test_layers_compile_and_share_their_graphs(compiled: dict[str, Any], policy: str) -> None:
    shallow, deep = compiled[f"{policy} 2"], compiled[f"{policy} 4"]
    assert shallow["graphs"] == deep["graphs"] > 0
    assert max(shallow["error"], deep["error"]) < 1e-5


if __name__ == "__main__":
    work(Path(sys.argv[1]), Path(sys.argv[2]))
