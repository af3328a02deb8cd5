"""What a stage is, in numbers, told once at its start."""

import resource
from collections import Counter

import torch
from torch import nn

from worldmodel.config import StageConfig
from worldmodel.parallel.mesh import Mesh
from worldmodel.train.distributed import Root, local

GIB = 2**30


def describe(root: Root, stage: StageConfig, mesh: Mesh) -> list[str]:
    """Say how large every component is, what of it learns, and what the mesh and the memory come to."""
    total: Counter[str] = Counter()
    trained: Counter[str] = Counter()
    held = learned = 0
    for name, parameter in root.named_parameters():
        component = name.split(".")[1] if name.startswith("model.") else "objective"
        total[component] += parameter.numel()
        held += _bytes(parameter)
        if parameter.requires_grad:
            trained[component] += parameter.numel()
            learned += _bytes(parameter)
    lines = [
        f"  {name:10s} {total[name] / 1e6:9.2f} M parameters, {trained[name] / 1e6:9.2f} M trained"
        for name in total
    ]
    config = root.model.config
    frames = 1 + stage.rounds * config.chunk_frames
    round_tokens = root.model.round_tokens
    lines += [
        f"  mesh       dp_replicate {mesh.dp_replicate} x dp_shard {mesh.dp_shard} x cp {mesh.cp} x sp "
        f"{mesh.sp} = {mesh.world_size} processes on {mesh.device.type}",
        f"  sample     {frames} frames, {stage.rounds} rounds of {round_tokens} backbone tokens and "
        f"{(1 + config.chunk_latents) * config.codec.grid**2} generator tokens; "
        f"{stage.batch_size} samples a step",
        f"  memory     {(held + 3 * learned) / GIB:.3f} GiB a process for weights, gradients and optimizers, "
        "activations not counted",
    ]
    return lines


def peak_memory(device: torch.device) -> str:
    """Say how much memory this process has needed at most."""
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) / GIB:.2f} GiB of the device"
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB:.2f} GiB"


def _bytes(parameter: nn.Parameter) -> int:
    return local(parameter).nbytes
