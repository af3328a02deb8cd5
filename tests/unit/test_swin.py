"""Causal Swin-DPM: chunk after chunk against a window of two chunks that moves in one pass."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from worldmodel.actions import Action
from worldmodel.batch import take
from worldmodel.config import GeneratorConfig, StageConfig, TrainConfig, WorldModelConfig
from worldmodel.data.loader import Batch
from worldmodel.diffusion.sampler import Chunk, Denoiser
from worldmodel.diffusion.schedule import sampling_sigmas
from worldmodel.diffusion.solver import EulerSolver
from worldmodel.diffusion.swin import ChunkTrace, half, renoise, window_places
from worldmodel.env.vector import play_sessions
from worldmodel.episodes import Episode
from worldmodel.errors import ConfigError
from worldmodel.models.conditioning import Condition
from worldmodel.models.generator.base import LossOutput
from worldmodel.models.generator.dit import DiT
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout import Session
from worldmodel.train.objectives.base import SampleRng
from worldmodel.train.objectives.generator import GeneratorObjective

FRAMES, CHANNELS, GRID, WIDTH = 3, 4, (4, 6), 48
WINDOW = [0] + [1] * FRAMES + [2] * FRAMES
"""Blocks of a window's frames: condition frame, front chunk, back chunk."""


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
        cells=draw(seed + 2, batch, math.prod(GRID), WIDTH),
        forecast=draw(seed + 3, batch, FRAMES, CHANNELS, *GRID),
    )


def noise(seed: int, frames: int = FRAMES, batch: int = 2) -> Tensor:
    return draw(seed, batch, frames, CHANNELS, *GRID)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)


def advance(
    generator: Any,
    solver: EulerSolver,
    conditions: list[Any],
    context: Tensor,
    noise: Tensor,
    guidance_scale: float = 1.0,
    trace: ChunkTrace[Any] | None = None,
) -> tuple[Tensor, ChunkTrace[Any]]:
    """Denoise one chunk that follows the trace of the one before."""
    chunk = Chunk(noise, solver, tuple(conditions), context, guidance_scale, True, trace)
    denoiser = Denoiser(generator)
    while not chunk.finished:
        denoiser.step([chunk])
    assert chunk.trace is not None
    return chunk.latents, chunk.trace


def play(
    generator: DiT, rounds: int, steps: int, shared: Condition, contexts: list[Tensor]
) -> tuple[list[Tensor], list[ChunkTrace[Condition]]]:
    chunks, traces = [], []
    for index in range(rounds):
        own = replace(shared, forecast=noise(100 * index + 3))
        before = traces[-1] if traces else None
        solver = EulerSolver.of(steps)
        chunk, trace = advance(generator, solver, [own], contexts[index], noise(50 + index), trace=before)
        chunks.append(chunk)
        traces.append(trace)
    return chunks, traces


@torch.no_grad()
@pytest.mark.parametrize("steps", [2, 6])
def test_chunks_come_out_as_of_a_window_of_two_chunks_in_one_pass(generator: DiT, steps: int) -> None:
    """The window of the paper: condition frame, front chunk, back chunk, under one block-causal mask."""
    shared, contexts = condition(1), [noise(30 + index, frames=1) for index in range(3)]
    made, _ = play(generator, 3, steps, shared, contexts)
    forecasts = [noise(100 * index + 3) for index in range(3)]
    sigmas, middle = sampling_sigmas(steps), steps // 2
    blocks = torch.tensor(WINDOW)

    def move(front: Tensor, back: Tensor, index: int, first: int) -> tuple[Tensor, Tensor]:
        """One step of the window; `first` is the step of the back chunk."""
        level = sigmas[[first + middle] * FRAMES + [first] * FRAMES].expand(2, -1)
        clean = torch.cat([contexts[index], forecasts[index], forecasts[index + 1]], dim=1)
        latents = torch.cat([contexts[index], front, back], dim=1)
        level = torch.cat([level.new_zeros(2, 1), level], dim=1)
        velocity, _ = generator.velocity(latents, level, clean, shared, blocks=blocks, first_frame=-1)
        down_front = sigmas[first + middle + 1] - sigmas[first + middle]
        down_back = sigmas[first + 1] - sigmas[first]
        moved = velocity[:, 1:].split(FRAMES, dim=1)
        return front + down_front * moved[0], back + down_back * moved[1]

    past = generator.prefill(contexts[0], shared)
    front = noise(50)
    for step in range(middle):  # the first chunk of a world comes to the front alone
        own = replace(shared, forecast=forecasts[0])
        level = sigmas[step].expand(2, FRAMES)
        front = front + (sigmas[step + 1] - sigmas[step]) * generator(front, level, own, past)
    done = []
    for index in range(2):
        back = noise(51 + index)
        for step in range(middle):
            front, back = move(front, back, index, step)
        done.append(front)
        front = back
    close(made[0], done[0])
    close(made[1], done[1])


