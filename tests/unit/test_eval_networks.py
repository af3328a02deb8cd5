"""Distances over networks that the user gives: LPIPS and the Fréchet distance."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import Dinov2Config, Dinov2Model

from worldmodel.actions import Action
from worldmodel.errors import InputError, ModelError
from worldmodel.eval.frechet import FrameFeatures, frechet_distance, frechet_figure
from worldmodel.eval.metrics import Played
from worldmodel.eval.metrics.perceptual import Perceptual, PerceptualDistance

VGG = (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512)
VGG_ENDS = (4, 9, 16, 23, 30)
ALEX_ENDS = (2, 5, 8, 10, 12)


def alexnet() -> nn.Sequential:
    """The features of AlexNet, layer by layer as in its published form."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 11, 4, 2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(192, 384, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1),
        nn.ReLU(),
    )


def vgg16() -> nn.Sequential:
    layers, before = [], 3
    for width in VGG:
        if width == "M":
            layers.append(nn.MaxPool2d(2, 2))
        else:
            layers += [nn.Conv2d(before, int(width), 3, padding=1), nn.ReLU()]
            before = int(width)
    return nn.Sequential(*layers)


@pytest.mark.parametrize(("build", "ends"), [(alexnet, ALEX_ENDS), (vgg16, VGG_ENDS)])
def test_perceptual_distance_against_its_definition(build, ends: tuple[int, ...], tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = build()
    starts = (0, *ends[:-1])
    weights: dict[str, torch.Tensor] = {}
    heads = []
    for place, (start, end) in enumerate(zip(starts, ends, strict=True)):
        for index in range(start, min(end, len(network))):
            if isinstance(network[index], nn.Conv2d):
                name = f"net.slice{place + 1}.{index}"
                weights |= {f"{name}.weight": network[index].weight, f"{name}.bias": network[index].bias}
                width = network[index].out_channels
        heads.append(torch.rand(1, width, 1, 1))
        weights[f"lin{place}.model.1.weight"] = heads[-1]
    file = tmp_path / "lpips.safetensors"
    save_file({name: weight.detach().contiguous() for name, weight in weights.items()}, file)
    one, other = torch.rand(2, 2, 3, 64, 64) * 2 - 1
    mean, scale = torch.tensor([-0.030, -0.088, -0.188]), torch.tensor([0.458, 0.448, 0.450])
    expected = torch.zeros(2)
    features = [(frames - mean.view(3, 1, 1)) / scale.view(3, 1, 1) for frames in (one, other)]
    with torch.no_grad():
        for start, end, head in zip(starts, ends, heads, strict=True):
            features = [network[start:end](x) for x in features]
            unit = [x / x.norm(dim=1, keepdim=True) for x in features]
            expected += (head * (unit[0] - unit[1]) ** 2).sum(dim=1).mean(dim=(1, 2))
    distance = PerceptualDistance(file)
    assert torch.allclose(distance(one, other), expected, rtol=1e-4)
    assert torch.equal(distance(one, one), torch.zeros(2))
    clips = np.random.default_rng(0).integers(0, 256, (2, 3, 64, 64, 3)).astype(np.uint8)
    values = Perceptual(file)(Played(clips[:, 0], clips, clips[::-1], [Action(), Action()]))
    assert values[0] == pytest.approx(values[1]) and values[0] > 0


def test_other_files_are_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(1)}, tmp_path / "other.safetensors")
    (tmp_path / "text.safetensors").write_text("text")
    for name in ("other", "text", "gone"):
        with pytest.raises(InputError, match=f"{name}.safetensors"):
            PerceptualDistance(tmp_path / f"{name}.safetensors")
    with pytest.raises(ModelError, match="gone"):
        FrameFeatures(str(tmp_path / "gone"), 64)


def test_frechet_distance_against_its_definition() -> None:
    rng = np.random.default_rng(0)
    one, other = rng.normal(size=(500, 1)), 3 + 2 * rng.normal(size=(400, 1))
    sides = float(one.std(ddof=1)), float(other.std(ddof=1))
    expected = float(one.mean() - other.mean()) ** 2 + (sides[0] - sides[1]) ** 2
    assert frechet_distance(one, other) == pytest.approx(expected)
    one, other = (rng.normal(size=(60, 4)) @ rng.normal(size=(4, 4)) for _ in range(2))
    product = np.linalg.eigvals(np.cov(one.T) @ np.cov(other.T))  # of the product, which is not symmetric
    traces = np.trace(np.cov(one.T)) + np.trace(np.cov(other.T))
    means = ((one.mean(0) - other.mean(0)) ** 2).sum()
    assert frechet_distance(one, other) == pytest.approx(
        means + traces - 2 * np.sqrt(product.astype(complex)).sum().real
    )
    assert frechet_distance(one, one) == pytest.approx(0, abs=1e-9)
    figure = frechet_figure(one[:, None], one[:, None] + 1)  # 60 episodes of one frame
    assert figure["value"] == pytest.approx(4)
    assert figure["low"] <= figure["value"] <= figure["high"]
    assert figure["n"] == 60


def test_frechet_intervals_are_of_episodes() -> None:
    rng = np.random.default_rng(0)
    one, other = rng.normal(size=(20, 1, 3)), rng.normal(size=(20, 1, 3)) + 1
    single = frechet_figure(one, other)
    repeated = frechet_figure(one.repeat(10, axis=1), other.repeat(10, axis=1))  # ten equal rounds
    widths = [figure["high"] - figure["low"] for figure in (single, repeated)]
    assert widths[1] == pytest.approx(widths[0], rel=0.15)
    assert (single["n"], repeated["n"]) == (20, 200)
    with pytest.raises(InputError, match="two frames"):
        frechet_figure(one[:1], other[:1])


def test_features_are_those_of_the_encoder(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Dinov2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=8
    )
    Dinov2Model(config).save_pretrained(tmp_path / "dino")
    features = FrameFeatures(str(tmp_path / "dino"), 32)
    clips = np.random.default_rng(0).integers(0, 256, (5, 2, 32, 32, 3)).astype(np.uint8)
    found = features(clips)
    assert found.shape == (5, 16)
    assert np.abs(found[0] - found[1]).max() > 1e-3
    changed = clips.copy()
    changed[:, 0] = 0
    assert np.array_equal(features(changed), found)  # of the last frames alone
