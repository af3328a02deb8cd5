"""Buckets: clips of several sizes and aspect ratios in one run, each read in the size that suits it best.

All samples of a step are of one bucket, which is drawn as its task is, so every process has the same.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np

from worldmodel.config import DataConfig, WorldModelConfig
from worldmodel.data.clips import Clip
from worldmodel.data.sources import Recipe, Source, open_sources
from worldmodel.errors import ConfigError

SET_SIZE = "set its size to the one of data.buckets in which all of them are read"
Size = tuple[int, int]
"""Height and width of frames in pixels."""


@runtime_checkable
class SizedSource(Source, Protocol):
    """A finite source that knows the sizes of its clips before they are read."""

    def frame_sizes(self) -> np.ndarray:
        """Return height and width of the frames of every episode, `[n, 2]`; 0 where they cannot be read."""
        ...


def nearest(size: Size, buckets: Sequence[Size]) -> int:
    """Return the index of the bucket of a clip.

    Of the buckets with the nearest aspect ratio it is the largest that is not larger than the clip, else the
    smallest.
    """
    height, width = size

    def difference(bucket: Size) -> float:
        return round(abs(math.log(bucket[0] * width / (bucket[1] * height))), 6)

    least = min(map(difference, buckets))
    alike = [index for index, bucket in enumerate(buckets) if difference(bucket) == least]
    areas = {index: math.prod(buckets[index]) for index in alike}
    filled = [index for index in alike if buckets[index][0] <= height and buckets[index][1] <= width]
    return max(filled, key=areas.__getitem__) if filled else min(alike, key=areas.__getitem__)


class BucketedSource:
    """The clips of a source, bucket after bucket, each in the size of its bucket.

    Args:
        source: The source.
        buckets: Height and width of the frames of every bucket.
    """

    streams = 0

    def __init__(self, source: SizedSource, buckets: Sequence[Size]) -> None:
        self.source, self.buckets = source, buckets
        self.tasks = source.tasks
        sizes, of_clip = np.unique(source.frame_sizes(), axis=0, return_inverse=True)
        # What cannot be read is replaced later by another clip of the bucket that it is put into.
        found = [nearest((height, width), buckets) if height else 0 for height, width in sizes.tolist()]
        self.bucket = np.array(found)[of_clip.ravel()]
        """Bucket of every clip, in the order of the source."""
        self.rows = np.argsort(self.bucket, kind="stable")
        self.counts = np.bincount(self.bucket, minlength=len(buckets)).tolist()
        """Clips of each bucket."""
        self.size = len(self.rows)

    def at(self, index: int) -> Recipe:
        """Return the recipe of a clip; `index` counts the clips of the first bucket first."""
        row = int(self.rows[index % self.size])
        recipe = self.source.at(row)
        if not isinstance(recipe, Clip):
            return recipe
        return replace(recipe, format=replace(recipe.format, size=self.buckets[self.bucket[row]]))

    def cost(self, index: int, rounds: int) -> float:
        return self.source.cost(int(self.rows[index % self.size]), rounds)

    def close(self) -> None:
        self.source.close()


def open_in_buckets(config: DataConfig, model: WorldModelConfig) -> dict[str, Source]:
    """Open all of `data.sources`, with their clips in `data.buckets`, if there are any.

    Texts without pictures are in the first bucket.

    Raises:
        ConfigError: as `open_sources`, a source does not know the sizes of its clips, or states one that no
            bucket has.
    """
    for name, settings in config.sources.items():
        if settings.size and settings.size not in config.buckets:
            raise ConfigError(
                f"data.sources.{name}.size is {list(settings.size)}, which is not one of data.buckets "
                f"({', '.join(str(list(size)) for size in config.buckets) or 'none'}); add it there."
            )
    sources = open_sources(config, model)
    for name, source in sources.items() if config.buckets else ():
        if config.sources[name].size:
            continue
        if isinstance(source, SizedSource):
            sources[name] = BucketedSource(source, config.buckets)
        elif set(source.tasks) - {"document"}:
            raise ConfigError(
                f"data.sources.{name} does not know the sizes of its clips before they are read; {SET_SIZE}."
            )
    return sources


def bucket_of(config: DataConfig) -> dict[str, int]:
    """Return the index of the bucket of each source whose clips are all in one."""
    return {name: config.buckets.index(each.size) for name, each in config.sources.items() if each.size}


def check_filled(sources: Mapping[str, Source], config: DataConfig) -> None:
    """Check that every bucket has a clip.

    Raises:
        ConfigError: one has none; the message names it.
    """
    counts = Counter(bucket_of(config).values())
    for source in sources.values():
        counts.update(dict(enumerate(source.counts)) if isinstance(source, BucketedSource) else {})
    for number, (height, width) in enumerate(config.buckets):
        if not counts[number]:
            raise ConfigError(
                f"data.buckets has [{height}, {width}], to which the shape of no clip in data.sources is "
                "nearest; leave it out, or add such clips."
            )