@torch.no_grad()
def test_the_first_chunk_is_sampled_as_without_a_window(generator: DiT) -> None:
    known, context, solver = condition(1), noise(2, frames=1), EulerSolver.of(4)
    made, trace = advance(generator, solver, [known], context, noise(3))
    past, latents, on_the_way = generator.prefill(context, known), noise(3), []
    for step in range(4):
        on_the_way.append(latents)
        level = torch.full((2, FRAMES), solver.timestep(step))
        latents = solver.step(step, generator(latents, level, known, past), latents)
    assert torch.equal(made, latents)
    assert trace.timesteps == pytest.approx(sampling_sigmas(4)[2:4].tolist())
    assert all(torch.equal(a, b) for a, b in zip(trace.latents, on_the_way[2:], strict=True))
    assert torch.equal(trace.context, context)


@torch.no_grad()
def test_a_chunk_follows_the_noisy_chunk_before_it(generator: DiT) -> None:
    known, context = condition(1), noise(2, frames=1)
    _, trace = advance(generator, EulerSolver.of(2), [known], context, noise(3))

    def after(trace: ChunkTrace[Condition] | None) -> Tensor:
        return advance(generator, EulerSolver.of(2), [condition(7)], context, noise(4), trace=trace)[0]

    plain, behind = after(None), after(trace)
    assert float((plain - behind).abs().max()) > 1e-3
    shifted = replace(trace, latents=tuple(each + 1 for each in trace.latents))
    assert float((after(shifted) - behind).abs().max()) > 1e-3
    assert torch.equal(after(trace), behind), "nothing in a trace changes when it is followed: forks share it"


@torch.no_grad()
def test_guidance_away_from_the_same_condition_changes_nothing(generator: DiT) -> None:
    known, context = condition(1), noise(2, frames=1)
    traces, chunks = [], []
    for conditions in ([known], [known, known]):
        _, trace = advance(generator, EulerSolver.of(2), conditions, context, noise(3), 4.0)
        chunk, again = advance(generator, EulerSolver.of(2), conditions, context, noise(4), 4.0, trace)
        traces.append(again)
        chunks.append(chunk)
    close(chunks[1], chunks[0])
    assert [len(trace.conditions) for trace in traces] == [1, 2]


@torch.no_grad()
def test_a_trail_of_other_settings_is_not_followed(generator: DiT) -> None:
    """A snapshot may be restored into a session with other steps or guidance."""
    known, context = condition(1), noise(2, frames=1)
    _, trace = advance(generator, EulerSolver.of(6), [known], context, noise(3))
    made, _ = advance(generator, EulerSolver.of(2), [known], context, noise(4), trace=trace)
    plain, _ = advance(generator, EulerSolver.of(2), [known], context, noise(4))
    assert torch.equal(made, plain)
    _, guided = advance(generator, EulerSolver.of(2), [known, condition(9)], context, noise(3), 2.0)
    made, _ = advance(generator, EulerSolver.of(2), [known], context, noise(4), trace=guided)
    assert torch.equal(made, plain)


def test_the_condition_frame_is_a_little_noisy() -> None:
    context, drawn = noise(1, frames=1), noise(2, frames=1)
    close(renoise(context, drawn), 0.945 * context + 0.055 * drawn)
    assert torch.equal(renoise(context, drawn, sigma=0.0), context)


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_steps_without_a_half_are_refused(steps: int) -> None:
    with pytest.raises(ConfigError, match=rf"num_inference_steps.*\b{steps}\b"):
        half(steps)


# Training


@given(st.lists(st.floats(0, 1, exclude_max=True, width=32), min_size=1, max_size=7))
def test_rounds_are_placed_in_windows_of_two(draws: list[float]) -> None:
    places, behind = window_places(torch.tensor([draws]))
    expected, index, first = [], 0, 1 - draws[0]
    if first > 0.5:  # the chunk that begins the world is alone until it is half-way
        expected, index = [(first, False)], 1
    while index < len(draws):
        front = first if index == 0 else 0.5 - draws[index] % 0.5
        expected += [(front, False), (front + 0.5, True)]
        index += 2
    expected = expected[: len(draws)]
    assert places[0].tolist() == pytest.approx([place for place, _ in expected], abs=1e-6)
    assert behind[0].tolist() == [after for _, after in expected]
    assert bool((places > 0).all()) and bool((places <= 1).all())


