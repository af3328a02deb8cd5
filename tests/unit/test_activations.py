"""Policies for activations: what is stored on the device, what is computed again, what is compiled."""

from collections import Counter
from typing import Any

import pytest
import torch
from storages import Storages
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from worldmodel.models.layers.attention import attend
from worldmodel.train import activations
from worldmodel.train.activations import Offload, Policy, apply_policy
from worldmodel.train.distributed import layer_stacks, layers

WIDTH = 32


class Layer(nn.Module):
    """Attention and a feed-forward; all layers read the same vector."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        q, k, v = (part[:, None] for part in self.qkv(x * shared).chunk(3, dim=-1))
        x = x + attend(q, k, v)[:, 0]
        return x + self.down(nn.functional.gelu(self.up(x)))


def stack(policy: Policy) -> nn.ModuleList:
    torch.manual_seed(0)
    made, offload = nn.ModuleList(Layer() for _ in range(4)), Offload(torch.device("cpu"))
    for layer in made:
        apply_policy(layer, policy, offload)
    return made


def run(made: nn.ModuleList, x: Tensor, shared: Tensor) -> Tensor:
    for layer in made:
        x = layer(x, shared)
    return x


class Count(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def computed_again(policy: Policy) -> dict[str, int]:
    """Operators of four layers that the backward pass calls again."""
    made = stack(policy)
    x, shared = torch.randn(2, 8, WIDTH, requires_grad=True), torch.randn(WIDTH)
    y = run(made, x, shared)
    with Count() as count:
        y.sum().backward()
    attention = sum(
        n for name, n in count.calls.items() if "scaled_dot_product" in name and "backward" not in name
    )
    return {"linear": count.calls["addmm"], "attention": attention, "gelu": count.calls["gelu"]}


def test_each_policy_computes_again_what_it_does_not_keep() -> None:
    nothing = {"linear": 0, "attention": 0, "gelu": 0}
    assert computed_again("keep") == computed_again("offload") == nothing
    # The last linear layer of a layer is not needed: recomputation stops before it.
    assert computed_again("recompute") == {"linear": 8, "attention": 4, "gelu": 4}
    assert computed_again("selective") == {"linear": 8, "attention": 0, "gelu": 4}


def test_offload_stores_nothing_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are counted apart: on a CPU, the memory that they are in is that of the device, too."""
    copies, copy = [], activations._SavedLayer._to_host

    def to_host(self: Any, tensor: Tensor) -> Tensor:
        copies.append(copy(self, tensor))
        return copies[-1]

    monkeypatch.setattr(activations._SavedLayer, "_to_host", to_host)
    held, gradients = {}, {}
    for policy in ("keep", "offload"):
        made, shared = stack(policy), torch.randn(WIDTH)
        x = torch.randn(2, 8, WIDTH, requires_grad=True)
        with Storages() as storages:
            y = run(made, x, shared)
            held[policy] = storages.held() - y.untyped_storage().nbytes()
        held[policy] -= sum(each.untyped_storage().nbytes() for each in copies)
        assert bool(copies) == (policy == "offload")
        y.sum().backward()
        gradients[policy] = [p.grad for p in made.parameters()]
    assert held["keep"] > 4 * 7 * x.nbytes
    assert held["offload"] == 0
    assert all(torch.equal(*pair) for pair in zip(*gradients.values(), strict=True))
    sizes = [each.numel() for each in copies]
    assert WIDTH not in sizes, "what layers share is not copied by each of them"
    assert not {p.numel() for p in made.parameters() if p.dim() > 1} & set(sizes), "weights stay"


def test_offload_copies_back_one_layer_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    saved_layer, events, order = activations._SavedLayer, [], {}
    load, unpack = saved_layer.load, saved_layer.unpack

    def loading(self: Any) -> None:
        if self.tensors:
            events.append(order.setdefault(id(self), len(order)))
        load(self)

    def using(self: Any, saved: Any) -> Tensor:
        events.append("use")
        return unpack(self, saved)

    monkeypatch.setattr(saved_layer, "load", loading)
    monkeypatch.setattr(saved_layer, "unpack", using)
    y = run(stack("offload"), torch.randn(1, 4, WIDTH, requires_grad=True), torch.randn(WIDTH))
    y.sum().backward()
    assert events[:4] == ["use", 0, 1, "use"]
    loads = [event for event in events if event != "use"]
    assert loads == [0, 1, 2, 3]
    assert events[events.index(2) - 1] == "use"
    assert events.index(2) > 4


def test_layers_inside_layers_are_not_wrapped_again() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    class Network(nn.Module):
        """As generators of diffusers: branches lie beside the blocks that run them."""

        def __init__(self) -> None:
            super().__init__()
            self.transformer, self.stream = nn.Module(), nn.Module()
            self.transformer.blocks = nn.ModuleList([Block(), Block()])
            self.stream.branches = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    network = Network()
    blocks, branches = network.transformer.blocks, network.stream.branches
    assert layers(network) == [*blocks, *branches]
    assert layer_stacks(network) == [[[blocks[0], branches[0]], [blocks[1], branches[1]]]]
