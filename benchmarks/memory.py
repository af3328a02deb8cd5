"""Memory of a training step of the generator on long video, per process: `python benchmarks/memory.py`.

Nothing is computed: fake tensors pass the real code on a fake process group, and every allocation is counted
(torch's MemTracker). The figures are modelled peaks; `sp` processes share weights and sequences. The mask is
left out: a dense one is for short sequences, and flex attention keeps a few numbers a block.
"""

import argparse
import json
import warnings
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from worldmodel.config import GeneratorConfig, MeshConfig
from worldmodel.models.conditioning import Condition
from worldmodel.models.generator.dit import DiT
from worldmodel.models.layers import attention
from worldmodel.parallel.layout import Layout
from worldmodel.parallel.mesh import Mesh

GIB = 2**30
CHANNELS, CELLS = 16, 16
FRAMES = (16, 32, 64, 128)
PROCESSES = (1, 2, 4, 8)


class Root(torch.nn.Module):
    """The generator under one FSDP root."""

    def __init__(self, generator: DiT) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, latents: torch.Tensor, sigma: torch.Tensor, condition: Condition) -> torch.Tensor:
        """Return the velocity of a context frame and a chunk."""
        blocks = torch.zeros(latents.shape[1], dtype=torch.long)
        return self.generator.velocity(latents, sigma, latents, condition, blocks=blocks)[0]


def peak(frames: int, processes: int, width: int, num_layers: int) -> float:
    """Return the modelled peak of a forward and a backward pass, in GiB a process."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    try:
        mesh = Mesh.build(MeshConfig(sp=processes), torch.device("cpu"))
        layout = Layout.frames(torch.tensor([0] + [1] * frames), CELLS**2)
        layout = layout.shard(mesh.sequence)
        layout._cache["visible", "cpu"] = None
        if layout.shards is not None:
            layout.halo((CELLS, CELLS), mesh.device)
        ready = Mock(shard=lambda *args, **kwargs: layout)  # layouts are numbers, which fake tensors have not
        with patch.object(Layout, "frames", return_value=ready), FakeTensorMode(allow_non_fake_inputs=True):
            generator = DiT(
                GeneratorConfig(width=width, num_layers=num_layers, num_heads=width // 64),
                CHANNELS,
                (CELLS, CELLS),
            )
            generator.sequence = mesh.sequence
            for layer in generator.layers:
                fully_shard(layer, mesh=mesh.fsdp)
            root = Root(generator)
            fully_shard(root, mesh=mesh.fsdp)
            tracker = MemTracker()
            tracker.track_external(root)
            with tracker:
                latents = torch.randn(1, frames + 1, CHANNELS, CELLS, CELLS)
                condition = Condition(
                    tokens=torch.randn(1, CELLS**2, width),
                    pooled=torch.randn(1, width),
                    cells=torch.randn(1, CELLS**2, width),
                    forecast=latents,
                )
                root(latents, torch.rand(1, frames + 1), condition).sum().backward()
            snapshot = tracker.get_tracker_snapshot("peak")
        return snapshot[torch.device("cpu")]["Total"] / GIB
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=512, help="width of the generator (default 512)")
    parser.add_argument("--num-layers", type=int, default=8, help="its layers (default 8)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    attention.use("sdpa")
    table = {
        frames: {number: peak(frames, number, args.width, args.num_layers) for number in PROCESSES}
        for frames in FRAMES
    }
    if args.json:
        print(json.dumps(table))
        return
    print(f"modelled peak, GiB a process; {CELLS * CELLS} tokens a latent frame")
    print("latent frames " + "".join(f"{f'sp {number}':>10}" for number in PROCESSES))
    for frames, row in table.items():
        print(f"{frames:13d} " + "".join(f"{value:10.2f}" for value in row.values()))


if __name__ == "__main__":
    main()
