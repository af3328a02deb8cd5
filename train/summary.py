"""The summary of a stage that is printed at its start."""

import resource
from collections import Counter

import torch
from torch import nn

from worldmodel.config import StageConfig
from worldmodel.models.world_model import WorldModel
from worldmodel.parallel.mask_rules import Kind, mask_area
from worldmodel.parallel.mesh import Mesh
from worldmodel.train.distributed import Root, to_local

GIB = 2**30


def describe(root: Root, stage: StageConfig, mesh: Mesh) -> list[str]:
    """Return lines on the size of every component, the mesh, the work of a step, and memory."""
    total: Counter[str] = Counter()
    trained: Counter[str] = Counter()
    weights = trained_weights = 0
    for name, parameter in root.named_parameters():
        component = name.split(".")[1] if name.startswith("model.") else "objective"
        total[component] += parameter.numel()
        weights += _bytes(parameter)
        if parameter.requires_grad:
            trained[component] += parameter.numel()
            trained_weights += _bytes(parameter)
    lines = [
        f"  {name:10s} {total[name] / 1e6:9.2f} M parameters, {trained[name] / 1e6:9.2f} M trained"
        for name in total
    ]
    config = root.model.config
    frames = 1 + stage.rounds * config.chunk_frames
    round_tokens = root.model.round_tokens
    cells = config.codec.cells // root.model.generator.cells_per_token
    generator_tokens = (config.context_latents + config.chunk_latents) * cells
    backbone, generator = step_flops(root.model, stage)
    lines += [
        f"  mesh       dp_replicate {mesh.dp_replicate} x dp_shard {mesh.dp_shard} x cp {mesh.cp} x sp "
        f"{mesh.sp} = {mesh.world_size} processes on {mesh.device.type}",
        f"  sample     {frames} frames, {stage.rounds} rounds of {round_tokens} backbone tokens and "
        f"{generator_tokens} generator tokens; "
        f"{stage.batch_size} samples per step",
        f"  work       {backbone / 1e12:.3g} TFLOP per step of rounds in the backbone's layers and "
        f"{generator / 1e12:.3g} in the generator's, forward and backward, if both run",
        f"  memory     {(weights + 3 * trained_weights) / GIB:.3f} GiB per process for weights, gradients "
        "and optimizers, without activations",
    ]
    return lines


def step_flops(model: WorldModel, stage: StageConfig) -> tuple[float, float]:
    """Return the FLOPs of a step of rounds in the layers of the backbone and of the generator.

    Counts matrix products and attention, without recomputed activations.
    """
    text, config = model.backbone.model.config.get_text_config(), model.config
    heads = text.num_attention_heads
    width = heads * (getattr(text, "head_dim", None) or text.hidden_size // heads)
    tokens = stage.rounds * model.round_tokens
    layers = model.backbone.model.base_model.layers
    assert isinstance(layers, nn.ModuleList), "decoder families keep their layers in a list"
    backbone = training_flops(layers, width, tokens, mask_area([(Kind.TEXT, tokens)]))
    cells = config.codec.cells // model.generator.cells_per_token
    frames = [(Kind.FRAME, config.context_latents * cells), (Kind.FRAME, config.chunk_latents * cells)]
    generator = training_flops(
        model.generator.layers, model.generator.width, sum(size for _, size in frames), mask_area(frames)
    )
    return stage.batch_size * backbone, stage.batch_size * stage.rounds * generator


def training_flops(layers: nn.ModuleList, width: int, tokens: int, area: int) -> float:
    """Return the FLOPs of a sequence in a stack of layers, forward and backward.

    Matrices cost 6 FLOPs per parameter and token. Attention costs 4 x area x width forward and 2.5 times that
    backward.

    Args:
        layers: The layers.
        width: Query heads times head width.
        tokens: Length of the sequence.
        area: Visible pairs of its mask.
    """
    matrices = sum(parameter.numel() for parameter in layers.parameters() if parameter.dim() > 1)
    return 6.0 * matrices * tokens + 14.0 * len(layers) * width * area


def peak_memory(device: torch.device) -> str:
    """Return the peak memory of this process, in words."""
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) / GIB:.2f} GiB of device memory"
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB:.2f} GiB"


def _bytes(parameter: nn.Parameter) -> int:
    return to_local(parameter).nbytes
