"""The demo's history of a visitor against a real server: worlds that are lost, cancelled calls, the queue."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import numpy as np
import pytest
import torch

from worldmodel.config import StateConfig
from worldmodel.demo import history as demo_history
from worldmodel.demo.history import Origin, RolloutHistory
from worldmodel.demo.jobs import JobQueue
from worldmodel.errors import InputError
from worldmodel.media import Frame
from worldmodel.models.world_model import WorldModel
from worldmodel.serving.client import AsyncClient
from worldmodel.serving.errors import NotFoundError
from worldmodel.worlds import World
from worldmodel.worlds.base import Target


@pytest.fixture(scope="module")
def address(serve: Callable[..., str]) -> str:
    return serve(requests_per_minute=60_000)


def play(address: str, body: Callable[[AsyncClient, RolloutHistory], Awaitable[None]]) -> None:
    async def run() -> None:
        async with AsyncClient(address) as client:
            origin = Origin(3, text="a red ball")
            history = await RolloutHistory.start(client, World(), await client.model(), origin)
            await history.step({"keys": ["left"]})
            await history.step("the red ball jumps")
            await body(client, history)
            await history.close()

    asyncio.run(run())


def test_a_chosen_future_happens_again_when_its_moment_is_returned_to(
    make_model: Callable[..., WorldModel], serve: Callable[..., str]
) -> None:
    state = StateConfig(width=32, num_layers=1, num_heads=2, code_groups=3, code_classes=4)
    model = make_model(state=state, num_inference_steps=1)
    assert model.state is not None
    torch.nn.init.normal_(model.state.to_latents.weight)  # zeros before training: all codes have one forecast
    coded = serve(model, requests_per_minute=60_000)

    async def body(client: AsyncClient, history: RolloutHistory) -> None:
        assert history.model.has_futures
        await history.foresee({"keys": ["left"]})
        possible = history.possible
        assert len(possible) > 1 and history.branch.at == 2  # nothing has happened
        await history.happen(len(possible) - 1)
        chosen = history.branch.now
        assert np.abs(chosen.clip.astype(int) - possible[-1].frames).max() <= 1
        assert not history.possible
        await history.branch.world.close()  # the server has lost it, so its rounds are played again
        await history.step({"keys": ["right"]})
        following = history.branch.now.clip
        await history.go(3)
        chosen.snapshot = None
        await history.branch.world.reset()
        for moment in history.branch.moments[1:4]:
            replayed = await history.branch.world.step(moment.action, code=moment.code)
        np.testing.assert_array_equal(replayed.frames, chosen.clip)
        again = await history.branch.world.step({"keys": ["right"]})
        np.testing.assert_array_equal(again.frames, following)

    play(coded, body)


def test_a_world_that_the_server_lost_is_made_again(address: str) -> None:
    async def body(client: AsyncClient, history: RolloutHistory) -> None:
        lost = history.branch.world.id
        twin = await history.branch.world.fork()
        await history.branch.world.close()
        await history.step({"keys": ["right"]})
        assert history.branch.world.id != lost
        assert (history.branch.at, history.branch.world.round) == (3, 3)
        expected = await twin.step({"keys": ["right"]})
        np.testing.assert_array_equal(history.branch.now.clip, expected.frames)
        await twin.close()

    play(address, body)


def test_a_round_whose_answer_was_cancelled_is_undone(address: str) -> None:
    async def body(client: AsyncClient, history: RolloutHistory) -> None:
        # The server has played a round of which the history does not know.
        await (await client.worlds.open(history.branch.world.id)).step(None)
        await history.step({"keys": ["right"]})
        assert history.branch.world.round == history.branch.at == 3

    play(address, body)


class Leaving(World):
    """Cancels the call that looks for objects: the visitor gives it up when the round is played."""

    def targets_in(self, frame: Frame) -> tuple[Target, ...]:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return ()


async def cancelled(call: Coroutine[Any, Any, Any]) -> bool:
    task = asyncio.create_task(call)
    await asyncio.wait({task})
    return task.cancelled()


def test_a_cancelled_call_changes_nothing(address: str) -> None:
    async def body(client: AsyncClient, history: RolloutHistory) -> None:
        await history.compare({"keys": ["left"]}, {"keys": ["right"]})
        here, futures = history.branch.world.id, list(history.futures)
        history.catalog = Leaving()
        assert await cancelled(history.choose(0))
        assert (history.branch.world.id, history.futures) == (here, futures)
        assert await cancelled(history.step("the red ball jumps"))
        assert (history.branch.at, len(history.branch.moments)) == (2, 3)
        history.catalog = World()
        await history.step({"keys": ["right"]})
        assert history.branch.world.round == history.branch.at == 3
        # Two futures are a batch, and a step is alone: equal up to rounding.
        alone, beside = (clip.astype(int) for clip in (history.branch.now.clip, futures[1][1].clip))
        np.testing.assert_allclose(alone, beside, atol=1)

    play(address, body)


def test_no_way_to_go_on_passes_the_maximum_of_moments(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = {"keys": ["left"]}, {"keys": ["right"]}

    async def body(client: AsyncClient, history: RolloutHistory) -> None:
        await history.compare(left, right)
        monkeypatch.setattr(demo_history, "MAX_MOMENTS", 3)
        for call in (history.choose(0), history.compare(left, right), history.step(left)):
            with pytest.raises(InputError, match="3 moments"):
                await call
        assert (history.branch.at, len(history.branch.moments), len(history.futures)) == (2, 3, 2)
        monkeypatch.undo()
        await history.choose(0)
        assert history.branch.at == 3

    play(address, body)


def test_a_cancelled_start_leaves_no_world(address: str) -> None:
    async def body(client: AsyncClient, history: RolloutHistory) -> None:
        before = await client.worlds.list()
        origin = Origin(4, text="a red ball")
        assert await cancelled(RolloutHistory.start(client, Leaving(), history.model, origin))
        assert await client.worlds.list() == before

    play(address, body)


def test_worlds_are_reopened_by_their_ids(address: str) -> None:
    async def body(client: AsyncClient, history: RolloutHistory) -> None:
        await history.fork()
        _, *ids = history.address.split()
        again = await RolloutHistory.reopen(client, World(), history.model, ids)
        assert [branch.world.id for branch in again.branches] == ids
        np.testing.assert_array_equal(again.branch.now.clip, history.branch.now.clip)
        await again.step({"keys": ["left"]})
        assert (again.branch.at, again.branch.world.round) == (1, 3)
        await again.go(0)
        assert again.branch.world.round == 2
        with pytest.raises(NotFoundError):
            await RolloutHistory.reopen(client, World(), history.model, ["world-gone"])

    play(address, body)


def test_a_world_of_the_other_tab_is_a_branch(address: str) -> None:
    async def body(client: AsyncClient, history: RolloutHistory) -> None:
        other = await client.worlds.create(text="a red ball", seed=9)
        frames = (await other.step(None)).frames
        await history.adopt(other.id)
        assert (history.current, history.branch.first_round) == (1, 1)
        np.testing.assert_array_equal(history.branch.now.clip, frames)
        await history.step({"keys": ["left"]})
        assert history.branch.world.round == 2
        while len(history.branches) < demo_history.MAX_BRANCHES:
            await history.fork()
        another = await client.worlds.create(text="a red ball", seed=10)
        with pytest.raises(InputError):
            await history.adopt(another.id)
        with pytest.raises(NotFoundError):
            await client.worlds.open(another.id)
        history.current = 1
        await history.branch.world.close()
        with pytest.raises(NotFoundError):  # it is not made again from where another branch began
            await history.step(None)

    play(address, body)


def test_jobs_run_in_order_and_can_be_cancelled_while_they_run_or_wait() -> None:
    async def run() -> None:
        queue, made = JobQueue(), list[str]()
        release = asyncio.Event()

        def job(name: str) -> Callable[[], Awaitable[None]]:
            async def call() -> None:
                await release.wait()
                made.append(name)

            return call

        jobs = [queue.add(name, job(name)) for name in "abcd"]
        await asyncio.sleep(0)
        assert [each.began is not None for each in jobs] == [True, False, False, False]
        queue.cancel(jobs[0].number)
        queue.cancel(jobs[2].number)
        release.set()
        await asyncio.wait([each.task for each in jobs if each.task])
        assert made == ["b", "d"]

    asyncio.run(run())
