"""Checkpoints of a run: written in the background, loaded on any number of processes.

    with Checkpoints(run) as checkpoints:
        if newest := checkpoints.latest():                      # checked byte for byte
            progress = load(newest, module_state(module))       # in place
            load_optimizer_state(newest, optimizers, module)
        ...
        state = module_state(module) | optimizer_state(optimizers, module)
        checkpoints.save("state-400", state, {"stage": "state", "step": 400})
        ...
        checkpoints.wait_until_staged()                         # before the tensors change

A checkpoint is a folder `RUN/checkpoints/00007-state-400` of safetensors, one file per process, and a
manifest. It is written under a temporary name and renamed when complete. Nothing is pickled, so loading one
cannot execute code. torch.distributed.checkpoint plans which process reads and writes which shards, and its
Hugging Face reader can read these folders.
"""

import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from worldmodel.errors import ModelError
from worldmodel.train.checkpoint.manifest import Manifest, Origin, verify
from worldmodel.train.checkpoint.storage import State, Writer, dtype_name, folders, read, write


class Checkpoints:
    """The checkpoints of one run.

    Every call is collective: all processes make it, in the same order, after the process group exists (if
    there is one). At most one checkpoint is written at a time.

    Args:
        run: Folder of the run.
        keep: Number of checkpoints to keep, besides `lasting` ones; older ones are removed.
    """

    def __init__(self, run: Path, keep: int = 2) -> None:
        self.root = run / "checkpoints"
        self.keep = keep
        self.group: dist.ProcessGroup | None = None
        if dist.is_initialized():
            # A separate group, because two threads must not share one.
            group = dist.new_group(backend="gloo")
            assert isinstance(group, dist.ProcessGroup)
            self.group = group
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.pending: Future[Path] | None = None
        self.stager = pinned_stager()
        self.staged: Future[State] | None = None

    def save(
        self,
        name: str,
        state: State,
        progress: dict[str, Any],
        lasting: bool = False,
        origin: Origin = Origin(),  # noqa: B008 -- it never changes
    ) -> Future[Path]:
        """Copy `state` and write it in the background; waits for the previous checkpoint first.

        Tensors on a GPU are copied in the background, too, to pinned memory: they must not change before
        `wait_until_staged` returns. Others may change as soon as this returns.

        Args:
            name: Suffix of the folder's name, for example `state-400`.
            state: Names and full shapes are the same on all processes. DTensors are written in shards;
                replicated data is written by one process.
            progress: JSON that `load` returns.
            lasting: Whether to keep this checkpoint permanently, as at the end of a stage.
            origin: Where the weights are that `state` lacks.

        Returns:
            A future of the folder.

        Raises:
            OutputError: the previous checkpoint could not be written.
        """
        self.wait()
        writer = Writer(self.root, name, progress, lasting, self.keep, origin)
        if self.stager is None:
            staged = writer.stage(state)
            self.pending = self.thread.submit(write, writer, staged, self.group)
            return self.pending
        if torch.accelerator.is_available():  # the copies are made on a stream of their own
            torch.accelerator.synchronize()
        future = self.stager.stage(state)
        assert isinstance(future, Future)
        self.staged = future
        self.pending = self.thread.submit(lambda: write(writer, future.result(), self.group))
        return self.pending

    def wait_until_staged(self) -> None:
        """Wait until the tensors of the newest `save` are copied and may change."""
        staged = self.staged
        self.staged = None
        if staged:
            staged.result()

    def wait(self) -> None:
        """Wait until the pending checkpoint is complete on disk.

        Raises:
            OutputError: it could not be written.
        """
        pending = self.pending
        self.pending = None
        if pending:
            pending.result()

    def latest(self) -> Path | None:
        """Return the newest valid checkpoint; warn of newer ones that are damaged.

        Processes divide the files among them: reading a large checkpoint takes one alone minutes.
        """
        self.wait()
        if not self.group:
            return latest(self.root.parent)
        rank, size = dist.get_rank(), dist.get_world_size()
        found = [folders(self.root) if rank == 0 else []]
        dist.broadcast_object_list(found, src=0, group=self.group)
        for folder in reversed(found[0]):
            problems: list[str | None] = [None] * size
            dist.all_gather_object(problems, _problem(folder, slice(rank, None, size)), group=self.group)
            problem = next(filter(None, problems), None)
            if problem is None:
                return folder
            if rank == 0:
                _warn(problem)
        return None

    def close(self) -> None:
        """Wait for the pending checkpoint and end the thread; call before destroying the process group."""
        try:
            self.wait()
        finally:
            self._shutdown()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:  # keep the error: a save without the other processes would only add another
            self._shutdown()

    def _shutdown(self) -> None:
        self.thread.shutdown()
        if self.stager:
            self.stager.close()


