"""Memory estimates of training steps, without allocating weights."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from worldmodel import config as configs
from worldmodel.cli import main
from worldmodel.config import TrainConfig
from worldmodel.train import memory_estimate

WAN_1B = ["num_attention_heads=12", "num_layers=30", "ffn_dim=8960"]


@pytest.fixture(scope="module")
def small(tiny: SimpleNamespace) -> TrainConfig:
    """The preset of PAN with everything in it tiny."""
    config = configs.load("pan")
    model = config.model
    codec = replace(model.codec, architecture=tiny.VAES["wan"], image_size=32, pretrained=None)
    generator = replace(model.generator, architecture=tiny.TRANSFORMERS["wan"], pretrained=None)
    language = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    backbone = replace(
        model.backbone,
        architecture=model.backbone.architecture | language | {"vocab_size": 300},
        pretrained=None,
    )
    tower = {"depth": 2, "hidden_size": 24, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 48}
    vision = replace(
        model.vision, architecture=model.vision.architecture | tower | {"fullatt_block_indexes": [1]}
    )
    model = replace(
        model, codec=codec, generator=generator, backbone=backbone, vision=vision, chunk_frames=8, queries=8
    )
    return replace(config, model=model)


def test_weights_and_gradients_are_counted_exactly(small: TrainConfig) -> None:
    model = memory_estimate.build_on_meta(small.model)
    kept = memory_estimate.activation_bytes(small)
    held = sum(parameter.nbytes for parameter in model.parameters())
    alone, shared = (memory_estimate.estimate(small, "full", number, kept) for number in (1, 8))
    assert alone.weights == held
    assert (alone.gathered, shared.weights) == (0, held / 8)
    assert alone.optimizer == 2 * alone.gradients
    learned = [model.backbone, model.generator, model.action, model.condition_adapter]
    expected = sum(p.nbytes for part in learned for p in part.parameters()) + model.queries.nbytes
    assert alone.gradients == expected
    assert alone.activations == shared.activations == kept > 0


def test_bf16_weights_take_half_the_memory(small: TrainConfig) -> None:
    """At the width of Wan 14B; all but norms and time embeddings, which diffusers keeps in fp32."""
    wide = {
        "_class_name": "WanTransformer3DModel",
        "num_attention_heads": 40,
        "num_layers": 2,
        "ffn_dim": 13824,
    }
    needs = []
    for dtype in ("fp32", "bf16"):
        generator = replace(small.model.generator, architecture=wide, dtype=dtype)
        codec = replace(small.model.codec, dtype=dtype)
        model = memory_estimate.build_on_meta(replace(small.model, generator=generator, codec=codec))
        needs.append([sum(p.nbytes for p in part.parameters()) for part in (model.generator, model.codec)])
        config = replace(small, model=model.config)
        assert memory_estimate.estimate(config, "lora", 1, 0).weights > needs[-1][0]
    (full, full_codec), (half, half_codec) = needs
    assert half / full == pytest.approx(0.5, rel=0.06)  # the time embedding weighs more beside two layers
    assert half_codec * 2 == full_codec


def test_an_image_encoder_has_weights_but_saves_no_activations(
    small: TrainConfig, tiny: SimpleNamespace
) -> None:
    kept, held = [], []
    for number in (3, 5):
        encoder = tiny.CLIP | {"num_hidden_layers": number}
        architecture = tiny.TRANSFORMERS["wan-clip"] | {"image_encoder": encoder}
        generator = replace(small.model.generator, architecture=architecture)
        config = replace(small, model=replace(small.model, generator=generator, sampler="chunk"))
        kept.append(memory_estimate.activation_bytes(config))
        held.append(memory_estimate.estimate(config, "full", 1, 0).weights)
    assert kept[0] == kept[1] > 0
    assert held[0] < held[1]


def test_lora_has_fewer_gradients(small: TrainConfig) -> None:
    low, full = (
        memory_estimate.estimate(small, "lora", 1, 0, lora_rank=1),
        memory_estimate.estimate(small, "full", 1, 0),
    )
    assert low.gradients < full.gradients / 2  # far fewer in large layers
    assert low.total < full.total


def test_recomputation_saves_less(small: TrainConfig) -> None:
    kept = memory_estimate.activation_bytes(replace(small, activations="keep"))
    assert memory_estimate.activation_bytes(small) < kept


def test_every_layer_saves_the_same_amount(small: TrainConfig) -> None:
    """Each further layer of the language model adds the same, measured with fake tensors."""
    counts = [
        memory_estimate._saved_bytes(memory_estimate._backbone(small.model, 1, count)) for count in (1, 2, 3)
    ]
    assert counts[2] - counts[1] == pytest.approx(counts[1] - counts[0], rel=0.02)


@pytest.mark.slow
def test_the_command_line_prints_estimates_of_large_models(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [f"model.generator.architecture.{each}" for each in WAN_1B]
    assert main(["info", "--plan", "pan", *overrides]) == 0
    out = capsys.readouterr().out
    assert "backbone      7.616 B parameters" in out
    for number in ("1 GPU ", "8 GPUs", "64 GPUs"):
        assert out.count(number) == 2
    assert not torch.cuda.is_available() or torch.cuda.memory_allocated() == 0
    assert main(["info", "shapes-tiny", "seed=1"]) == 2
