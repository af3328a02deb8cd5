"""vLLM workers that can return the hidden states at the last positions of a prompt.

Text requests are unchanged. A request with `num_states` in its `extra_args` returns, besides the one token
that vLLM requires, the states at its last positions in the field that pooling models use
(`ModelRunnerOutput.pooler_output`). Both kinds share batches, weights, adapters and the KV cache.

The workers read private state of vLLM's model runner: `pyproject.toml` pins the version, and
`tests/serving/test_vllm_engine.py` compares the results with transformers.
"""

from typing import Any

import torch
from vllm.platforms import current_platform

from worldmodel.serving.engine import vllm_plugin

vllm_plugin.register()  # again: VLLM_PLUGINS may exclude plugins, and states would be wrong


class _StateWorker:
    """Collects states between the forward pass and sampling."""

    model_runner: Any
    _states: dict[str, torch.Tensor]
    """Complete states of requests in the current step."""
    _parts: dict[str, tuple[int, list[torch.Tensor]]]
    """States of prompts that take several steps: first position and parts."""

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run the model over the scheduled positions and keep the requested states."""
        output = super().execute_model(scheduler_output)  # type: ignore[misc]
        if not hasattr(self, "_parts"):
            self._parts = {}
        self._states = {}
        for name in scheduler_output.finished_req_ids:
            self._parts.pop(name, None)
        runner = self.model_runner
        if runner.execute_model_state is not None:
            hidden = runner.execute_model_state.hidden_states  # after the last norm
            for row, name in enumerate(runner.input_batch.req_ids):
                self._collect(row, name, scheduler_output.num_scheduled_tokens[name], hidden)
        return output

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample tokens and attach the states."""
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        if output is not None and self._states:
            output.pooler_output = [self._states.get(name) for name in output.req_ids]
        return output

    def _collect(self, row: int, name: str, scheduled: int, hidden: torch.Tensor) -> None:
        runner = self.model_runner
        request = runner.requests[name]
        asked = ((request.sampling_params and request.sampling_params.extra_args) or {}).get("num_states")
        if not asked:
            return
        length = request.num_prompt_tokens
        begin = int(runner.input_batch.num_computed_tokens_cpu[row])
        end = min(begin + scheduled, length)
        first = max(begin, length - asked)
        if first < end:
            offset = int(runner.query_start_loc.np[row]) - begin
            start, parts = self._parts.get(name, (first, []))
            if start + sum(map(len, parts)) != first:  # preempted and restarted
                start, parts = first, []
            parts.append(hidden[offset + first : offset + end].clone())
            self._parts[name] = start, parts
        if end == length and name in self._parts:
            self._states[name] = torch.cat(self._parts.pop(name)[1]).float().cpu()


# The worker of a platform can be imported only on that platform.
if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker

    class CpuStateWorker(_StateWorker, CPUWorker):
        """vLLM's CPU worker, returning states."""

else:
    from vllm.v1.worker.gpu_worker import Worker

    class GpuStateWorker(_StateWorker, Worker):
        """vLLM's GPU worker, returning states."""
