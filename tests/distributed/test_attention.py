"""Attention on two and four processes is the attention of one: values, gradients, and the bytes it takes.

Four processes are started once and run every case, by twos or together; they write down what they measured.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import volumes
from processes import results_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from worldmodel.config import MeshConfig
from worldmodel.errors import ConfigError
from worldmodel.models.layers import attention
from worldmodel.models.layers.attention import attend
from worldmodel.parallel import collectives, ulysses
from worldmodel.parallel.layout import Layout
from worldmodel.parallel.mask_rules import Kind
from worldmodel.parallel.mesh import Mesh
from worldmodel.train.diagnostics.collective_check import CollectiveCheck

pytestmark = pytest.mark.slow
WIDTH = 8
LEAST = ulysses.MIN_GROUP_BYTES
GROUPS = 3
"""Most groups of heads; those of some cases cannot be divided evenly."""

# Text, then frames; a document without a causal mask; text alone: side by side, and padded.
STORY = [(Kind.TEXT, 7), (Kind.FRAME, 12), (Kind.FRAME, 12), (Kind.TEXT, 5), (Kind.FRAME, 12)]
ROWS = [[STORY, [(Kind.FULL, 19)]], [[(Kind.TEXT, 30)], [(Kind.TEXT, 3)], [(Kind.FULL, 9)], STORY[:2]]]


@dataclass(frozen=True)
class Case:
    """One way to share a sequence."""

    cp: int
    sp: int
    heads: tuple[int, int] = (8, 4)
    balance: bool = False
    dtype: str = "float64"
    kernel: str = "reference"
    clip: bool = False
    """Frames of 6 cells, one row for the batch: the generator's layout."""

    @property
    def name(self) -> str:
        words = [f"cp{self.cp}sp{self.sp}", f"{self.heads[0]}of{self.heads[1]}", self.dtype, self.kernel]
        return "-".join([*words, *["balanced"] * self.balance, *["clip"] * self.clip])


def cases() -> Iterator[Case]:
    for cp, sp in ((1, 2), (2, 1), (1, 4), (4, 1), (2, 2)):
        yield Case(cp, sp)
        yield Case(cp, sp, balance=True)
        yield Case(cp, sp, kernel="sdpa", heads=(4, 4))
        yield Case(cp, sp, heads=(6, 2), kernel="sdpa", balance=True)
        yield Case(cp, sp, heads=(28, 7))
        yield Case(cp, sp, heads=(4, 1), clip=True)
        yield Case(cp, sp, clip=True, balance=True)
        yield Case(cp, sp, dtype="float32", balance=True)
        yield Case(cp, sp, dtype="bfloat16", kernel="sdpa")


@dataclass
class Measured:
    """Measurements of one process; errors are relative to the largest number of one process's result."""

    out: float = 0.0
    gradients: list[float] = field(default_factory=list)
    same_out: bool = True
    same_gradients: bool = True
    same_as_whole: bool = True
    """Whether heads exchanged in groups give what heads exchanged together give, bit for bit."""
    sent: dict[str, int] = field(default_factory=dict)
    expected: dict[str, int] = field(default_factory=dict)
    yardstick: list[float] = field(default_factory=list)
    """bf16: errors of one process in bf16 against fp64, where the others are errors of many against fp64."""


@cache
def mesh_of(config: MeshConfig) -> Mesh:
    return Mesh.build(config, torch.device("cpu"))


def layout_of(case: Case) -> Layout:
    if case.clip:
        return Layout.frames(torch.tensor([0, 0, 1, 2, 2, 3, 4]), 6)
    return Layout.rows(ROWS, length=81)


def alone(parts: list[Tensor], weight: Tensor, layout: Layout) -> list[Tensor]:
    """Result and gradients of one process."""
    parts = [part.detach().requires_grad_() for part in parts]
    out = attend(*parts, layout)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), parts)]


def together(parts: list[Tensor], weight: Tensor, layout: Layout) -> list[Tensor]:
    """Result and gradients of all processes, put together."""
    parts = [part.detach().requires_grad_() for part in parts]
    out = attend(*(layout.take(part, 2) for part in parts), layout)
    gradients = torch.autograd.grad((out * layout.take(weight, 2)).sum(), parts)
    with torch.no_grad():
        out = layout.gather(out, 2)
    assert layout.shards is not None
    for gradient in gradients:
        dist.all_reduce(gradient, group=layout.shards.group.group)
    return [out, *gradients]


