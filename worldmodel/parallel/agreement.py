"""Counts that all processes agree on, so that each calls its sharded modules equally often.

FSDP gathers a sharded module whenever it is called, which is a collective: if a process calls it less often
than the others, the run crashes or hangs. Where the number of calls depends on samples, the processes agree
on the largest, and those with fewer call the module on a row that they have, without effect on values or
gradients.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Agreement:
    """The processes of a run; by default one, outside of training."""

    num_processes: int = 1

    def most(self, *counts: int) -> list[int]:
        """Return the largest of each count over all processes.

        Every process must call this equally often, and before the calls that are counted.
        """
        if self.num_processes == 1:
            return list(counts)
        largest = torch.tensor(counts)  # on the CPU, also where models are on a GPU
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest.tolist()
