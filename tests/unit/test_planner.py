"""Balanced assignment of chunks and heads to ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldmodel.errors import ConfigError
from worldmodel.parallel import ulysses
from worldmodel.parallel.planner import chunks_by_area


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=90), st.integers(1, 9))
def test_every_rank_gets_equally_many_chunks(areas: list[int], ranks: int) -> None:
    parts = chunks_by_area(areas, ranks)
    assert sorted(chunk for part in parts for chunk in part) == list(range(len(areas)))
    each = -(-len(areas) // ranks)
    assert max(len(part) for part in parts) <= each
    assert parts == chunks_by_area(areas, ranks)


def test_chunks_have_about_equal_areas() -> None:
    areas = [chunk * chunk for chunk in range(64)]
    loads = [sum(areas[chunk] for chunk in part) for part in chunks_by_area(areas, 8)]
    assert max(loads) < 1.03 * sum(areas) / 8


@pytest.mark.parametrize(("query", "key", "ranks"), [(8, 4, 4), (6, 2, 4), (28, 7, 4), (4, 4, 3), (8, 1, 8)])
def test_query_heads_are_on_the_rank_of_their_key_head(query: int, key: int, ranks: int) -> None:
    heads = ulysses.divide_heads(query, key, ranks)
    assert [head for part in heads.query for head in part] == list(range(query))
    for rank, (queries, keys) in enumerate(zip(heads.query, heads.key, strict=True)):
        each = len(queries) // len(keys)
        local = heads.readers(rank) or [number // each for number in range(len(queries))]
        assert [keys[number] for number in local] == [head // (query // key) for head in queries]
    counts = [len(part) for part in heads.query]
    assert max(counts) - min(counts) <= 1


def test_more_processes_than_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"mesh\.sp is 8"):
        ulysses.divide_heads(4, 2, 8)
