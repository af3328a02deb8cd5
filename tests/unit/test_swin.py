"""Causal Swin-DPM: chunk after chunk against a window of two chunks that moves in one pass."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from worldmodel.config import GeneratorConfig, WorldModelConfig
from worldmodel.diffusion.sampler import EulerSolver
from worldmodel.diffusion.schedule import sampling_sigmas
from worldmodel.diffusion.swin import Trail, advance, middle, renoise, window_blocks, window_sigmas
from worldmodel.env.vector import play_round
from worldmodel.errors import ConfigError
from worldmodel.models.condition import Condition
from worldmodel.models.dit import DiT
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout import Session
from worldmodel.types import Action

FRAMES, CHANNELS, GRID, WIDTH = 3, 4, 4, 48


@pytest.fixture(scope="module")
def generator() -> DiT:
    """A generator whose every weight matters."""
    torch.manual_seed(0)
    dit = DiT(GeneratorConfig(width=WIDTH, num_layers=2, num_heads=3), CHANNELS, GRID).eval()
    for parameter in dit.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return dit


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def condition(seed: int, batch: int = 2) -> Condition:
    return Condition(
        tokens=draw(seed, batch, 5, WIDTH),
        pooled=draw(seed + 1, batch, WIDTH),
        cells=draw(seed + 2, batch, GRID**2, WIDTH),
        forecast=draw(seed + 3, batch, FRAMES, CHANNELS, GRID, GRID),
    )


def noise(seed: int, frames: int = FRAMES, batch: int = 2) -> Tensor:
    return draw(seed, batch, frames, CHANNELS, GRID, GRID)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)


def play(
    generator: DiT, rounds: int, steps: int, shared: Condition, contexts: list[Tensor]
) -> tuple[list[Tensor], list[Trail[Condition]]]:
    chunks, trails = [], []
    for index in range(rounds):
        own = replace(shared, forecast=noise(100 * index + 3))
        before = trails[-1] if trails else None
        solver = EulerSolver.of(steps)
        chunk, trail = advance(generator, solver, [own], contexts[index], noise(50 + index), trail=before)
        chunks.append(chunk)
        trails.append(trail)
    return chunks, trails


@torch.no_grad()
@pytest.mark.parametrize("steps", [2, 6])
def test_chunks_come_out_as_of_a_window_of_two_chunks_in_one_pass(generator: DiT, steps: int) -> None:
    """The window of the paper: condition frame, front chunk, back chunk, under one block-causal mask."""
    shared, contexts = condition(1), [noise(30 + index, frames=1) for index in range(3)]
    made, _ = play(generator, 3, steps, shared, contexts)
    forecasts = [noise(100 * index + 3) for index in range(3)]
    sigmas, half = sampling_sigmas(steps), steps // 2
    blocks = window_blocks(1, FRAMES)

    def move(front: Tensor, back: Tensor, index: int, first: int) -> tuple[Tensor, Tensor]:
        """One step of the window; `first` is the step of the back chunk."""
        level = sigmas[[first + half] * FRAMES + [first] * FRAMES].expand(2, -1)
        clean = torch.cat([contexts[index], forecasts[index], forecasts[index + 1]], dim=1)
        latents = torch.cat([contexts[index], front, back], dim=1)
        level = torch.cat([level.new_zeros(2, 1), level], dim=1)
        velocity, _ = generator.velocity(latents, level, clean, shared, blocks=blocks, first_frame=-1)
        down_front = sigmas[first + half + 1] - sigmas[first + half]
        down_back = sigmas[first + 1] - sigmas[first]
        moved = velocity[:, 1:].split(FRAMES, dim=1)
        return front + down_front * moved[0], back + down_back * moved[1]

    past = generator.start(contexts[0], shared)
    front = noise(50)
    for step in range(half):  # the first chunk of a world comes to the front alone
        own = replace(shared, forecast=forecasts[0])
        level = sigmas[step].expand(2, FRAMES)
        front = front + (sigmas[step + 1] - sigmas[step]) * generator(front, level, own, past)
    done = []
    for index in range(2):
        back = noise(51 + index)
        for step in range(half):
            front, back = move(front, back, index, step)
        done.append(front)
        front = back
    close(made[0], done[0])
    close(made[1], done[1])


@torch.no_grad()
def test_the_first_chunk_is_sampled_as_without_a_window(generator: DiT) -> None:
    known, context, solver = condition(1), noise(2, frames=1), EulerSolver.of(4)
    made, trail = advance(generator, solver, [known], context, noise(3))
    past, latents, on_the_way = generator.start(context, known), noise(3), []
    for step in range(4):
        on_the_way.append(latents)
        level = torch.full((2, FRAMES), solver.level(step))
        latents = solver.step(step, generator(latents, level, known, past), latents)
    assert torch.equal(made, latents)
    assert trail.levels == pytest.approx(sampling_sigmas(4)[2:4].tolist())
    assert all(torch.equal(a, b) for a, b in zip(trail.latents, on_the_way[2:], strict=True))
    assert torch.equal(trail.context, context)


@torch.no_grad()
def test_a_chunk_gives_way_to_what_the_chunk_before_looked_like(generator: DiT) -> None:
    known, context = condition(1), noise(2, frames=1)
    _, trail = advance(generator, EulerSolver.of(2), [known], context, noise(3))

    def after(trail: Trail[Condition] | None) -> Tensor:
        return advance(generator, EulerSolver.of(2), [condition(7)], context, noise(4), trail=trail)[0]

    plain, behind = after(None), after(trail)
    assert float((plain - behind).abs().max()) > 1e-3
    shifted = replace(trail, latents=tuple(each + 1 for each in trail.latents))
    assert float((after(shifted) - behind).abs().max()) > 1e-3
    assert torch.equal(after(trail), behind), "nothing in a trail changes when it is followed: forks share it"


@torch.no_grad()
def test_guidance_away_from_the_same_condition_changes_nothing(generator: DiT) -> None:
    known, context = condition(1), noise(2, frames=1)
    trails, chunks = [], []
    for conditions in ([known], [known, known]):
        _, trail = advance(generator, EulerSolver.of(2), conditions, context, noise(3), 4.0)
        chunk, again = advance(generator, EulerSolver.of(2), conditions, context, noise(4), 4.0, trail)
        trails.append(again)
        chunks.append(chunk)
    close(chunks[1], chunks[0])
    assert [len(trail.conditions) for trail in trails] == [1, 2]


@torch.no_grad()
def test_a_trail_of_other_settings_is_not_followed(generator: DiT) -> None:
    """A snapshot may be restored into a session with other steps or guidance."""
    known, context = condition(1), noise(2, frames=1)
    _, trail = advance(generator, EulerSolver.of(6), [known], context, noise(3))
    made, _ = advance(generator, EulerSolver.of(2), [known], context, noise(4), trail=trail)
    plain, _ = advance(generator, EulerSolver.of(2), [known], context, noise(4))
    assert torch.equal(made, plain)
    _, guided = advance(generator, EulerSolver.of(2), [known, condition(9)], context, noise(3), 2.0)
    made, _ = advance(generator, EulerSolver.of(2), [known], context, noise(4), trail=guided)
    assert torch.equal(made, plain)


def test_the_condition_frame_is_a_little_noisy() -> None:
    context, drawn = noise(1, frames=1), noise(2, frames=1)
    close(renoise(context, drawn), 0.945 * context + 0.055 * drawn)
    assert torch.equal(renoise(context, drawn, sigma=0.0), context)


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_steps_without_a_half_are_refused(steps: int) -> None:
    with pytest.raises(ConfigError, match=f"num_inference_steps is {steps}.*even"):
        middle(steps)


def test_training_meets_the_levels_of_sampling() -> None:
    sigmas = sampling_sigmas(10)
    uniform = 1 - torch.arange(5) / 5
    levels, both = window_sigmas(uniform, torch.zeros(5, dtype=torch.bool))
    close(levels[:, 0], sigmas[5:10])
    close(levels[:, 1], sigmas[:5])
    assert bool(both.all())


def test_the_first_chunk_trains_over_the_whole_schedule() -> None:
    uniform = torch.linspace(0, 1, 101)
    levels, both = window_sigmas(uniform, torch.ones(101, dtype=torch.bool), shift=1.0)
    close(levels[:, 0], uniform)
    assert both.tolist() == [place <= 0.5 for place in uniform.tolist()]
    close(levels[both, 1], uniform[both] + 0.5)
    assert bool((levels <= 1).all())


def test_a_window_trains_in_two_passes_as_in_one(generator: DiT) -> None:
    """Each chunk passes under its own condition; where both are the same it is the window's one pass."""
    shared, context = condition(1), noise(2, frames=1)
    assert shared.forecast is not None
    levels, _ = window_sigmas(torch.tensor([0.3, 0.8]), torch.zeros(2, dtype=torch.bool))
    sigma = levels.repeat_interleave(FRAMES, dim=1)
    front, back = noise(3), noise(4)
    past = generator.follow(context, front, sigma[:, :FRAMES], shared)
    behind = generator(back, sigma[:, FRAMES:], shared, past)
    whole, _ = generator.velocity(
        torch.cat([context, front, back], dim=1),
        torch.cat([sigma.new_zeros(2, 1), sigma], dim=1),
        torch.cat([context, shared.forecast, shared.forecast], dim=1),
        shared,
        blocks=window_blocks(1, FRAMES),
        first_frame=-1,
    )
    close(behind, whole[:, -FRAMES:])
    behind.square().mean().backward()
    gradients = [p.grad for name, p in generator.named_parameters() if "qkv" in name]
    assert all(each is not None and bool(each.isfinite().all()) for each in gradients)
    generator.zero_grad()


