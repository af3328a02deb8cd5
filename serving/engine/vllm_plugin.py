"""Runs first in every process of vLLM (entry point `vllm.general_plugins`): mends vLLM 0.32 for our engine.

Processes that `VllmEngine` did not start are left alone.
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
"""Environment variable with the process id of the server whose engine this is."""
SHUTDOWN_S = 10.0
"""How long an engine without a server may take to end by itself."""


def register() -> None:
    """Mend what is broken; nothing more happens when it is called again."""
    if SERVER not in os.environ:
        return
    if os.environ[SERVER] != str(os.getpid()):
        _end_with_the_server()
    if current_platform.is_cpu():
        if hasattr(torch.cpu, "_init_amx"):
            torch.cpu._init_amx()  # or the first product in bfloat16 ends in SIGILL
        _keep_adapters_off_the_base_model()


def _end_with_the_server() -> None:
    """End this process when its parent is gone: vLLM's engine would outlive a killed server for ever."""
    name, parent = "end-with-the-server", multiprocessing.parent_process()
    if parent is None or name in (thread.name for thread in threading.enumerate()):
        return

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(SHUTDOWN_S)
        os._exit(1)

    threading.Thread(target=watch, name=name, daemon=True).start()


def _keep_adapters_off_the_base_model() -> None:
    """Give tokens of the base model no adapter: their index -1 would pick the one in the last slot."""
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

    # The second module imported the function by name; `sgmv_shrink` of the first one calls it.
    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = bgmv_shrink
