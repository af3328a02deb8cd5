"""The processes of a run, and how a model is laid over them: FSDP2 for weights, a policy for activations."""

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
from worldmodel.parallel.mesh import Mesh
from worldmodel.train.objectives.states import Objective
from worldmodel.train.watchdog import meet

T = TypeVar("T")

# Layers hand out views (keys and values), which FSDP warns not to write to; nothing does.
warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")


def start(config: TrainConfig) -> Mesh:
    """Join the group that torchrun made, or found a group of one, and arrange it as `config.mesh` says.

    Raises:
        ConfigError: the axes do not multiply to the number of processes.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=config.hang_timeout_s)
    alone = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    store, rank, world_size = meet(timeout) if "RANK" in os.environ else (alone, 0, 1)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        return Mesh.build(config.mesh, device)
    except BaseException:
        dist.destroy_process_group()
        raise


STACKS = ("layers", "layer", "blocks", "transformer_blocks", "branches")
"""What libraries call the list of a transformer's layers."""


class Root(nn.Module):
    """The module that owns all weights of a run: the model and its objective's heads.

    FSDP gathers weights when a module is called; whatever a run computes, it computes inside this call.
    """

    def __init__(self, model: WorldModel, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self.objective = objective

    def forward(self, work: Callable[[], T]) -> T:
        """Do some work with the weights at hand."""
        return work()


def spread(root: Root, config: TrainConfig, mesh: Mesh) -> None:
    """Shard a root over the mesh on its device, layer by layer, in place.

    What waits on the meta device (see `models.unread`) is made, each process its own part, and still empty.

    Raises:
        ConfigError: weights that are trained in full are held in bf16, or clips cannot be shared as asked.
    """
    for name, parameter in root.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.bfloat16:
            raise ConfigError(
                f"{name.removeprefix('model.')} is held in bf16 and would be trained in full, in steps too "
                "small for that; set its part's dtype to fp32, or train it by LoRA."
            )
    root.model.backbone.sequence = mesh.sequence
    model = root.model.config
    if mesh.sequence.size > 1 and not (model.generator.is_ours and model.sampler == "chunk"):
        raise ConfigError(
            "mesh.sp and mesh.cp share clips of our own generator under sampler: chunk alone; set both to 1."
        )
    root.model.generator.sequence = mesh.sequence
    for layer in layers(root.model):
        if config.activations != "keep":
            recompute(layer, offload=config.activations == "offload")
        if config.compile:
            layer.compile()
        fully_shard(layer, mesh=mesh.fsdp, reshard_after_forward=mesh.fsdp.size(-1) > 1)
    fully_shard(root, mesh=mesh.fsdp, reshard_after_forward=False)
    deferred.make(root, mesh.device)


def layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of all transformer stacks, ours and those of transformers and diffusers."""
    stacks = [getattr(module, name, None) for module in model.modules() for name in STACKS]
    found = [layer for stack in stacks if isinstance(stack, nn.ModuleList) for layer in stack]
    return list(dict.fromkeys(found))


def recompute(layer: nn.Module, offload: bool) -> None:
    """Keep only a layer's input for the backward pass and compute the rest again.

    With `offload`, the products of matrices and attention wait in the CPU's memory instead of being
    computed again (Yuan et al. 2024, arXiv:2407.12117).
    """
    contexts: dict[str, Any] = {}
    if offload:
        contexts["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _offload_products)
    layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, **contexts)


def _offload_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = ("mm", "addmm", "bmm", "baddbmm", "scaled_dot_product", "convolution")
    name = op.__name__ if hasattr(op, "__name__") else str(op)
    found = any(word in name for word in products)
    return CheckpointPolicy.MUST_CPU_OFFLOAD if found else CheckpointPolicy.PREFER_RECOMPUTE


def accumulate(root: nn.Module, last: bool) -> None:
    """Tell FSDP whether the next backward pass is the step's last: only then gradients are exchanged."""
    assert isinstance(root, FSDPModule)
    root.set_requires_gradient_sync(last)


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the tensor of which processes hold parts."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def stop() -> None:
    """Leave the group."""
    dist.destroy_process_group()
