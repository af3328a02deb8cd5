"""Processes that share a sequence compute vision and text encoders, codecs and the vocabulary's loss once.

Each of them encodes some of the frames, texts or rounds and scores some of the tokens; the loss and gradients
are those of one process, in fp64.
"""

import importlib.util
import json
import math
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from architectures import QWEN_VL, SIGLIP, TEXT, WAN, WAN_VAE
from precise import in_fp64
from processes import results_of
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen2Config

from worldmodel.config import CodecConfig, MeshConfig, VisionConfig
from worldmodel.models.backbone.causal_lm import Backbone
from worldmodel.models.layers import attention
from worldmodel.models.rounds import RoundEncoder
from worldmodel.models.vision.adapter import Observation
from worldmodel.models.vision.encoders import EncoderVision
from worldmodel.parallel.mesh import Mesh, SequenceGroup
from worldmodel.train.objectives.language import text_loss

pytestmark = pytest.mark.slow
ENCODERS = {"siglip": SIGLIP, "qwen2_5_vl": QWEN_VL}
MESHES = [MeshConfig(sp=2), MeshConfig(cp=2), MeshConfig(sp=4), MeshConfig(cp=2, sp=2)]
FRAMES = 3
"""Frames of each of two clips: six groups of one frame, or four of two."""
LABELS = [[-100, 3, 1, -100, 5, 2, 4], [6, -100, 0]]
"""Seven tokens are scored, which no mesh divides evenly."""
TEXTS = ["left", "it goes on and on", "left", "", "right", "the end", "up"]
"""Six texts, of which one is given twice."""


@cache
def mesh_of(config: MeshConfig) -> Mesh:
    return Mesh.build(config, torch.device("cpu"))


def vision_of(name: str) -> tuple[Any, Any]:
    """Return a vision encoder with its adapter, and a function from them to a loss."""
    torch.manual_seed(0)
    config = VisionConfig(architecture=ENCODERS[name], max_frames=FRAMES, width=32, num_blocks=1)
    vision: Any = EncoderVision.from_config(config, 48, image_size=32)
    in_fp64(vision)
    frames = torch.rand(2, FRAMES, 3, 32, 32, dtype=torch.float64) * 2 - 1

    def loss() -> Tensor:
        tokens = vision(Observation(frames[:, :0], frames)).tokens
        return (tokens * torch.linspace(-1, 1, tokens.numel()).view_as(tokens)).sum()

    return vision, loss


def language_of(name: str) -> tuple[Any, Any]:
    """Return a backbone, and a function from it to the loss of packed texts."""
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=11,
    )
    tokenizer: Any = SimpleNamespace(eos_token_id=0)  # nothing is tokenized
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    backbone: Any = Backbone(model, tokenizer)
    in_fp64(backbone)
    embeds = [torch.randn(len(row), 32, dtype=torch.float64) for row in LABELS]
    world: Any = SimpleNamespace(backbone=backbone)
    return backbone, lambda: text_loss(world, embeds, [torch.tensor(row) for row in LABELS])


def learn(part: Any, loss: Any, counted: nn.Module, group: SequenceGroup) -> dict[str, Any]:
    """Return the loss, all gradients, and how many items a module was given."""
    seen: list[int] = []
    handle = counted.register_forward_hook(lambda module, inputs, out: seen.append(len(inputs[0])))
    part.sequence = group
    value = loss()
    value.backward()
    handle.remove()
    gradients = {name: p.grad for name, p in part.named_parameters() if p.grad is not None}
    part.zero_grad(set_to_none=True)
    for gradient in gradients.values() if group.size > 1 else ():
        dist.all_reduce(gradient, group=group.group)
        gradient /= group.size
    return {"loss": float(value.detach()), "gradients": gradients, "items": sum(seen)}


def measure(name: str) -> dict[str, dict[str, Any]]:
    """Compare processes that share a part with one process, on every mesh."""
    part, loss = (language_of if name == "language" else vision_of)(name)
    counted = part.model.get_output_embeddings() if name == "language" else part.encoder
    alone, found = learn(part, loss, counted, SequenceGroup()), {}
    largest = max(gradient.norm() for gradient in alone["gradients"].values())
    for mesh in MESHES:
        shared = learn(part, loss, counted, mesh_of(mesh).sequence)
        assert shared["gradients"].keys() == alone["gradients"].keys()
        errors = [
            float((shared["gradients"][key] - truth).norm() / truth.norm().clamp(min=1e-4 * largest))
            for key, truth in alone["gradients"].items()
        ]
        found[f"cp {mesh.cp} sp {mesh.sp}"] = {
            "loss": abs(shared["loss"] / alone["loss"] - 1),
            "gradient": max(errors),
            "items": shared["items"],
        }
    return found


