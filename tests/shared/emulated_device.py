"""A second device that needs no hardware: CPU tensors that report another device.

Mixing them with plain CPU tensors raises, as on a GPU, and every wait of the host for the device is counted.
The device is called `meta`, the only one besides the CPU that every build of torch has; tensors that are
really without data must not take part.
"""

import traceback
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from worldmodel.config import StageConfig
from worldmodel.data.loader import Batch
from worldmodel.models.world_model import WorldModel
from worldmodel.train.distributed import Root
from worldmodel.train.objectives.base import Objective, SampleRng
from worldmodel.train.optim.average import EMA
from worldmodel.train.optim.optimizers import build_optimizers
from worldmodel.train.trainer import freeze

DEVICE = torch.device("meta")
WAITS = {
    "aten._local_scalar_dense.default": "item",
    "aten.equal.default": "equal",
    "aten.is_nonzero.default": "bool",
    "aten.masked_select.default": "masked_select",
    "aten.nonzero.default": "nonzero",
    "aten.repeat_interleave.Tensor": "repeat_interleave",
    "aten._unique2.default": "unique",
    "aten.unique_dim.default": "unique",
}
"""Operations for whose results the host waits."""
INDEXING = ("aten.index.", "aten.index_put", "aten._index_put", "aten._unsafe_index")
CONVERSIONS = ("to", "cpu", "cuda", "type_as")


class DeviceError(RuntimeError):
    """An operation mixes tensors of two devices."""


class DeviceTensor(Tensor):
    """A CPU tensor, `held`, that reports `DEVICE` as its device."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> "DeviceTensor":
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=DEVICE,
            requires_grad=False,
        )
        made.held = held
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.held})"

    def new_tensor(self, data: Any, dtype: torch.dtype | None = None, **_: Any) -> "DeviceTensor":
        with torch._C.DisableTorchFunction():
            return DeviceTensor(_real_tensor(data, dtype=dtype or self.dtype))

    def tolist(self) -> Any:
        _current().waits["tolist"] += 1
        return self.held.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("a tensor of a device has no numpy array; copy it to the CPU first")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _current().run(func, args, kwargs or {})


_real_tensor = torch.tensor
_active: list["EmulatedDevice"] = []


def _current() -> "EmulatedDevice":
    assert _active, "a tensor of the emulated device is used outside of its block"
    return _active[-1]


class EmulatedDevice:
    """Emulates a device within its block.

    with EmulatedDevice() as device:
        device.move(module)
        loss = module(batch.to(DEVICE))
    assert device.waits["item"] <= 1
    """

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        """Times that the host waited for the device, by operation."""
        self.places: Counter[str] = Counter()
        """The same by line of the package."""
        self.modes = (_Functions(self), _Operations(self))

    def __enter__(self) -> "EmulatedDevice":
        _active.append(self)
        for mode in self.modes:
            mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for mode in reversed(self.modes):
            mode.__exit__(kind, error, trace)
        _active.remove(self)

    def move(self, root: nn.Module) -> None:
        """Move the parameters and buffers of a module, in place; tied parameters stay tied."""
        moved: dict[int, nn.Parameter] = {}
        for module in root.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    made = nn.Parameter(DeviceTensor(parameter.detach()), parameter.requires_grad)
                    module._parameters[name] = moved.setdefault(id(parameter), made)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = DeviceTensor(buffer.detach())

    def wait(self, operation: str) -> None:
        """Count a wait of the host."""
        self.waits[operation] += 1
        self.places[f"{_place()}: {operation}"] += 1

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation on the tensors that are held, if all of them are on one device."""
        name = str(func)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        ours = [each for each in tensors if isinstance(each, DeviceTensor)]
        copies = name in ("aten.copy_.default", "aten._to_copy.default")
        if ours:
            self._check(name, tensors, args, copies)
        target, kwargs = kwargs.get("device"), _on_cpu(kwargs)
        if ours and (target is not None and torch.device(target) != DEVICE):
            self.wait("copy to the host")
        if name == "aten.copy_.default" and ours and not isinstance(args[0], DeviceTensor):
            self.wait("copy to the host")
        result = func(*tree_map(_held, args), **tree_map(_held, kwargs))
        if name == "aten._local_scalar_dense.default":
            return result
        if name == "aten.copy_.default":
            return args[0]
        if not (ours if target is None else torch.device(target) == DEVICE):
            return result
        wrapped = tree_map(_wrapped, result)
        if not ours:
            return wrapped
        try:
            return return_and_correct_aliasing(func, args, kwargs, wrapped)
        except (AssertionError, RuntimeError):  # operations without an alias annotation
            return wrapped

    def _check(self, name: str, tensors: list[Tensor], args: Any, copies: bool) -> None:
        if name in WAITS:
            self.wait(WAITS[name])
        # A number on the CPU may meet any device, and indices may come from it.
        plain = [each for each in tensors if not isinstance(each, DeviceTensor) and each.dim()]
        if any(each.device == DEVICE for each in plain):
            raise DeviceError(f"{name} reads a tensor without data at {_place()}")
        if name.startswith(INDEXING):
            indices = [each for each in tree_leaves(args[1]) if isinstance(each, Tensor)]
            if any(each.dtype in (torch.bool, torch.uint8) for each in indices):
                self.wait("index by a mask")
            elif any(not isinstance(each, DeviceTensor) for each in indices):
                self.wait("index from the host")
            plain = [each for each in plain if all(each is not index for index in indices)]
        if plain and not copies:
            shapes = [
                f"{'device' if isinstance(each, DeviceTensor) else 'cpu'} {list(each.shape)}"
                for each in tensors
            ]
            raise DeviceError(f"{name} mixes devices: {', '.join(shapes)} at {_place()}")