def error(found: Tensor, truth: Tensor) -> float:
    return ((found.double() - truth).abs().max() / truth.abs().max()).item()


def measure(case: Case) -> Measured:
    mesh = mesh_of(MeshConfig(cp=case.cp, sp=case.sp))
    whole = layout_of(case)
    layout = whole.shard(mesh.sequence, balance=case.balance)
    dtype = getattr(torch, case.dtype)
    generator = torch.Generator().manual_seed(5)
    queries, keys = case.heads
    shapes = [(2, heads, whole.length, WIDTH) for heads in (queries, keys, keys, queries)]
    *parts, weight = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    measured = Measured(expected=expected_bytes(case, layout, dtype))
    with attention.using(case.kernel):
        one = alone(parts, weight, whole)
        with collectives.counted() as sent:
            many = together(parts, weight, layout)
        if case.cp == 1:  # sums over cp ranks may have another order if they are made in pieces
            ulysses.MAX_GROUPS = 1
            measured.same_as_whole = all(map(torch.equal, together(parts, weight, layout), many))
            ulysses.MAX_GROUPS = GROUPS
    measured.sent = dict(sent)
    measured.same_out = torch.equal(many[0], one[0])
    measured.same_gradients = all(map(torch.equal, many[1:], one[1:]))
    truth = one
    if dtype != torch.float64:
        with attention.using("reference"):
            truth = alone([part.double() for part in parts], weight.double(), whole)
        measured.yardstick = [error(*pair) for pair in zip(one, truth, strict=True)]
    measured.out, *measured.gradients = (error(*pair) for pair in zip(many, truth, strict=True))
    return measured


def expected_bytes(case: Case, layout: Layout, dtype: torch.dtype) -> dict[str, int]:
    """Bytes by the formulas; keys and values are gathered back in fp32 or better."""
    assert layout.shards is not None
    shards, precise = layout.shards, torch.promote_types(dtype, torch.float32).itemsize
    heads, bytes_sent = ulysses.divide_heads(*case.heads, case.sp), {}
    if case.sp > 1:
        both = volumes.exchanged(heads, WIDTH, shards.sp_sizes, shards.group.sp_rank)
        bytes_sent["ulysses"] = 2 * sum(both) * dtype.itemsize
    if case.cp > 1:
        numbers = 2 * volumes.gathered(len(heads.key[shards.group.sp_rank]), WIDTH, shards.cp_sizes)
        bytes_sent["context"] = numbers * (dtype.itemsize + precise)
    rows = 2 * case.heads[0] * WIDTH * max(shards.sizes) * (shards.group.size - 1)
    return bytes_sent | {"gather": rows * dtype.itemsize}


# ---- a whole step: the weights shared by FSDP, the sequence by both axes -------------------------------


STEPS = [
    MeshConfig(sp=4),
    MeshConfig(cp=4),
    MeshConfig(cp=2, sp=2),
    MeshConfig(dp_shard=2, sp=2),
    MeshConfig(dp_replicate=2, cp=2),
    MeshConfig(dp_replicate=2, dp_shard=2),
]


