"""The work of a run in FLOPs, compared with the peak of its devices."""

import resource
import time
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import nn

from worldmodel.config import StageConfig
from worldmodel.models.world_model import WorldModel
from worldmodel.parallel.mask_rules import Kind, mask_area
from worldmodel.train.diagnostics.timing import Phases
from worldmodel.train.objectives.base import Rounds, StageBatch
from worldmodel.train.objectives.generator import GeneratorObjective
from worldmodel.train.objectives.registry import objective_class

GIB = 2**30
AFTER_BACKBONE = ("state.", "condition_adapter.", "generator.", "codec.")
"""Components whose gradients do not pass through the backbone."""


@dataclass(frozen=True)
class Stack:
    """A stack of transformer layers and a sequence that passes through it."""

    matrices: int
    """Parameters of its matrices."""
    layers: int
    width: int
    """Query heads times head width."""
    tokens: int
    area: int
    """Visible pairs of the mask."""

    def flops(self, passes: int = 3) -> float:
        """Return the FLOPs of the sequence.

        A matrix costs 2 FLOPs per parameter, token and pass. Attention costs 4 x area x width forward and 2.5
        times that backward.

        Args:
            passes: 1 forward, 2 with gradients of activations, 3 with gradients of weights as well.
        """
        attention = (4 + 10 * (passes > 1)) * self.layers * self.width * self.area
        return 2.0 * passes * self.matrices * self.tokens + attention