def measure_codec() -> dict[str, dict[str, Any]]:
    """Compare the latents of the rounds of two episodes, divided on every mesh, with those of one process."""
    from worldmodel.models.codec.diffusers import DiffusersCodec

    torch.manual_seed(0)
    config = CodecConfig(image_size=16, temporal_factor=4, latent_channels=16, architecture=WAN_VAE)
    codec = DiffusersCodec.from_config(config)
    in_fp64(codec)
    seen: list[int] = []
    codec.vae.encoder.register_forward_hook(lambda module, inputs, out: seen.append(len(inputs[0])))
    first, *clips = (torch.rand(2, count, 3, 16, 16, dtype=torch.float64) * 2 - 1 for count in (1, 8, 8))

    def encode(group: SequenceGroup) -> tuple[tuple[Tensor, Tensor], int]:
        seen.clear()
        with torch.no_grad():
            return RoundEncoder(codec, 2, 2, 8, group).rounds(first, clips), sum(seen)

    (alone, whole), found = encode(SequenceGroup()), {}
    for mesh in MESHES:
        made, items = encode(mesh_of(mesh).sequence)
        errors = [float((x - y).abs().max()) for x, y in zip(made, alone, strict=True)]
        found[f"cp {mesh.cp} sp {mesh.sp}"] = {"error": max(errors), "items": items, "whole": whole}
    return found


def measure_texts() -> dict[str, dict[str, Any]]:
    """Compare the embeddings of texts, divided on every mesh, with those of one process."""
    from worldmodel.models.generator.diffusers.base import Clip
    from worldmodel.models.generator.diffusers.wan import WanGenerator

    torch.manual_seed(0)
    transformer, clip = WanGenerator.transformer_class(**WAN), Clip(1, 1, (2, 2), 4, 8, 16)
    generator: Any = WanGenerator(transformer, WanGenerator.read_scheduler({}), clip, False)
    sizes = {"d_model": TEXT, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 384}
    generator.text_architecture = {"model_type": "umt5", **sizes}
    generator.add_text_encoder()
    in_fp64(generator)
    seen: list[int] = []
    generator.text_encoder.register_forward_hook(lambda module, inputs, out: seen.append(len(inputs[0])))

    def encode(texts: list[str], group: SequenceGroup) -> tuple[Tensor, int]:
        seen.clear()
        generator.sequence = group
        return generator.encode_distinct(texts), sum(seen)

    found = {}
    for mesh in MESHES:
        group, made = mesh_of(mesh).sequence, {}
        for name, texts in {"many": TEXTS, "one": TEXTS[:1]}.items():
            shared, items = encode(texts, group)
            error = float((shared - encode(texts, SequenceGroup())[0]).abs().max())
            made[name] = {"error": error, "items": items}
        found[f"cp {mesh.cp} sp {mesh.sp}"] = made
    return found


def work(folder: Path) -> None:
    """Runs in each process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    narrow = torch.Tensor.float
    torch.Tensor.float = lambda x: x if x.dtype == torch.float64 else narrow(x)  # type: ignore[method-assign]
    found = {name: measure(name) for name in (*ENCODERS, "language")}
    if importlib.util.find_spec("diffusers"):
        found["codec"], found["texts"] = measure_codec(), measure_texts()
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The measurements of every process."""
    folder = tmp_path_factory.mktemp("world")
    return results_of(__file__, 4, folder)


@pytest.mark.parametrize("name", [*ENCODERS, "language"])
def test_loss_and_gradients_are_those_of_one_process(world: list[dict], name: str) -> None:
    for rank in world:
        for measured in rank[name].values():
            assert measured["loss"] <= 1e-12
            assert measured["gradient"] <= 1e-12


@pytest.mark.parametrize(("name", "total"), [("siglip", 6), ("qwen2_5_vl", 4), ("language", 7)])
def test_every_process_computes_its_part(world: list[dict], name: str, total: int) -> None:
    for mesh in MESHES:
        items = [rank[name][f"cp {mesh.cp} sp {mesh.sp}"]["items"] for rank in world]
        size = mesh.cp * mesh.sp
        assert sum(items[:size]) == total
        assert max(items) - min(items) <= 1


def test_rounds_are_divided_for_a_causal_codec(world: list[dict]) -> None:
    pytest.importorskip("diffusers", reason="diffusers is not installed: openworldmodel[diffusers]")
    for rank in world:
        for name, measured in rank["codec"].items():
            assert measured["error"] <= 1e-12
            size = math.prod(map(int, name.split()[1::2]))
            assert measured["items"] <= measured["whole"] / size


def test_texts_are_divided_for_a_text_encoder(world: list[dict]) -> None:
    pytest.importorskip("diffusers", reason="diffusers is not installed: openworldmodel[diffusers]")
    for mesh in MESHES:
        name, size = f"cp {mesh.cp} sp {mesh.sp}", mesh.cp * mesh.sp
        found = [rank["texts"][name] for rank in world]
        assert max(each[texts]["error"] for each in found for texts in ("many", "one")) <= 1e-12
        items = [each["many"]["items"] for each in found]
        assert sum(items[:size]) == len(set(TEXTS))
        assert max(items) - min(items) <= 1
        assert [each["one"]["items"] for each in found] == [1] * len(world)  # fewer texts than processes


if __name__ == "__main__":
    work(Path(sys.argv[1]))
