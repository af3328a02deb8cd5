"""Clips of mixed lengths: every rank computes about equally long."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from worldmodel.actions import Action
from worldmodel.config import DataConfig, SourceConfig, StageConfig
from worldmodel.data.loader import Batch, BatchLoader
from worldmodel.data.sampler import EpisodeSampler
from worldmodel.data.sources import Recipe
from worldmodel.episodes import Episode
from worldmodel.parallel.mask_rules import Kind, mask_area
from worldmodel.train.diagnostics.throughput import Stack

RANKS = 8
STAGE = StageConfig(rounds=8, microbatch_size=1, tasks={"rounds": 1})


@dataclass(frozen=True)
class MixedRecipe:
    rounds: int
    name: str = "mixed"
    texts: tuple[str, ...] = ()

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


@pytest.mark.parametrize(("per_rank", "length_buckets"), [(32, False), (4, True), (1, True)])
def test_ranks_with_clips_of_mixed_lengths_compute_equally_long(per_rank: int, length_buckets: bool) -> None:
    data = DataConfig({"mixed": SourceConfig("clips")}, length_buckets=length_buckets)
    stage = replace(STAGE, batch_size=per_rank * RANKS, steps=1024 // (per_rank * RANKS))
    loaders = [
        BatchLoader({"mixed": MixedLengths()}, data, stage, 0, 0, rank, RANKS) for rank in range(RANKS)
    ]
    total, waited = 0.0, 0.0
    for batches in zip(*loaders, strict=True):
        work = [[flops(batch) for batch in own] for own in batches]
        # Ranks wait for the slowest in every microbatch, and repeat their last until all have finished.
        most = max(map(len, work))
        total += sum(map(sum, work)) / RANKS
        waited += sum(max(own[min(index, len(own) - 1)] for own in work) for index in range(most))
    assert waited <= 1.05 * total


def test_buckets_have_every_episode_once_an_epoch_and_are_shuffled() -> None:
    source = MixedLengths(size=1000)
    sampler = EpisodeSampler(source, "mixed", window=256, seed=0, bucket=16, rounds=8)
    rows = [sampler.episode(position) for position in range(1000)]
    assert sorted(rows) == list(range(1000))
    lengths = np.array([source.cost(row, 8) for row in rows[:256]]).reshape(16, 16)
    assert (np.ptp(lengths, axis=1) <= 1).all()
    assert sorted(lengths[:, 0]) != list(lengths[:, 0])
