"""The memory of a training step over time, from a step of two layers of every stack, without memory.

FSDP is not played: weights have the data type in which it gathers them, and hooks add what it holds.
"""

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from worldmodel.config import SMALL_DECODER, StageConfig, TrainConfig, WorldModelConfig, height_width
from worldmodel.models.layers import attention
from worldmodel.models.loading import deferred
from worldmodel.models.rounds import RoundEncoder
from worldmodel.models.vision.vit import PatchEncoder
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout.state import observed_frames
from worldmodel.train import distributed
from worldmodel.train.activations import Offload, apply_policy
from worldmodel.train.distributed import Root
from worldmodel.train.memory import synthetic
from worldmodel.train.memory.allocations import Allocations, Moment
from worldmodel.train.memory.optimizer_step import OptimizerStep, optimizer_steps
from worldmodel.train.objectives.base import SampleRng, StageBatch
from worldmodel.train.trainer import build_root

DeviceType = Literal["cpu", "cuda"]
CPU = torch.device("cpu")
"""Device of the tensors without memory, also of those that stand for ones of a GPU."""
DEPTH = 2
"""Layers of each stack that are played; the others need as much as the first."""
REDUCED = 4
"""Bytes of a gradient while it is reduced over processes, in fp32."""


@dataclass(frozen=True)
class Weights:
    """Bytes of weights, as shards hold them."""

    held: float
    """All parameters and buffers."""
    trained: float
    """Parameters with gradients."""
    optimizers: list[OptimizerStep]
    """The optimizers, in the order in which they step."""
    averaged: float
    """Parameters of the model with gradients, of which there may be an average."""
    sizes: dict[str, int]
    """Number of parameters of every component."""

    @property
    def optimizer(self) -> float:
        """States of all optimizers."""
        return sum(each.states for each in self.optimizers)


@dataclass(frozen=True)
class Played:
    """A step of one microbatch that was played."""

    weights: Weights
    moments: list[Moment]
    waiting: float
    """Bytes of a microbatch that was prepared and waits for its forward pass."""


def play(config: TrainConfig, name: str, rows: int, device_type: DeviceType = "cuda") -> Played:
    """Play a step of a stage with one microbatch of `rows` episodes.

    Args:
        config: The run; settings that read weights are replaced by those that describe them.
        name: The stage.
        rows: Episodes of the microbatch.
        device_type: cuda, or cpu, whose attention needs other memory.

    Raises:
        ConfigError: the model cannot be built, or does not fit the stage.
    """
    config = without_files(config)
    if config.data.buckets:
        largest = max(config.data.buckets, key=math.prod)
        config = replace(config, model=config.model.sized(largest))
    # On GPUs long sequences take kernels without a dense mask; what their attention needs is that of none.
    kernel = "unmasked" if device_type == "cuda" else config.attention
    allocations = Allocations()
    with attention.using(kernel), deferred.empty_parameters():
        root = build_root(config, name)
        muon_dtype = torch.float32 if config.precision == "fp32" else torch.bfloat16
        weights = _weights(root, config.stages[name], muon_dtype)
        # Weights are counted in full; of the layers of a stack, which need equal memory, two are played.
        depths = truncate(root.model)
        with allocations:
            step = _Step(config, name, root, depths, allocations)
            stage = config.stages[name]
            waiting = max(
                step.run(synthetic.batch(config, name, task, rows, encoded=True))
                for task, weight in stage.tasks.items()
                if weight
            )
    return Played(weights, allocations.moments, waiting)