class _Operations(TorchDispatchMode):
    def __init__(self, device: EmulatedDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.device.run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Conversions between devices, which torch does not pass on for `meta`."""

    def __init__(self, device: EmulatedDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in ("__getitem__", "__setitem__") and isinstance(args[0], DeviceTensor):
            args = (args[0], _index(args[1]), *args[2:])
        if name in CONVERSIONS and args and isinstance(args[0], Tensor):
            return self._converted(name, args[0], args[1:], kwargs)
        target = kwargs.get("device")
        if target is None or torch.device(target) != DEVICE:
            return func(*args, **kwargs)
        kwargs["device"] = None if name.startswith("new_") or name.endswith("_like") else "cpu"
        made = func(
            *args, **{key: value for key, value in kwargs.items() if value is not None or key != "device"}
        )
        return tree_map(_moved, made)

    def _converted(self, name: str, tensor: Tensor, rest: Any, kwargs: dict[str, Any]) -> Tensor:
        device, dtype = kwargs.get("device"), kwargs.get("dtype")
        for each in (*rest, kwargs.get("other")):
            if isinstance(each, Tensor):
                device, dtype = each.device, each.dtype
            elif isinstance(each, torch.dtype):
                dtype = each
            elif isinstance(each, torch.device | str):
                device = each
        if name == "cpu":
            device = "cpu"
        target = tensor.device if device is None else torch.device(device)
        if dtype is not None and dtype != tensor.dtype:
            with torch._C.DisableTorchFunction():
                tensor = tensor.to(dtype)
        if (target == DEVICE) == isinstance(tensor, DeviceTensor):
            return tensor
        if target == DEVICE:
            return _ToDevice.apply(tensor)  # type: ignore[return-value]
        self.device.wait("copy to the host")
        return _ToHost.apply(tensor)  # type: ignore[return-value]


class _ToDevice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return DeviceTensor(x.detach().clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return _held(gradient)


class _ToHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return _held(x).detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return DeviceTensor(gradient)


def _index(index: Any) -> Any:
    """Make tensors of the lists of an index: torch would make them on `meta`, where they have no data."""
    if isinstance(index, tuple):
        return tuple(_index(each) for each in index)
    return _real_tensor(index) if isinstance(index, list) else index


def _held(value: Any) -> Any:
    return value.held if isinstance(value, DeviceTensor) else value


def _wrapped(value: Any) -> Any:
    return DeviceTensor(value) if isinstance(value, Tensor) and not isinstance(value, DeviceTensor) else value


def _moved(value: Any) -> Any:
    if not isinstance(value, Tensor) or isinstance(value, DeviceTensor):
        return value
    return DeviceTensor(value.detach()).requires_grad_(value.requires_grad)


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    if kwargs.get("device") is None:
        return kwargs
    return {**kwargs, "device": torch.device("cpu")}


def _place() -> str:
    """Return the innermost line of the package that runs, an editable install or a wheel."""
    lines = [
        f"{Path(frame.f_code.co_filename).name}:{line}"
        for frame, line in traceback.walk_stack(None)
        if frame.f_globals.get("__name__", "").startswith("worldmodel.")
    ]
    return lines[0] if lines else "?"


def train_step(
    device: EmulatedDevice, model: WorldModel, stage: StageConfig, batch: Batch, train_objective: Objective
) -> dict[str, float]:
    """Run one step of a stage on the device; returns the losses. The model and the objective stay there."""
    root = Root(model, train_objective)
    freeze(model, stage)
    device.move(root)
    optimizers, average = build_optimizers(root, stage), EMA(model.named_parameters(), 0.9)
    rng = SampleRng([(0, index) for index in batch.indices], DEVICE)
    with torch.no_grad():
        inputs = root.objective.teach(model, root.objective.prepare(model, batch, rng))
    losses = root.objective(model, inputs)
    weights = root.objective.weights
    terms = [
        weights[name] / max(inputs.counts[name], 1.0) * losses[name] for name in losses if name in weights
    ]
    torch.stack([term.reshape(()) for term in terms]).sum().backward()
    for optimizer in optimizers.values():
        optimizer.step()
    average.update(0)
    with torch.no_grad():
        root.objective.finish(model, [batch], lambda tensor: tensor)
    return {name: float(value.detach()) for name, value in losses.items()}
