"""How checkpoints reach the disk and come back: safetensors, planned by torch.distributed.checkpoint."""

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
from worldmodel.train.checkpoint.manifest import File, Manifest

State = dict[str, Tensor]
"""Tensors by dotted name; the first part says whose they are: `model.`, `optimizer.`, `ema.`"""


class Writer(HuggingFaceStorageWriter):
    """Writes one safetensors file a process; the first process then writes the manifest and renames."""

    def __init__(self, root: Path, name: str, progress: dict[str, Any], lasting: bool, keep: int) -> None:
        self.root, self.folder = root, root / ".writing"
        super().__init__(str(self.folder), save_distributed=True)
        self.name, self.progress, self.lasting, self.keep = name, progress, lasting, keep

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # On the first process, before any of them writes.
        shutil.rmtree(self.folder, ignore_errors=True)  # of a run that was killed
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
        manifest = Manifest(self.progress, self.lasting, tensors, sorted(files, key=lambda file: file.name))
        manifest.write(self.folder)
        fsync(self.folder)
        serial = 1 + max((int(folder.name.split("-")[0]) for folder in folders(self.root)), default=0)
        final = self.root / f"{serial:05d}-{self.name}"
        move(self.folder, final, durable=True)
        self._remove_old()
        metadata.storage_meta = StorageMeta(checkpoint_id=final)  # tells the other processes

    def _remove_old(self) -> None:
        passing = []
        for folder in folders(self.root):
            try:
                passing += [] if Manifest.read(folder).lasting else [folder]
            except ModelError:
                continue  # damaged: left to whoever wants to know why
        for folder in passing[: -self.keep]:
            folder.rename(self.folder)  # a removal that is killed leaves no half checkpoint
            shutil.rmtree(self.folder)


def write(writer: Writer, state: State, group: dist.ProcessGroup | None) -> Path:
    """Write a checkpoint of tensors that no longer change; returns its folder.

    Raises:
        OutputError: some process could not write its part.
    """
    _expect_no_group()
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
            "make room and start again."
        ) from None
    assert metadata.storage_meta and metadata.storage_meta.checkpoint_id
    return Path(metadata.storage_meta.checkpoint_id)


def read(folder: Path, state: State) -> None:
    """Fill tensors, whose names and shapes must be the checkpoint's; no other process is needed."""
    _expect_no_group()
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    reader = HuggingFaceStorageReader(str(folder))
    state_dict_loader.load(dict(state), storage_reader=reader, planner=planner, no_dist=True)


def folders(root: Path) -> list[Path]:
    """List what may be checkpoints, the oldest first."""
    found = [path for path in root.glob("*-*") if re.match(r"\d{5,}-", path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.split("-")[0]))


def dtype_name(dtype: torch.dtype) -> str:
    """Name a type as `torch` does."""
    return str(dtype).removeprefix("torch.")


def _expect_no_group() -> None:
    # Said of every save by a single process and of every load that needs no other; both are meant.
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
