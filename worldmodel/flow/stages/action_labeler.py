"""The model behind the stage `label_actions`: its inverse dynamics names the actions of videos."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from worldmodel.actions.words import understand
from worldmodel.config import SourceConfig
from worldmodel.episodes import WHAT_HAPPENED
from worldmodel.errors import ConfigError, InputError
from worldmodel.flow.catalog.clips import ClipReader
from worldmodel.flow.stages.base import DROP
from worldmodel.flow.stages.models import load_parts
from worldmodel.flow.stages.rows import Row
from worldmodel.media.tensors import to_tensor
from worldmodel.models.rounds import RoundEncoder
from worldmodel.models.vision.adapter import Observation


class ActionLabeler:
    """Runs the stage; for the settings and errors see `LabelActions`."""

    def __init__(
        self,
        *,
        model: str,
        columns: Mapping[str, str] | None,
        max_frames: int,
        max_rows: int,
        device: str,
    ) -> None:
        self.model = load_parts(model, device, lambda each: (each.codec, each.vision, each.backbone))
        self.encoder = RoundEncoder.of(self.model)
        self.chunk, self.max_rows = self.model.config.chunk_frames, max_rows
        self.reader = ClipReader(
            "label_actions", SourceConfig(columns=dict(columns or {})), self.model.config
        )
        self.max_rounds = (max_frames - 1) // self.chunk
        if self.max_rounds < 1 or max_rows < 1:
            raise ConfigError(
                f"The stage label_actions has max_frames {max_frames} and max_rows {max_rows}; use at least "
                f"{1 + self.chunk}, a round of the model, and 1."
            )

    def __call__(self, batch: pa.RecordBatch) -> list[Row]:
        """Label a batch; clips shorter than a round are dropped."""
        rows: list[Row] = []
        clips: dict[int, np.ndarray] = {}
        for index, columns in enumerate(batch.to_pylist()):
            try:
                video = columns.pop("video")
                if video is None:
                    raise InputError("the clip has no video")
                clip = self.reader.clip(columns["clip"], columns, {"video": video})
                if not clip.has_actions:
                    clips[index] = clip.read_rounds(self.max_rounds)
                rows.append({})
            except InputError as error:
                rows.append({DROP: str(error)})
        rounds = [
            (index, frames[first : first + 1 + self.chunk])
            for index, frames in clips.items()
            for first in range(0, len(frames) - 1, self.chunk)
        ]
        labels: dict[int, list[dict[str, Any]]] = {}
        for first in range(0, len(rounds), self.max_rows):
            indices, frames = zip(*rounds[first : first + self.max_rows], strict=True)
            for index, text in zip(indices, self.label(np.stack(frames)), strict=True):
                labels.setdefault(index, []).append(understand(text, self.model.config.action).as_dict())
        for index, actions in labels.items():
            rows[index]["actions"] = json.dumps(actions)
        return rows

    @torch.no_grad()
    def label(self, frames: np.ndarray) -> list[str]:
        """Return what happened in rounds: uint8 `[b, 1 + t, h, w, 3]`, the frame before a round first."""
        pixels = to_tensor(list(frames), self.model.device).to(self.model.dtype)
        latents = [self.encoder.encode(part) for part in (pixels[:, :1], pixels[:, 1:])]
        observation = Observation(torch.cat(latents, dim=1), self.model.vision.select_frames(pixels))
        return self.model.generate_text(observation, WHAT_HAPPENED)
