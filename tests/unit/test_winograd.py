"""Convolutions of exported graphs: those of PyTorch, with fewer multiplications."""

import copy

import pytest
import torch
from torch import nn

from worldmodel.export.web.winograd import (
    WinogradConvolution,
    minimal_filter,
    replace_convolutions,
    tile_side,
)


@pytest.mark.parametrize("size", [(6, 6), (8, 8), (16, 16), (12, 20), (5, 7), (1, 2)])
def test_a_convolution_is_that_of_torch(size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(24, 40, 3, padding=1)
    x = torch.randn(2, 24, *size)
    with torch.no_grad():
        torch.testing.assert_close(WinogradConvolution(layer)(x), layer(x), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("side", [2, 3, 4])
def test_the_filter_is_minimal(side: int) -> None:
    # A plain filter needs three products for each of its outputs.
    read, filtered, write = minimal_filter(side)
    assert read.shape == (side + 2, side + 2)
    assert (filtered.shape, write.shape) == ((side + 2, 3), (side, side + 2))


def test_tiles_have_the_side_with_the_fewest_products() -> None:
    assert [tile_side(size, size) for size in (6, 8, 16)] == [3, 4, 4]


def test_only_convolutions_that_fit_are_replaced() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(8, 32, 3, padding=1),
        nn.Conv2d(32, 32, 3, padding=1, bias=False),
        nn.Sequential(nn.Conv2d(32, 32, 3, padding=1, groups=32), nn.Conv2d(32, 4, 1)),
        nn.Conv2d(4, 4, 3, padding=1, stride=2),
    )
    fast = copy.deepcopy(plain)
    replace_convolutions(fast)
    kinds = [type(each).__name__ for each in fast.modules() if not isinstance(each, nn.Sequential)]
    assert kinds == ["Conv2d", "WinogradConvolution", "Conv2d", "Conv2d", "Conv2d"]
    x = torch.randn(1, 8, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), plain(x), atol=2e-5, rtol=1e-5)
