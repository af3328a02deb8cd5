"""Live worlds: batched results match single sessions; failed calls keep the state."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from served import near

from worldmodel.actions import Action
from worldmodel.diffusion.sampler import Chunk
from worldmodel.errors import InputError
from worldmodel.models.conditioning import Condition
from worldmodel.models.world_model import WorldModel
from worldmodel.serving.engine.batching import CONDITION, Batcher, Compute
from worldmodel.serving.engine.denoiser import DenoisingLoop
from worldmodel.serving.worlds.service import WorldService

ACTIONS = ("the red ball moves left", "the blue box jumps", None, "wait", "the red ball explodes")


def run(body: Callable[[WorldService], Coroutine[Any, Any, Any]], model: WorldModel, **options: Any) -> Any:
    async def whole() -> Any:
        service = WorldService(model, **options)
        try:
            return await asyncio.wait_for(body(service), 120)
        finally:
            await service.close()

    return asyncio.run(whole())


def test_batched_worlds_match_single_sessions(model: WorldModel, image: np.ndarray) -> None:
    kinds = [(seed, 1 + seed % 3, (1.0, 2.5)[seed % 2]) for seed in range(5)]

    async def body(service: WorldService) -> list[list[np.ndarray]]:
        async def one(seed: int, steps: int, guidance: float) -> list[np.ndarray]:
            world = await service.start(
                image[None], seed=seed, num_inference_steps=steps, guidance_scale=guidance
            )
            return [await world.step(action) for action in ACTIONS]

        return list(await asyncio.gather(*(one(*kind) for kind in kinds)))

    played = run(body, model)
    for (seed, steps, guidance), clips in zip(kinds, played, strict=True):
        session = model.session(seed, steps, guidance)
        session.reset(image)
        for clip, action in zip(clips, ACTIONS, strict=True):
            assert near(clip, session.step(action).frames)


def test_batched_denoising_matches_unbatched(model: WorldModel) -> None:
    config, grid = model.config, model.config.codec.grid
    generator = torch.Generator().manual_seed(0)
    jobs = []
    for index in range(6):
        states = torch.randn(1, config.num_queries, model.backbone.width, generator=generator)
        context = torch.randn(1, 1, config.codec.latent_channels, *grid, generator=generator)
        with torch.no_grad():
            condition = model.condition(model.read_state(states, context), context)
        noise = torch.randn(condition.forecast.shape, generator=generator)
        guidance = (1.0, 3.0)[index % 2]
        jobs.append((condition, context, noise, 1 + index, guidance))

    def chunks() -> list[Chunk[Condition]]:
        made = []
        for condition, context, noise, steps, guidance in jobs:
            conditions = (condition,) if guidance == 1 else (condition, model.null_condition(context))
            made.append(Chunk(noise, model.generator.solver(steps), conditions, context, guidance))
        return made

    async def body(together: list[Chunk[Condition]]) -> DenoisingLoop:
        compute = Compute()
        loop = DenoisingLoop(model.generator, compute, max_batch=4)
        await asyncio.gather(*(loop.run(chunk) for chunk in together))
        compute.close()
        return loop

    together = chunks()
    loop = asyncio.run(body(together))
    assert loop.occupancy.steps < sum(job[3] for job in jobs)  # they did share batches
    for chunk, alone in zip(together, chunks(), strict=True):
        with torch.no_grad():
            (latents,) = model.denoise([alone])
        torch.testing.assert_close(chunk.latents, latents, atol=1e-5, rtol=1e-5)


def test_overlapping_chunks_share_batches_and_equal_a_session(
    make_model: Callable[..., WorldModel], image: np.ndarray
) -> None:
    sliding = make_model()
    sliding.config = replace(sliding.config, sampler="swin", num_inference_steps=4)

    async def body(service: WorldService) -> list[list[np.ndarray]]:
        worlds = [await service.start(image[None], seed=seed) for seed in range(3)]

        async def rounds(world: Any) -> list[np.ndarray]:
            return [await world.step(action) for action in ACTIONS]

        played = await asyncio.gather(*(rounds(world) for world in worlds))
        assert service.denoising.occupancy.rows == 3 * 4 * len(ACTIONS)
        assert service.denoising.occupancy.steps < service.denoising.occupancy.rows
        return list(played)

    for seed, clips in enumerate(run(body, sliding)):
        session = sliding.session(seed)
        session.reset(image)
        for clip, action in zip(clips, ACTIONS, strict=True):
            assert near(clip, session.step(action).frames)


def test_a_number_of_steps_that_the_sampler_cannot_take_is_refused(
    make_model: Callable[..., WorldModel],
) -> None:
    """In a round it would be an error of every world of the batch."""
    sliding = make_model(sampler="swin", num_inference_steps=2)

    async def body(service: WorldService) -> list[int]:
        accepted = []
        for steps in range(-1, 6):
            try:
                accepted.append(service.settings(num_inference_steps=steps).num_inference_steps)
            except InputError:
                continue
        return accepted

    assert run(body, sliding) == [0, 2, 4]


def test_a_batch_is_taken_when_the_thread_reaches_it() -> None:
    batches: list[list[int]] = []

    def double(items: Sequence[int]) -> list[int]:
        batches.append(list(items))
        return [2 * item for item in items]

    async def body() -> list[int]:
        compute, busy = Compute(), threading.Event()
        batcher = Batcher(compute, double, CONDITION, max_batch=3)
        blocked = asyncio.create_task(compute.run(busy.wait))
        calls = []
        for item in range(5):
            calls.append(asyncio.create_task(batcher(item)))
            await asyncio.sleep(0.01)  # long enough to queue the batch before the next item comes
        calls[1].cancel()
        await asyncio.sleep(0)
        busy.set()
        await blocked
        results = await asyncio.gather(*calls, return_exceptions=True)
        compute.close()
        return [result for result in results if isinstance(result, int)]

    assert asyncio.run(body()) == [0, 4, 6, 8]
    assert batches == [[0, 2, 3], [4]]


def test_calls_fail_when_the_thread_is_closed(model: WorldModel, image: np.ndarray) -> None:
    async def body(service: WorldService) -> None:
        world = await service.start(image[None], num_inference_steps=64)
        running = asyncio.create_task(world.step(None))
        while not service.denoising.occupancy.steps:
            await asyncio.sleep(0.001)
        service.compute.close()
        for call in (running, world.step(None)):
            with pytest.raises(RuntimeError, match="closed"):
                await asyncio.wait_for(call, 10)

    run(body, model)


@pytest.mark.parametrize(("head_start_s", "order"), [(60.0, [0, 1, 2, 3]), (0.0, [3, 1, 0, 2])])
def test_earlier_stages_go_first_within_their_head_start(head_start_s: float, order: list[int]) -> None:
    async def body() -> list[int]:
        compute, busy, done = Compute(head_start_s), threading.Event(), []
        calls = [asyncio.create_task(compute.run(busy.wait))]
        await asyncio.sleep(0)
        for stage in (3, 1, 0, 2):
            calls.append(asyncio.create_task(compute.run(done.append, stage, stage=stage)))
            await asyncio.sleep(0.001)
        busy.set()
        await asyncio.gather(*calls)
        compute.close()
        return done

    assert asyncio.run(body()) == order


def test_worlds_that_start_apart_share_batches(model: WorldModel, image: np.ndarray) -> None:
    async def body(service: WorldService) -> float:
        worlds = [await service.start(image[None], seed=seed) for seed in range(8)]

        async def play(index: int, world: Any) -> None:
            await asyncio.sleep(0.002 * index)
            for _ in range(6):
                await world.step(ACTIONS[0])

        await asyncio.gather(*(play(*each) for each in enumerate(worlds)))
        return service.denoising.occupancy.rows / service.denoising.occupancy.steps

    assert run(body, model) >= 2.5


def test_an_invalid_action_fails_alone(model: WorldModel, image: np.ndarray) -> None:
    async def body(service: WorldService) -> None:
        worlds = [await service.start(image[None], seed=seed) for seed in range(3)]
        actions = (None, {"vector": [1.0]}, ACTIONS[0])
        results = await asyncio.gather(
            *(world.step(action) for world, action in zip(worlds, actions, strict=True)),
            return_exceptions=True,
        )
        assert [type(result) for result in results] == [np.ndarray, InputError, np.ndarray]
        assert [world.round for world in worlds] == [1, 0, 1]

    run(body, model)


@pytest.mark.parametrize("sampler", ["chunk", "swin"])
def test_cancellation_within_one_step_keeps_the_state(
    make_model: Callable[..., WorldModel], image: np.ndarray, sampler: Any
) -> None:
    model = make_model()
    model.config = replace(model.config, sampler=sampler, num_inference_steps=2)

    async def body(service: WorldService) -> None:
        world = await service.start(image[None], num_inference_steps=50)
        other = await service.start(image[None], seed=1)
        steps: list[int] = []
        asked = asyncio.Event()

        def on_progress(step: int, total: int) -> None:
            steps.append(step)
            assert total == 50
            if step == 3:
                task.cancel()
                asked.set()

        task = asyncio.create_task(world.step(ACTIONS[0], on_progress))
        await asked.wait()
        with pytest.raises(asyncio.CancelledError):
            await task
        await other.step(ACTIONS[0])
        assert steps[-1] <= 4
        assert world.round == 0
        assert service.denoising.occupancy.cancelled == 1
        assert (await world.step(None)).shape == (8, 32, 32, 3)

    run(body, model)


def test_fork_and_restore(model: WorldModel, image: np.ndarray) -> None:
    async def body(service: WorldService) -> None:
        world = await service.start(image[None])
        await world.step(ACTIONS[0])
        name, fork = world.snapshot(), world.fork()
        assert fork.id != world.id
        mine, same = await asyncio.gather(world.step(ACTIONS[1]), fork.step(ACTIONS[1]))
        assert near(mine, same)
        world.restore(name)
        assert world.round == 1
        assert near(await world.step(ACTIONS[1]), mine)
        with pytest.raises(InputError, match="snapshot-"):
            world.restore("snapshot-none")
        with pytest.raises(InputError, match="snapshot-"):
            fork.restore(name)

    run(body, model)


def test_text_matches_session(model: WorldModel, image: np.ndarray) -> None:
    async def body(service: WorldService) -> list[str | Action]:
        world = await service.start(image[None])
        with pytest.raises(InputError, match="observation"):
            await world.infer_action()
        await world.step(ACTIONS[0])
        return list(await asyncio.gather(world.describe(), world.describe("how many"), world.infer_action()))

    session = model.session()
    session.reset(image)
    session.step(ACTIONS[0])
    assert run(body, model) == [session.describe(), session.describe("how many"), session.infer_action()]


def test_world_from_text_matches_session(model: WorldModel) -> None:
    async def body(service: WorldService) -> np.ndarray:
        return (await service.start(text="a red ball", seed=5)).last_frames

    session = model.session(seed=5)
    assert near(run(body, model), session.reset(text="a red ball"))


def test_zero_steps_show_the_forecast(model: WorldModel, image: np.ndarray) -> None:
    async def body(service: WorldService) -> np.ndarray:
        world = await service.start(image[None], num_inference_steps=0)
        return await world.step("the red ball moves left")

    session = model.session(num_inference_steps=0)
    session.reset(image)
    assert near(run(body, model), session.step("the red ball moves left").frames)


def test_invalid_calls_keep_the_state(model: WorldModel, image: np.ndarray) -> None:
    async def body(service: WorldService) -> None:
        for settings, named in (
            ({"num_inference_steps": -1}, "0 to 64"),
            ({"guidance_scale": float("nan")}, "guidance_scale"),
            ({"seed": -1}, "seed"),
            ({"adapter": "none"}, "none"),
            ({"text": "a ball"}, "text"),
        ):
            with pytest.raises(InputError, match=named):
                await service.start(image[None], **settings)
        world = await service.start(image[None])
        for action in ("", {"keys": ["jump"]}, {"key": 1}, {"vector": [1.0]}, 7):
            with pytest.raises(InputError):
                await world.step(action)  # type: ignore[arg-type]
        assert world.round == 0
        service.max_rounds = 1
        await world.step(None)
        with pytest.raises(InputError, match="1 rounds"):
            await world.step(None)

    run(body, model)


def test_the_number_of_snapshots_is_bounded(model: WorldModel, image: np.ndarray) -> None:
    async def body(service: WorldService) -> None:
        world = await service.start(image[None])
        for _ in range(20):
            world.snapshot()
        assert len(world.snapshots) == service.max_snapshots

    run(body, model)
