"""Workers of vLLM that also return hidden states: of the last positions of a prompt, when a request asks.

A text request is served as ever. One whose `extra_args` say `num_states` gets, beside the one token that
vLLM insists on, the states at its last positions through the channel that pooling models use
(`ModelRunnerOutput.pooler_output`), so both kinds share batches, weights, adapters and keys and values.

This reads private state of vLLM's model runner: `pyproject.toml` pins the version, and
`tests/serving/test_vllm_engine.py` compares with transformers.
"""

from typing import Any

import torch
from vllm.platforms import current_platform

from worldmodel.serving.engine import vllm_plugin

vllm_plugin.register()  # once more: VLLM_PLUGINS may leave plugins out, and states would be wrong


class _StateWorker:
    """Takes the states between the forward pass and the sampling of tokens."""

    model_runner: Any
    _states: dict[str, torch.Tensor]
    """Complete states of requests in the present step."""
    _parts: dict[str, tuple[int, list[torch.Tensor]]]
    """States of prompts that are computed in several steps: their first position, and piece by piece."""

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run the model over the scheduled positions and keep the states that were asked for."""
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
                self._take(row, name, scheduler_output.num_scheduled_tokens[name], hidden)
        return output

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample tokens as ever and attach the states."""
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        if output is not None and self._states:
            output.pooler_output = [self._states.get(name) for name in output.req_ids]
        return output

    def _take(self, row: int, name: str, scheduled: int, hidden: torch.Tensor) -> None:
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
            place = int(runner.query_start_loc.np[row]) - begin
            since, pieces = self._parts.get(name, (first, []))
            if since + sum(map(len, pieces)) != first:  # preempted and begun anew
                since, pieces = first, []
            pieces.append(hidden[place + first : place + end].clone())
            self._parts[name] = since, pieces
        if end == length and name in self._parts:
            self._states[name] = torch.cat(self._parts.pop(name)[1]).float().cpu()


# Each platform's worker can be imported only there.
if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker

    class CpuStateWorker(_StateWorker, CPUWorker):
        """vLLM's CPU worker, returning states."""

else:
    from vllm.v1.worker.gpu_worker import Worker

    class GpuStateWorker(_StateWorker, Worker):
        """vLLM's GPU worker, returning states."""
