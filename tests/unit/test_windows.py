"""Episodes longer than a session's memory are trained as a session plays them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from worldmodel.actions import Action
from worldmodel.data.loader import Batch
from worldmodel.episodes import Episode
from worldmodel.models.world_model import WorldModel
from worldmodel.train.activations import Offload, apply_policy
from worldmodel.train.objectives.base import SampleRng
from worldmodel.train.objectives.registry import OBJECTIVES
from worldmodel.train.objectives.rollout import RolloutWindow
from worldmodel.train.objectives.state import predict_windows

WORDS = ("the red ball moves left", "the red ball vanishes", "the blue box turns green")
SHORT = {"chunk_frames": 2, "context_latents": 3}
"""Rounds of one latent frame, which continue the last three."""
ACTIONS = [Action(WORDS[index % len(WORDS)]) for index in range(7)]


@pytest.mark.parametrize("history", [0, 1, 2])
def test_rounds_are_predicted_in_windows(make_model: Callable[..., WorldModel], history: int) -> None:
    model = make_model(history_rounds=history)
    size = model.config.context_rounds
    context = torch.randn(2, 7, model.config.context_latents, *model.config.latent_shape[1:])
    actions = [ACTIONS, ACTIONS[::-1]]
    together = predict_windows(model, context, actions, None)
    forecast = together.condition.forecast
    assert forecast is not None and together.hidden.shape[:2] == (2, 7) and len(forecast) == 14
    whole = 7 // size * size
    for first in [*range(0, whole, size), 7 - size]:
        part = slice(first, first + size)
        alone = model(context[:, part], [episode[part] for episode in actions])
        seen = slice(0, size) if first % size == 0 else slice(whole - first, size)  # not predicted before
        torch.testing.assert_close(together.hidden[:, part][:, seen], alone.hidden[:, seen])
        assert alone.condition.forecast is not None
        torch.testing.assert_close(
            forecast.unflatten(0, (2, 7))[:, part][:, seen],
            alone.condition.forecast.unflatten(0, (2, size))[:, seen],
        )


@pytest.mark.parametrize("texts", [("go on", "go on"), ("go on", "the small red ball " * 8)])
def test_rounds_of_a_self_rollout_are_those_of_one_pass(
    make_model: Callable[..., WorldModel], texts: tuple[str, str]
) -> None:
    """With a cache, and where actions of different lengths have none."""
    model = make_model(history_rounds=1)
    size, generator = model.config.context_rounds, torch.Generator().manual_seed(0)
    context = torch.randn(2, 7, *model.config.latent_shape, generator=generator)[:, :, :1]
    episodes = [[Action(text), *ACTIONS[:5], Action(keys=("left",))] for text in texts]
    window = RolloutWindow(model, episodes)
    with torch.no_grad():
        played, cached = [], []
        for index in range(7):
            played.append(window.play(index, context[:, index], None))
            cached.append(window.cache is not None)
        for first in range(0, 7, size):
            part = slice(first, first + size)
            together = model(context[:, part], [episode[part] for episode in episodes])
            torch.testing.assert_close(torch.stack(played[part], dim=1), together.hidden)
    assert cached == [texts[0] == texts[1]] * size + [True] * 4


@pytest.mark.parametrize("parts", [{}, SHORT])
def test_a_self_rollout_continues_as_a_session_does(
    make_model: Callable[..., WorldModel], parts: dict[str, Any]
) -> None:
    """A session without memory; with one, windows begin at other rounds than a session's."""
    model = make_model(history_rounds=0, **parts)
    size = (8, model.config.chunk_frames, 32, 32, 3)
    start, *clips = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
    episode = Episode("one", (start[:1], *clips), tuple(ACTIONS))
    batch = Batch(step=0, task="rounds", indices=(0,), episodes=[episode], self_rollout=True)
    objective = OBJECTIVES["state"](model)
    objective.context_noise = 0.0  # type: ignore[assignment]
    rng = SampleRng([(0,)])
    with torch.no_grad():
        prediction = objective.predict(model, objective.prepare(model, batch, rng))  # type: ignore[operator]
        short = replace(batch, episodes=[replace(episode, observations=episode.observations[:3],
                                                 actions=episode.actions[:2])])  # fmt: skip
        first = objective.predict(model, objective.prepare(model, short, rng))  # type: ignore[operator]
    torch.testing.assert_close(first.hidden, prediction.hidden[:, :2])
    session = model.session(num_inference_steps=0)
    session.reset(start[0])
    for index, action in enumerate(ACTIONS):
        torch.testing.assert_close(prediction.context[:, index], session.state.context, atol=1e-4, rtol=1e-4)
        session.step(action)