def stacks(model: WorldModel, rounds: int) -> tuple[Stack, Stack]:
    """Return the backbone's stack with the rounds of an episode, and the generator's with one round."""
    text = model.backbone.model.config.get_text_config()
    config = model.config
    heads = text.num_attention_heads
    width = heads * (getattr(text, "head_dim", None) or text.hidden_size // heads)
    tokens = rounds * model.round_tokens
    layers = model.backbone.model.base_model.layers
    assert isinstance(layers, nn.ModuleList), "decoder families keep their layers in a list"
    backbone = Stack(_matrices(layers), len(layers), width, tokens, mask_area([(Kind.TEXT, tokens)]))
    cells = config.codec.cells // model.generator.cells_per_token
    sizes = (config.context_latents, config.chunk_latents) if config.generator is not None else ()
    frames = [(Kind.FRAME, size * cells) for size in sizes]
    layers = model.generator.layers
    tokens = sum(size for _, size in frames)
    generator = Stack(_matrices(layers), len(layers), model.generator.width, tokens, mask_area(frames))
    return backbone, generator


def step_flops(model: WorldModel, stage: StageConfig) -> tuple[float, float]:
    """Return the FLOPs of a step of rounds in the layers of the backbone and of the generator.

    Forward and backward, with all weights trained and without recomputed activations.
    """
    backbone, generator = stacks(model, stage.rounds)
    return stage.batch_size * backbone.flops(), stage.batch_size * stage.rounds * generator.flops()


class Work:
    """The FLOPs of microbatches in the layers of the backbone and of the generator.

    Counted are matrix products and attention, forward and backward as far as gradients are needed. Recomputed
    activations, self-rollouts, codecs, adapters and the vocabulary are not.
    """

    def __init__(self, model: WorldModel, stage: StageConfig) -> None:
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        own = {part: _trains_layers(trained, part) for part in ("backbone.", "generator.")}
        before = any(not name.startswith(AFTER_BACKBONE) for name in trained)
        self.backbone_passes = 1 + before + own["backbone."]
        self.generator_passes = 1 + bool(trained) + own["generator."]
        self.stacks = cache(lambda rounds, image_size: stacks(model, rounds))
        self.generates = issubclass(objective_class(stage), GeneratorObjective)

    def of(self, inputs: StageBatch) -> float:
        """Return the FLOPs of a microbatch; 0 if it does not pass through the backbone."""
        size = inputs.batch.image_size
        if not isinstance(inputs.content, Rounds):
            backbone, _ = self.stacks(1, size)
            return 2.0 * self.backbone_passes * backbone.matrices * inputs.tokens
        rows, rounds = inputs.content.context.shape[:2]
        backbone, generator = self.stacks(rounds, size)
        flops = rows * backbone.flops(self.backbone_passes)
        if self.generates:
            flops += rows * rounds * generator.flops(self.generator_passes)
        return flops


class Meter:
    """Step time, FLOP/s, MFU, memory and the shares of phases, over the steps between two records.

    Args:
        device: Device of this process.
        world_size: Number of processes.
        peak_tflops: Peak of one device; model FLOPs utilisation (MFU) is relative to it.
        phases: Times of the phases of steps.
    """

    def __init__(self, device: torch.device, world_size: int, peak_tflops: float, phases: Phases) -> None:
        self.device = device
        self.world_size = world_size
        self.peak_tflops = peak_tflops
        self.phases = phases
        self.step_s = 0.0
        self.steps = 0
        self.flops = 0.0
        self.began = time.perf_counter()

    def step(self, flops: float) -> None:
        """Count a step, whose FLOPs are those of all processes."""
        self.steps = self.steps + 1
        self.flops = self.flops + flops

    def take(self) -> dict[str, float]:
        """Return the figures since the last call.

        `step_s`; `tflops_per_s` of one process and `mfu`, where FLOPs were counted; `memory_gib`, the peak of
        this process so far; `PHASE_share` of the time.
        """
        phases = self.phases.take()
        elapsed = time.perf_counter() - self.began
        self.step_s = elapsed / max(self.steps, 1)
        figures = {"step_s": self.step_s, "memory_gib": peak_memory_gib(self.device)}
        if self.flops:
            figures["tflops_per_s"] = self.flops / elapsed / self.world_size / 1e12
            figures["mfu"] = figures["tflops_per_s"] / self.peak_tflops
        total = sum(phases.values()) or 1.0
        figures |= {f"{name}_share": seconds / total for name, seconds in phases.items()}
        self.steps = 0
        self.flops = 0.0
        self.began = time.perf_counter()
        return {name: float(f"{value:.5g}") for name, value in figures.items()}


@cache
def measured_tflops(
    device: torch.device, dtypes: tuple[torch.dtype, ...], seconds: float = 0.25
) -> tuple[float, ...]:
    """Return the TFLOP/s of a matrix product of random numbers in each data type: the best of several.

    Random, because products of zeros draw less power and run faster. The data types take turns for
    `seconds` each, so that a moment in which the machine is busy slows none of them alone.
    """
    size = 8192 if device.type == "cuda" else 512
    left, right = (torch.randn(size, size, device=device) for _ in range(2))
    operands = [(left.to(dtype), right.to(dtype)) for dtype in dtypes]
    best = [float("inf")] * len(dtypes)
    ends = time.perf_counter() + seconds * len(dtypes)
    while time.perf_counter() < ends:
        for index, pair in enumerate(operands):
            phases = Phases(device)
            phases.begin("product")
            torch.matmul(*pair)
            phases.begin("end")
            best[index] = min(best[index], phases.take()["product"])
    return tuple(2 * size**3 / least / 1e12 for least in best)


def faster_precision(device: torch.device) -> Literal["bf16", "fp32"]:
    """Return the precision in which a device computes matrix products faster.

    CPUs without instructions for bf16 emulate it, several times slower than fp32.
    """
    bf16, fp32 = measured_tflops(device, (torch.bfloat16, torch.float32))
    return "bf16" if bf16 > fp32 else "fp32"


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory of this process: of its device, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def _matrices(layers: nn.ModuleList) -> int:
    return sum(parameter.numel() for parameter in layers.parameters() if parameter.dim() > 1)


def _trains_layers(trained: list[str], component: str) -> bool:
    """Return whether weights of a component's layers are trained, other than LoRA's."""
    return any(name.startswith(component) and ".lora_" not in name for name in trained)
