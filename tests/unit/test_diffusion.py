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
from worldmodel.diffusion.solver import AncestralSolver, EulerSolver


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


def test_an_ancestral_step_draws_from_the_posterior_of_the_noising_process() -> None:
    rows, step = 4000, 1
    solver = AncestralSolver.of(4)
    sigma, following = solver.sigmas[step].double(), solver.sigmas[step + 1].double()
    clean, noise = torch.tensor(0.7).double(), torch.tensor(-0.4).double()
    now = ((1 - sigma) * clean + sigma * noise).expand(rows, 1, 1, 1, 1)
    seeds = torch.randn(rows, 1, 1, 1, 1, generator=torch.Generator().manual_seed(0))
    solver.step(0, torch.zeros_like(seeds), seeds)  # the first latents decide what every row draws
    made = solver.step(step, (noise - clean).expand_as(now), now)
    # Conditioning of the Gaussian pair (following, now) given the clean value, for a Markov process.
    covariance = (1 - sigma) / (1 - following) * following**2
    mean = (1 - following) * clean + covariance / sigma**2 * (now[0] - (1 - sigma) * clean)
    spread = (following**2 - covariance**2 / sigma**2).sqrt()
    assert abs(made.mean() - mean) < 4 * spread / rows**0.5
    assert made.std() == pytest.approx(float(spread), rel=0.05)


def test_ancestral_sampling_recovers_a_distribution_with_two_modes() -> None:
    """Data are -1 (probability 0.25) or 1, with the exact velocity."""
    solver = AncestralSolver.of(64)
    x = torch.randn(4000, 1, 1, 1, 1, generator=torch.Generator().manual_seed(1)).double()
    for step in range(solver.num_steps):
        sigma = solver.timestep(step)
        logits = torch.stack([-((x - (1 - sigma) * mode) ** 2) / (2 * sigma**2) for mode in (-1, 1)])
        weight = (logits + torch.tensor([0.25, 0.75]).double().log().view(2, 1, 1, 1, 1, 1)).softmax(dim=0)
        x = solver.step(step, (x - (weight[1] - weight[0])) / sigma, x)
    assert (x.abs() - 1).abs().max() < 0.01
    assert (x < 0).double().mean() == pytest.approx(0.25, abs=0.03)


def test_what_an_ancestral_sampler_makes_of_a_row_does_not_depend_on_the_batch() -> None:
    start = torch.randn(3, 1, 2, 2, 2, generator=torch.Generator().manual_seed(2))

    def made(x: torch.Tensor) -> torch.Tensor:
        solver = AncestralSolver.of(4)
        for step in range(solver.num_steps):
            x = solver.step(step, x, x)
        return x

    torch.testing.assert_close(made(start)[1:2], made(start[1:2]), rtol=0, atol=0)
    assert not torch.equal(made(start[:1]), made(start[1:2]))
