"""Step caching: each row of each chunk decides for itself, whatever shares its batch."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from worldmodel.actions import Action
from worldmodel.diffusion.sampler import Chunk, Denoiser
from worldmodel.errors import ConfigError
from worldmodel.experiments.step_cache import StepCache
from worldmodel.models.conditioning import Condition
from worldmodel.models.inference import optimize
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout import LocalEngine, SamplingParams, WorldState, play_round

THRESHOLD = 0.6
"""Some steps are reused with the random weights of these tests, at different places."""
KINDS = [(4, 1.0), (8, 2.5), (6, 1.0), (8, 1.0), (12, 2.5)]
"""Steps and guidance of each chunk."""


def chunk_of(model: WorldModel, seed: int, steps: int, guidance: float, threshold: float) -> Chunk[Condition]:
    """Return a chunk of two rows."""
    config, draw = model.config, torch.Generator().manual_seed(seed)
    states = torch.randn(2, config.num_queries, model.backbone.width, generator=draw)
    context = torch.randn(2, 1, *config.latent_shape[1:], generator=draw)
    noise = torch.randn(2, *config.latent_shape, generator=draw)
    conditions = [model.condition(model.read_state(states, context), context)]
    if guidance != 1.0:
        conditions.append(model.null_condition(context))
    cache = StepCache(threshold) if threshold else None
    solver = model.generator.solver(steps)
    return Chunk(noise, solver, tuple(conditions), context, guidance, step_cache=cache)


class Rows:
    """Counts the rows that a generator computes."""

    def __init__(self, model: WorldModel) -> None:
        self.count = 0
        self.hook = model.generator.register_forward_hook(self._count)

    def _count(self, module: object, inputs: tuple[Tensor, ...], made: Tensor) -> None:
        self.count += len(inputs[0])


@torch.no_grad()
def test_chunks_that_join_and_leave_match_those_alone(make_model: Callable[..., WorldModel]) -> None:
    model = make_model()
    rows = Rows(model)
    alone = [chunk_of(model, seed, *kind, THRESHOLD) for seed, kind in enumerate(KINDS)]
    for chunk in alone:
        model.denoise([chunk])
    counted, rows.count = rows.count, 0
    together = [chunk_of(model, seed, *kind, THRESHOLD) for seed, kind in enumerate(KINDS)]
    denoiser: Denoiser[Condition] = Denoiser(model.generator)
    for step in range(2 * len(together) + 12):  # chunk i joins at step 2 i
        denoiser.step([each for each in together[: 1 + step // 2] if not each.finished])
    assert all(chunk.finished for chunk in together)
    assert rows.count == counted
    for made, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(made.latents, expected.latents, atol=1e-4, rtol=1e-4)
    every = sum(2 * steps * (1 if guidance == 1.0 else 2) for steps, guidance in KINDS)
    assert 0.3 * every < counted < 0.9 * every


@torch.no_grad()
def test_without_reuse_nothing_changes(model: WorldModel) -> None:
    for seed, kind in enumerate(KINDS):
        plain, tiny = (chunk_of(model, seed, *kind, threshold) for threshold in (0.0, 1e-12))
        assert torch.equal(*model.denoise([plain]), *model.denoise([tiny]))


@torch.no_grad()
def test_a_reused_prediction_is_one_long_step(model: WorldModel) -> None:
    chunk = chunk_of(model, 0, 8, 1.0, 1e9)
    sigmas = [chunk.solver.timestep(step) for step in range(8)]
    by_hand = chunk_of(model, 0, 8, 1.0, 0.0)
    denoiser: Denoiser[Condition] = Denoiser(model.generator)
    denoiser.step([by_hand])
    before = by_hand.latents
    denoiser.step([by_hand])  # all steps but the first two and the last one reuse this prediction
    velocity = (by_hand.latents - before) / (sigmas[2] - sigmas[1])
    by_hand.latents, by_hand.step = before + (sigmas[7] - sigmas[1]) * velocity, 7
    denoiser.step([by_hand])
    torch.testing.assert_close(*model.denoise([chunk]), by_hand.latents, atol=1e-4, rtol=1e-4)


def test_a_round_of_several_worlds_matches_single_ones(
    make_model: Callable[..., WorldModel], image: np.ndarray
) -> None:
    model = make_model()
    optimize(model, cache_threshold=THRESHOLD)
    engine, params, actions = LocalEngine(model.backbone), SamplingParams(8), [Action.of("wait")] * 3
    images = np.stack([image, image[::-1], image[:, ::-1]])[:, None]
    rows = Rows(model)
    (together,) = play_round(
        model, engine, [WorldState.from_frames(model, images, (1, 2, 3))], actions, params
    )
    assert rows.count < 8 * 3
    for row in range(3):
        world = WorldState.from_frames(model, images[row : row + 1], (row + 1,))
        (single,) = play_round(model, engine, [world], actions[:1], params)
        torch.testing.assert_close(together.latents[row], single.latents[0], atol=1e-4, rtol=1e-4)


def test_a_threshold_below_zero_is_refused(model: WorldModel) -> None:
    for threshold in (-1.0, float("nan")):
        with pytest.raises(ConfigError, match=f"{threshold}"):
            optimize(model, cache_threshold=threshold)
