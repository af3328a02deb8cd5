"""How the time of the model is divided among keys and purposes, with calls that only sleep."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from worldmodel.serving.engine.batching import MAX_KINDS, Batcher, Compute
from worldmodel.serving.engine.shares import Purpose, ask_as, round_in_progress

ROW_S = 0.01
STAGES = 3


class Rounds:
    """Rounds of three calls, each of which takes `ROW_S` per row; counts what was played by whom.

    Those `beside` others are rounds of another model in the same thread.
    """

    def __init__(self, beside: "Rounds | None" = None, **options: Any) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)
        self.batches: list[int] = []
        self.compute = Compute(used=self._used, **options) if beside is None else beside.compute
        self._calls = [Batcher[int, int](self.compute, self._sleep, stage, 16) for stage in range(STAGES)]

    def _used(self, key: str, purpose: Purpose, seconds: float) -> None:
        self.spent[key] += seconds

    def _sleep(self, rows: Sequence[int]) -> Sequence[int]:
        self.batches.append(len(rows))
        time.sleep(ROW_S * len(rows))
        return rows

    async def play(self, key: str, purpose: Purpose, seconds: float, pause_s: float = 0.0) -> None:
        """Play rounds one after another for a time."""
        ask_as(key, purpose)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with round_in_progress():
                for call in self._calls:
                    await call(0)
            await asyncio.sleep(pause_s)


def run(body: Callable[[Rounds], Any], **options: Any) -> Any:
    async def whole() -> Any:
        rounds = Rounds(**options)
        try:
            return await body(rounds)
        finally:
            rounds.compute.close()

    return asyncio.run(whole())


async def spent_after_warm_up(rounds: Rounds, *players: Any) -> dict[str, float]:
    """Return the time of each key once durations are known, and what keys had saved up is spent."""
    playing = asyncio.gather(*map(asyncio.create_task, players))
    await asyncio.sleep(0.5)
    rounds.spent.clear()
    await playing
    return rounds.spent


@pytest.mark.parametrize("purpose", ["step", "image", "video"])
def test_a_key_with_one_world_gets_its_share_beside_one_that_asks_for_far_more(purpose: Purpose) -> None:
    async def body(rounds: Rounds) -> dict[str, float]:
        load = [rounds.play("a", purpose, 1.5) for _ in range(15)]
        return await spent_after_warm_up(rounds, *load, rounds.play("b", "step", 1.5, pause_s=0.01))

    spent = run(body)
    assert spent["b"] > 0.25 * sum(spent.values())  # oldest first, it would be a sixteenth


def test_a_key_gets_no_more_time_by_using_several_models() -> None:
    async def body(rounds: Rounds) -> dict[str, float]:
        models = [rounds, *(Rounds(beside=rounds) for _ in range(4))]
        load = [each.play("a", "step", 1.5) for each in models]
        spent = await spent_after_warm_up(rounds, *load, rounds.play("b", "step", 1.5))
        assert all(each.batches for each in models)
        return spent

    spent = run(body)
    assert spent["b"] > 0.35 * sum(spent.values())  # oldest first, it would be a sixth


def test_kinds_of_batches_that_clients_invent_are_forgotten() -> None:
    compute = Compute()
    batcher = Batcher[float, float](compute, lambda rows: rows, 0, group=lambda temperature: temperature)

    async def body() -> None:
        for index in range(2 * MAX_KINDS):
            await batcher(float(index))
            await batcher(-1.0)  # the usual one is remembered

    try:
        asyncio.run(body())
        assert len(batcher._seconds) == MAX_KINDS
        assert batcher.seconds(-1.0, 1) > 0 == batcher.seconds(0.0, 1)
    finally:
        compute.close()


def test_a_step_gets_four_fifths_of_the_time_beside_the_chats_of_another_key() -> None:
    """So it takes 5/4 as long as alone, and what calls cannot be interrupted add to that."""

    async def chat(rounds: Rounds, seconds: float) -> None:
        ask_as("a", "chat")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            await rounds.compute.run(time.sleep, ROW_S)

    async def body(rounds: Rounds) -> dict[str, float]:
        chats = [chat(rounds, 2.0) for _ in range(15)]
        return await spent_after_warm_up(rounds, *chats, rounds.play("b", "step", 2.0))

    spent = run(body)
    assert 0.7 < spent["b"] / sum(spent.values()) < 0.9


def test_keys_that_ask_for_much_get_time_by_their_weights() -> None:
    async def body(rounds: Rounds) -> dict[str, float]:
        play = [rounds.play(key, "step", 1.8) for key in ("light", "heavy") for _ in range(4)]
        return await spent_after_warm_up(rounds, *play)

    spent = run(body, weight_of=lambda key: 3.0 if key == "heavy" else 1.0)
    assert 1.8 < spent["heavy"] / spent["light"] < 4.5


def test_purposes_have_weights_and_none_starves() -> None:
    async def body(rounds: Rounds) -> dict[str, float]:
        play = [rounds.play(purpose, purpose, 1.8) for purpose in ("live", "video") for _ in range(4)]
        return await spent_after_warm_up(rounds, *play)

    spent = run(body)
    assert spent["live"] > 3 * spent["video"] > 0


@pytest.mark.parametrize("num_keys", [1, 4, 16])
def test_worlds_of_many_keys_share_batches_as_those_of_one(num_keys: int) -> None:
    async def body(rounds: Rounds) -> float:
        play = [rounds.play(str(number % num_keys), "step", 0.8) for number in range(16)]
        await asyncio.gather(*map(asyncio.create_task, play))
        return sum(rounds.batches) / len(rounds.batches)

    assert run(body) >= 12
