"""Reading and writing of checkpoints as safetensors, planned by torch.distributed.checkpoint."""

import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from worldmodel.errors import ModelError, OutputError
from worldmodel.io import fsync, move
from worldmodel.train.checkpoint.manifest import File, Manifest, Origin

State = dict[str, Tensor]
"""Tensors by dotted name; the first part is their owner: `model.`, `optimizer.`, `ema.`"""


class Writer(HuggingFaceStorageWriter):
    """Writes one safetensors file per process; the first process then writes the manifest and renames."""

    def __init__(
        self, root: Path, name: str, progress: dict[str, Any], lasting: bool, keep: int, origin: Origin
    ) -> None:
        self.root = root
        self.folder = root / ".writing"
        super().__init__(str(self.folder), save_distributed=True)
        self.name = name
        self.progress = progress
        self.lasting = lasting
        self.keep = keep
        self.origin = origin

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # On the first process, before any process writes.
        shutil.rmtree(self.folder, ignore_errors=True)  # left by a run that was killed
        self.folder.mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        if plan.items:
            tensors = {
                item.index.fqn: data
                for item in plan.items
                if isinstance(data := planner.resolve_data(item), Tensor)
            }
            assert len(tensors) == len(plan.items), "a process holds at most one shard of a tensor"
            offsets = {
                item.index.fqn: {"saved_offsets": list(item.index.offset or ())} for item in plan.items
            }
            path = self.folder / f"{plan.storage_data['shard_index']:05d}.safetensors"
            # The key under which HuggingFaceStorageReader looks for where a shard begins.
            save_file(tensors, path, metadata={"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets)})
            fsync(path)
            file = File.of(path)
            results = [WriteResult(item.index, 0, file) for item in plan.items]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files = {result.storage_data for each in results for result in each}
        tensors = {
            name: (dtype_name(tensor.properties.dtype), list(tensor.size))
            for name, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
        }
        ordered = sorted(files, key=lambda file: file.name)
        Manifest(self.progress, self.lasting, tensors, ordered, self.origin).write(self.folder)
        fsync(self.folder)
        serial = 1 + max((int(folder.name.split("-")[0]) for folder in folders(self.root)), default=0)
        final = self.root / f"{serial:05d}-{self.name}"
        move(self.folder, final, durable=True)
        self._remove_old()
        metadata.storage_meta = StorageMeta(checkpoint_id=final)  # is broadcast to the other processes

    def _remove_old(self) -> None:
        removable = []
        for folder in folders(self.root):
            try:
                removable += [] if Manifest.read(folder).lasting else [folder]
            except ModelError:
                continue  # damaged: kept for inspection
        for folder in removable[: -self.keep]:
            folder.rename(self.folder)  # a removal that is killed leaves no half checkpoint
            shutil.rmtree(self.folder)


def write(writer: Writer, state: State, group: dist.ProcessGroup | None) -> Path:
    """Write a checkpoint of tensors that no longer change; returns its folder.

    Raises:
        OutputError: a process could not write its shards.
    """
    _ignore_warning()
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        metadata = state_dict_saver.save(
            state, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None
        )
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if not isinstance(cause, OSError | SafetensorError):
            raise cause from None
        raise OutputError(
            f"The checkpoint {writer.name} cannot be written to {writer.root} by process {rank}: {cause}; "
            "free some disk space and start again."
        ) from None
    assert metadata.storage_meta and metadata.storage_meta.checkpoint_id
    return Path(metadata.storage_meta.checkpoint_id)


def read(folder: Path, state: State) -> None:
    """Load tensors in place, whose names and shapes must match the checkpoint; not a collective call."""
    _ignore_warning()
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    reader = HuggingFaceStorageReader(str(folder))
    state_dict_loader.load(dict(state), storage_reader=reader, planner=planner, no_dist=True)


def folders(root: Path) -> list[Path]:
    """List the folders named like checkpoints, oldest first."""
    found = [path for path in root.glob("*-*") if re.match(r"\d{5,}-", path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.split("-")[0]))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in `torch`."""
    return str(dtype).removeprefix("torch.")


def _ignore_warning() -> None:
    # Issued by every save of a single process and every load without the others, both of which are intended.
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