@pytest.mark.parametrize("through_time", [1.0, 0.5, 0.0])
def test_errors_of_a_round_reach_the_rounds_before_it(
    make_model: Callable[..., WorldModel], through_time: float
) -> None:
    """Gradients are those of rounds that are predicted one after the other, each from all before it."""
    model = make_model(history_rounds=2, **SHORT, generator=None, num_inference_steps=0)
    model.requires_grad_(True).train()
    model.codec.requires_grad_(False)
    first, *clips = np.random.default_rng(1).integers(0, 256, (5, 2, 32, 32, 3), dtype=np.uint8)
    episode = Episode("one", (first[:1], *clips), tuple(ACTIONS[:4]))
    batch = Batch(step=0, task="rounds", indices=(0,), episodes=[episode], self_rollout=True)
    objective = OBJECTIVES["state"](model, observed_rounds=1, through_time=through_time)
    objective.context_noise = 0.0  # type: ignore[assignment]
    inputs = objective.prepare(model, batch, SampleRng([(0,)]))
    objective(model, inputs)["changed"].backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}

    model.zero_grad()
    rounds, losses = inputs.content, []
    context = list(rounds.context[:, :2].unbind(dim=1))
    for index in range(4):
        seen = torch.stack(context[: index + 1], dim=1)
        forecast = model(seen, [ACTIONS[: index + 1]]).state.forecast[-1:]
        error = (forecast - rounds.target[:, index]).pow(2).mean(dim=2)
        losses.append((error * rounds.changed[:, index]).sum())
        if index:
            context.append(torch.cat([context[index], forecast], dim=1)[:, -3:])
            context[-1].register_hook(lambda gradient: through_time * gradient)
    sum(losses).backward()  # type: ignore[union-attr]
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.grad.any():
            torch.testing.assert_close(found[name], parameter.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("policy", ["recompute", "selective", "offload"])
def test_activations_of_a_self_rollout_can_be_recomputed(
    make_model: Callable[..., WorldModel], policy: Any
) -> None:
    """Layers run again for the backward pass, and must find the keys and values of then."""
    model = make_model(history_rounds=2, **SHORT, generator=None, num_inference_steps=0)
    model.requires_grad_(True)
    first, *clips = np.random.default_rng(1).integers(0, 256, (5, 2, 32, 32, 3), dtype=np.uint8)
    episode = Episode("one", (first[:1], *clips), tuple(ACTIONS[:4]))
    batch = Batch(step=0, task="rounds", indices=(0,), episodes=[episode], self_rollout=True)
    objective = OBJECTIVES["state"](model)
    gradients = []
    for _ in range(2):
        model.zero_grad()
        objective(model, objective.prepare(model, batch, SampleRng([(0,)])))["changed"].backward()
        gradients.append([each.grad for each in model.backbone.parameters() if each.grad is not None])
        offload = Offload(model.device)
        for layer in model.backbone.model.base_model.layers:  # type: ignore[union-attr]
            apply_policy(layer, policy, offload)
    assert len(gradients[0]) > 10
    for kept, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(kept, recomputed)
