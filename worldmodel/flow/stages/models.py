"""What stages that run a model share: its parts, without those that stay in their files, and its clips."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from worldmodel.data.clips import Clip
from worldmodel.errors import InputError
from worldmodel.flow.catalog.clips import ClipReader
from worldmodel.flow.stages.base import CLIP
from worldmodel.flow.stages.rows import Row
from worldmodel.models.loading import deferred
from worldmodel.models.world_model import WorldModel


def load_parts(name: str, device: str, parts: Callable[[WorldModel], Iterable[nn.Module]]) -> WorldModel:
    """Load a model of which only some parts are used.

    Args:
        name: a shipped model, a model folder, or a repository on the Hub.
        device: where they run; empty takes a GPU if there is one.
        parts: the parts, of which weights in files of other libraries are read, too.

    Raises:
        ModelError: there is no such model.
    """
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    with deferred.loading():
        model = WorldModel.from_pretrained(name)
        chosen = list(parts(model))
    for part in chosen:
        deferred.materialize(part, place)
        deferred.load_shards(part)
        part.to(place)
    for parameter in model.parameters(recurse=False):
        parameter.data = parameter.data.to(place)
    return model.requires_grad_(False)


def read_clip(reader: ClipReader, columns: Row) -> Clip:
    """Return the clip of a row of a batch.

    Raises:
        InputError: it has no video, or a column that cannot be read.
    """
    if columns["video"] is None:
        raise InputError("the clip has no video")
    files = {"video": columns.pop("video")}
    return reader.clip(columns[CLIP], columns, files)
