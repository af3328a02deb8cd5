"""Process groups, and the parallelism of a model: FSDP2, compilation, activations."""

import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from worldmodel import allocator
from worldmodel.config import TrainConfig
from worldmodel.errors import ConfigError
from worldmodel.models.generator.dit import DiT
from worldmodel.models.loading import deferred
from worldmodel.models.loading.pretrained import first_line
from worldmodel.models.world_model import WorldModel
from worldmodel.parallel.agreement import Agreement
from worldmodel.parallel.mesh import Mesh
from worldmodel.train.activations import Offload, apply_policy
from worldmodel.train.diagnostics.watchdog import rendezvous_store
from worldmodel.train.objectives.base import Losses, Objective, StageBatch

T = TypeVar("T")

# Layers return views (keys and values), which FSDP warns not to modify in place; nothing does.
warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")


def init(config: TrainConfig) -> Mesh:
    """Initialise the process group of torchrun, or one of a single process, and build `config.mesh`.

    Raises:
        ConfigError: the product of the mesh axes is not the number of processes, or some did not start.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    else:
        allocator.keep_freed_memory()
    timeout = timedelta(seconds=config.hang_timeout_s)
    # One process uses the same code as many, on a group of its own: there is no second path to test.
    local_store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    launched = "RANK" in os.environ
    try:
        store, rank, world_size = rendezvous_store(timeout) if launched else (local_store, 0, 1)
    except dist.DistError as error:
        raise ConfigError(
            f"The processes of the run did not all meet within {config.hang_timeout_s:g} s "
            f"({first_line(error)}); start torchrun with the same --nnodes and --rdzv-endpoint on every "
            "machine, or raise hang_timeout_s."
        ) from None
    # gloo as well on GPUs: counts, errors and checkpoints are exchanged without waiting for the device.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        return Mesh.build(config.mesh, device)
    except BaseException:
        dist.destroy_process_group()
        raise


STACKS = ("layers", "layer", "block", "blocks", "transformer_blocks", "branches")
"""Attribute names of a transformer's layer list in the supported libraries."""


PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Root(nn.Module):
    """The root module for FSDP: the model and the heads of its objective.

    FSDP gathers weights where a module's `forward` is called, and an objective calls the parts of a model in
    many places. So the root is called once, and everything that needs weights runs inside that call: a
    microbatch of training is `root(inputs)`, and anything else `root.gathered(function)`, which FSDP treats
    as a forward pass, too (`register_fsdp_forward_method`).
    """

    def __init__(self, model: WorldModel, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self.objective = objective

    def forward(self, inputs: StageBatch) -> Losses:
        """Return the summed losses of a microbatch."""
        return self.objective(self.model, inputs)

    def gathered(self, function: Callable[[], T]) -> T:
        """Call a function while the weights are gathered."""
        return function()


def parallelize(root: Root, config: TrainConfig, mesh: Mesh) -> None:
    """Apply sequence parallelism, compilation, activation checkpointing and FSDP, in place.

    Parameters on the meta device (see `models.loading.deferred`) are allocated, each process its own shard,
    but not loaded.

    Raises:
        ConfigError: weights that are trained in full are in bf16.
    """
    # The order matters: sequences first, since compiled code must see them; then compilation and activation
    # policies, which replace `forward`; then FSDP from the inside out, whose hooks must run around both; and
    # memory last, when each process knows its shard.
    for name, parameter in root.named_parameters():
        # 8 bits of mantissa lose updates below 1/256 of a weight, which are most of them.
        if parameter.requires_grad and parameter.dtype == torch.bfloat16:
            raise ConfigError(
                f"{name.removeprefix('model.')} is in bf16, which is too coarse for full training; set its "
                "component's dtype to fp32, or set lora_rank."
            )
    for part in (root.model.backbone, root.model.vision, root.model.generator):
        part.sequence = mesh.sequence
    root.model.agreement = root.model.generator.agreement = Agreement(mesh.world_size)
    stacks = layer_stacks(root.model)
    offload = Offload(mesh.device)
    for stack in stacks:
        for layer, *_ in stack:
            if config.compile:  # `forward` alone: FSDP's hooks and checkpointing cannot be traced
                layer.forward = torch.compile(layer.forward)
            apply_policy(layer, config.activations, offload)
    shard_layers(stacks, mesh, config.precision)
    shard_parts(root.model, mesh, config.precision)
    fully_shard(root, mesh=mesh.fsdp, reshard_after_forward=False)
    register_fsdp_forward_method(root, "gathered")
    deferred.materialize(root, mesh.device)


def shard_layers(stacks: Sequence[Sequence[list[nn.Module]]], mesh: Mesh, precision: str) -> None:
    """Shard the layers of stacks, each layer in a group of its own, which is gathered one layer ahead.

    On a single shard, too, a layer is freed after use: FSDP computes with a copy of the weights.
    """
    for stack in stacks:
        sharded = [
            fully_shard(
                group, mesh=mesh.fsdp, reshard_after_forward=True, mp_policy=weight_policy(precision)
            )[0]
            for group in stack
        ]
        if precision == "bf16":
            for layer, *_ in stack:
                layer.register_forward_pre_hook(cast_hidden_states, with_kwargs=True)
        # One layer ahead in both directions, so that gathering overlaps the computation of this layer.
        for before, after in pairwise(sharded):
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])


