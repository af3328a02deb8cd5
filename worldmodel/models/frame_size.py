"""The size of the frames that a model observes and predicts, where it was built for another."""

from typing import Protocol, runtime_checkable

from worldmodel.config import ImageSize, WorldModelConfig
from worldmodel.models.conditioning import ConditionAdapter
from worldmodel.models.generator.base import VideoGenerator
from worldmodel.models.state import StateHead
from worldmodel.models.vision.adapter import VisionAdapter


@runtime_checkable
class SizedModel(Protocol):
    """The parts of a world model that depend on the size of its frames."""

    config: WorldModelConfig
    vision: VisionAdapter
    state: StateHead | None
    generator: VideoGenerator
    condition_adapter: ConditionAdapter
    query_grids: tuple[tuple[int, int], tuple[int, int]]


def resize(model: SizedModel, image_size: ImageSize) -> None:
    """Let a model take frames of another size, such as one of `data.buckets`.

    What is learned per cell keeps its size and is interpolated where it is used.

    Raises:
        ConfigError: a part of the model cannot take such frames.
    """
    config = model.config.sized(image_size)
    if config.codec.image_size == model.config.codec.image_size:
        return
    for part in (model.vision, model.state, model.generator, model.condition_adapter):
        if part is not None:
            part.resize(config)
    if not config.queries:  # else there are equally many for frames of any size
        model.query_grids = model.query_grids[0], config.query_grid
    model.config = config
