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
from worldmodel.errors import ConfigError
from worldmodel.flow.catalog.clips import ClipReader
from worldmodel.flow.stages.base import CLIP
from worldmodel.flow.stages.models import load_parts, read_clip
from worldmodel.flow.stages.rows import Row, each_row
from worldmodel.media.tensors import to_tensor
from worldmodel.models.rounds import RoundEncoder
from worldmodel.models.vision.adapter import Observation


class ActionLabeler:
    """Runs the stage; for the settings and errors see `LabelActions`."""

    def __init__(
        self, model: str, columns: Mapping[str, str] | None, max_frames: int, max_rows: int, device: str
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
        rounds: list[tuple[str, np.ndarray]] = []

        def read(columns: Row) -> Row:
            clip = read_clip(self.reader, columns)
            if not clip.has_actions:
                frames = clip.read_rounds(self.max_rounds)
                for first in range(0, len(frames) - 1, self.chunk):
                    rounds.append((columns[CLIP], frames[first : first + 1 + self.chunk]))
            return {}

        rows = dict(zip(batch.column(CLIP).to_pylist(), each_row(batch, read), strict=True))
        labels: dict[str, list[dict[str, Any]]] = {}
        for first in range(0, len(rounds), self.max_rows):
            names, frames = zip(*rounds[first : first + self.max_rows], strict=True)
            for name, text in zip(names, self.label(np.stack(frames)), strict=True):
                labels.setdefault(name, []).append(understand(text, self.model.config.action).as_dict())
        for name, actions in labels.items():
            rows[name]["actions"] = json.dumps(actions)
        return list(rows.values())

    @torch.no_grad()
    def label(self, frames: np.ndarray) -> list[str]:
        """Return what happened in rounds: uint8 `[b, 1 + t, h, w, 3]`, the frame before a round first."""
        pixels = to_tensor(list(frames), self.model.device).to(self.model.dtype)
        latents = [self.encoder.encode(part) for part in (pixels[:, :1], pixels[:, 1:])]
        observation = Observation(torch.cat(latents, dim=1), self.model.vision.select_frames(pixels))
        return self.model.generate_text(observation, WHAT_HAPPENED)
