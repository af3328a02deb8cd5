"""Generators on processes that share a clip compute what one process computes: values, gradients, bytes.

The models are tiny, with random weights and in fp64. Transformers of diffusers convert to fp32 in places, so
the workers let `Tensor.float` keep fp64.
"""

import importlib.util
import itertools
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import volumes
from precise import fill_zeros
from processes import results_of
from torch import Tensor

from worldmodel.config import GeneratorConfig, MeshConfig
from worldmodel.models.codec.diffusers import DiffusersCodec
from worldmodel.models.conditioning import Condition
from worldmodel.models.generator.base import VideoGenerator
from worldmodel.models.generator.dit import DiT
from worldmodel.models.layers import attention
from worldmodel.parallel import collectives, ulysses
from worldmodel.parallel.layout import Layout
from worldmodel.parallel.mesh import Mesh, SequenceGroup
from worldmodel.train.activations import Offload, Policy, apply_policy

pytestmark = pytest.mark.slow
SELF = Path(__file__)
HEADS, BATCH, CHUNK = 5, 2, 3
"""Numbers of heads and of tokens cannot be divided evenly."""
GRID = (6, 10)


@dataclass(frozen=True)
class Case:
    """A generator and the processes that share its clip."""

    kind: str
    cp: int
    sp: int
    streamed: bool = False
    task: str = "chunk"
    """chunk, window (two overlapping chunks, as for `sampler: swin`) or blocks."""
    activations: Policy = "keep"

    @property
    def name(self) -> str:
        words = [self.kind, f"cp{self.cp}sp{self.sp}", self.task]
        return "-".join([*words, *["stream"] * self.streamed, self.activations])


def cases() -> Iterator[Case]:
    for cp, sp in ((1, 2), (2, 1), (1, 4), (4, 1), (2, 2)):
        yield Case("dit", cp, sp, activations="selective")
        yield Case("dit", cp, sp, task="window")
        yield Case("wan", cp, sp)
        yield Case("wan", cp, sp, task="window", activations="recompute")
        yield Case("ltx", cp, sp, streamed=cp == 1)
        yield Case("cog-i2v", cp, sp, streamed=cp == 1, activations="keep" if sp > 1 else "selective")
    for cp, sp in ((1, 4), (2, 2)):
        yield Case("wan", cp, sp, streamed=True, activations="recompute")
        yield Case("wan", cp, sp, task="blocks")
        yield Case("wan-causal", cp, sp)
        yield Case("wan-causal", cp, sp, streamed=True, task="window", activations="recompute")
        yield Case("wan-clip", cp, sp)
        yield Case("cog1.5-i2v", cp, sp)


@dataclass
class Measured:
    """Measurements of one process; errors are relative to the norm of one process's result."""

    loss: float = 0.0
    gradient: tuple[float, str] = (0.0, "")
    """The worst error of a parameter's gradient, and its name."""
    tokens: float = 0.0
    """Error of the gradient of the condition's tokens."""
    denoised: float = 0.0
    same: bool = True
    """Whether the denoised chunk is that of one process, bit for bit."""
    modulated: int = 0
    """Timesteps for which Wan computed modulations in a pass with gradients, for all clips."""
    sent: dict[str, int] = field(default_factory=dict)
    expected: dict[str, int] = field(default_factory=dict)


@cache
def mesh_of(config: MeshConfig) -> Mesh:
    return Mesh.build(config, torch.device("cpu"))


@cache
def tiny() -> Any:
    """The makers of tiny models of the tests of diffusers."""
    file = SELF.parents[1] / "unit" / "diffusers" / "conftest.py"
    spec = importlib.util.spec_from_file_location("tiny_diffusers", file)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.GRID = GRID
    for transformer in module.TRANSFORMERS.values():
        transformer["num_attention_heads"] = HEADS
        width = HEADS * transformer["attention_head_dim"]
        transformer |= {
            name: width for name in ("added_kv_proj_dim", "cross_attention_dim") if name in transformer
        }
    return module


@cache
def generator_of(kind: str, streamed: bool) -> VideoGenerator:
    """Make a generator in which no weight is zero, so that every gradient depends on every part."""
    torch.manual_seed(4)
    if kind == "dit":
        made: VideoGenerator = DiT(GeneratorConfig(width=16 * HEADS, num_layers=2, num_heads=HEADS), 4, GRID)
    else:
        codec = DiffusersCodec(tiny().vae(kind))
        made = tiny().generator(
            kind, 1, CHUNK, streamed, codec=codec, state_channels=codec.latent_channels + 2
        )
    fill_zeros(made, std=0.3)
    return made.double().train().requires_grad_(True)


