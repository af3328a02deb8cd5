"""The shapes world behind the library's protocol."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from worldmodel.config import DataConfig, WorldModelConfig
from worldmodel.worlds import shapes
from worldmodel.worlds.base import World
from worldmodel.worlds.shapes.source import LABEL_WORDS, ShapesSource, open_shapes


class ShapesWorld(World):
    """Shapes of eight colours on dark backgrounds that obey sentences; see the package."""

    name = "shapes"

    def open_source(self, name: str, config: DataConfig, model: WorldModelConfig) -> ShapesSource:
        return open_shapes(name, config, model)

    def documents(self, rng: np.random.Generator) -> Iterator[str]:
        return shapes.documents(rng)

    def label_words(self) -> Mapping[str, Sequence[str]]:
        return LABEL_WORDS

    def start(self, rng: np.random.Generator) -> Mapping[str, Any]:
        return {"observation": shapes.render(shapes.random_scene(rng))}
