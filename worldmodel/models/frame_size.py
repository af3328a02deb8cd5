"""The size of the frames that a model observes and predicts, where it was built for another."""

from typing import TYPE_CHECKING

from worldmodel.config import ImageSize

if TYPE_CHECKING:
    from worldmodel.models.world_model import WorldModel


def resize(model: "WorldModel", image_size: ImageSize) -> None:
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
