"""Model loading for verbs."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worldmodel.models.world_model import WorldModel


def load_model(name: str) -> "WorldModel":
    """Load a model by name or path.

    Raises:
        ModelError: there is no such model, or its files are damaged.
    """
    from worldmodel.models.world_model import WorldModel

    quiet_transformers()
    return WorldModel.from_pretrained(name)


def quiet_transformers() -> None:
    """Disable the progress bars and warnings of transformers."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
