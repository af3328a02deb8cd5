"""The mesh of processes: dp_replicate x dp_shard x cp x sp, with ranks in row-major order."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from worldmodel.config import MeshConfig
from worldmodel.errors import ConfigError


@dataclass(frozen=True)
class SequenceGroup:
    """The processes that share each sequence: cp is the outer axis, sp the inner; by default one process."""

    cp: int = 1
    sp: int = 1
    cp_rank: int = 0
    sp_rank: int = 0
    cp_group: ProcessGroup | None = None
    """Processes with the same sp rank, which gather keys and values."""
    sp_group: ProcessGroup | None = None
    """Processes with the same cp rank, which exchange heads."""
    group: ProcessGroup | None = None
    """All processes of the group, in the order of `rank`."""

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.cp * self.sp

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""
        return self.cp_rank * self.sp + self.sp_rank


@dataclass(frozen=True)
class Mesh:
    """The position of this process in the mesh, and its process groups."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    sp: int = 1
    rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    sequence: SequenceGroup = SequenceGroup()
    """The processes that share the samples and sequences of this one."""
    weights: DeviceMesh | None = None
    """Axes `replicate` x `shard` of the weights."""
    samples: ProcessGroup | None = None
    """The processes with this sequence rank, each with different samples."""

    @classmethod
    def build(cls, config: MeshConfig, device: torch.device) -> "Mesh":
        """Build the mesh of the default process group (gloo or NCCL), or of one process without a group.

        This is a collective: every process must call it.

        Raises:
            ConfigError: the product of the axes is not the number of processes.
        """
        world = dist.get_world_size() if dist.is_initialized() else 1
        replicate, shard = data_parallel(config, world)
        sequence = config.cp * config.sp
        sizes = (replicate, shard, config.cp, config.sp)
        if not dist.is_initialized():
            return cls(*sizes, device=device)
        names = ("dp", "cp", "sp")
        axes = init_device_mesh(device.type, (world // sequence, config.cp, config.sp), mesh_dim_names=names)
        dp, cp, sp = (axes.get_group(name) for name in names)
        # Combined axes are groups and meshes of their own over the same ranks: flattening is private API of
        # torch. NCCL allocates nothing for a group before its first collective.
        both: Any = sp if config.cp == 1 else cp if config.sp == 1 else dist.new_subgroups(sequence)[0]
        # Processes that share a sequence see the same samples but hold different shards of the weights:
        # sharding over cp and sp, too, costs nothing and saves memory.
        weights = init_device_mesh(
            device.type, (replicate, shard * sequence), mesh_dim_names=("replicate", "shard")
        )
        ranks = axes.get_local_rank("cp"), axes.get_local_rank("sp")
        group = SequenceGroup(config.cp, config.sp, *ranks, cp, sp, both)
        return cls(*sizes, dist.get_rank(), device, group, weights, dp)

    @property
    def first(self) -> bool:
        """Whether this process writes files and logs."""
        return self.rank == 0

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.dp_size * self.cp * self.sp

    @property
    def dp_size(self) -> int:
        """Number of data-parallel groups."""
        return self.dp_replicate * self.dp_shard

    @property
    def dp_rank(self) -> int:
        """Data-parallel group of this process; the same within a sequence group."""
        return self.rank // (self.cp * self.sp)

    @property
    def fsdp(self) -> DeviceMesh:
        """The mesh for `fully_shard`: replicate x shard, or only shard if nothing is replicated.

        Weights are sharded over dp_shard, cp and sp; gradients are averaged over all processes.
        """
        assert self.weights is not None, "start a process group before the mesh"
        return self.weights if self.dp_replicate > 1 else self.weights["shard"]

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of `tensor` over the data-parallel processes with this sequence rank."""
        total = tensor.detach().clone()
        if self.dp_size > 1:
            dist.all_reduce(total, group=self.samples)
        return total

    def sum_counts(self, counts: Sequence[int]) -> list[int]:
        """Return the sums over the data-parallel processes of this sequence rank; the device is not used."""
        return self.sum(torch.tensor(counts)).tolist()

    def all_gather(self, value: Any) -> list[Any]:
        """Return the picklable values of all processes, by rank."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.world_size > 1:
            dist.barrier()


def data_parallel(config: MeshConfig, world_size: int) -> tuple[int, int]:
    """Return the sizes of dp_replicate and dp_shard on a number of processes.

    Raises:
        ConfigError: the product of the axes is not the number of processes.
    """
    replicate, sequence = config.dp_replicate, config.cp * config.sp
    shard = config.dp_shard or max(1, world_size // (replicate * sequence))
    if replicate * shard * sequence != world_size:
        given = f"mesh.dp_replicate {replicate} x mesh.cp {config.cp} x mesh.sp {config.sp}"
        if config.dp_shard:
            given = f"{given} x mesh.dp_shard {shard}"
        raise ConfigError(
            f"The run has {world_size} processes, but {given} is {replicate * shard * sequence}; start as "
            "many processes, or change one of these keys (mesh.dp_shard=0 uses the remaining processes)."
        )
    return replicate, shard
