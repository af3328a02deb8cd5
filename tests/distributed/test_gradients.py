"""Two processes average their gradients, whichever parameters each of them used."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.run import main as torchrun

from worldmodel.train import distributed

SELF = Path(__file__)


class Heads(nn.Module):
    """Three weights, of which a batch may need only some, as episodes need only some adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.second, self.none = (nn.Parameter(torch.ones(2)) for _ in range(3))


def work(folder: Path) -> None:
    """Runs in each process: the second weight gets a gradient on rank 1 only."""
    processes = distributed.start()
    model = Heads()
    loss = (1 + processes.rank) * model.both.sum()
    if processes.rank == 1:
        loss = loss + 4 * model.second.sum()
    loss.backward()
    distributed.average_gradients(model, processes)
    seen = [None if p.grad is None else p.grad.tolist() for p in (model.both, model.second, model.none)]
    (folder / f"{processes.rank}.txt").write_text(str(seen), encoding="utf-8")
    distributed.stop(processes)


def test_a_parameter_used_on_one_process_is_averaged_on_all(tmp_path: Path) -> None:
    torchrun(["--standalone", "--nproc-per-node", "2", str(SELF), str(tmp_path)])
    for rank in range(2):
        text = (tmp_path / f"{rank}.txt").read_text(encoding="utf-8")
        assert text == "[[1.5, 1.5], [2.0, 2.0], None]"


if __name__ == "__main__":
    work(Path(sys.argv[1]))
