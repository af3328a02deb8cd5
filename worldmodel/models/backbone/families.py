"""Families of language models that may be the backbone."""

from collections.abc import Container

from transformers import Qwen2ForCausalLM, Qwen3ForCausalLM

from worldmodel.errors import ConfigError

MODEL_TYPES = (
    "arcee",
    "cohere",
    "cohere2",
    "ernie4_5",
    "exaone4",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "granite",
    "hunyuan_v1_dense",
    "llama",
    "ministral3",
    "mistral",
    "olmo",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen3",
    "seed_oss",
    "smollm3",
)
"""Decoder families that may be loaded: known code, no remote code, served by vLLM as they are."""

VISION_LANGUAGE = {"qwen2_5_vl": Qwen2ForCausalLM, "qwen3_vl": Qwen3ForCausalLM}
"""Vision-language models, and the class of the language model inside."""


def check_model_type(model_type: object, extra: Container[str] = ()) -> str:
    """Check that a family is one of `MODEL_TYPES` or `extra`, and return it.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(model_type, str) or (model_type not in MODEL_TYPES and model_type not in extra):
        raise ConfigError(
            f"Backbone type {model_type!r} is not supported; use one of {', '.join(MODEL_TYPES)}."
        )
    return model_type
