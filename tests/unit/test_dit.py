"""Our diffusion transformer without a forecast: plain flow matching from states alone."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from worldmodel.actions import Action
from worldmodel.config import ConditionAdapterConfig, GeneratorConfig
from worldmodel.diffusion.sampler import Chunk, Denoiser
from worldmodel.diffusion.schedule import training_sigmas
from worldmodel.errors import ConfigError
from worldmodel.eval.runner import ModelSubject
from worldmodel.models.conditioning import Condition
from worldmodel.models.generator.dit import DiT
from worldmodel.models.world_model import WorldModel

WITHOUT_FORECAST = ConditionAdapterConfig(forecast="none")


def test_the_forecast_reaches_the_generator_as_the_config_says(make_model: Callable[..., WorldModel]) -> None:
    for adapter, matters in (
        (ConditionAdapterConfig(), True),
        (WITHOUT_FORECAST, False),
    ):
        model: WorldModel = make_model(condition_adapter=adapter)
        states = torch.randn(1, model.config.num_queries, model.backbone.width)
        context = torch.randn(1, 1, *model.blank_latents.shape)
        noise = torch.randn(1, *model.config.latent_shape)
        condition = model.condition(model.read_state(states, context), context)
        other = replace(condition, forecast=condition.forecast + 1)
        made = [
            model.denoise([Chunk(noise, model.generator.solver(2), (each,), context)])[0]
            for each in (condition, other)
        ]
        assert torch.equal(*made) != matters


@pytest.mark.slow
def test_without_a_forecast_the_generator_samples_futures_that_a_regression_averages() -> None:
    """Latents are all +1 or all -1, with equal probability; their mean, 0, never occurs."""
    torch.manual_seed(0)
    grid, channels, batch = (2, 2), 2, 64
    dit = DiT(GeneratorConfig(width=32, num_layers=2, num_heads=2), channels, grid, residual=False)
    empty = torch.zeros(batch, 4, 32)
    forecast = torch.zeros(batch, 1, channels, *grid)
    condition = Condition(tokens=empty, pooled=empty[:, 0], cells=empty, forecast=forecast)
    context = torch.zeros(batch, 1, channels, *grid)
    optimizer = torch.optim.Adam(dit.parameters(), lr=3e-3)
    for _ in range(250):
        clean = forecast + (2 * torch.randint(2, (batch, 1, 1, 1, 1)) - 1)
        sigma = training_sigmas(torch.randn(batch, 1), torch.rand(batch, 2), pure=0.0)
        loss = dit.training_loss(clean, torch.randn_like(clean), sigma, condition, context).error.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    solver = dit.solver(16)
    chunk = Chunk(torch.randn_like(forecast), solver, (condition,), context)
    with torch.no_grad():
        while not chunk.finished:
            Denoiser(dit).step([chunk])
    means = chunk.latents.mean(dim=(1, 2, 3, 4))
    assert ((means.abs() - 1).abs() < 0.25).float().mean() > 0.9
    assert 0.25 < (means > 0).float().mean() < 0.75


def test_stochastic_sampling_has_one_outcome_for_each_seed(make_model: Callable[..., WorldModel]) -> None:
    def played(seeds: Sequence[int], stochastic: bool = True) -> np.ndarray:
        settings = GeneratorConfig(width=64, num_layers=2, num_heads=2, stochastic_sampling=stochastic)
        model = make_model(generator=settings, num_inference_steps=4)
        start = np.random.default_rng(0).integers(0, 256, (len(seeds), 32, 32, 3), np.uint8)
        start[:] = start[0]
        return ModelSubject(model).open(start, seeds).step([Action("go left")] * len(seeds))

    both = played([1, 2])
    np.testing.assert_allclose(both[:1].astype(int), played([1]).astype(int), atol=1)
    assert not np.array_equal(both[0], both[1])
    assert not np.array_equal(both, played([1, 2], stochastic=False))
    with pytest.raises(ConfigError, match="stochastic_sampling"):
        GeneratorConfig(pretrained="some/folder", stochastic_sampling=True)