class Recorder:
    """Stands where a generator does, and notes at which levels a chunk and the one ahead are shown."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float | None]] = []

    def prefill(self, context: Tensor, condition: None) -> None:
        return None

    def prefill_chunk(
        self, context: Tensor, latents: Tensor, timestep: Tensor, condition: None
    ) -> tuple[Tensor, float]:
        return latents, float(timestep[0, 0])

    def __call__(self, latents: Tensor, timestep: Tensor, condition: None, cache: float | None) -> Tensor:
        self.seen.append((float(timestep[0, 0]), cache))
        return torch.zeros_like(latents)


def test_training_meets_the_levels_of_sampling(generator: DiT) -> None:
    """Every level that a chunk or the one ahead of it has in sampling is met in training, and no other."""
    steps, rounds = 10, 3
    recorder, trace = Recorder(), None
    for _ in range(rounds):
        _, trace = advance(recorder, EulerSolver.of(steps), [None], noise(1, 1), noise(2), trace=trace)
    draws = torch.cartesian_prod(*[torch.arange(steps) / steps] * rounds).reshape(-1, rounds)
    places, behind = window_places(draws)
    sigmas = generator.sigma_at(places)
    met = set()
    for levels, after in zip(sigmas.tolist(), behind.tolist(), strict=True):
        for index in range(rounds):
            met.add((index > 0, levels[index], levels[index - 1] if after[index] else None))
    sampled = {(index >= steps, level, ahead) for index, (level, ahead) in enumerate(recorder.seen)}

    def rounded(pairs: set[tuple[bool, float, float | None]]) -> set[tuple[bool, float, float | None]]:
        return {(later, round(a, 4), b if b is None else round(b, 4)) for later, a, b in pairs}

    assert rounded(met) == rounded(sampled)
    counts = torch.histc(places[:, 1], bins=steps, min=0.5 / steps, max=1 + 0.5 / steps)
    assert bool((counts == counts[0]).all()), "every place is as likely"


@torch.no_grad()
def test_a_window_is_taught_as_the_sampler_shows_it(generator: DiT) -> None:
    """Two worlds of three rounds; in one the first chunk is alone, so windows begin elsewhere in each."""
    shared = condition(1, batch=2)
    each = take(shared, torch.arange(2).repeat_interleave(3))
    known = replace(each, forecast=noise(5, batch=6))
    clean, drawn, context = noise(6, batch=6), noise(7, batch=6), noise(8, frames=1, batch=6)
    places, behind = window_places(torch.tensor([[0.7, 0.1, 0.4], [0.2, 0.8, 0.9]]))
    assert behind.tolist() == [[False, True, False], [False, False, True]]
    sigma = generator.sigma_at(places).flatten()[:, None].expand(-1, FRAMES)
    taught = generator.training_loss(clean, drawn, sigma, known, context, behind.flatten())
    noisy = (1 - sigma[:, :, None, None, None]) * clean + sigma[:, :, None, None, None] * drawn
    assert known.forecast is not None
    for front, back in ((0, 1), (4, 5)):
        frames = [context[front], noisy[front], noisy[back]]
        levels = [torch.zeros(1), sigma[front], sigma[back]]
        forecasts = [context[front], known.forecast[front], known.forecast[back]]
        velocity, _ = generator.velocity(
            torch.cat(frames)[None],
            torch.cat(levels)[None],
            torch.cat(forecasts)[None],
            take(shared, torch.tensor([front // 3])),
            blocks=torch.tensor(WINDOW),
            first_frame=-1,
        )
        _, *chunks = velocity[0].split([1, FRAMES, FRAMES])
        for row, chunk in zip((front, back), chunks, strict=True):
            close(taught.clean[row], noisy[row] - sigma[row, 0] * chunk)
    plain = generator.training_loss(clean, drawn, sigma, known, context)
    for row in (0, 2, 3, 4):
        close(taught.error[row], plain.error[row])
    assert float((taught.error[1] - plain.error[1]).abs().max()) > 1e-3


def test_rounds_without_a_window_are_taught_alone(generator: DiT) -> None:
    """Both passes run all the same: processes that share weights wait for each other in each."""
    known, clean, drawn, context = condition(1), noise(3), noise(4), noise(2, frames=1)
    sigma = torch.full((2, FRAMES), 0.8)
    calls = []
    hook = generator.layers[0].register_forward_hook(lambda *_: calls.append(1))
    alone = generator.training_loss(clean, drawn, sigma, known, context, torch.zeros(2, dtype=torch.bool))
    hook.remove()
    assert len(calls) == 2
    plain = generator.training_loss(clean, drawn, sigma, known, context)
    gradients = []
    for taught in (alone, plain):
        generator.zero_grad()
        taught.error.mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in generator.parameters() if p.grad is not None]))
    generator.zero_grad()
    close(alone.error, plain.error)
    torch.testing.assert_close(*gradients, atol=1e-3, rtol=1e-3)


def test_a_step_is_learned_from_windows(
    make_model: Callable[..., WorldModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs of the generator: levels by windows, and the condition frame at 0.055."""
    model = make_model()
    model.config = replace(model.config, sampler="swin", num_inference_steps=4)
    model.generator.requires_grad_(True)
    objective = GeneratorObjective(model)
    batch = Batch(step=0, task="rounds", indices=(0, 1), episodes=clips(), self_rollout=False)
    asked: list[tuple[Any, ...]] = []
    training_loss = DiT.training_loss

    def spied(self: DiT, *args: Any) -> LossOutput:
        asked.append(args)
        return training_loss(self, *args)

    monkeypatch.setattr(DiT, "training_loss", spied)
    optimizer = torch.optim.Adam(model.generator.parameters(), lr=3e-3)
    losses = []
    for step in range(40):
        chance = SampleRng([(step % 4, row) for row in range(2)])
        with torch.no_grad():
            prepared = objective.prepare(model, batch, chance)
        loss = objective(model, prepared)["flow"] / prepared.counts["flow"]
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-4:]) < 0.7 * sum(losses[:4]), losses
    _, _, sigma, _, context, behind = asked[0]
    known = objective.prepare(model, batch, SampleRng([(0, 0), (0, 1)])).content.context.flatten(0, 1)
    assert behind is not None and sigma.shape == (4, model.config.chunk_latents)
    added = (context - 0.945 * known) / 0.055
    assert abs(float(added.mean())) < 0.2 and abs(float(added.std()) - 1) < 0.2
    for back in behind.nonzero()[:, 0].tolist():
        halves = [float(level / (3 - 2 * level)) for level in sigma[[back - 1, back], 0]]  # unshifted
        assert halves[1] - halves[0] == pytest.approx(0.5, abs=1e-5)


