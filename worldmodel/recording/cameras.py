"""Images of an environment: what it renders, and what is in its observations."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from worldmodel.config import ImageSize, height_width
from worldmodel.errors import InputError
from worldmodel.media import crop_and_resize

RENDER, OBSERVATION = "render", "observation"
"""Cameras: the picture that the environment renders, and the images in its observations."""


class Cameras:
    """Takes pictures.

    Args:
        source: Name of the environment or dataset, for messages.
        names: `render`, `observation`, or the path of an image such as `observation.top`.
        size: Size of the frames; None keeps it.
    """

    def __init__(self, source: str, names: Sequence[str], size: ImageSize | None) -> None:
        self.source, self.names, self.size = source, names, size

    def frames(self, observation: Any, render: Callable[[], Any]) -> dict[str, np.ndarray]:
        """Return the picture of every camera, uint8 `[h, w, 3]`.

        Raises:
            InputError: there is no such camera, or it gives no image.
        """
        frames: dict[str, np.ndarray] = {}
        for camera in self.names:
            picture = self._picture(camera, observation, render)
            # A mapping may also hold other things than images.
            images = list(images_in(camera, picture)) if isinstance(picture, Mapping) else [(camera, picture)]
            if not images:
                raise InputError(f"The camera {camera!r} of {self.source} has no image; name another.")
            # Files and features are named after cameras.
            frames |= {name.replace("/", "_"): self._frame(name, image) for name, image in images}
        return frames

    def _picture(self, camera: str, observation: Any, render: Callable[[], Any]) -> Any:
        first, *path = camera.split(".")
        picture = render() if first == RENDER else observation
        if first not in (RENDER, OBSERVATION):
            raise InputError(f"There is no camera {camera!r}; use render, observation or observation.NAME.")
        for name in path:
            if not isinstance(picture, Mapping) or name not in picture:
                has = (
                    f"it has {', '.join(map(str, picture))}"
                    if isinstance(picture, Mapping)
                    else "it has no parts"
                )
                raise InputError(f"The camera {camera!r} is not in the {first}; {has}.")
            picture = picture[name]
        return picture

    def _frame(self, name: str, picture: Any) -> np.ndarray:
        image = _rgb(picture)
        if image is None:
            given = np.asarray(picture)
            shape = f"{given.dtype} values of shape {list(given.shape)}"
            raise InputError(
                f"The camera {name!r} of {self.source} gives {shape}, not an image; record a camera of uint8 "
                "[height, width] with 3 colour channels, 1, 4 or none."
            )
        height, width = image.shape[:2]
        if self.size is not None:
            wanted, times = height_width(self.size), height_width(self.size)[0] // height
            if times > 1 and wanted == (times * height, times * width):  # one pixel per cell of a board
                return image.repeat(times, axis=0).repeat(times, axis=1)
            return crop_and_resize(Image.fromarray(image), self.size)
        # H.264 needs even sides.
        return np.pad(image, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")


def images_in(camera: str, picture: Any) -> Iterator[tuple[str, Any]]:
    """Yield the images of a camera: the picture itself, or those in a mapping of pictures."""
    if isinstance(picture, Mapping):
        for name, part in picture.items():
            yield from images_in(f"{camera}.{name}", part)
        return
    coloured = np.ndim(picture) == 3 and np.shape(picture)[2] == 3
    # Grey arrays inside of a mapping may be anything, such as a map.
    alone = camera == OBSERVATION and np.ndim(picture) in (2, 3) and _rgb(picture) is not None
    if coloured or alone:
        yield camera, picture


def _rgb(picture: Any) -> np.ndarray | None:
    """Return an RGB image of an RGB, RGBA or grey one, or of the newest of a list; None if it is none.

    Values are 0 to 255 in uint8, or 0 to 1 in floats.
    """
    if isinstance(picture, list | tuple) and picture and isinstance(picture[-1], np.ndarray):
        picture = picture[-1]
    image = np.asarray(picture)
    if image.ndim == 2:
        image = image[..., None]
    # Other arrays of floats may be anything, such as measurements.
    coloured = image.size and np.issubdtype(image.dtype, np.floating) and image.shape[-1] in (3, 4)
    if coloured and 0 <= image.min() <= image.max() <= 1:
        image = np.round(image * 255).astype(np.uint8)
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] not in (1, 3, 4) or 0 in image.shape:
        return None
    return np.repeat(image, 3, axis=2) if image.shape[2] == 1 else image[..., :3]
