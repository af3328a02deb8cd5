"""Rounds that continue more latent frames than one of them has: the state head sees how things move."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import precomputed
import pytest
import torch

from worldmodel.actions import Action
from worldmodel.config import WorldModelConfig
from worldmodel.errors import ConfigError
from worldmodel.media.tensors import to_tensor
from worldmodel.models.rounds import RoundEncoder
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout import Session

FRAMES = np.random.default_rng(0).integers(0, 256, (9, 32, 32, 3), dtype=np.uint8)
"""A first frame and four rounds of two, which are a latent frame each."""
ROUNDS = tuple(FRAMES[1 + 2 * index : 3 + 2 * index] for index in range(4))


@pytest.fixture(scope="module")
def model(make_model: Callable[..., WorldModel]) -> WorldModel:
    return make_model(chunk_frames=2, context_latents=3, history_rounds=2)


@torch.no_grad()
def latents(model: WorldModel) -> torch.Tensor:
    """Return the latents of the first frame and of the rounds, encoded one by one."""
    clips = [FRAMES[:1], *ROUNDS]
    return torch.cat([model.codec.encode(to_tensor([clip], model.device)) for clip in clips], dim=1)


@torch.no_grad()
def test_rounds_in_training_continue_the_last_frames(model: WorldModel) -> None:
    first, *clips = (to_tensor([clip], model.device) for clip in (FRAMES[:1], *ROUNDS))
    context, target = RoundEncoder.of(model).rounds(first, clips)
    encoded = latents(model)
    for index, numbers in enumerate([(0, 0, 0), (0, 0, 1), (0, 1, 2), (1, 2, 3)]):
        torch.testing.assert_close(context[:, index], encoded[:, list(numbers)])
    torch.testing.assert_close(target[:, :, 0], encoded[:, 1:])


def test_stored_latents_have_the_same_contexts(model: WorldModel) -> None:
    for first in (0, 1):
        stored = precomputed.encode(model, FRAMES).observations("rounds", first, 3)
        begin = 2 * first
        clips = (FRAMES[begin : begin + 1], *ROUNDS[first : first + 3])
        before, *after = (to_tensor([clip], model.device) for clip in clips)
        with torch.no_grad():
            context, target = RoundEncoder.of(model).rounds(before, after)
        np.testing.assert_allclose(stored.context, context[0].numpy(), atol=1e-5)
        np.testing.assert_allclose(stored.target, target[0].numpy(), atol=1e-5)


def test_what_a_session_observed_is_what_it_continues(model: WorldModel) -> None:
    session = model.session(seed=3)
    session.reset(FRAMES[0])
    for clip in ROUNDS[:3]:
        session.observe(clip, Action("go on"))
    torch.testing.assert_close(session.state.context, latents(model)[:, 1:4])
    session.step("go on")
    torch.testing.assert_close(session.state.context[:, :2], latents(model)[:, 2:4])
    torch.testing.assert_close(session.state.context[:, 2:], session.state.latents)


def test_a_saved_session_goes_on_as_it_would_have(model: WorldModel, tmp_path: Path) -> None:
    session = model.session(seed=3)
    session.reset(FRAMES[0])
    session.step("go on")
    session.save(tmp_path / "world.safetensors")
    again = Session.load(tmp_path / "world.safetensors", model)
    for _ in range(2):
        one, other = session.step({"keys": ["left"]}), again.step({"keys": ["left"]})
        np.testing.assert_array_equal(one.frames, other.frames)


@torch.no_grad()
def test_the_state_depends_on_how_things_moved(model: WorldModel) -> None:
    """Not so with one context frame: the frame before it is in the history alone."""
    assert model.state is not None
    still = latents(model)[:, 3:4].expand(-1, 3, -1, -1, -1)
    hidden = torch.randn(1, model.config.num_queries, model.backbone.width)
    forecasts = [model.state(hidden, context).forecast for context in (still, latents(model)[:, 1:4])]
    assert forecasts[0] is not None and forecasts[1] is not None
    assert not torch.allclose(*forecasts, atol=1e-3)
    # Vision tokens are those of the round alone.
    assert model.vision.round_tokens == model.config.codec.cells // model.config.vision.merge**2


def test_unused_numbers_of_frames_are_refused() -> None:
    for number in (0, 65):
        with pytest.raises(ConfigError, match="context_latents"):
            WorldModelConfig(context_latents=number)