class _Step:
    """A step on fake tensors, with what FSDP holds added by hooks."""

    def __init__(
        self, config: TrainConfig, name: str, root: Root, depths: dict[int, int], allocations: Allocations
    ) -> None:
        self.config = config
        self.name = name
        self.root = root
        self.allocations = allocations
        self.bf16 = config.precision != "fp32"
        self.parts: set[int] = set()
        """Gathered parts that stay."""
        self.backward = 0.0
        """Bytes of the layer that is in its backward pass."""
        self.stacks: list[_Stack] = []
        self._add_hooks(depths)

    def _add_hooks(self, depths: dict[int, int]) -> None:
        # The groups are those of `distributed.parallelize`, in its order: a parameter belongs to the first
        # group that has it.
        model = self.root.model
        seen = set[int]()
        offload = Offload(CPU)
        # Offloaded activations leave the device, so a layer needs what it would keep until the next one runs;
        # `_Stack` counts no others.
        policy = "keep" if self.config.activations == "offload" else self.config.activations
        for groups in distributed.layer_stacks(model):
            sizes = [self._gather(group, seen, self.bf16) for group in groups]
            self.stacks.append(_Stack(self, groups, sizes, depths[id(groups[0][0])]))
            for layer, *_ in groups:
                apply_policy(layer, policy, offload)
                if self.bf16:
                    layer.register_forward_pre_hook(distributed.cast_hidden_states, with_kwargs=True)
        codec: Any = getattr(model.codec, "vae", model.codec)
        parts: list[list[Any]] = [*distributed.embeddings(model)]
        parts += [[part] for part in (*distributed.adapters(model), *model.generator.networks)]
        for group in parts:
            self._keep(group, self._gather(group, seen, self.bf16))
        for half in (codec.encoder, codec.decoder):
            self._keep([half], self._gather([half], seen, False))
        self.rest, _ = self._gather([self.root], seen, False)

    def _gather(self, group: list[Any], seen: set[int], bf16: bool) -> tuple[float, float]:
        """Give the weights of a group of FSDP memory; return the bytes gathered, and of whole gradients."""
        made = allocate(group, seen, torch.bfloat16 if bf16 else None)
        trained = [(parameter, fake) for parameter, fake in made.items() if fake.requires_grad]
        for _, fake in trained:
            # Gradients are counted by `_begin_backward`, where FSDP reduces them, and not as activations.
            fake.register_post_accumulate_grad_hook(_drop)
        return sum(each.nbytes for each in made.values()), sum(parameter.nbytes for parameter, _ in trained)

    def _keep(self, group: list[Any], sizes: tuple[float, float]) -> None:
        """Count a part as gathered from its first use on."""
        gathered, _ = sizes

        def use(*_: Any) -> None:
            if id(group) not in self.parts:
                self.parts.add(id(group))
                self.allocations.gathered += gathered

        for module in group:
            module.register_forward_pre_hook(use)

    def run(self, batch: Any) -> float:
        """Play a step; return the bytes of its prepared microbatch."""
        config = self.config
        root = self.root
        allocations = self.allocations
        precision = "bf16" if self.bf16 else "fp32"
        keys = [(config.seed, index) for index in batch.indices]
        with allocations.counted():
            with self._gathered(), torch.no_grad(), distributed.compute_precision(precision, CPU):
                rng = SampleRng(keys, "cpu", root.model.dtype)
                if batch.task == "rounds":
                    self._encode(len(batch.indices))
                inputs: StageBatch = root.objective.prepare(root.model, batch, rng)
                inputs = root.objective.teach(root.model, inputs)
            allocations.prepared = True
            content = inputs.content
            tensors = _tensors(vars(content) if hasattr(content, "__dict__") else content)
            waiting = sum(each.nbytes for each in tensors)
            with self._gathered():
                with distributed.compute_precision(precision, CPU):
                    losses = root.objective(root.model, inputs)
                total = torch.stack([each.float().reshape(()) for each in losses.values()]).sum()
                del losses
                total.backward()
            allocations.prepared = False
        return float(waiting)

    def _encode(self, rows: int) -> None:
        """Encode one round of episodes: the codec is not called for the others, which come after it."""
        config = self.config.model
        stage = self.config.stages[self.name]
        frames = config.chunk_frames
        before = observed_frames(config)
        size = height_width(config.codec.image_size)
        clips = torch.zeros(rows, before + stage.rounds * frames, 3, *size)
        RoundEncoder.of(self.root.model).encode(clips[:, -frames:], clips[:, :before])

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        allocations = self.allocations
        allocations.gathered = self.rest
        yield
        allocations.gathered = allocations.gradients = allocations.repeated = 0.0
        self.parts.clear()
        self.backward = 0.0
        for stack in self.stacks:
            stack.finished.clear()

    def enter_backward(self, num_bytes: float) -> None:
        """Replace the bytes of the layer that was in its backward pass before."""
        self.allocations.gathered += num_bytes - self.backward
        self.backward = num_bytes


@dataclass
class _Call:
    """One pass through a stack."""

    entered: float = 0.0
    """Bytes held before the first layer."""
    others: float = 0.0
    """Bytes that the layers hold that are not played."""


