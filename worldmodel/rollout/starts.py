"""Images to start a rollout from."""

from collections.abc import Sequence

from worldmodel.models.world_model import WorldModel
from worldmodel.types import StartImage
from worldmodel.worlds import get_world, world_names


def start_images(model: WorldModel) -> Sequence[StartImage]:
    """Return the start images of a model: its own or, if it has none, those of its world."""
    if model.start_images or model.config.world not in world_names():
        return model.start_images
    return get_world(model.config.world).start_images()
