"""Offloading of parts, on an emulated device that fails where a part is missing."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from emulated_device import DEVICE, EmulatedDevice

from worldmodel.actions import Action
from worldmodel.models.offload import Offload
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout import LocalEngine, SamplingParams, WorldState, play_round


def play(model: WorldModel, image: np.ndarray) -> list[WorldState]:
    worlds, engine = [WorldState.from_frames(model, image[None, None], (3,))], LocalEngine(model.backbone)
    for text in ("the red ball moves left", "the blue box jumps"):
        worlds = play_round(model, engine, worlds, [Action.of(text)], SamplingParams(2, 2.0))
    return worlds


@torch.no_grad()
def test_rounds_with_offloaded_parts_are_the_same(
    make_model: Callable[..., WorldModel], image: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    (expected,), model = play(make_model(), image), make_model()
    with EmulatedDevice():
        offload, moved = Offload(model, DEVICE), list[str]()
        use = offload.use
        monkeypatch.setattr(offload, "use", lambda name: (moved.append(name), use(name)))
        (made,) = play(model, image)
        assert model.device == DEVICE
        assert made.latents.device == DEVICE
        torch.testing.assert_close(made.latents.cpu(), expected.latents)
        assert np.array_equal(made.frames, expected.frames)
        on_device = {
            name: {parameter.device for module in modules for parameter in module.parameters()}
            for name, modules in offload.parts.items()
        }
    assert on_device == {"codec": {DEVICE}, "generator": {torch.device("cpu")}}
    changes = [name for name, before in zip(moved, ["", *moved], strict=False) if name != before]
    assert changes == ["codec", *("generator", "codec") * 2]  # not once per step
