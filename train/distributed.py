"""Process groups, FSDP2 sharding and activation checkpointing."""

import functools
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from worldmodel.config import TrainConfig
from worldmodel.errors import ConfigError
from worldmodel.models.loading import deferred
from worldmodel.models.world_model import WorldModel
from worldmodel.parallel.agreement import Agreement
from worldmodel.parallel.mesh import Mesh
from worldmodel.train.objectives.base import Objective
from worldmodel.train.watchdog import rendezvous_store

T = TypeVar("T")

# Layers return views (keys and values), which FSDP warns not to modify in place; nothing does.
warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")


def init(config: TrainConfig) -> Mesh:
    """Initialise the process group of torchrun, or one of a single process, and build `config.mesh`.

    Raises:
        ConfigError: the product of the mesh axes is not the number of processes.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=config.hang_timeout_s)
    local_store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    launched = "RANK" in os.environ
    store, rank, world_size = rendezvous_store(timeout) if launched else (local_store, 0, 1)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        return Mesh.build(config.mesh, device)
    except BaseException:
        dist.destroy_process_group()
        raise


STACKS = ("layers", "layer", "blocks", "transformer_blocks", "branches")
"""Attribute names of a transformer's layer list in the supported libraries."""


class Root(nn.Module):
    """The root module for FSDP: the model and the heads of its objective.

    FSDP gathers weights when a module is called, so all computation runs inside a call of this module.
    """

    def __init__(self, model: WorldModel, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self.objective = objective

    def forward(self, work: Callable[[], T]) -> T:
        """Call a function with the weights gathered."""
        return work()


def parallelize(root: Root, config: TrainConfig, mesh: Mesh) -> None:
    """Apply sequence parallelism, activation checkpointing, compilation and FSDP, in place.

    Parameters on the meta device (see `models.loading.deferred`) are allocated, each process its own shard,
    but not loaded.

    Raises:
        ConfigError: weights that are trained in full are in bf16, or the sampler does not support sequence
            parallelism.
    """
    for name, parameter in root.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.bfloat16:
            raise ConfigError(
                f"{name.removeprefix('model.')} is in bf16, which is too coarse for full training; set its "
                "component's dtype to fp32, or set lora_rank."
            )
    root.model.backbone.sequence = mesh.sequence
    root.model.agreement = root.model.generator.agreement = Agreement(mesh.world_size)
    model = root.model.config
    if mesh.sequence.size > 1 and model.generator.is_ours and model.sampler == "swin":
        raise ConfigError(
            f"mesh.sp is {mesh.sp} and mesh.cp is {mesh.cp}, but our own generator supports them only with "
            "sampler: chunk; set both to 1."
        )
    root.model.generator.sequence = mesh.sequence
    for layer in layers(root.model):
        if config.activations != "keep":
            checkpoint_activations(layer, offload=config.activations == "offload")
        if config.compile:
            layer.compile()
        fully_shard(layer, mesh=mesh.fsdp, reshard_after_forward=mesh.fsdp.size(-1) > 1)
    fully_shard(root, mesh=mesh.fsdp, reshard_after_forward=False)
    deferred.materialize(root, mesh.device)


def layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of all transformer stacks: our own and those of transformers and diffusers."""
    stacks = [getattr(module, name, None) for module in model.modules() for name in STACKS]
    found = [layer for stack in stacks if isinstance(stack, nn.ModuleList) for layer in stack]
    return list(dict.fromkeys(found))


def checkpoint_activations(layer: nn.Module, offload: bool) -> None:
    """Save only a layer's input for the backward pass and recompute the rest.

    With `offload`, outputs of matrix products and attention are kept in CPU memory instead of being
    recomputed. Source: Yuan et al. 2024 (arXiv:2407.12117).
    """
    contexts: dict[str, Any] = {}
    if offload:
        contexts["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _offload_products)
    layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, **contexts)


def _offload_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = ("mm", "addmm", "bmm", "baddbmm", "scaled_dot_product", "convolution")
    name = op.__name__ if hasattr(op, "__name__") else str(op)
    offload = any(product in name for product in products)
    return CheckpointPolicy.MUST_CPU_OFFLOAD if offload else CheckpointPolicy.PREFER_RECOMPUTE


def set_gradient_sync(root: nn.Module, enabled: bool) -> None:
    """Set whether the next backward pass reduces gradients; only the last one of a step does."""
    assert isinstance(root, FSDPModule)
    root.set_requires_gradient_sync(enabled)


def to_local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor from the shards of all processes."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shutdown() -> None:
    """Destroy the process group."""
    dist.destroy_process_group()