class Reader(nn.Module):
    """Two layers of attention over a packed sequence; the loss is made from the gathered tokens."""

    def __init__(self, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        width = heads * WIDTH
        self.heads, self.groups = heads, groups
        self.embed = nn.Embedding(11, width)
        self.layers = nn.ModuleList(nn.Linear(width, width + 2 * groups * WIDTH) for _ in range(2))
        self.head = nn.Linear(width, 11)

    def forward(self, ids: Tensor, layout: Layout) -> Tensor:
        x = layout.take(self.embed(ids))
        for layer in self.layers:
            parts = layer(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2)
            q, k, v = parts.split([self.heads, self.groups, self.groups], dim=1)
            x = x + attend(q, k, v, layout).transpose(1, 2).flatten(2)
        return layout.gather(self.head(x))


def step_error(config: MeshConfig) -> float:
    """Worst error of any weight's gradient, against one process with all samples."""
    mesh = mesh_of(config)
    torch.manual_seed(0)
    model = Reader().double()
    ids = torch.randint(11, (4, 81))
    layout = Layout.rows(ROWS, 81)
    rows = [Layout(*(x[row % 2][None] for x in fields_of(layout))) for row in range(len(ids))]
    losses = [model(ids[row][None], rows[row]).logsumexp(-1).sum() for row in range(len(ids))]
    truth = torch.autograd.grad(torch.stack(losses).sum(), list(model.parameters()))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh.fsdp)
    fully_shard(model, mesh=mesh.fsdp)
    for row in range(mesh.dp_rank, len(ids), mesh.dp_size):
        shared = rows[row].shard(mesh.sequence, balance=True)
        # FSDP takes the mean over all processes; samples are summed, and each counts once a sequence rank.
        (model(ids[row][None], shared).logsumexp(-1).sum() * mesh.dp_size).backward()
    errors = [error(p.grad.full_tensor(), t) for p, t in zip(model.parameters(), truth, strict=True)]
    return max(errors)


def fields_of(layout: Layout) -> tuple[Tensor, ...]:
    return layout.document, layout.block, layout.kind, layout.position


def facts() -> dict[str, object]:
    """Return properties of a mesh of all processes, and the error of an invalid one."""
    mesh = mesh_of(MeshConfig(dp_shard=2, sp=2))
    try:
        Mesh.build(MeshConfig(dp_replicate=1, cp=3), torch.device("cpu"))
        refused = ""
    except ConfigError as wrong:
        refused = str(wrong)
    mesh.barrier()
    meshes = (MeshConfig(dp_shard=2, sp=2), MeshConfig(dp_shard=2, cp=2), MeshConfig(cp=2, sp=2))
    alike = [mesh_of(config).sequence for config in meshes]
    members = [dist.get_process_group_ranks(each.group) for each in alike]
    shared = [each.group in (each.sp_group, each.cp_group) for each in alike]
    ranks = [mesh.rank, mesh.dp_rank, mesh.sequence.cp_rank, mesh.sequence.sp_rank]
    total = mesh.sum(torch.tensor([1.0, mesh.rank]))
    return {
        "ranks": ranks,
        "sum": total.tolist(),
        "refused": refused,
        "first": mesh.first,
        "members": members,
        "shared": shared,
    }


def compiled_equals_eager() -> list[bool]:
    """Whether a layer may be compiled: in one graph alone, and with messages between graphs where shared."""
    whole, same = Layout.rows(ROWS, 81), []
    whole.visible()  # made once, before the layers
    for layout in (whole, whole.shard(mesh_of(MeshConfig(sp=dist.get_world_size())).sequence)):
        parts = [layout.take(torch.randn(2, heads, 81, WIDTH), 2) for heads in (8, 4, 4)]

        def layer(q: Tensor, k: Tensor, v: Tensor, layout: Layout = layout) -> Tensor:
            return attend(q * 2, k, v, layout) + 1

        compiled = torch.compile(layer, backend="eager", fullgraph=layout is whole)
        same.append(torch.equal(compiled(*parts), layer(*parts)))
    return same


class Operators(TorchDispatchMode):
    """Lists when heads are sent, when they are waited for, and when they are attended to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {"all_to_all": "send", "wait_tensor": "wait", "scaled_dot_product": "attend"}
        self.found += [word for name, word in known.items() if name in str(func)]
        return func(*args, **(kwargs or {}))


def operators() -> list[list[str]]:
    """Return the operators of attention in two groups of heads: forward, backward, and of few bytes.

    The last list has the collectives that the check of collectives saw in the first two.
    """
    mesh = mesh_of(MeshConfig(sp=dist.get_world_size()))
    layout = Layout.unmasked(12).shard(mesh.sequence)
    parts = [layout.take(torch.randn(1, 8, 12, WIDTH), 2).requires_grad_() for _ in range(3)]
    with attention.using("sdpa"):
        with CollectiveCheck(timedelta(seconds=60)) as check:
            with Operators() as forward:
                out = attend(*parts, layout)
            with Operators() as backward:
                out.sum().backward()
        ulysses.MIN_GROUP_BYTES = LEAST
        with Operators() as small:
            attend(*parts, layout)
    return [*(each.found for each in (forward, backward, small)), [each.operator for each in check.recent]]


def work(folder: Path) -> None:
    """Runs in each process."""
    dist.init_process_group("gloo")
    ulysses.MAX_GROUPS, ulysses.MIN_GROUP_BYTES = GROUPS, 1
    found = {
        "cases": {case.name: asdict(measure(case)) for case in cases()},
        "steps": {str(config): step_error(config) for config in STEPS},
        "mesh": facts(),
        "compiled": compiled_equals_eager(),
        "operators": operators(),
    }
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The measurements of every process."""
    folder = tmp_path_factory.mktemp("world")
    return results_of(__file__, 4, folder)


