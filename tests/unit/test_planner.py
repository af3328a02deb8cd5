"""Plans: every sequence once, no rank idle before its end, and no later than the bound."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worldmodel.errors import ConfigError
from worldmodel.parallel import ulysses
from worldmodel.parallel.planner import CostModel, Plan, assign, buddy, chunks_by_area

COST = CostModel(parameters=7e9, num_layers=28, width=4096, key_width=1024)
CAPACITY = 16_384
lengths = st.lists(st.one_of(st.integers(1, 4096), st.integers(1, 8 * CAPACITY)), min_size=1, max_size=120)


def seconds(tokens: list[int]):
    return lambda item, degree: COST.seconds(tokens[item], tokens[item] ** 2 // 2, degree)


def check(plan: Plan, tokens: list[int], ranks: int) -> None:
    """A plan can run as it says: blocks are aligned, no rank waits inside one, loads are what is placed."""
    assert sorted(placement.item for placement in plan.placements) == list(range(len(tokens)))
    loads = [0.0] * ranks
    for placement in plan.placements:
        assert placement.first % placement.degree == 0
        assert tokens[placement.item] <= placement.degree * CAPACITY
        members = range(placement.first, placement.first + placement.degree)
        assert len({loads[rank] for rank in members}) == 1, "a rank would wait for its peers"
        for rank in members:
            loads[rank] += placement.seconds
    assert plan.loads == pytest.approx(loads)
    assert plan.makespan <= plan.bound * (1 + 1e-9)
    assert plan.ideal <= plan.makespan * (1 + 1e-9)


@settings(deadline=None)
@given(lengths, st.sampled_from([8, 16, 24, 64, 96, 1024]), st.sampled_from([None, 0.5, 0.1]))
def test_buddy_plans_keep_their_bound(tokens: list[int], ranks: int, evenness: float | None) -> None:
    plan = buddy(tokens, seconds(tokens), ranks, CAPACITY, evenness)
    check(plan, tokens, ranks)
    assert plan == buddy(tokens, seconds(tokens), ranks, CAPACITY, evenness)


@settings(deadline=None, max_examples=4)
@given(st.integers(0, 1000))
def test_buddy_plans_keep_their_bound_on_12288_ranks(seed: int) -> None:
    tokens = [
        1 + (seed + 7919 * item * item) % (40_000 if item % 9 else 16 * CAPACITY) for item in range(6_000)
    ]
    check(buddy(tokens, seconds(tokens), 12_288, CAPACITY), tokens, 12_288)


def test_evenness_shortens_what_everybody_waits_for() -> None:
    tokens = [8 * CAPACITY, *[2000] * 300]
    plain, even = (buddy(tokens, seconds(tokens), 64, CAPACITY, evenness) for evenness in (None, 0.5))
    assert even.makespan < 0.6 * plain.makespan
    assert max(p.seconds for p in even.placements) < max(p.seconds for p in plain.placements)


def test_a_sequence_for_more_ranks_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Sequence 1 has 131072 tokens; 4 of 12 "):
        buddy([5, 8 * CAPACITY], lambda item, degree: 1.0, 12, CAPACITY)


@given(st.lists(st.floats(0, 100), max_size=60), st.integers(1, 9))
def test_assign_gives_every_item_once_and_evenly(costs: list[float], ranks: int) -> None:
    items = assign(costs, ranks)
    assert sorted(item for part in items for item in part) == list(range(len(costs)))
    loads = [sum(costs[item] for item in part) for part in items]
    assert max(loads) <= sum(costs) / ranks + (1 - 1 / ranks) * max(costs, default=0) + 1e-6
    assert items == assign(costs, ranks)


def test_slow_ranks_get_less() -> None:
    items = assign([1.0] * 90, 3, speeds=[1.0, 0.5, 1.5])
    assert [len(part) for part in items] == [30, 15, 45]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=90), st.integers(1, 9))
def test_chunks_are_equally_many(areas: list[int], ranks: int) -> None:
    parts = chunks_by_area(areas, ranks)
    assert sorted(chunk for part in parts for chunk in part) == list(range(len(areas)))
    each = -(-len(areas) // ranks)
    assert max(len(part) for part in parts) <= each
    assert parts == chunks_by_area(areas, ranks)


def test_chunks_weigh_the_same() -> None:
    areas = [chunk * chunk for chunk in range(64)]
    loads = [sum(areas[chunk] for chunk in part) for part in chunks_by_area(areas, 8)]
    assert max(loads) < 1.03 * sum(areas) / 8


def test_cost_counts_what_the_model_does() -> None:
    cost = CostModel(parameters=10, num_layers=3, width=16, key_width=8, flops=1e3, bandwidth=1e3)
    assert cost.work(tokens=4, area=5) == 6 * 10 * 4 + 3 * 3.5 * (4 * 5 * 16)
    heads = ulysses.divide_heads(8, 4, 4)
    volumes = ulysses.volume(heads, 2, [25] * 4, rank=0)
    assert cost.traffic(tokens=100, degree=4) == 3 * sum(volumes) * 2
    assert cost.seconds(100, 50, 4) == pytest.approx(cost.work(100, 50) / 4e3 + cost.traffic(100, 4) / 1e3)
    assert cost.traffic(100, 1) == 0


@pytest.mark.parametrize(("query", "key", "ranks"), [(8, 4, 4), (6, 2, 4), (28, 7, 4), (4, 4, 3), (8, 1, 8)])
def test_queries_stay_with_their_keys(query: int, key: int, ranks: int) -> None:
    heads = ulysses.divide_heads(query, key, ranks)
    assert [head for part in heads.query for head in part] == list(range(query))
    for rank, (queries, keys) in enumerate(zip(heads.query, heads.key, strict=True)):
        each = len(queries) // len(keys)
        local = heads.readers(rank) or [number // each for number in range(len(queries))]
        assert [keys[number] for number in local] == [head // (query // key) for head in queries]
    counts = [len(part) for part in heads.query]
    assert max(counts) - min(counts) <= 1


def test_more_processes_than_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"mesh\.sp is 8.*4 heads"):
        ulysses.divide_heads(4, 2, 8)
