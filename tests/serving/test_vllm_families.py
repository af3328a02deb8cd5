"""vLLM with backbones of several model families, compared with transformers."""

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from worldmodel.config import BackboneConfig
from worldmodel.models.backbone.causal_lm import Backbone

pytest.importorskip("vllm")

from worldmodel.serving.engine.completion import TextParams
from worldmodel.serving.engine.limits import EngineLimits
from worldmodel.serving.engine.vllm_engine import VllmEngine

WIDTH, NUM_QUERIES, ROUND = 64, 20, 60
FAMILIES = ("qwen2", "llama", "mistral", "gemma")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", FAMILIES)
def test_states_and_text_match_transformers(
    family: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    architecture = {
        "model_type": family,
        "hidden_size": WIDTH,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,  # heads of 32 in every family: vLLM has none smaller on CPUs
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(0)
    Backbone.from_config(BackboneConfig(architecture=architecture), tokenizer).save_pretrained(tmp_path)
    backbone = Backbone.from_pretrained(tmp_path).eval()
    history = tuple(torch.randn(ROUND, WIDTH) * 0.125 for _ in range(3))
    with torch.no_grad():
        expected = backbone(torch.cat(history)[None])[0, -NUM_QUERIES:]
    said = backbone.decode_text(history[0][None], backbone.new_cache(), 12)[0]

    limits = EngineLimits(torch.float32, 512, kv_bytes=10**8, max_sessions=16)

    async def compare() -> None:
        engine = await VllmEngine.start(tmp_path, limits=limits)
        try:
            for rounds in (2, 3):  # the second time on top of what is cached
                states = await engine.predict_states(history[:rounds], NUM_QUERIES)
            torch.testing.assert_close(states, expected, atol=1e-4, rtol=1e-4)
            tokens = [token async for token in engine.generate_tokens(history[0], TextParams(12))]
            assert backbone.text(tokens) == said
        finally:
            await engine.close()

    asyncio.run(compare())
