"""Sampler, noise levels and loss: pure functions against arithmetic by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from worldmodel.diffusion.loss import add_noise, velocity_error
from worldmodel.diffusion.schedule import sampling_sigmas, training_sigmas
from worldmodel.diffusion.solver import EulerSolver


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_euler_is_exact_on_a_constant_flow(steps: int) -> None:
    generator = torch.Generator().manual_seed(0)
    noise, clean = (torch.randn(2, 3, 1, 2, 2, generator=generator) for _ in range(2))
    solver, latents = EulerSolver.of(steps), noise
    for step in range(solver.num_steps):
        latents = solver.step(step, noise - clean, latents)
    close(latents, clean)


def test_timesteps_of_euler_are_the_sigmas() -> None:
    solver = EulerSolver.of(4)
    levels = [solver.timestep(step) for step in range(solver.num_steps)]
    assert levels == pytest.approx(sampling_sigmas(4)[:-1].tolist())


@given(steps=st.integers(1, 200), shift=st.floats(0.1, 20))
def test_sampling_levels_fall_from_one_to_zero(steps: int, shift: float) -> None:
    sigmas = sampling_sigmas(steps, shift)
    assert len(sigmas) == steps + 1
    assert float(sigmas[0]) == 1
    assert float(sigmas[-1]) == 0
    assert bool((sigmas.diff() < 0).all())


def test_shift_of_the_levels_by_hand() -> None:
    assert sampling_sigmas(2, shift=3.0).tolist() == pytest.approx([1, 0.75, 0])
    assert sampling_sigmas(4, shift=1.0).tolist() == pytest.approx([1, 0.75, 0.5, 0.25, 0])


def test_training_levels_have_the_shares_that_are_asked_for() -> None:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(20_000, 4, generator=generator)
    sigma = training_sigmas(normal, torch.rand(20_000, 2, generator=generator), independent=0.25, pure=0.4)
    assert bool(((sigma > 0) & (sigma <= 1)).all())
    pure = (sigma == 1).all(dim=1)
    assert float(pure.float().mean()) == pytest.approx(0.4, abs=0.015)
    rest = sigma[~pure]
    mixed = (rest != rest[:, :1]).any(dim=1)
    assert float(mixed.float().mean()) == pytest.approx(0.25, abs=0.015)
    logits = torch.logit(rest[~mixed][:, 0].double())
    assert float(logits.mean()) == pytest.approx(0.8, abs=0.05)
    assert float(logits.std()) == pytest.approx(1.2, abs=0.05)


@given(
    sigma=hnp.arrays(np.float32, (1, 2), elements=st.floats(0.5009765625, 1, width=32)),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=30, deadline=None)
def test_the_loss_is_the_squared_velocity_error_at_high_noise(sigma: np.ndarray, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    clean, noise, guess = (torch.randn(1, 2, 3, 2, 2, generator=generator) for _ in range(3))
    level = torch.from_numpy(sigma)
    error = velocity_error(guess, add_noise(clean, noise, level), clean, level)
    close(error, (guess - (noise - clean)).pow(2).mean(dim=2), 1e-3)
    exact = velocity_error(noise - clean, add_noise(clean, noise, level), clean, level)
    assert float(exact.max()) < 1e-9