def drawn(generator: Any, kind: str) -> dict[str, Any]:
    """Draw a condition, and latents of a context and of a chunk."""
    channels = 4 if kind == "dit" else generator.transformer.config.out_channels

    def draw(seed: int, *shape: int) -> Tensor:
        return tiny().draw(seed, BATCH, *shape).double()

    def latents(seed: int, count: int = CHUNK) -> Tensor:
        return draw(seed, count, channels, *GRID)

    condition = Condition(tokens=draw(52, 7, generator.token_width).requires_grad_(True))
    if kind == "dit":
        made = {"pooled": draw(53, generator.width), "cells": draw(54, math.prod(GRID), generator.width)}
        condition = replace(condition, forecast=latents(55), **made)
    else:
        cells = draw(54, math.prod(GRID), CHUNK * 2).requires_grad_(True)
        condition = replace(condition, text=draw(51, 6, tiny().TEXT), cells=cells, forecast=latents(55))
    return {
        "clean": latents(1),
        "noise": latents(2),
        "context": latents(3, 1),
        "weight": latents(4)[:, :, 0],
        "condition": condition,
    }


def loss_of(generator: Any, case: Case, given: dict[str, Any]) -> Tensor:
    """Return a weighted loss at a noise level per frame."""
    sigma = torch.tensor([[0.3, 0.6, 0.9], [0.5, 0.2, 0.4]], dtype=torch.float64)
    names = ("condition", "context")
    if case.task == "blocks":
        level = generator.path.nearest(sigma)
        noisy = generator.path.add_noise(given["clean"], given["noise"], level)
        past = generator.prefill(given["context"], given["condition"])
        made = generator(noisy, level, given["condition"], past, torch.tensor([0, 0, 1]))
        return (made.pow(2).mean(dim=2) * given["weight"]).sum()
    follows = None
    if case.task == "window":
        sigma, follows = sigma[:, :1].expand(-1, CHUNK), torch.tensor([False, True])
    output = generator.training_loss(
        given["clean"], given["noise"], sigma, *(given[name] for name in names), follows
    )
    return (output.error * given["weight"]).sum()


def learn(generator: Any, case: Case, group: SequenceGroup) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Return the loss and the gradients of all parameters and of the condition's tokens.

    As in training, gradients are the mean over the processes, each of which has the whole loss.
    """
    generator.sequence = group
    given = drawn(generator, case.kind)
    loss = loss_of(generator, case, given)
    loss.backward()
    found = {name: p.grad for name, p in generator.named_parameters() if p.grad is not None}
    generator.zero_grad(set_to_none=True)
    tokens = given["condition"].tokens.grad
    if group.size > 1:
        for gradient in (*found.values(), tokens):
            dist.all_reduce(gradient, group=group.group)
            gradient /= group.size
    return loss.detach(), found, tokens


def denoise(generator: Any, case: Case, group: SequenceGroup) -> Tensor:
    """Return a chunk made in two steps with guidance."""
    generator.sequence = group
    given = drawn(generator, case.kind)
    null = replace(given["condition"], tokens=torch.zeros_like(given["condition"].tokens))
    return tiny().denoise(
        generator, [given["condition"], null], given["context"], given["noise"], 2, guidance_scale=3.0
    )


def error(found: Tensor, truth: Tensor, least: float = 1e-30) -> float:
    return float((found - truth).norm() / truth.norm().clamp(min=least))


@contextmanager
def modulations(generator: Any) -> Iterator[list[int]]:
    """Collect the number of timesteps of every pass through Wan's transformer."""
    rows: list[int] = []
    if isinstance(generator, DiT) or not generator.transformer_class.__name__.startswith("Wan"):
        yield rows
        return
    hook = generator.transformer.condition_embedder.time_proj.register_forward_hook(
        lambda module, inputs, made: rows.append(made.shape[:-1].numel())
    )
    try:
        yield rows
    finally:
        hook.remove()


def measure(case: Case) -> Measured:
    group = mesh_of(MeshConfig(cp=case.cp, sp=case.sp)).sequence
    generator: Any = generator_of(case.kind, case.streamed)
    plain = [layer.forward for layer in generator.layers]
    measured = Measured()
    try:
        loss, truth, truth_tokens = learn(generator, case, SequenceGroup())
        for layer in generator.layers:
            apply_policy(layer, case.activations, Offload(torch.device("cpu")))
        with collectives.counted() as sent, modulations(generator) as rows:
            shared_loss, found, tokens = learn(generator, case, group)
        measured.modulated = max(rows, default=0)
        if case.task == "chunk":
            measured.sent, measured.expected = dict(sent), expected_bytes(generator, case, group)
        measured.loss = error(shared_loss, loss)
        assert found.keys() == truth.keys()
        largest = float(max(gradient.norm() for gradient in truth.values()))
        # A bias of all keys changes no softmax: its gradient is zero but for rounding.
        measured.gradient = max((error(found[name], truth[name], 1e-4 * largest), name) for name in truth)
        measured.tokens = error(tokens, truth_tokens)
        one, many = (denoise(generator, case, each) for each in (SequenceGroup(), group))
        measured.denoised, measured.same = error(many, one), torch.equal(many, one)
    finally:
        for layer, forward in zip(generator.layers, plain, strict=True):
            layer.forward = forward
    return measured


