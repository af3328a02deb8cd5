"""Training on latents of causal codecs, and on text states, that were computed before it."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import precomputed
import pytest
import torch
from architectures import DECODER, SIGLIP
from transformers import PreTrainedTokenizerBase

from worldmodel.config import (
    ActionConfig,
    BackboneConfig,
    CodecConfig,
    ConditionAdapterConfig,
    GeneratorConfig,
    StageConfig,
    TrainConfig,
    TrainedConfig,
    VisionConfig,
    WorldModelConfig,
)
from worldmodel.errors import ConfigError
from worldmodel.models.world_model import WorldModel
from worldmodel.train import start

TEXTS = ("it goes left", "everything around it vanishes at once")
TRAINED = {name: TrainedConfig() for name in ("adapters", "generator.network")}
SIZE = (16, 32)
Adapter = Literal["prompt", "stream"]
Make = Callable[..., tuple[TrainConfig, WorldModel]]


@pytest.fixture
def make(tiny: SimpleNamespace, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Make the config of a run and a model with a text encoder."""
    monkeypatch.setattr(start, "build_tokenizer", lambda config: tokenizer)

    def make(
        kind: str,
        objective: str,
        encoder: dict[str, Any] | None = None,
        adapter: Adapter = "stream",
    ) -> tuple[TrainConfig, WorldModel]:
        vae = tiny.VAES[tiny.family(kind)]
        text = {"model_type": "umt5" if kind == "wan" else "t5", "d_model": tiny.TEXT, "d_kv": 8, "d_ff": 32}
        text |= {"num_layers": 2, "num_heads": 2, "vocab_size": 384}
        config = WorldModelConfig(
            codec=CodecConfig(
                image_size=SIZE,
                temporal_factor=4,
                latent_channels=vae.get("z_dim") or vae["latent_channels"],
                architecture=dict(vae),
            ),
            backbone=BackboneConfig(architecture=DECODER | {"model_type": "qwen3"}),
            vision=VisionConfig(architecture=encoder or {}, max_frames=4, width=32, num_blocks=1),
            action=ActionConfig(text={"max_tokens": 64}),
            condition_adapter=ConditionAdapterConfig(
                kind=adapter, width=32, num_layers=1, num_heads=2, num_tokens=6, text=True
            ),
            generator=GeneratorConfig(architecture=tiny.TRANSFORMERS[kind] | {"text_encoder": text}),
            queries=8 if encoder else 0,
            chunk_frames=8,
            context_latents=2,
        )
        stage = StageConfig(objective, steps=1, batch_size=2, rounds=2, train=TRAINED, tasks={"rounds": 1.0})
        torch.manual_seed(0)
        model = WorldModel.from_config(config, tokenizer)
        return TrainConfig(model=config, stages={"only": stage}, precision="fp32"), model

    return make


@pytest.fixture
def frames() -> np.ndarray:
    """A clip of three rounds."""
    return np.random.default_rng(0).integers(0, 255, (25, *SIZE, 3), dtype=np.uint8)


@pytest.fixture
def forbid(monkeypatch: pytest.MonkeyPatch) -> Callable[[WorldModel], None]:
    """Make a model's codec and text encoder fail when they are called in a step."""

    def forbid(model: WorldModel) -> None:
        def fail(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError("encoded in the step")

        for part in (type(model.codec), type(model.generator)):
            for name in {"encode", "embed_text"} & set(dir(part)):
                monkeypatch.setattr(part, name, fail)

    return forbid


@pytest.mark.parametrize(
    ("kind", "objective", "task", "encoder", "adapter"),
    [
        pytest.param("wan", "generator", "rounds", None, "stream", marks=pytest.mark.slow),
        ("wan", "generator", "describe", None, "stream"),
        pytest.param("wan", "joint", "imagine", None, "prompt", marks=pytest.mark.slow),
        pytest.param("wan", "prompt", "rounds", SIGLIP, "prompt", marks=pytest.mark.slow),
        pytest.param("ltx", "joint", "rounds", None, "prompt", marks=pytest.mark.slow),
        pytest.param("cog-i2v", "generator", "rounds", SIGLIP, "stream", marks=pytest.mark.slow),
    ],
)
def test_a_step_on_latents_and_text_states_equals_the_step_that_encodes(
    make: Make, frames: np.ndarray, forbid: Callable[[WorldModel], None],
    kind: str, objective: str, task: str, encoder: dict[str, Any] | None, adapter: Adapter,
) -> None:  # fmt: skip
    config, model = make(kind, objective, encoder, adapter)
    texts = TEXTS if task == "rounds" else TEXTS[:1]
    pairs = [precomputed.pair(model, frames, task, texts, first) for first in (0, 1)]
    plain, encoded = zip(*pairs, strict=True)
    expected = precomputed.step(config, model, task, plain)
    forbid(model)
    assert precomputed.step(config, model, task, encoded) == pytest.approx(expected, rel=1e-5)
    assert expected["gradient_norm"] > 0


def test_other_texts_are_encoded_in_the_step(make: Make, frames: np.ndarray) -> None:
    config, model = make("wan", "generator")
    plain, encoded = precomputed.pair(model, frames, "rounds", TEXTS)
    states = encoded.text_states or {}
    encoded = replace(encoded, text_states={text: states[text] for text in TEXTS[:1]})
    expected = precomputed.step(config, model, "rounds", [plain])
    assert precomputed.step(config, model, "rounds", [encoded]) == pytest.approx(expected, rel=1e-5)


def test_text_states_of_another_encoder_are_refused(make: Make, frames: np.ndarray) -> None:
    config, model = make("wan", "generator")
    _, encoded = precomputed.pair(model, frames, "rounds", TEXTS)
    states = {text: np.repeat(state, 2, axis=1) for text, state in (encoded.text_states or {}).items()}
    with pytest.raises(ConfigError, match=r"width 64.*precomputed"):
        precomputed.step(config, model, "rounds", [replace(encoded, text_states=states)])


def test_text_states_that_are_too_long_are_refused(make: Make, frames: np.ndarray) -> None:
    config, model = make("wan", "generator")
    _, encoded = precomputed.pair(model, frames, "rounds", TEXTS)
    most, width = model.generator.max_text_tokens, model.generator.text_width
    states = dict.fromkeys(encoded.text_states or {}, np.ones((most, width), np.float32))
    losses = precomputed.step(config, model, "rounds", [replace(encoded, text_states=states)])
    assert np.isfinite(losses["loss"])
    states |= {TEXTS[0]: np.ones((most + 1, width), np.float32)}
    with pytest.raises(ConfigError, match=rf"{most + 1} tokens.*up to {most} .*precomputed"):
        precomputed.step(config, model, "rounds", [replace(encoded, text_states=states)])
