"""Deferred loading of generators and codecs: each process reads its own shards, and all buffers are real."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from architectures import DECODER
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedTokenizerBase

from worldmodel.config import (
    ActionConfig,
    BackboneConfig,
    CodecConfig,
    ConditionAdapterConfig,
    GeneratorConfig,
    MeshConfig,
    StageConfig,
    TrainConfig,
    TrainedConfig,
    VisionConfig,
    WorldModelConfig,
)
from worldmodel.models.loading import deferred
from worldmodel.models.world_model import WorldModel
from worldmodel.parallel.mesh import Mesh
from worldmodel.train import distributed
from worldmodel.train.distributed import Root
from worldmodel.train.objectives.registry import OBJECTIVES
from worldmodel.train.trainer import freeze

CHANNELS = {"wan": 16, "ltx": 8, "cog": 4}


def settings(
    folder: Path, kind: str, condition: Any, dtype: Any = "fp32", text: bool = True
) -> WorldModelConfig:
    """A model whose generator, codec and text encoder are in the folder of a pipeline."""
    return WorldModelConfig(
        codec=CodecConfig(
            image_size=32,
            temporal_factor=4,
            latent_channels=CHANNELS[kind],
            pretrained=str(folder),
            dtype=dtype,
        ),
        backbone=BackboneConfig(architecture=DECODER),
        vision=VisionConfig(width=32, num_blocks=1),
        action=ActionConfig(text={"max_tokens": 64}),
        condition_adapter=ConditionAdapterConfig(
            kind=condition, width=32, num_layers=1, num_heads=2, num_tokens=6, text=text
        ),
        generator=GeneratorConfig(pretrained=str(folder), dtype=dtype),
        chunk_frames=12,
    )


def build(config: WorldModelConfig, tokenizer: PreTrainedTokenizerBase) -> WorldModel:
    torch.manual_seed(4)
    return WorldModel.from_config(config, tokenizer)


def tensors(model: WorldModel) -> dict[str, Tensor]:
    """Weights, and buffers that are in no file."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


class Counted:
    """A slice that counts how many numbers were read."""

    numbers = 0

    def __init__(self, slices: Any) -> None:
        self.slices = slices

    def __getitem__(self, index: Any) -> Tensor:
        found = self.slices[index]
        Counted.numbers += found.numel()
        return found


@pytest.mark.parametrize(
    ("kind", "condition", "dtype"),
    [
        ("wan", "stream", "fp32"),
        ("wan", "stream", "bf16"),
        ("ltx", "stream", "fp32"),
        ("cog", "prompt", "bf16"),
    ],
)
def test_deferred_weights_are_those_of_a_model_read_whole(
    tiny: SimpleNamespace,
    pipeline: Callable[..., Any],
    tokenizer: PreTrainedTokenizerBase,
    kind: str,
    condition: str,
    dtype: str,
) -> None:
    config = settings(pipeline(kind)[0], kind, condition, dtype)
    whole = tensors(build(config, tokenizer))
    with deferred.loading():
        model = build(config, tokenizer)
    parts = {name.split(".")[0] for name, parameter in model.named_parameters() if parameter.is_meta}
    assert parts == {"generator", "codec"}
    waiting = [
        name for name, parameter in model.named_parameters() if name.startswith(("generator", "codec"))
    ]
    assert all(dict(model.named_parameters())[name].is_meta for name in waiting)
    assert {*waiting} <= deferred.names(model)
    assert all(file.is_file() for file in deferred.files(model).values())
    deferred.materialize(model, torch.device("cpu"))
    deferred.load_shards(model)
    found = tensors(model)
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name], tensor), name


@pytest.fixture
def two_processes() -> Iterator[None]:
    """The first of two processes, the other of which does not exist: collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("two_processes")
def test_a_process_reads_and_holds_half_of_a_generator(
    tiny: SimpleNamespace,
    pipeline: Callable[..., Any],
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = settings(pipeline("wan")[0], "wan", "stream", text=False)
    attach = deferred.attach

    def counted(module: Any, slices: Any, *files: Any) -> None:
        wrapped = {name: x if isinstance(x, Counted) else Counted(x) for name, x in slices.items()}
        attach(module, wrapped, *files)

    monkeypatch.setattr(deferred, "attach", counted)
    monkeypatch.setattr(Counted, "numbers", 0)
    with deferred.loading():
        model = build(config, tokenizer)
    stage = StageConfig("generator", train={"generator": TrainedConfig()}, tasks={"rounds": 1.0})
    run = TrainConfig(model=config, stages={"generator": stage}, mesh=MeshConfig(dp_shard=2))
    root = Root(model, OBJECTIVES["generator"](model))
    freeze(model, stage)
    distributed.parallelize(root, run, Mesh.build(run.mesh, torch.device("cpu")))
    deferred.load_shards(root)
    parameters = [*model.generator.parameters(), *model.codec.parameters()]
    held = sum(distributed.to_local(parameter).numel() for parameter in parameters)
    whole = sum(parameter.numel() for parameter in parameters)
    assert held <= 0.55 * whole  # the first half of an odd axis is larger
    assert Counted.numbers <= held
