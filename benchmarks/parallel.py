"""Sequence parallelism: exactness, bytes sent, and balance.

    exactness   attention on 2 and 4 gloo processes against one, and the bytes sent against the formulas
    balance     the busiest rank against the mean when a packed sequence is cut for context parallelism
    overlap     seconds of attention on 2 gloo processes whose heads are exchanged together or in groups

`balance` counts visible pairs; the others run attention. `overlap` needs a slow link to show a difference:

    unshare -rn sh -c "ip link set lo up &&
        tc qdisc add dev lo root tbf rate 400mbit burst 256kb latency 1s &&
        GLOO_SOCKET_IFNAME=lo python benchmarks/parallel.py --tables overlap"
"""

import argparse
import json
import math
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.run import main as torchrun

from worldmodel.config import MeshConfig
from worldmodel.models.layers import attention
from worldmodel.models.layers.attention import attend
from worldmodel.parallel import collectives, context, ulysses
from worldmodel.parallel.layout import Layout
from worldmodel.parallel.mask_rules import Kind, Segment
from worldmodel.parallel.mesh import Mesh, SequenceGroup

FRAME = 390
"""Tokens of a latent frame in `balance`."""


def documents(total: int, seed: int) -> list[list[Segment]]:
    """Draw a row of `total` tokens: half its documents text, 30 % text and video, a fifth bidirectional."""
    chance, row, room = random.Random(seed), [], total
    while room:
        length = min(room, max(16, int(chance.lognormvariate(math.log(2000), 1.2))))
        kind, frames = chance.random(), length // FRAME
        if kind < 0.2:
            row.append([(Kind.FULL, length)])
        elif kind < 0.5 and frames:
            row.append([(Kind.TEXT, length - frames * FRAME), *[(Kind.FRAME, FRAME)] * frames])
        else:
            row.append([(Kind.TEXT, length)])
        room -= length
    return row


# ---- exactness and bytes -------------------------------------------------------------------------------

HEADS, WIDTH, LENGTH = (8, 4), 16, 512


def measure(mode: str, shared: int, dtype: torch.dtype) -> dict:
    """Compare `shared` processes with one; errors are relative to the largest number of the result."""
    sizes = {"ulysses": (1, shared), "kv-gather": (shared, 1), "both": (shared // 2, 2)}[mode]
    mesh = Mesh.build(MeshConfig(cp=sizes[0], sp=sizes[1]), torch.device("cpu"))
    whole = Layout.rows([documents(LENGTH - 3, 2)], LENGTH)
    layout = whole.shard(mesh.sequence, balance=True)
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, LENGTH, WIDTH) for heads in (HEADS[0], HEADS[1], HEADS[1], HEADS[0])]
    *parts, weight = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    parts = [part.requires_grad_() for part in parts]
    with attention.using("reference"):
        one = attend(*parts, whole)
        truth = [one, *torch.autograd.grad((one * weight).sum(), parts)]
        with collectives.counted() as sent:
            out = attend(*(layout.take(part, 2) for part in parts), layout)
            gradients = torch.autograd.grad((out * layout.take(weight, 2)).sum(), parts)
    for gradient in gradients:
        dist.all_reduce(gradient, group=mesh.sequence.group)
    found = [layout.gather(out.detach(), 2), *gradients]
    errors = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, truth, strict=True)]
    return {"errors": errors, "sent": sum(sent.values()), "formula": formula(layout, dtype)}


def formula(layout: Layout, dtype: torch.dtype) -> int:
    """Bytes of one forward and backward pass, as `ulysses.volume` and `context.volume` have them."""
    assert layout.shards is not None
    shards, group = layout.shards, layout.shards.group
    heads = ulysses.divide_heads(*HEADS, group.sp)
    exchanged = sum(ulysses.volume(heads, WIDTH, shards.sp_sizes, group.sp_rank))
    gathered = context.volume(len(heads.key[group.sp_rank]), WIDTH, shards.cp_sizes)
    precise = torch.promote_types(dtype, torch.float32).itemsize
    return exchanged * dtype.itemsize + gathered * (dtype.itemsize + precise)


def exactness_worker(args: argparse.Namespace) -> dict:
    """Measure every mode; runs in each process."""
    return {
        f"{mode} {shared} {str(dtype).removeprefix('torch.')}": measure(mode, shared, dtype)
        for dtype in (torch.float64, torch.float32)
        for mode, shared in (("ulysses", 2), ("kv-gather", 2), ("ulysses", 4), ("kv-gather", 4), ("both", 4))
    }


def exactness(args: argparse.Namespace) -> None:
    """Start the processes and print what the first measured."""
    rows = of_processes(4, "exactness", args)
    print(f"{HEADS[0]} heads on {HEADS[1]}, width {WIDTH}, {LENGTH} packed tokens; error / largest value")
    print("mode       P  dtype         out       dq       dk       dv   bytes sent   formula")
    for name, row in rows.items():
        mode, shared, dtype = name.split()
        errors = " ".join(f"{error:8.1e}" for error in row["errors"])
        print(f"{mode:9}  {shared}  {dtype:8} {errors}  {row['sent']:11,d}  {row['formula']:8,d}")