def measurements(world: list[dict]) -> Iterator[tuple[Case, Measured]]:
    for rank in world:
        for case in cases():
            yield case, Measured(**rank["cases"][case.name])


def test_fp64_is_exact(world: list[dict]) -> None:
    wrong = {
        case.name: measured
        for case, measured in measurements(world)
        if case.dtype == "float64" and max(measured.out, *measured.gradients) > 1e-12
    }
    assert wrong == {}


def test_fp32_is_as_exact_as_fp32(world: list[dict]) -> None:
    for case, measured in measurements(world):
        if case.dtype == "float32":
            assert max(measured.out, *measured.gradients) < 5e-6, case


def test_bf16_is_as_good_as_on_one_process(world: list[dict]) -> None:
    for case, measured in measurements(world):
        if case.dtype == "bfloat16":
            many = [measured.out, *measured.gradients]
            assert all(a < 1.5 * b for a, b in zip(many, measured.yardstick, strict=True)), case


def test_ulysses_changes_no_bit(world: list[dict]) -> None:
    """Each head is computed as on one process; gradients too, where no key head is on two processes."""
    seen = 0
    for case, measured in measurements(world):
        if case.cp == 1 and case.kernel == "reference" and case.dtype == "float64":
            assert measured.same_out, case
            whole = case.heads[1] % case.sp == 0
            assert measured.same_gradients or not whole, case
            seen += whole
    assert seen > 4


def test_groups_of_heads_change_no_bit(world: list[dict]) -> None:
    for case, measured in measurements(world):
        assert measured.same_as_whole, case


def test_heads_are_exchanged_while_others_are_attended_to(world: list[dict]) -> None:
    """Those of the second group are sent before the first is attended to; so are gradients, in reverse."""
    for rank in world:
        forward, backward, small, checked = rank["operators"]
        expected = ["send", "send", "wait", "attend", "send", "wait", "attend", "send", "wait", "wait"]
        assert forward == backward == expected
        assert small == ["send", "wait", "attend", "send", "wait"]
        assert checked == ["all_to_all"] * (forward + backward).count("send")


def test_bytes_are_those_of_the_formulas(world: list[dict]) -> None:
    for case, measured in measurements(world):
        assert measured.sent == measured.expected, case


def test_a_step_has_the_gradients_of_one_process(world: list[dict]) -> None:
    for rank in world:
        assert len(rank["steps"]) == len(STEPS)
        assert max(rank["steps"].values()) < 1e-12, rank["steps"]


def test_the_mesh_counts_ranks_row_major(world: list[dict]) -> None:
    for rank, found in enumerate(world):
        facts = found["mesh"]
        assert facts["ranks"] == [rank, rank // 2, 0, rank % 2]
        assert facts["sum"] == [2, 2 + 2 * (rank % 2)]
        assert facts["first"] == (rank == 0)
        assert facts["members"] == [[rank // 2 * 2, rank // 2 * 2 + 1]] * 2 + [[0, 1, 2, 3]]
        assert facts["shared"] == [True, True, False]  # a group of its own only where both axes are used
        assert "mesh.cp 3" in facts["refused"]
        assert "4 processes" in facts["refused"]


def test_layers_may_be_compiled(world: list[dict]) -> None:
    assert [rank["compiled"] for rank in world] == [[True, True]] * 4


if __name__ == "__main__":
    work(Path(sys.argv[1]))
