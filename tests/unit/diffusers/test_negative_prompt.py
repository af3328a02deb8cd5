"""Guidance away from a text, for models whose generator reads text."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
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
    VisionConfig,
    WorldModelConfig,
)
from worldmodel.errors import ConfigError, InputError
from worldmodel.models.world_model import WorldModel
from worldmodel.serving.worlds.service import WorldService

ACTION, NEGATIVE = "the red ball moves left", "a blue box, blurred"
SETTINGS: dict[str, Any] = {"seed": 3, "num_inference_steps": 2, "guidance_scale": 3.0}


@pytest.fixture
def reads_text(pipeline: Callable[..., Any], tokenizer: PreTrainedTokenizerBase) -> WorldModel:
    folder, _ = pipeline("wan")
    torch.manual_seed(0)
    config = WorldModelConfig(
        codec=CodecConfig(image_size=32, temporal_factor=4, latent_channels=16, pretrained=str(folder)),
        backbone=BackboneConfig(architecture=DECODER),
        vision=VisionConfig(architecture=SIGLIP, max_frames=2),
        action=ActionConfig(text={"max_tokens": 64}),
        condition_adapter=ConditionAdapterConfig(
            kind="stream", width=32, num_layers=1, num_heads=2, num_tokens=6, text=True
        ),
        generator=GeneratorConfig(pretrained=str(folder)),
        queries=8,
    )
    return WorldModel.from_config(config, tokenizer).eval().requires_grad_(False)


def test_guidance_leads_away_from_a_negative_prompt(reads_text: WorldModel, image: np.ndarray) -> None:
    def play(negative: str | None, **settings: Any) -> np.ndarray:
        session = reads_text.session(**SETTINGS | settings, negative_prompt=negative)
        session.reset(image)
        return session.fork().step(ACTION).frames

    async def serve() -> np.ndarray:
        service = WorldService(reads_text)
        try:
            world = await service.start(image[None], **SETTINGS, negative_prompt=NEGATIVE)
            return await world.step(ACTION)
        finally:
            await service.close()

    plain, negative = play(None), play(NEGATIVE)
    assert not np.array_equal(plain, negative)
    assert np.array_equal(negative, asyncio.run(serve()))
    # The text is where the unconditional condition has none; the states are those of no state in both.
    context = torch.zeros(1, 1, *reads_text.config.latent_shape[1:])
    null, away = reads_text.null_condition(context), reads_text.null_condition(context, NEGATIVE)
    assert away.text is not None and away.tokens is not None and null.tokens is not None
    text = reads_text.generator.encode_distinct([NEGATIVE])
    assert text is not None and torch.equal(away.text, text)
    assert torch.equal(away.tokens, null.tokens)
    with pytest.raises(ConfigError, match="guidance_scale 1"):
        play(NEGATIVE, guidance_scale=1.0)


def test_a_model_that_reads_no_text_refuses_a_negative_prompt(model: WorldModel) -> None:
    with pytest.raises(ConfigError, match="negative_prompt"):
        model.session(guidance_scale=2.0, negative_prompt=NEGATIVE)
    service = WorldService(model)
    try:
        with pytest.raises(InputError, match="negative_prompt"):
            service.settings(guidance_scale=2.0, negative_prompt=NEGATIVE)
    finally:
        asyncio.run(service.close())