def cast_hidden_states(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast what enters a layer from a part in fp32, because norms refuse weights of another type."""
    if args:
        return (args[0].bfloat16(), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": kwargs["hidden_states"].bfloat16()}


def shard_parts(model: WorldModel, mesh: Mesh, precision: str) -> None:
    """Shard what is not a layer: embeddings, adapters and the codec, each in a group of its own.

    A part is gathered when it is first used and kept until its backward pass: processes call it a different
    number of times, since they have different samples. What remains (the model's own vectors, the heads of
    the objective) is gathered with the root. The codec and the root compute in the precision of their
    weights.
    """
    # A part that is resharded after each call would be gathered once per call, and processes that call it a
    # different number of times would wait for each other forever.
    shard = functools.partial(fully_shard, mesh=mesh.fsdp, reshard_after_forward=False)
    for tied in embeddings(model):
        shard(tied, mp_policy=weight_policy(precision))
    for part in (*adapters(model), *model.generator.networks):
        shard(part, mp_policy=weight_policy(precision))
    # Methods other than `forward` that use weights must gather them, too.
    register_fsdp_forward_method(model.condition_adapter, "null")
    if model.state is not None:
        register_fsdp_forward_method(model.state, "posterior")
        register_fsdp_forward_method(model.state, "history")
    if isinstance(model.generator, DiT):
        register_fsdp_forward_method(model.generator, "velocity")
    # The halves of a codec are used in different phases; together they would stay gathered in both.
    codec: Any = getattr(model.codec, "vae", model.codec)
    for half in (codec.encoder, codec.decoder):
        shard(half)


def adapters(model: WorldModel) -> list[nn.Module]:
    """Return the parts between backbone, codec and generator that have weights."""
    parts = (model.action, model.vision, model.state, model.condition_adapter)
    return [part for part in parts if part is not None and any(True for _ in part.parameters())]


def weight_policy(precision: str) -> MixedPrecisionPolicy:
    """Return FSDP's policy: weights are gathered in bf16, gradients are reduced in fp32.

    Inputs are not cast: masks, rotary tables and timesteps need their precision. `compute_precision` casts
    the operands of products.
    """
    if precision == "fp32":
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)


def compute_precision(precision: str, device: torch.device) -> torch.autocast:
    """Return the context of a forward pass.

    Weights are in bf16 already (`weight_policy`); autocast casts what enters them from parts in fp32. It
    keeps no casts of weights, which would be a second copy of them.
    """
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False)


def layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of all transformer stacks: our own, and those from transformers and diffusers.

    Of stacks inside a layer, only the layer around them counts.
    """
    found: list[nn.Module] = []
    for module in model.modules():
        for name in STACKS:
            stack = getattr(module, name, None)
            if isinstance(stack, nn.ModuleList):
                found += stack
    inner: set[int] = set()
    for layer in found:
        inner |= {id(each) for each in layer.modules() if each is not layer}
    return [layer for layer in dict.fromkeys(found) if id(layer) not in inner]


def layer_stacks(model: nn.Module) -> list[list[list[nn.Module]]]:
    """Return the stacks of `layers` in the order in which their layers run.

    A layer comes with the branch that a state stream runs inside it (`generator.diffusers`).
    """
    # A block and its branch exchange hidden states in the middle, so they must be gathered together.
    beside: dict[int, nn.Module] = {}
    for network in model.modules():
        branches = getattr(getattr(network, "stream", None), "branches", ())
        if len(branches):
            blocks = layers(network.get_submodule("transformer"))
            beside |= {id(block): branch for block, branch in zip(blocks, branches, strict=True)}
    inside = {id(branch) for branch in beside.values()}
    alone = {id(layer) for layer in layers(model)} - inside
    stacks: dict[int, list[list[nn.Module]]] = {}
    for module in model.modules():
        stack = [
            each for each in module.children() if isinstance(module, nn.ModuleList) and id(each) in alone
        ]
        if stack:
            stacks[id(module)] = [[each, *filter(None, [beside.get(id(each))])] for each in stack]
    return list(stacks.values())


def embeddings(model: WorldModel) -> list[list[nn.Module]]:
    """Return the word embeddings and output layers of language models; tied ones together."""
    found: dict[int, list[nn.Module]] = {}
    for encoder in (model.backbone.model, getattr(model.generator, "text_encoder", None)):
        if not isinstance(encoder, PreTrainedModel) or encoder not in set(model.modules()):
            continue  # a text encoder that is loaded on demand is not a part of the model
        ends = encoder.get_input_embeddings(), encoder.get_output_embeddings()
        weights = {id(end.weight) for end in ends if end is not None}
        # By identity of the weight: tied modules must be in one group, or each would reduce half a gradient.
        for module in encoder.modules():
            if id(weight := getattr(module, "weight", None)) in weights:
                found.setdefault(id(weight), []).append(module)
    return list(found.values())


def free_gathered(root: nn.Module) -> None:
    """Free the weights that a pass without gradients gathered, and forget the order of its layers."""
    # It is offered for recovery after an exception, and does what is needed here: it reshards every group and
    # clears the records of a pass whose backward pass never comes. There are no unreduced gradients to lose.
    assert isinstance(root, FSDPModule)
    root.reset_iter_state()


def to_local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor from the shards of all processes."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shutdown() -> None:
    """Destroy the process group."""
    dist.destroy_process_group()


def leave() -> NoReturn:
    """End the process successfully and at once.

    DTensor never releases process groups, and threads of gloo that still run when the interpreter ends may
    abort it (exit code -6, in 5 of 47 runs of four processes on a busy machine): a failure to torchrun.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
