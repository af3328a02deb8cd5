"""Activations of transformer layers until their backward pass: recomputed, or moved to CPU memory."""

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Policy = Literal["keep", "recompute", "selective", "offload"]

SAVED = ("scaled_dot_product", "aten.bmm", "flash_attn", "flex_attention", "worldmodel.all_")
"""Parts of the names of operators whose outputs `selective` keeps: attention, and collectives of sequences.

Linear layers are `mm` and `addmm`; `bmm` is the product with the values where attention is not fused.
"""


def apply_policy(layer: nn.Module, policy: Policy, offload: "Offload") -> None:
    """Apply a policy to the activations of a layer, in place.

    Args:
        layer: Its `forward` may already be compiled: recomputation inside a compiled function would have to
            be traced with it.
        policy: `recompute` keeps the layer's inputs alone, `selective` also the outputs of `SAVED` operators
            (source: Korthikanti et al. 2022, arXiv:2205.05198), `offload` moves everything to CPU memory.
        offload: Shared by all layers of a model.
    """
    if policy == "offload":
        layer.forward = functools.partial(offload.run, layer, layer.forward)
    elif policy != "keep":
        contexts: dict[str, Any] = {}
        if policy == "selective":
            contexts["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _select)
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, **contexts)


def _select(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = any(part in str(op) for part in SAVED)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


class Offload:
    """Moves what layers save for the backward pass to CPU memory, and back one layer ahead of its use.

    On CUDA, copies run beside the computation: on a stream of their own and through pinned memory.
    `torch.autograd.graph.save_on_cpu` copies on the stream of the computation; it would also copy gathered
    weights, which FSDP frees and gathers again, and an input as often as layers save it.

    Weights stay on the device, and so do inputs that all layers share: all but the first tensor.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.newest: Callable[[], _SavedLayer | None] = lambda: None

    def run(self, layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the `forward` of a layer, and offload what it saves."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Hidden states are the first tensor; masks and rotary tables after it are the same in all layers.
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        stay = {_place(tensor) for tensor in (*inputs[1:], *layer.parameters())}
        saved = _SavedLayer(self.stream, stay - {_place(tensor) for tensor in inputs[:1]}, self.newest)
        self.newest = weakref.ref(saved)  # weak: the autograd graph alone decides how long it lives
        try:
            with saved_tensors_hooks(saved.pack, saved.unpack):
                return forward(*args, **kwargs)
        finally:
            saved.copied.clear()  # the sources may be freed now, since `record_stream` waits for the copies


@dataclass
class _Saved:
    """A tensor in CPU memory; it lives as long as the autograd graph needs it."""

    layer: "_SavedLayer"
    device: torch.device
    host: Tensor
    loaded: Tensor | None = None
    """On the device again."""


@dataclass
class _SavedLayer:
    """The tensors that one call of a layer saved."""

    stream: Any
    stay: set[int]
    """Memory that stays on the device."""
    previous: "Callable[[], _SavedLayer | None]"
    """The call before this one, which comes next in the backward pass."""
    tensors: list[weakref.ref[_Saved]] = field(default_factory=list)
    copied: dict[tuple[Any, ...], tuple[Tensor, _Saved]] = field(default_factory=dict)
    """Copies of the forward pass, with their sources, whose memory must not be used again meanwhile."""
    event: Any = None
    """The end of the copies back to the device."""

    def pack(self, tensor: Tensor) -> Any:
        """Copy a tensor to CPU memory, once."""
        # FSDP frees gathered weights and gathers them again, so a copy of one would be memory for nothing.
        base = tensor if tensor._base is None else tensor._base
        if not tensor.numel() or isinstance(base, nn.Parameter) or _place(tensor) in self.stay:
            return tensor
        if self.stream is not None and tensor.is_cpu:  # such as the seeds of fused attention
            return tensor
        # Several operators save one tensor; `_version` tells it from what is written into it later.
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        if key not in self.copied:
            saved = _Saved(self, tensor.device, self._to_host(tensor.detach()))
            self.tensors.append(weakref.ref(saved))
            self.copied[key] = (tensor, saved)
        return self.copied[key][1]

    def unpack(self, saved: Any) -> Tensor:
        """Return a tensor on its device, and begin to load the tensors of the layer before."""
        if isinstance(saved, Tensor):
            return saved
        self.load()
        assert saved.loaded is not None
        if self.event is not None:
            current = torch.cuda.current_stream()
            current.wait_event(self.event)
            saved.loaded.record_stream(current)
        if previous := self.previous():  # of the layer before: its copies run while this one computes
            previous.load()
        return saved.loaded

    def load(self) -> None:
        """Begin to copy all tensors that are still needed to the device; they are copied once."""
        tensors = [each for ref in self.tensors if (each := ref()) is not None]
        self.tensors = []
        if self.stream is None:
            for saved in tensors:
                saved.loaded = saved.host
        elif tensors:
            with torch.cuda.stream(self.stream):
                for saved in tensors:
                    saved.loaded = saved.host.to(saved.device, non_blocking=True)
            self.event = self.stream.record_event()

    def _to_host(self, tensor: Tensor) -> Tensor:
        if self.stream is None:
            return tensor.clone()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream())  # until the tensor has been computed
        with torch.cuda.stream(self.stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self.stream)
        return host


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