def layout_of(generator: Any, case: Case, group: SequenceGroup) -> tuple[Layout, int]:
    """Return how tokens are divided, and how many of the first are text."""
    tokens = (1 + CHUNK) * GRID[0] * GRID[1] // generator.cells_per_token
    if case.kind in ("dit", "wan-causal"):
        blocks = torch.tensor([0] + [1] * CHUNK)
        return Layout.frames(blocks, tokens // (1 + CHUNK)).shard(group, balance=True), 0
    text = generator.transformer.config.max_text_seq_length if case.kind.startswith("cog") else 0
    return Layout.unmasked(text + tokens).shard(group), text


def expected_bytes(generator: Any, case: Case, group: SequenceGroup) -> dict[str, int]:
    """Bytes of a step on one clip, by the formulas; `recompute` repeats those of the forward pass."""
    layout, text = layout_of(generator, case, group)
    assert layout.shards is not None
    width, layers, numbers = generator.width // HEADS, len(generator.layers), BATCH * 8
    heads, sent, forwards = (
        ulysses.divide_heads(HEADS, HEADS, case.sp),
        {},
        1 + (case.activations == "recompute"),
    )
    if case.sp > 1:
        forward, backward = volumes.exchanged(heads, width, layout.shards.sp_sizes, group.sp_rank)
        sent["ulysses"] = layers * numbers * (forwards * forward + backward)
    if case.cp > 1:
        volume = volumes.gathered(len(heads.key[group.sp_rank]), width, layout.shards.cp_sizes)
        sent["context"] = layers * numbers * (forwards + 1) * volume
    video, channels = layout.shards, 4
    if case.kind == "dit":
        given, received = edges(layout, group.rank)
        sent["halo"] = layers * numbers * 3 * generator.width * (forwards * given + received)
    else:
        half = layout if layout.masked else layout.split(text)[1]
        assert half.shards is not None
        video, channels = half.shards, generator.transformer.proj_out.out_features
    sent = {name: count for name, count in sent.items() if count}  # pieces may end with frames
    return sent | {"gather": 2 * numbers * max(video.sizes) * (group.size - 1) * channels}


def edges(layout: Layout, rank: int) -> tuple[int, int]:
    """Count the cells that a process sends to others and receives from them, cell by cell."""
    assert layout.shards is not None
    order = layout.shards.order
    pieces = (torch.arange(layout.length) if order is None else order).split(layout.shards.sizes)
    owner = {int(cell): number for number, piece in enumerate(pieces) for cell in piece}
    rows, columns = GRID
    pairs = set()
    for cell, own in owner.items():
        frame, row, column = cell // (rows * columns), cell // columns % rows, cell % columns
        for y, x in itertools.product(range(row - 1, row + 2), range(column - 1, column + 2)):
            if 0 <= y < rows and 0 <= x < columns:
                other = (frame * rows + y) * columns + x
                pairs |= {(other, owner[other], own)} if owner[other] != own else set()
    return tuple(sum(pair[side] == rank for pair in pairs) for side in (1, 2))  # type: ignore[return-value]


def work(folder: Path) -> None:
    """Runs in each process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    narrow = torch.Tensor.float
    torch.Tensor.float = lambda x: x if x.dtype == torch.float64 else narrow(x)  # type: ignore[method-assign]
    attention.use("sdpa")
    ulysses.MIN_GROUP_BYTES = 1  # heads are exchanged in groups
    found = {case.name: asdict(measure(case)) for case in cases()}
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The measurements of every process."""
    pytest.importorskip("diffusers", reason="diffusers is not installed: openworldmodel[diffusers]")
    folder = tmp_path_factory.mktemp("world")
    return results_of(__file__, 4, folder)


def test_values_and_gradients_are_those_of_one_process(world: list[dict]) -> None:
    for rank in world:
        for case in cases():
            measured = Measured(**rank[case.name])
            errors = (measured.loss, measured.gradient[0], measured.tokens, measured.denoised)
            assert max(errors) <= 1e-12, (case.name, measured)


def test_wan_modulates_pieces_of_frames_and_not_tokens(world: list[dict]) -> None:
    """A process with 15, 30 or 60 of the 60 tokens of four frames has whole frames of 15."""
    for rank in world:
        for case in cases():
            if case.kind == "wan" and case.task == "chunk":
                pieces = (1 + CHUNK) // (case.cp * case.sp)
                assert rank[case.name]["modulated"] == BATCH * pieces, case


def test_bytes_are_those_of_the_formulas(world: list[dict]) -> None:
    for rank in world:
        for case in cases():
            assert rank[case.name]["sent"] == rank[case.name]["expected"], case
    assert any(rank[case.name]["sent"] for rank in world for case in cases())


if __name__ == "__main__":
    work(Path(sys.argv[1]))
