"""Loads models for verbs."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worldmodel.models.world_model import WorldModel


def load_model(name: str) -> "WorldModel":
    """Load a model by name or folder; transformers keeps its progress bars and warnings to itself.

    Raises:
        ModelError: there is no such model, or its files are damaged.
    """
    from transformers.utils import logging

    from worldmodel.models.world_model import WorldModel

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    return WorldModel.from_pretrained(name)
