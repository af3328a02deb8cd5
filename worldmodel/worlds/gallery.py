"""The worlds that are here: shipped ones, and models of runs in the current folder. It imports no torch."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from worldmodel.actions import ActionConfig
from worldmodel.errors import ConfigError
from worldmodel.models.loading import location
from worldmodel.worlds.registry import get_world, world_names

START_IMAGES = "start_images"


@dataclass(frozen=True)
class Card:
    """What one sees of a world before it is loaded."""

    name: str
    """What commands take: a shipped name or a folder."""
    folder: Path
    size: tuple[int, int]
    """Height and width of a frame in pixels."""
    takes: tuple[str, ...]
    """Kinds of action."""
    about: str
    """What the world is and what one wants in it, in a sentence; may be empty."""
    world: str | None
    """Name of the world whose actions are suggested."""

    def picture(self) -> bytes | None:
        """Return a PNG of a scene to start from; None if the model brings none."""
        from worldmodel.media.encoding import encode_png

        for file in sorted((self.folder / START_IMAGES).glob("*.png")):
            return file.read_bytes()
        scenes = get_world(self.world).start_images() if self.world in world_names() else ()
        return encode_png(scenes[0].image) if scenes else None


def gallery() -> Iterator[Card]:
    """Yield the models that can be played: those that are shipped, then those of runs in this folder."""
    shipped = {name: location.resolve(name) for name in location.shipped_models()}
    own = {str(folder): folder for folder in sorted(Path("runs").glob("**/model"))}
    for name, folder in (shipped | own).items():
        if (card := card_of(name, folder)) is not None:
            yield card


def card_of(name: str, folder: Path) -> Card | None:
    """Return the card of a model folder; None if it is a folder of something else."""
    try:
        model = json.loads((folder / location.CONFIG).read_text(encoding="utf-8"))["model"]
        size, takes = model["codec"]["image_size"], ActionConfig.of(model["action"]).kinds
        height, width = (size, size) if isinstance(size, int) else size
        about, world = model.get("about", ""), model.get("world")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ConfigError):
        return None
    return Card(name, folder, (height, width), tuple(takes), about, world)
