"""The shapes world as a `World`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from worldmodel.config import DataConfig, WorldModelConfig
from worldmodel.media import Frame
from worldmodel.worlds import shapes
from worldmodel.worlds.base import StartImage, SuggestedAction, Target, World
from worldmodel.worlds.shapes import suggestions
from worldmodel.worlds.shapes.source import LABEL_WORDS, ShapesSource, open_shapes

if TYPE_CHECKING:
    from worldmodel.eval.suite import EvalSuite


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

    def eval_suite(self) -> "EvalSuite":
        from worldmodel.worlds.shapes.evaluation.suite import ShapesSuite

        return ShapesSuite()

    def start_images(self) -> Sequence[StartImage]:
        return suggestions.start_images()

    def targets_in(self, frame: Frame) -> tuple[Target, ...]:
        return suggestions.targets_in(frame)

    def targets_named(self, text: str) -> tuple[Target, ...]:
        return suggestions.targets_named(text)

    def target_actions(self, targets: Sequence[Target]) -> list[list[SuggestedAction]]:
        return suggestions.target_actions(targets)

    def other_actions(self, targets: Sequence[Target], seed: int) -> list[SuggestedAction]:
        return [suggestions.newcomer(targets, seed)] if targets else []
