"""Who computes what: plans from lengths and masks alone, the same on every process.

Nothing here touches a tensor or a process group, so plans for ten thousand processes can be made, and tested,
anywhere.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from worldmodel.errors import ConfigError


@dataclass(frozen=True)
class CostModel:
    """Seconds of one training step (forward and backward) on a sequence.

    Linear layers cost 6 FLOPs a parameter and token. Attention costs 4 x area x width forward and 2.5 times
    that backward, 14 together; `area` counts the visible pairs of the mask, not the square of the length.
    """

    parameters: float
    """Parameters that every token passes."""
    num_layers: int
    width: int
    """Query heads x head width."""
    key_width: int
    """Key heads x head width."""
    flops: float = 4.5e14
    """FLOPs a second that a process really does."""
    bandwidth: float = 3e11
    """Bytes a second between processes of one sequence."""
    wide: int = 8
    """Degree above which a sequence leaves the machine."""
    wide_bandwidth: float = 4e10
    """Bytes a second between machines."""
    element_size: int = 2

    def work(self, tokens: int, area: int) -> float:
        """Return FLOPs of a sequence."""
        return 6.0 * self.parameters * tokens + 14.0 * self.num_layers * self.width * area

    def traffic(self, tokens: int, degree: int) -> float:
        """Return bytes that each of `degree` processes sends to share a sequence (see `ulysses.volume`)."""
        share = tokens / degree * (degree - 1) / degree
        return 2 * self.num_layers * (2 * self.width + 2 * self.key_width) * share * self.element_size

    def seconds(self, tokens: int, area: int, degree: int = 1) -> float:
        """Return how long `degree` processes take, each for its part."""
        bandwidth = self.bandwidth if degree <= self.wide else self.wide_bandwidth
        return self.work(tokens, area) / (degree * self.flops) + self.traffic(tokens, degree) / bandwidth


def assign(costs: Sequence[float], ranks: int, speeds: Sequence[float] | None = None) -> list[list[int]]:
    """Give every item to one rank, so that all finish about together; return each rank's items, in order.

    The longest first, each to the rank that would be done with it soonest (LPT): on equal ranks at most 4/3
    of the shortest time possible (Graham 1969). A slow rank has a lower speed: 0.8 does 0.8 of the work.
    """
    alike: dict[float, list[tuple[float, int]]] = {}
    for rank, speed in enumerate([1.0] * ranks if speeds is None else speeds):
        alike.setdefault(speed, []).append((0.0, rank))  # equal numbers: already a heap
    items: list[list[int]] = [[] for _ in range(ranks)]
    for index in _longest_first(costs):
        # Of ranks of one speed the first that is ready would also be the first to finish.
        ends = {speed: (free[0][0] + costs[index] / speed, free[0][1]) for speed, free in alike.items()}
        speed = min(ends, key=lambda speed: ends[speed])
        heapq.heapreplace(alike[speed], ends[speed])
        items[ends[speed][1]].append(index)
    return [sorted(part) for part in items]


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


@dataclass(frozen=True)
class Placement:
    """One sequence on `degree` neighbouring ranks from `first`, a multiple of `degree`."""

    item: int
    first: int
    degree: int
    seconds: float


@dataclass(frozen=True)
class Plan:
    """Sequences on groups of ranks, in the order in which they run."""

    placements: tuple[Placement, ...]
    loads: tuple[float, ...]
    """Seconds that each rank is busy; there are no gaps before it is done."""

    @property
    def makespan(self) -> float:
        """Seconds until all are done."""
        return max(self.loads)

    @property
    def ideal(self) -> float:
        """Seconds if the same work were spread evenly."""
        return sum(self.loads) / len(self.loads)

    @property
    def bound(self) -> float:
        """What `makespan` cannot exceed: W/P + (1 - w/P) t_max, with w the narrowest degree in use."""
        widest = max(placement.seconds for placement in self.placements)
        narrow = min(placement.degree for placement in self.placements)
        return self.ideal + (1 - narrow / len(self.loads)) * widest


def buddy(
    tokens: Sequence[int],
    seconds: Callable[[int, int], float],
    ranks: int,
    capacity: int,
    evenness: float | None = None,
) -> Plan:
    """Choose how many ranks share each sequence, and which: long ones on many, short ones alone.

    A degree is the least power of two at which a rank holds at most `capacity` tokens. Widest first, then
    longest first, a sequence goes to the aligned block of ranks that is free soonest. Widths divide each
    other, so the ranks of a block are equally loaded whenever something as wide comes, none waits inside a
    block, and this is list scheduling on P / w machines: `makespan <= Plan.bound`.

    Args:
        tokens: length of every sequence.
        seconds: time of sequence `item` on `degree` ranks.
        ranks: number of ranks.
        capacity: tokens that a rank can hold.
        evenness: above 0, degrees rise until no sequence takes longer than this share of an even load, or no
            more ranks can share it.

    Raises:
        ConfigError: a sequence is too long for the ranks that may share it.
    """
    widest = ranks & -ranks  # the largest power of two whose blocks tile the ranks
    degrees = []
    for item, length in enumerate(tokens):
        degree = 1 << max(0, (-(-length // capacity) - 1).bit_length())
        if degree > widest:
            raise ConfigError(
                f"Sequence {item} has {length} tokens; {widest} of {ranks} processes that may share it hold "
                f"{widest * capacity}. Use more processes (a power of two), or shorter sequences."
            )
        degrees.append(degree)
    times = [seconds(item, degree) for item, degree in enumerate(degrees)]
    while evenness:
        limit = evenness * sum(t * d for t, d in zip(times, degrees, strict=True)) / ranks
        slow = [item for item, t in enumerate(times) if t > limit and degrees[item] < widest]
        if not slow:
            break
        for item in slow:
            degrees[item] *= 2
            times[item] = seconds(item, degrees[item])
    return _place(times, degrees, ranks)


def _place(times: Sequence[float], degrees: Sequence[int], ranks: int) -> Plan:
    """Run list scheduling width by width; blocks start with the load of the wider block they were part of."""
    placements = []
    width, free = ranks, [(0.0, 0)]
    for degree in sorted(set(degrees), reverse=True):
        free = [(load, first + part) for load, first in free for part in range(0, width, degree)]
        heapq.heapify(free)
        width = degree
        alike = [item for item, other in enumerate(degrees) if other == degree]
        for item in sorted(alike, key=lambda item: (-times[item], item)):
            load, first = free[0]
            heapq.heapreplace(free, (load + times[item], first))
            placements.append(Placement(item, first, degree, times[item]))
    loads = [load for load, _ in sorted(free, key=lambda block: block[1]) for _ in range(width)]
    return Plan(tuple(placements), tuple(loads))


def _longest_first(costs: Sequence[float]) -> list[int]:
    return sorted(range(len(costs)), key=lambda index: (-costs[index], index))
