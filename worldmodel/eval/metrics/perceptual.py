"""LPIPS, a learned perceptual distance, with weights that the user gives.

The file is the state of the `lpips` package's network, AlexNet or VGG-16, as safetensors; which of them it
is follows from its shapes.

Source: Zhang et al. 2018, arXiv:1801.03924, eq. 1.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from worldmodel.errors import InputError
from worldmodel.eval.metrics import Metric, Played
from worldmodel.media.tensors import to_tensor

Layer = tuple[int, int, int]
"""Index of a convolution in its slice, its stride and its padding."""
ALEX: tuple[tuple[Layer, ...], ...] = (((0, 4, 2),), ((3, 1, 2),), ((6, 1, 1),), ((8, 1, 1),), ((10, 1, 1),))
VGG: tuple[tuple[Layer, ...], ...] = tuple(
    tuple((index, 1, 1) for index in slice_)
    for slice_ in ((0, 2), (5, 7), (10, 12, 14), (17, 19, 21), (24, 26, 28))
)
POOLED = {"alex": (3, {1, 2}), "vgg": (2, {1, 2, 3, 4})}
"""Window of max pooling with stride 2, and the slices that begin with it."""
SHIFT = (-0.030, -0.088, -0.188)
SCALE = (0.458, 0.448, 0.450)
"""Mean and standard deviation of the pixels in ImageNet, for pixels from -1 to 1."""


class Perceptual(Metric):
    """Learned perceptual distance of a round, the mean over its frames: 0 for equal ones."""

    name, title, unit = "perceptual", "perceptual distance", ""

    def __init__(self, path: str | Path) -> None:
        self.distance = PerceptualDistance(path)

    def __call__(self, played: Played) -> Sequence[float]:
        pairs = zip(to_tensor(list(played.clips)), to_tensor(list(played.truth)), strict=True)
        return [float(self.distance(made, true).mean()) for made, true in pairs]


class PerceptualDistance:
    """LPIPS between batches of frames: 0 for equal ones.

    Args:
        path: safetensors file with the weights `net.sliceN.I.weight`, `net.sliceN.I.bias` and
            `linN.model.1.weight`.

    Raises:
        InputError: The file cannot be read, or has other weights.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            weights = load_file(Path(path).expanduser())
            self.kind = "alex" if weights["net.slice1.0.weight"].shape[-1] == 11 else "vgg"
            self.slices = ALEX if self.kind == "alex" else VGG
            self.weights = {name: weights[name].float() for name in self._names()}
        except (OSError, SafetensorError, KeyError) as error:
            raise InputError(
                f"{str(path)!r} is not a safetensors file of LPIPS with AlexNet or VGG-16 ({error}); save "
                "the state of the network of the lpips package."
            ) from None

    @torch.no_grad()
    def __call__(self, one: Float[Tensor, "n 3 h w"], other: Float[Tensor, "n 3 h w"]) -> Float[Tensor, " n"]:
        """Return the distance of every pair of frames, whose values are -1 to 1."""
        total = torch.zeros(len(one))
        for place, (a, b) in enumerate(zip(self._features(one), self._features(other), strict=True)):
            apart = (_unit(a) - _unit(b)).square()
            weighted = F.conv2d(apart, self.weights[f"lin{place}.model.1.weight"])
            total = total + weighted.mean(dim=(1, 2, 3))
        return total

    def _features(self, frames: Float[Tensor, "n 3 h w"]) -> list[Tensor]:
        x = (frames - torch.tensor(SHIFT)[:, None, None]) / torch.tensor(SCALE)[:, None, None]
        window, pooled = POOLED[self.kind]
        found: list[Tensor] = []
        for place, layers in enumerate(self.slices):
            if place in pooled:
                x = F.max_pool2d(x, window, stride=2)
            for index, stride, padding in layers:
                name = f"net.slice{place + 1}.{index}"
                weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
                x = F.relu(F.conv2d(x, weight, bias, stride, padding))
            found.append(x)
        return found

    def _names(self) -> list[str]:
        convolutions = [
            f"net.slice{place + 1}.{index}.{part}"
            for place, layers in enumerate(self.slices)
            for index, _, _ in layers
            for part in ("weight", "bias")
        ]
        return [*convolutions, *(f"lin{place}.model.1.weight" for place in range(len(self.slices)))]


def _unit(x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
    """Normalise the features at every position to unit length."""
    return x / (x.square().sum(dim=1, keepdim=True).sqrt() + 1e-10)
