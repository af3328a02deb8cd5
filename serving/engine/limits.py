"""Limits of an engine, derived from the model and checked against its memory before anything is served."""

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from worldmodel.errors import ConfigError
from worldmodel.models import text
from worldmodel.models.backbone.causal_lm import Backbone
from worldmodel.models.world_model import WorldModel
from worldmodel.serving.errors import UnavailableError
from worldmodel.serving.settings import EngineOptions

MAX_SESSIONS = 16
"""Sessions by default, if the memory is enough."""
QUESTION_TOKENS = 400
"""Longest question about an observation: one token per character of the longest that is accepted."""
COPIES = {"in-process": 2, "vllm": 1}
"""Histories held per session: the cache of this process keeps the previous round's for a while."""
BLOCK = 32
"""Positions that vLLM allocates at once; attention on CPUs requires multiples of 32."""
SHARE = 0.5
"""Largest share of the free memory that keys and values take by default; the generator needs some, too."""


@dataclass(frozen=True)
class EngineLimits:
    """Capacity of an engine."""

    dtype: torch.dtype
    max_model_len: int
    """Positions of the longest history, or of an observation, a question and the answer."""
    kv_bytes: int
    """Memory for keys and values."""
    max_sessions: int

    def __str__(self) -> str:
        return (
            f"{str(self.dtype).removeprefix('torch.')}, histories of up to {self.max_model_len} positions, "
            f"{self.max_sessions} sessions in {gib(self.kv_bytes)} of keys and values"
        )


def resolve(
    options: EngineOptions, model: WorldModel, engine: str, free_bytes: int | None = None
) -> EngineLimits:
    """Complete the options by the needs of the model.

    Args:
        options: Those of the user.
        model: The model, loaded.
        engine: `in-process` or `vllm`.
        free_bytes: Free memory of the model's device; None measures it.

    Raises:
        ConfigError: the model does not fit the options, the engine or the memory.
    """
    if engine != "vllm" and (options.tensor_parallel_size != 1 or not options.enforce_eager):
        raise ConfigError(
            f"tensor_parallel_size is {options.tensor_parallel_size} and enforce_eager "
            f"{options.enforce_eager}, which need --engine vllm; leave them out."
        )
    dtype = getattr(torch, options.dtype) if options.dtype else model.backbone.model.dtype
    length = _length(options.max_model_len, model)
    positions = COPIES[engine] * -(-length // BLOCK) * BLOCK
    history = positions * model.backbone.position_bytes(dtype) // options.tensor_parallel_size
    free = _free_bytes(model.device) if free_bytes is None else free_bytes
    if engine == "vllm":
        free -= _weight_bytes(model.backbone, dtype, options)
    sessions, kv_bytes = options.max_sessions, options.kv_cache_memory
    if kv_bytes is None:
        wanted = sessions or max(1, min(MAX_SESSIONS, int(SHARE * free) // history))
        kv_bytes = wanted * history
    if kv_bytes > free:
        raise ConfigError(
            f"{gib(kv_bytes)} of keys and values do not fit into the {gib(max(0, free))} of memory that "
            f"{model.device.type} has beside the weights: one session of {length} positions takes "
            f"{gib(history)}; lower --max-sessions, --max-model-len or --kv-cache-memory, or use "
            "--dtype bfloat16."
        )
    if (needed := (sessions or 1) * history) > kv_bytes:
        many = f"{sessions} sessions" if sessions and sessions > 1 else "one session"
        raise ConfigError(
            f"kv_cache_memory is {gib(kv_bytes)}, but {many} of {length} positions need "
            f"{gib(needed)}; raise --kv-cache-memory, or lower --max-sessions or --max-model-len."
        )
    return EngineLimits(dtype, length, kv_bytes, sessions or min(MAX_SESSIONS, kv_bytes // history))


def check_weights(folder: Path, device: torch.device) -> None:
    """Raise `ConfigError` if the weights of a model folder do not fit into the free memory of a device."""
    size = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    if size > (free := _free_bytes(device)):
        raise ConfigError(
            f"The weights in {folder.name!r} have {gib(size)}, and {gib(free)} of memory are free on "
            f"{device.type}; unload another model first."
        )


def check_length(length: int, limit: int | None) -> None:
    """Raise `UnavailableError` if a sequence is longer than the engine allows."""
    if limit is not None and length > limit:
        raise UnavailableError(
            f"A sequence of {length} positions is too long for this server, which has max_model_len {limit}; "
            "use shorter actions, or start the server with a higher --max-model-len."
        )


def gib(num_bytes: int) -> str:
    """Return a size in GiB, or in MiB below one GiB."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _length(given: int | None, model: WorldModel) -> int:
    """Return the positions of the longest sequence: by default those of histories of the longest actions."""
    config, rounds, slot = model.config, model.config.context_rounds, model.action.slot
    longest_round = model.round_tokens + model.action.max_tokens - slot
    vision = model.vision.round_tokens
    if config.vision.sees_latents:  # a clip that is described has more frames than a round
        vision = vision // config.unseen_latents * config.vision.max_frames
    needed = rounds * model.round_tokens + 1  # vLLM adds a token to every sequence
    known = getattr(model.backbone.model.config, "max_position_embeddings", None) or needed
    longest = max(rounds * longest_round + 1, vision + QUESTION_TOKENS + 2 + text.MAX_TOKENS)
    length = given or min(known, longest)
    if length > known:
        raise ConfigError(
            f"max_model_len is {length}, but the backbone has {known} positions (max_position_embeddings); "
            "lower --max-model-len."
        )
    if length < needed:
        raise ConfigError(
            f"The histories of this model need {needed} positions ({rounds} rounds of {model.round_tokens}, "
            f"and one more), but the longest that fit are {length} "
            f"({'--max-model-len' if given else 'max_position_embeddings of the backbone'}); "
            f"{'raise it' if given else 'set a lower history_rounds in the model'}."
        )
    return length


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def _weight_bytes(backbone: Backbone, dtype: torch.dtype, options: EngineOptions) -> int:
    """Return the memory of vLLM's own copy of the weights on each device."""
    weights = sum(parameter.numel() for parameter in backbone.model.parameters())
    return weights * (1 if options.quantization else dtype.itemsize) // options.tensor_parallel_size
