"""Checkpoints of a run: written while the training goes on, loaded on any number of processes.

    with Checkpoints(run) as checkpoints:
        if newest := checkpoints.latest():                      # checked byte for byte
            progress = load(newest, module_state(module))       # in place
            load_optimizer_state(newest, optimizers, module)
        ...
        state = module_state(module) | optimizer_state(optimizers, module)
        checkpoints.save("state-400", state, {"stage": "state", "step": 400})

A checkpoint is a folder `RUN/checkpoints/00007-state-400` of safetensors, one file a process, and a manifest.
It is written under another name and renamed when complete, never over an old one. Nothing is pickled, so a
crafted one cannot run code. Who writes and who reads which part of which tensor is planned by
torch.distributed.checkpoint; its Hugging Face reader reads these folders as they are.
"""

import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from worldmodel.errors import ModelError
from worldmodel.train.checkpoint.manifest import Manifest, verify
from worldmodel.train.checkpoint.storage import State, Writer, dtype_name, folders, read, write


class Checkpoints:
    """The checkpoints of one run.

    Made by all processes together after they joined their group, if there is one; every call is made by all
    of them, in the same order. At most one checkpoint is in flight.

    Args:
        run: Folder of the run.
        keep: How many of those that are not `lasting` stay; older ones are removed.
    """

    def __init__(self, run: Path, keep: int = 2) -> None:
        self.root, self.keep = run / "checkpoints", keep
        self.group: dist.ProcessGroup | None = None
        if dist.is_initialized():
            # The training's own group cannot be shared: two threads would mix up their messages.
            group = dist.new_group(backend="gloo")
            assert isinstance(group, dist.ProcessGroup)
            self.group = group
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.pending: Future[Path] | None = None

    def save(self, name: str, state: State, progress: dict[str, Any], lasting: bool = False) -> Future[Path]:
        """Copy `state` and write it behind the caller's back; the tensors may change at once.

        Waits for the checkpoint before this one first, if that is not written yet.

        Args:
            name: Ends the folder's name, for example `state-400`.
            state: Names and whole shapes are the same on all processes; a DTensor is written in shards, and
                what several processes hold is written by one of them.
            progress: JSON that `load` gives back.
            lasting: Never remove this one: the end of a stage.

        Returns:
            The future of the folder.

        Raises:
            OutputError: the checkpoint before this one could not be written.
        """
        self.wait()
        writer = Writer(self.root, name, progress, lasting, self.keep)
        self.pending = self.thread.submit(write, writer, writer.stage(state), self.group)
        return self.pending

    def wait(self) -> None:
        """Wait until the checkpoint in flight is complete on the disk.

        Raises:
            OutputError: it could not be written.
        """
        pending, self.pending = self.pending, None
        if pending:
            pending.result()

    def latest(self) -> Path | None:
        """Find the newest checkpoint that is whole; warn of newer ones that are not."""
        self.wait()
        found = [latest(self.root.parent) if not self.group or dist.get_rank() == 0 else None]
        if self.group:
            dist.broadcast_object_list(found, src=0, group=self.group)
        return found[0]

    def close(self) -> None:
        """Wait for the checkpoint in flight and end the thread; before the process group is destroyed."""
        try:
            self.wait()
        finally:
            self.thread.shutdown()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:  # which says more than what a save without the others would
            self.thread.shutdown()


def latest(run: Path) -> Path | None:
    """Find the newest checkpoint of a run that is whole; warn of newer ones that are not."""
    for folder in reversed(folders(run / "checkpoints")):
        try:
            verify(folder)
            return folder
        except ModelError as error:
            warnings.warn(f"A checkpoint is skipped: {error}", stacklevel=2)
    return None


def load(folder: Path, state: State) -> dict[str, Any]:
    """Fill tensors in place from a checkpoint, each process its own shards of them; returns the progress.

    Needs no other process. The files are taken to be whole: see `latest` and `verify`.

    Args:
        folder: A checkpoint, written by any number of processes on any mesh.
        state: Tensors to fill. All that the checkpoint has of an owner (`model.`) are asked for, or none.

    Raises:
        ModelError: the checkpoint is of another model; the sentence names the first tensor that differs.
            Nothing was changed then.
    """
    manifest = Manifest.read(folder)
    owners = {_owner(name) for name in state}
    there = {name: tensor for name, tensor in manifest.tensors.items() if _owner(name) in owners}
    for name in sorted(state.keys() | there.keys()):
        wanted = _kind(state[name]) if name in state else None
        found = (there[name][0], list(there[name][1])) if name in there else None
        if wanted != found:
            raise ModelError(
                f"The checkpoint {folder} is of another model: {name} is {_told(found)} there and "
                f"{_told(wanted)} here; choose another run_dir."
            )
    if state:
        read(folder, state)
    return manifest.progress


def module_state(module: nn.Module, owner: str = "model") -> State:
    """Name the parameters and buffers of a module; those that are one tensor (tied embeddings) once."""
    named = module.state_dict(keep_vars=True)
    once = {id(tensor): name for name, tensor in reversed(named.items())}
    return {f"{owner}.{name}": named[name].detach() for name in reversed(once.values())}


def optimizer_state(optimizers: Mapping[str, torch.optim.Optimizer], module: nn.Module) -> State:
    """Name what optimizers remember: `optimizer.OPTIMIZER.PARAMETER.KEY`."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {
        f"optimizer.{kind}.{names[id(parameter)]}.{key}": value
        for kind, optimizer in optimizers.items()
        for parameter, slots in optimizer.state.items()
        for key, value in slots.items()
    }


def load_optimizer_state(
    folder: Path, optimizers: Mapping[str, torch.optim.Optimizer], module: nn.Module
) -> None:
    """Let new optimizers remember what those of a checkpoint did, of the parameters that had been moved.

    Raises:
        ModelError: the checkpoint is of another model.
    """
    parameters = dict(module.named_parameters())
    slots: dict[str, dict[str, State]] = {kind: {} for kind in optimizers}
    state: State = {}
    for name, (dtype, shape) in Manifest.read(folder).tensors.items():
        if _owner(name) != "optimizer":
            continue
        kind, _, rest = name.removeprefix("optimizer.").partition(".")
        parameter, _, key = rest.rpartition(".")
        if kind not in optimizers or parameter not in parameters:
            raise ModelError(
                f"The checkpoint {folder} is of another model: {name} is absent here; choose another run_dir."
            )
        like = parameters[parameter].detach()
        alike = list(like.shape) == shape
        state[name] = torch.zeros_like(like) if alike else torch.zeros(shape)
        state[name] = state[name].to(getattr(torch, dtype))
        slots[kind].setdefault(parameter, {})[key] = state[name]
    load(folder, state)
    names = {id(parameter): name for name, parameter in parameters.items()}
    for kind, optimizer in optimizers.items():
        groups = optimizer.state_dict()["param_groups"]
        order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
        remembered = {index: slots[kind][name] for index, name in enumerate(order) if name in slots[kind]}
        optimizer.load_state_dict({"state": remembered, "param_groups": groups})


def _owner(name: str) -> str:
    return name.split(".")[0]


def _kind(tensor: Tensor) -> tuple[str, list[int]]:
    return dtype_name(tensor.dtype), list(tensor.shape)


def _told(kind: tuple[str, list[int]] | None) -> str:
    return f"{kind[0]} {kind[1]}" if kind else "absent"