def clips() -> list[Episode]:
    """Two worlds of two rounds."""
    rng = np.random.default_rng(0)
    return [
        Episode(
            words,
            tuple(rng.integers(0, 255, (frames, 32, 32, 3), dtype=np.uint8) for frames in (2, 8, 8)),
            (Action(text=words), Action(text=words)),
        )
        for words in ("it goes left", "it jumps")
    ]


def test_windows_want_two_rounds() -> None:
    model = WorldModelConfig(sampler="swin", num_inference_steps=4)
    stage = StageConfig("generator", rounds=1, tasks={"rounds": 1.0})
    with pytest.raises(ConfigError, match=r"stages\.joint\.rounds"):
        TrainConfig(model=model, stages={"joint": stage})
    TrainConfig(model=model, stages={"joint": replace(stage, tasks={"imagine": 1.0})})
    TrainConfig(model=replace(model, sampler="chunk"), stages={"joint": stage})


# Sessions whose chunks overlap


@pytest.fixture
def sliding(make_model: Callable[..., WorldModel]) -> WorldModel:
    model = make_model()
    model.config = replace(model.config, sampler="swin", num_inference_steps=4)
    return model


IMAGE = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)


def test_a_session_follows_its_trail(sliding: WorldModel) -> None:
    session = sliding.session(seed=5)
    session.reset(IMAGE)
    assert session.state.trace is None
    session.step("the red ball moves left")
    moment = session.snapshot()
    assert moment.state.trace is not None
    fork = session.fork()
    frames = session.step("it jumps").frames
    assert np.array_equal(frames, fork.step("it jumps").frames)
    alone = sliding.session(seed=5)
    alone.restore(replace(moment, state=replace(moment.state, trace=None)))
    assert not np.array_equal(frames, alone.step("it jumps").frames), "the trace changes nothing"
    session.restore(moment)
    assert np.array_equal(frames, session.step("it jumps").frames)


def test_a_snapshot_is_restored_into_a_session_of_no_steps(sliding: WorldModel) -> None:
    session, forecast = sliding.session(seed=5), sliding.session(seed=5, num_inference_steps=0)
    session.reset(IMAGE)
    session.step("it jumps")
    forecast.restore(session.snapshot())
    assert forecast.step("it grows").frames.shape == session.step("it grows").frames.shape


def test_worlds_played_together_follow_their_own_trails(sliding: WorldModel) -> None:
    def begun(rounds: int) -> Session:
        session = sliding.session(seed=rounds)
        session.reset(IMAGE)
        for _ in range(rounds):
            session.step("it jumps")
        return session

    sessions = [begun(0), begun(2)]
    expected = [session.fork().step("it grows").frames for session in sessions]
    for result, alone in zip(play_sessions(sessions, [Action("it grows")] * 2), expected, strict=True):
        assert np.abs(result.frames.astype(int) - alone).max() <= 1


def test_a_window_wants_an_even_number_of_steps() -> None:
    with pytest.raises(ConfigError, match="num_inference_steps"):
        WorldModelConfig(sampler="swin", num_inference_steps=3)


def test_a_session_wants_an_even_number_of_steps(sliding: WorldModel) -> None:
    with pytest.raises(ConfigError, match="num_inference_steps"):
        sliding.session(num_inference_steps=3)
