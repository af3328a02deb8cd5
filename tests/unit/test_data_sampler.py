"""Samplers: the order of samples is a function of (seed, step)."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldmodel.config import StageConfig
from worldmodel.data.sampler import BLOCK, EpisodeSampler, Mixture, StepSampler, rank_share
from worldmodel.data.sources import Recipe
from worldmodel.errors import ConfigError


@dataclass(frozen=True)
class Rows:
    """A source whose episodes are never made."""

    size: int | None
    tasks: tuple[str, ...] = ("rounds",)
    streams: int = 0

    def at(self, index: int) -> Recipe:
        raise AssertionError("samplers make no episodes")

    def cost(self, index: int, rounds: int) -> float:
        return rounds

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Streams(Rows):
    """The same, read front to back."""

    window: int = 8

    def sample(self) -> Iterator[Recipe]:
        return iter(())

    def marks(self, window: int) -> dict[str, object]:
        return {}

    def resume(self, bookmarks: Mapping[str, object]) -> None:
        pass


def plan(sources: dict[str, Rows], weights: dict[str, float] | None = None, **stage: object) -> StepSampler:
    settings = StageConfig(**{"steps": 100, "tasks": {"rounds": 1.0}, **stage})
    return StepSampler(sources, weights or dict.fromkeys(sources, 1.0), settings, seed=5, window=7)


@given(st.integers(1, 60), st.integers(1, 25), st.integers(0, 9))
def test_every_epoch_has_every_row_once(size: int, window: int, seed: int) -> None:
    order = EpisodeSampler(Rows(size), "clips", window, seed)
    walk = [order.episode(position) for position in range(3 * size)]
    for epoch in range(3):
        assert sorted(walk[epoch * size : (epoch + 1) * size]) == list(
            range(epoch * size, (epoch + 1) * size)
        )


def test_epochs_and_seeds_and_sources_differ() -> None:
    def rows(name: str, seed: int, epoch: int) -> list[int]:
        order = EpisodeSampler(Rows(100), name, 32, seed)
        return [order.episode(epoch * 100 + place) % 100 for place in range(100)]

    orders = [rows("a", 0, 0), rows("a", 0, 1), rows("a", 1, 0), rows("b", 0, 0)]
    assert len({tuple(order) for order in orders}) == 4
    assert rows("a", 0, 0) == orders[0]


def test_a_window_bounds_how_far_reading_jumps() -> None:
    order = EpisodeSampler(Rows(1000), "clips", 50, 0)
    walk = [order.episode(position) for position in range(1000)]
    assert max(len({row // 50 for row in walk[i : i + 50]}) for i in range(0, 1000, 50)) == 1
    assert Counter(row // 50 for row in walk).most_common(1)[0][1] == 50
    displacement = np.abs(np.array(walk) - np.arange(1000)).mean() / 1000
    assert displacement == pytest.approx(1 / 3, abs=0.1)  # of a perfect shuffle


def test_a_stream_is_read_front_to_back() -> None:
    order = EpisodeSampler(Streams(None, streams=1), "stream", 99, 0)
    walk = [order.episode(position) for position in range(40)]
    assert walk != sorted(walk)
    assert all(sorted(walk[i : i + 8]) == list(range(i, i + 8)) for i in range(0, 40, 8))
    assert all(order.replacement(17, attempt) // 8 == 2 for attempt in range(1, 20))


@given(st.integers(1, 6), st.integers(1, 30))
def test_streams_take_turns(streams: int, window: int) -> None:
    order = EpisodeSampler(Streams(None, streams=streams, window=window), "stream", 99, 0)
    assert order.window == window * streams
    window *= streams
    walk = [order.episode(position) for position in range(4 * window)]
    assert all(
        sorted(walk[i : i + window]) == list(range(i, i + window)) for i in range(0, len(walk), window)
    )
    assert all(row % streams == position % streams for position, row in enumerate(walk))
    for attempt in range(1, 20):
        other = order.replacement(walk[-1], attempt)
        assert other % streams == walk[-1] % streams
        assert other // window == 3
        assert other != walk[-1] or window == streams


@given(st.integers(2, 60), st.integers(2, 25), st.integers(0, 10**6))
def test_a_replacement_is_another_row_of_the_window(size: int, window: int, episode: int) -> None:
    order = EpisodeSampler(Rows(size), "clips", window, 3)
    epoch, row = divmod(episode, size)
    alone = min(order.window, size - row // order.window * order.window) == 1
    for attempt in range(1, 5):
        tried = order.replacement(episode, attempt)
        assert tried // size == epoch
        assert alone or tried % size // order.window == row // order.window
        assert tried != episode
        assert tried == order.replacement(episode, attempt)


def test_a_window_without_a_good_row_is_left() -> None:
    """Of 41 rows in windows of 8, the last stands alone and those of one window are all bad."""
    order = EpisodeSampler(Rows(41), "clips", 8, 3)
    for row, bad in ((40, {40}), (17, set(range(16, 24)))):
        tried = [order.replacement(row, attempt) for attempt in range(1, 20)]
        assert set(tried) - bad
        assert all(0 <= other < 41 and other != row for other in tried)
    assert EpisodeSampler(Rows(1), "clips", 8, 3).replacement(5, 1) == 5  # there is no other


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(0, 5000), st.integers(0, 9))
def test_shares_are_exact_in_every_block(weights: list[float], samples: int, seed: int) -> None:
    mixture = Mixture(weights, seed)
    drawn = [mixture.source(sample) for sample in range(min(samples, 1200))]
    for source, weight in enumerate(weights):
        assert mixture.count(source, len(drawn)) == drawn.count(source)
        wanted = weight / sum(weights)
        rounding = max(1, len(weights))  # samples of a block
        assert abs(mixture.count(source, 5 * BLOCK) / (5 * BLOCK) - wanted) <= rounding / BLOCK


@given(
    st.integers(1, 30),
    st.integers(1, 30),
    st.integers(1, 9),
    st.floats(0.1, 0.9),
    st.integers(0, 30),
)
def test_a_mixture_keeps_the_order_of_every_source(
    one: int, two: int, batch_size: int, share_of_text: float, step: int
) -> None:
    """Whatever the tasks and weights: the samples of a source are its walk, without gap or repetition."""
    sources = {
        "one": Rows(one, ("rounds", "describe")),
        "two": Rows(two),
        "world": Rows(None, ("rounds", "imagine")),
    }
    tasks = {"rounds": 1 - share_of_text, "describe": share_of_text / 2, "imagine": share_of_text / 2}
    made = plan(sources, {"one": 1.0, "two": 2.5, "world": 1.0}, batch_size=batch_size, tasks=tasks)
    steps = [made.samples(number) for number in range(step + 4)]
    for name in ("one", "two"):
        walk = [sample.episode for samples in steps for sample in samples if sample.source == name]
        order = EpisodeSampler(sources[name], name, 7, 5)
        assert walk == [order.episode(position) for position in range(len(walk))]
    for samples in steps:
        assert all(s.episode == s.index for s in samples if s.source == "world")
    assert [s.index for samples in steps for s in samples] == list(range(batch_size * len(steps)))
    # A plan that starts in the middle, or looks back, says the same.
    fresh = plan(sources, {"one": 1.0, "two": 2.5, "world": 1.0}, batch_size=batch_size, tasks=tasks)
    assert fresh.samples(step) == steps[step]
    assert fresh.samples(step // 2) == steps[step // 2]


def test_sources_of_weight_zero_and_tasks_without_a_source() -> None:
    sources = {"one": Rows(5), "two": Rows(5)}
    made = plan(sources, {"one": 0.0, "two": 1.0}, batch_size=20)
    assert {sample.source for sample in made.samples(0)} == {"two"}
    with pytest.raises(ConfigError, match=r"'dance'.*rounds"):
        plan(sources, tasks={"dance": 1.0})
    with pytest.raises(ConfigError, match=r"'rounds'.*nothing"):
        plan(sources, {"one": 0.0, "two": 0.0})


def test_the_order_in_which_tasks_are_written_changes_nothing() -> None:
    rows = {"clips": Rows(9, ("rounds", "ask", "describe"))}
    tasks = {"rounds": 1.0, "ask": 2.0, "describe": 3.0}
    one, two = plan(rows, tasks=tasks), plan(rows, tasks=dict(reversed(tasks.items())))
    assert [one.task(step) for step in range(50)] == [two.task(step) for step in range(50)]


def test_own_steps_follow_the_schedule() -> None:
    made = plan({"one": Rows(5)}, steps=4000, self_rollout=(0.0, 0.5))
    own = np.array([made.self_rollout(step) for step in range(4000)])
    assert own[:400].mean() < 0.06
    assert own[3000:].mean() == pytest.approx(0.44, abs=0.06)
    assert not any(plan({"one": Rows(5)}).self_rollout(step) for step in range(100))


@given(st.lists(st.sampled_from([1.0, 2.0, 3.5]), max_size=40), st.integers(1, 9))
def test_ranks_share_a_step_without_overlap(costs: list[float], dp_size: int) -> None:
    parts = [rank_share(costs, rank, dp_size) for rank in range(dp_size)]
    assert sorted(place for part in parts for place in part) == list(range(len(costs)))
    loads = [sum(costs[place] for place in part) for part in parts]
    assert max(loads) <= sum(costs) / dp_size + max(costs, default=0)
    if len(set(costs)) == 1:
        assert [place for part in parts for place in part] == list(range(len(costs)))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(
    st.lists(st.tuples(st.sampled_from([1.0, 2.0]), st.sampled_from([None, "a", "b"])), max_size=40),
    st.integers(1, 9),
    st.integers(0, 1000),
)
def test_ranks_take_turns_at_streams(
    samples: list[tuple[float, str | None]], dp_size: int, first: int
) -> None:
    costs = [cost for cost, _ in samples]
    before = {"a": first, "b": 2 * first + 1}
    turns: list[int | None] = []
    for _, source in samples:
        turns.append(before[source] if source else None)
        if source:
            before[source] += 1
    parts = [rank_share(costs, rank, dp_size, turns) for rank in range(dp_size)]
    assert sorted(place for part in parts for place in part) == list(range(len(costs)))
    assert all(part == sorted(part) for part in parts)
    if len(costs) >= dp_size:
        assert all(parts)
    moved = [
        p for r, part in enumerate(parts) for p in part if turns[p] is not None and turns[p] % dp_size != r
    ]
    assert len(moved) < dp_size  # taken by ranks that would have nothing
    if len({source for _, source in samples}) == 1 and turns[0] is not None:
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("kind", ["tasks", "sources"])
@pytest.mark.parametrize(
    ("weights", "named"),
    [
        ({"rounds": -1.0, "ask": 2.0}, "use 0 or more"),
        ({"rounds": float("nan")}, "use 0 or more"),
        ({"rounds": float("inf")}, "use 0 or more"),
        ({"rounds": 0.0}, "raise one above 0"),
    ],
)
def test_invalid_weights_of_a_stage(kind: str, weights: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"{kind}.*{named}"):
        replace(StageConfig(tasks={"rounds": 1.0}), **{kind: weights})