class _Stack:
    """The layers of a stack that are played, of which the first stands for those that are not."""

    def __init__(
        self,
        step: _Step,
        groups: list[list[nn.Module]],
        sizes: list[tuple[float, float]],
        depth: int,
    ) -> None:
        self.step = step
        self.groups = groups
        self.sizes = sizes
        self.others = depth - len(groups)
        self.call = _Call()
        self.finished: set[int] = set()
        """Layers whose gradients are counted."""
        for index, group in enumerate(groups):
            group[0].register_forward_pre_hook(functools.partial(self._enter, index))
            group[0].register_forward_hook(functools.partial(self._leave, index))

    def _enter(self, index: int, *_: Any) -> None:
        allocations = self.step.allocations
        allocations.gathered += 2 * self.sizes[index][0]  # its own weights, and those of the next layer
        if index == 0:
            self.call = _Call(allocations.held)
        # The layers that are not played come between the first and the last: when the last one begins, they
        # hold as much as the ones before it do on average.
        is_last = index == len(self.groups) - 1
        if is_last and self.others and self.step.config.activations != "offload":
            held_by_one = max(0.0, allocations.held - self.call.entered) / index
            self.call.others = held_by_one * self.others
            allocations.repeated += self.call.others

    def _leave(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        allocations = self.step.allocations
        call = self.call
        allocations.gathered -= 2 * self.sizes[index][0]
        outputs = [each for each in _tensors(output) if each.requires_grad]
        if outputs:  # the gradient of a layer's output is there when its backward pass begins
            outputs[0].register_hook(lambda _: self._begin_backward(index, call))
        elif index == len(self.groups) - 1:
            allocations.repeated -= call.others
            call.others = 0.0

    def _begin_backward(self, index: int, call: _Call) -> None:
        """Count the weights and gradients of a layer in its backward pass, and the gradients after it."""
        allocations = self.step.allocations
        gathered, gradients = self.sizes[index]
        trained = 0
        for module in self.groups[index]:
            trained += sum(each.numel() for each in module.parameters() if each.requires_grad)
        # The layer's weights and those of the layer before it, its gradients as autograd makes them, and a
        # copy in fp32 that is reduced over processes.
        made = 2 if self.step.bf16 else REDUCED
        self.step.enter_backward(2 * gathered + (made + REDUCED) * trained)
        if index == 0:  # those after it, and those that are not played, have finished
            allocations.repeated -= call.others
            call.others = 0.0
        if index not in self.finished:
            self.finished.add(index)
            allocations.gradients += gradients * (1 + (self.others if index == 0 else 0))


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def allocate(roots: list[Any], seen: set[int], dtype: torch.dtype | None) -> dict[nn.Parameter, nn.Parameter]:
    """Replace the parameters of modules by fake ones; tied weights stay tied.

    Args:
        roots: The modules.
        seen: Ids of parameters that were made before, which stay; the new ones are added.
        dtype: Data type of the new parameters; None keeps each one's.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for root in roots:
        for module in root.modules():
            for name, parameter in module._parameters.items():
                if parameter is None or id(parameter) in seen:
                    continue
                if parameter not in made:
                    empty = torch.empty(parameter.shape, dtype=dtype or parameter.dtype, device="cpu")
                    made[parameter] = nn.Parameter(empty, parameter.requires_grad)
                module._parameters[name] = made[parameter]
    seen.update(map(id, made.values()))
    return made


def truncate(model: WorldModel) -> dict[int, int]:
    """Keep the first layers of every stack; return its number of layers by the id of its first."""
    layers = {id(layer) for layer in distributed.layers(model)}
    depths: dict[int, int] = {}
    for module in list(model.modules()):
        for name in distributed.STACKS:
            stack = module._modules.get(name)
            if isinstance(stack, nn.ModuleList) and len(stack) and id(stack[0]) in layers:
                depths[id(stack[0])] = len(stack)
                module._modules[name] = stack[:DEPTH]
        if isinstance(module, PatchEncoder):  # the layer that it selects may be gone; the last has its size
            module.select_layer = -1
    return depths


def without_files(config: TrainConfig) -> TrainConfig:
    """Return the config of a run that reads no weights and no data, with the largest vocabulary."""
    model = without_weights(config.model)
    backbone = model.backbone
    if not (backbone.pretrained or config.tokenizer):
        architecture = {"vocab_size": backbone.vocab_size} | (backbone.architecture or SMALL_DECODER)
        model = replace(model, backbone=replace(backbone, architecture=architecture))
    return replace(config, model=model, init_from=None, data=replace(config.data, sources={}))


def without_weights(model: WorldModelConfig) -> WorldModelConfig:
    """Return the config with random weights in place of files, for the components that it describes."""
    changed: dict[str, Any] = {}
    for part in ("codec", "vision", "generator", "backbone"):
        settings: Any = getattr(model, part)
        if settings is None:
            continue
        described = "vocab_size" in settings.architecture if part == "backbone" else settings.architecture
        if described:
            changed[part] = replace(settings, **{"encoder" if part == "vision" else "pretrained": None})
    return replace(model, **changed)


def _weights(root: Root, stage: StageConfig, muon_dtype: torch.dtype) -> Weights:
    parameters = list(root.parameters())
    held = sum(each.nbytes for each in (*parameters, *root.buffers()))
    sizes: dict[str, int] = {}
    for name, parameter in root.model.named_parameters():
        part = name.split(".")[0]
        sizes[part] = sizes.get(part, 0) + parameter.numel()
    trained = sum(each.nbytes for each in parameters if each.requires_grad)
    optimizers = optimizer_steps(root, stage, muon_dtype)
    averaged = sum(each.nbytes for each in root.model.parameters() if each.requires_grad)
    return Weights(float(held), float(trained), optimizers, float(averaged), sizes)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
