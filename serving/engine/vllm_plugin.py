"""vLLM plugin (entry point `vllm.general_plugins`) with fixes for vLLM 0.32, loaded in each of its processes.

Processes that `VllmEngine` did not start are not changed.
"""

import multiprocessing
import os
import signal
import threading
import time
from typing import Any

import torch
from vllm.platforms import current_platform

SERVER = "WORLDMODEL_VLLM_SERVER"
"""Environment variable with the process id of the server."""
SHUTDOWN_S = 10.0
"""Time for an engine to exit after its server is gone."""


def register() -> None:
    """Apply the fixes; repeated calls have no effect."""
    if SERVER not in os.environ:
        return
    if os.environ[SERVER] != str(os.getpid()):
        _exit_with_server()
    if current_platform.is_cpu():
        if hasattr(torch.cpu, "_init_amx"):
            torch.cpu._init_amx()  # otherwise the first bfloat16 matmul ends in SIGILL
        _disable_adapters_for_base_model()


def _exit_with_server() -> None:
    """Exit when the parent process is gone: vLLM's engine would otherwise outlive a killed server."""
    name, parent = "exit-with-server", multiprocessing.parent_process()
    if parent is None or name in (thread.name for thread in threading.enumerate()):
        return

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(SHUTDOWN_S)
        os._exit(1)

    threading.Thread(target=watch, name=name, daemon=True).start()


def _disable_adapters_for_base_model() -> None:
    """Apply no adapter to tokens of the base model, whose index -1 would select the last slot."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    original = lora_ops.bgmv_shrink
    if original.__module__ == __name__:
        return

    def bgmv_shrink(
        inputs: torch.Tensor,
        weights: torch.Tensor,
        output: torch.Tensor,
        adapters: torch.Tensor,
        *scaling: Any,
        **scalings: Any,
    ) -> None:
        original(inputs, weights, output, adapters, *scaling, **scalings)
        output[: len(adapters)].masked_fill_((adapters < 0)[:, None], 0)

    # punica_cpu imports the function by name; lora_ops.sgmv_shrink calls it.
    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = bgmv_shrink