def pinned_stager() -> DefaultStager | None:
    """Return what copies tensors to pinned memory in the background; None without a GPU."""
    return DefaultStager(StagingOptions(use_shared_memory=False)) if torch.cuda.is_available() else None


def latest(run: Path) -> Path | None:
    """Return the newest valid checkpoint of a run; warn of newer ones that are damaged."""
    for folder in reversed(folders(run / "checkpoints")):
        problem = _problem(folder)
        if problem is None:
            return folder
        _warn(problem)
    return None


def _problem(folder: Path, mine: slice = slice(None)) -> str | None:
    """Return what is wrong with a checkpoint, as far as the files `mine` of it show."""
    try:
        verify(folder, mine)
    except ModelError as error:
        return str(error)
    return None


def _warn(problem: str) -> None:
    warnings.warn(f"A checkpoint is skipped: {problem}", stacklevel=3)


def load(folder: Path, state: State) -> dict[str, Any]:
    """Load tensors in place from a checkpoint, each process its own shards; returns the progress.

    Not a collective call. The files are not checked: see `latest` and `verify`.

    Args:
        folder: A checkpoint, written by any number of processes on any mesh.
        state: Tensors to load: of each owner (`model.`) all that the checkpoint has, or none.

    Raises:
        ModelError: the checkpoint is of another model; the message names the first tensor that differs.
            Nothing was changed then.
    """
    manifest = Manifest.read(folder)
    owners = {_owner(name) for name in state}
    saved = {name: tensor for name, tensor in manifest.tensors.items() if _owner(name) in owners}
    for name in sorted(state.keys() | saved.keys()):
        wanted = (dtype_name(state[name].dtype), list(state[name].shape)) if name in state else None
        found = (saved[name][0], list(saved[name][1])) if name in saved else None
        if wanted != found:
            raise ModelError(
                f"The checkpoint {folder} is of another model: {name} is {_describe(found)} there and "
                f"{_describe(wanted)} here; choose another run_dir."
            )
    if state:
        read(folder, state)
    return manifest.progress


def module_state(module: nn.Module, owner: str = "model") -> State:
    """Return the parameters and buffers of a module by name, each shared tensor (tied embeddings) once."""
    named = module.state_dict(keep_vars=True)
    once = {id(tensor): name for name, tensor in reversed(named.items())}
    return {f"{owner}.{name}": named[name].detach() for name in reversed(once.values())}


def optimizer_state(optimizers: Mapping[str, torch.optim.Optimizer], module: nn.Module) -> State:
    """Return the state of optimizers by name: `optimizer.OPTIMIZER.PARAMETER.KEY`."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    state: State = {}
    for kind, optimizer in optimizers.items():
        for parameter, slots in optimizer.state.items():
            for key, value in slots.items():
                state[f"optimizer.{kind}.{names[id(parameter)]}.{key}"] = value
    return state


def load_optimizer_state(
    folder: Path, optimizers: Mapping[str, torch.optim.Optimizer], module: nn.Module
) -> None:
    """Load the state of optimizers, for those parameters that have any in the checkpoint.

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
        state[name] = torch.zeros_like(like) if list(like.shape) == shape else torch.zeros(shape)
        state[name] = state[name].to(getattr(torch, dtype))
        slots[kind].setdefault(parameter, {})[key] = state[name]
    load(folder, state)
    names = {id(parameter): name for name, parameter in parameters.items()}
    for kind, optimizer in optimizers.items():
        groups = optimizer.state_dict()["param_groups"]
        order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
        saved = {index: slots[kind][name] for index, name in enumerate(order) if name in slots[kind]}
        optimizer.load_state_dict({"state": saved, "param_groups": groups})


def _owner(name: str) -> str:
    return name.split(".")[0]


def _describe(tensor: tuple[str, list[int]] | None) -> str:
    return f"{tensor[0]} {tensor[1]}" if tensor else "absent"
