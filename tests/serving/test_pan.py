"""PAN in small: its own lengths (tokens, queries, rounds, frames), tiny widths, served for 30 rounds."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from architectures import QWEN_VL, WAN, WAN_VAE
from transformers import PreTrainedTokenizerBase

from worldmodel import config as configs
from worldmodel.config import WorldModelConfig
from worldmodel.errors import ConfigError
from worldmodel.models.world_model import WorldModel
from worldmodel.serving.engine import limits
from worldmodel.serving.engine.batching import Compute
from worldmodel.serving.engine.local import Engine, InProcessEngine
from worldmodel.serving.errors import UnavailableError
from worldmodel.serving.settings import EngineOptions
from worldmodel.serving.worlds.saved import Origin, SavedWorld
from worldmodel.serving.worlds.service import WorldService

pytest.importorskip("diffusers", reason="diffusers is not installed: openworldmodel[diffusers]")

NUM_ROUNDS, ROUND_TOKENS = 30, 1312
"""PAN has 1,308 positions a round at its own resolution."""


def small() -> WorldModelConfig:
    """The shipped config with other widths, and pixels so small that it has as many vision tokens."""
    pan = configs.load("pan", []).model
    backbone = pan.backbone.architecture | {
        **{"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
    }
    vision = QWEN_VL | {"patch_size": 2, "window_size": 32, "out_hidden_size": 64}
    return replace(
        pan,
        codec=replace(pan.codec, pretrained=None, architecture=WAN_VAE, image_size=(64, 128)),
        backbone=replace(pan.backbone, pretrained=None, dtype="fp32", architecture=backbone),
        vision=replace(pan.vision, encoder=None, architecture=vision),
        condition_adapter=replace(pan.condition_adapter, text=False),
        generator=replace(pan.generator, pretrained=None, architecture=WAN),
        num_inference_steps=2,
    )


@pytest.fixture(scope="module")
def pan(tokenizer: PreTrainedTokenizerBase) -> WorldModel:
    torch.manual_seed(0)
    return WorldModel.from_config(small(), tokenizer).eval().requires_grad_(False)


def test_limits_hold_every_history_of_pan(pan: WorldModel) -> None:
    found = limits.resolve(EngineOptions(), pan, "vllm", free_bytes=2**34)
    assert pan.round_tokens == ROUND_TOKENS
    assert found.max_model_len > pan.config.context_rounds * ROUND_TOKENS
    assert found.kv_bytes >= found.max_sessions * found.max_model_len * 2 * 2 * 32 * 4  # keys and values


def test_options_that_cannot_hold_pan_are_refused_with_the_numbers(pan: WorldModel) -> None:
    for options, named in (
        (EngineOptions(max_model_len=4096), "14433 positions .11 rounds of 1312.*4096"),
        (EngineOptions(max_model_len=200_000), "128000"),
        (EngineOptions(kv_cache_memory=2**20), "1.0 MiB, but one session of 20065 positions need 9.8 MiB"),
        (EngineOptions(max_sessions=4, kv_cache_memory=2**24), "16.0 MiB, but 4 sessions"),
        (EngineOptions(max_sessions=1000), "9.6 GiB .* do not fit into the 1023.6 MiB"),
    ):
        with pytest.raises(ConfigError, match=named):
            limits.resolve(options, pan, "vllm", free_bytes=2**30)
    fewer = limits.resolve(EngineOptions(dtype="bfloat16"), pan, "vllm", free_bytes=2**26)
    assert 1 <= fewer.max_sessions < limits.MAX_SESSIONS  # what fits
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2"):
        limits.resolve(EngineOptions(tensor_parallel_size=2), pan, "in-process")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["in-process", "vllm"])
def test_pan_is_served_for_thirty_rounds(pan: WorldModel, name: str, tmp_path: Path) -> None:
    """Three times as many rounds as its history has."""
    found = limits.resolve(EngineOptions(max_sessions=2), pan, name)

    async def engine(compute: Compute) -> Engine:
        if name == "in-process":
            return InProcessEngine(pan.backbone, compute, None, found.kv_bytes, found.max_model_len)
        pytest.importorskip("vllm")
        from worldmodel.serving.engine.vllm_engine import VllmEngine

        pan.backbone.save_pretrained(tmp_path / "backbone")
        return await VllmEngine.start(tmp_path / "backbone", limits=found)

    async def body() -> None:
        compute = Compute()
        service = WorldService(pan, await engine(compute), compute=compute)
        try:
            world = await service.start(np.zeros((1, 64, 128, 3), np.uint8))
            clips = [await world.step("the car turns left") for _ in range(NUM_ROUNDS)]
            assert (world.round, clips[-1].shape) == (NUM_ROUNDS, (40, 64, 128, 3))
            assert service.stats()["kv_bytes"] <= found.kv_bytes
        finally:
            await service.close()

    asyncio.run(body())


@pytest.mark.slow
@pytest.mark.parametrize("start", ["frames", "text"])
def test_pan_is_exported_and_goes_on_elsewhere(pan: WorldModel, start: str) -> None:
    """A causal codec, and a chunk that the next one overlaps."""

    async def body() -> None:
        here, there = WorldService(pan), WorldService(pan)
        try:
            first = {"text": "a car"} if start == "text" else {"frames": np.zeros((1, 64, 128, 3), np.uint8)}
            world = await here.start(**first)  # type: ignore[arg-type]
            for _ in range(2):
                data = SavedWorld(world.settings, world.state(), Origin()).to_bytes(here.identity)
                saved = SavedWorld.from_bytes(data, pan, there.identity)
                copy = await there.resume(saved.settings, saved.state)
                clips = [await each.step("the car turns left") for each in (world, copy)]
                assert np.array_equal(*clips)
        finally:
            await here.close()
            await there.close()

    asyncio.run(body())


def test_a_history_above_the_limit_is_an_error_of_the_server(model: WorldModel, image: np.ndarray) -> None:
    async def body() -> None:
        compute = Compute()
        engine = InProcessEngine(model.backbone, compute, max_model_len=2 * model.round_tokens)
        service = WorldService(model, engine, compute=compute)
        try:
            world = await service.start(image[None])
            await world.step(None)
            await world.step(None)
            with pytest.raises(UnavailableError, match=rf"max_model_len {2 * model.round_tokens}"):
                await world.step(None)
            assert world.round == 2
        finally:
            await service.close()

    asyncio.run(body())
