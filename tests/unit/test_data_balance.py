"""Clips of mixed lengths: every rank computes about equally long."""

from dataclasses import dataclass

import numpy as np

from worldmodel.config import DataConfig, SourceConfig, StageConfig
from worldmodel.data.loader import Batch, BatchLoader
from worldmodel.data.sources import Recipe
from worldmodel.parallel.mask_rules import Kind, mask_area
from worldmodel.train.throughput import Stack
from worldmodel.types import Action, Episode

RANKS = 8
STAGE = StageConfig(steps=4, batch_size=256, microbatch_size=1, tasks={"rounds": 1})


@dataclass(frozen=True)
class MixedRecipe:
    rounds: int
    name: str = "mixed"

    def episode(self, task: str, seed: int, index: int, rounds: int) -> Episode:
        clip = np.zeros((1, 8, 8, 3), np.uint8)
        return Episode(f"{index}", (clip,) * (1 + self.rounds), (Action(),) * self.rounds)


@dataclass(frozen=True)
class MixedLengths:
    """Episodes of 1 to 8 rounds."""

    size: int = 4000
    tasks: tuple[str, ...] = ("rounds",)
    streams: int = 0

    def at(self, index: int) -> Recipe:
        return MixedRecipe(int(self.cost(index, 8)))

    def cost(self, index: int, rounds: int) -> float:
        return int(np.random.default_rng(index).integers(1, 9))

    def close(self) -> None:
        pass


def flops(batch: Batch) -> float:
    """Count the FLOPs of a decoder of 6.5 billion parameters, with 400 tokens per round."""
    tokens = 400 * len(batch.episodes[0].actions)
    decoder = Stack(6_500_000_000, 28, 3584, tokens, mask_area([(Kind.TEXT, tokens)]))
    return len(batch.episodes) * decoder.flops()


def test_ranks_with_clips_of_mixed_lengths_compute_equally_long() -> None:
    data, sources = DataConfig({"mixed": SourceConfig("clips")}), {"mixed": MixedLengths()}
    loaders = [BatchLoader(sources, data, STAGE, 0, 0, rank, RANKS) for rank in range(RANKS)]
    for batches in zip(*loaders, strict=True):
        work = [[flops(batch) for batch in own] for own in batches]
        mean = sum(map(sum, work)) / RANKS
        assert max(map(sum, work)) <= 1.05 * mean
        # Ranks wait for the slowest in every microbatch, and repeat their last until all have finished.
        most = max(map(len, work))
        waits = [max(own[min(index, len(own) - 1)] for own in work) for index in range(most)]
        assert sum(waits) <= 1.05 * mean