# Sessions whose chunks overlap


@pytest.fixture
def sliding(make_model: Callable[..., WorldModel]) -> WorldModel:
    model = make_model()
    model.config = replace(model.config, sampler="swin", num_inference_steps=4)
    return model


PICTURE = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)


def test_a_session_follows_its_trail(sliding: WorldModel) -> None:
    session = sliding.session(seed=5)
    session.reset(PICTURE)
    assert session.snapshot().trail is None
    session.step("the red ball moves left")
    moment = session.snapshot()
    assert moment.trail is not None
    fork = session.fork()
    frames = session.step("it jumps")
    assert np.array_equal(frames, fork.step("it jumps"))
    alone = sliding.session(seed=5)
    alone.restore(replace(moment, trail=None))
    assert not np.array_equal(frames, alone.step("it jumps")), "the trail changes nothing"
    session.restore(moment)
    assert np.array_equal(frames, session.step("it jumps"))


def test_worlds_played_together_follow_their_own_trails(sliding: WorldModel) -> None:
    def begun(rounds: int) -> Session:
        session = sliding.session(seed=rounds)
        session.reset(PICTURE)
        for _ in range(rounds):
            session.step("it jumps")
        return session

    sessions = [begun(0), begun(2)]
    expected = [session.fork().step("it grows") for session in sessions]
    for frames, alone in zip(play_round(sessions, [Action("it grows")] * 2), expected, strict=True):
        assert np.abs(frames.astype(int) - alone).max() <= 1


def test_a_window_wants_an_even_number_of_steps() -> None:
    with pytest.raises(ConfigError, match="even number"):
        WorldModelConfig(sampler="swin", num_inference_steps=3)