# ---- overlap -------------------------------------------------------------------------------------------

OVERLAP = (8, 2048, 64)
"""Heads, tokens and width of a head."""


def seconds(groups: int, layout: Layout) -> float:
    """Return the time of a forward and backward pass of attention, after one that is not counted."""
    ulysses.MAX_GROUPS, ulysses.MIN_GROUP_BYTES = groups, 1
    heads, length, width = OVERLAP
    parts = [layout.take(torch.randn(1, heads, length, width), 2).requires_grad_() for _ in range(3)]
    began = 0.0
    for _ in range(2):
        dist.barrier()
        began = time.perf_counter()
        attend(*parts, layout).sum().backward()
        dist.barrier()
    return time.perf_counter() - began


def overlap_worker(args: argparse.Namespace) -> dict:
    """Time numbers of groups in turns, since other processes come and go; runs in each process."""
    torch.set_num_threads(1)
    sequence = Mesh.build(MeshConfig(sp=2), torch.device("cpu")).sequence
    layout = Layout.unmasked(OVERLAP[1]).shard(sequence)
    found: dict[int, list[float]] = {groups: [] for groups in (1, 2, 4)}
    for _ in range(args.num_samples):
        for groups, times in found.items():
            times.append(seconds(groups, layout))
    return found


def overlap(args: argparse.Namespace) -> None:
    """Start the processes and print the times."""
    found = of_processes(2, "overlap", args)
    heads, length, width = OVERLAP
    sent = 8 * heads * length * width  # bytes: a quarter of q, k, v, the result and their gradients in fp32
    print(f"{heads} heads of width {width}, {length} tokens, 2 processes, each sends {sent / 1e6:.1f} MB")
    print("groups   seconds of a forward and backward pass: median (least to most)")
    for groups, times in found.items():
        print(f"{groups:>6}   {statistics.median(times):.3f} ({min(times):.3f} to {max(times):.3f})")


# ---- balance -------------------------------------------------------------------------------------------


def imbalance(areas: torch.Tensor, ranks: int, how: str, layout: Layout) -> float:
    """Return the visible pairs of the busiest rank over the mean."""
    if how == "contiguous":
        loads = areas.view(ranks, -1).sum(dim=1)
    elif how == "head-tail":  # of twice as many pieces, rank r gets r from the front and r from the back
        pieces = areas.view(2 * ranks, -1).sum(dim=1)
        loads = (pieces + pieces.flip(0))[:ranks]
    else:
        shards = layout.shard(SequenceGroup(cp=ranks), balance=True).shards
        assert shards is not None and shards.order is not None
        loads = torch.stack([part.sum() for part in areas[shards.order].split(shards.sizes)])
    return (loads.max() / loads.double().mean()).item()


def balance(args: argparse.Namespace) -> None:
    """Print the imbalance of three ways to cut, mean over draws."""
    ways = ("contiguous", "head-tail", "balanced")
    print(f"busiest rank over mean, {args.num_samples} draws (in brackets: the worst)")
    print("tokens    P     contiguous      head-tail       balanced")
    for length, ranks in ((32_768, 8), (131_072, 16), (131_072, 64), (524_288, 64)):
        found = {way: [] for way in ways}
        for seed in range(args.seed, args.seed + args.num_samples):
            layout = Layout.rows([documents(length, seed)])
            areas = layout.area()[0]
            for way in ways:
                found[way].append(imbalance(areas, ranks, way, layout))
        cells = [f"{sum(all_) / len(all_):6.3f} ({max(all_):.3f})" for all_ in found.values()]
        print(f"{length:7,d}  {ranks:2d} " + " ".join(f"{cell:>15}" for cell in cells))


TABLES = {"exactness": exactness, "balance": balance, "overlap": overlap}
WORKERS = {"exactness": exactness_worker, "overlap": overlap_worker}


def of_processes(count: int, table: str, args: argparse.Namespace) -> dict:
    """Return what the first of `count` processes measured for a table."""
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/found.json"
        options = ["--standalone", "--nproc-per-node", str(count), __file__, "--worker", file]
        torchrun([*options, "--tables", table, "--num-samples", str(args.num_samples)])
        return json.loads(Path(file).read_text(encoding="utf-8"))


def work(args: argparse.Namespace) -> None:
    """Runs in each process."""
    dist.init_process_group("gloo")
    found = WORKERS[args.tables[0]](args)
    if dist.get_rank() == 0:
        Path(args.worker).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Print the tables that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--num-samples", type=int, default=5, help="draws of sequences")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--worker", metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker and "RANK" in os.environ:
        work(args)
        return
    for name in args.tables:
        print(f"\n== {name}")
        TABLES[name](args)


if __name__ == "__main__":
    main()
