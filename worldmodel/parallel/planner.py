"""Balanced division of work over ranks, computed identically on every process from the costs."""

import heapq
from collections.abc import Sequence


def chunks_by_area(areas: Sequence[float], ranks: int) -> list[list[int]]:
    """Divide chunks over ranks: equally many for each (some have one fewer), of about equal `areas`."""
    each = -(-len(areas) // ranks)
    chunks: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]
    # Empty chunks make the numbers equal; being the smallest, they come last and fill the fullest ranks.
    filled = [*areas, *[0.0] * (each * ranks - len(areas))]
    for index in _longest_first(filled):
        load, rank = heapq.heappop(loads)
        chunks[rank].append(index)
        if len(chunks[rank]) < each:
            heapq.heappush(loads, (load + filled[index], rank))
    return [sorted(index for index in part if index < len(areas)) for part in chunks]


def _longest_first(costs: Sequence[float]) -> list[int]:
    return sorted(range(len(costs)), key=lambda index: (-costs[index], index))
