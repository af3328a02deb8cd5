"""The models behind the stage `encode`: the codec and the text encoder."""

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import save
from torch import Tensor, nn

from worldmodel.config import SourceConfig
from worldmodel.data.clips import Clip
from worldmodel.data.latents import TEXT
from worldmodel.errors import ConfigError
from worldmodel.flow.catalog.clips import ClipReader
from worldmodel.flow.stages.base import CLIP
from worldmodel.flow.stages.models import load_parts, read_clip
from worldmodel.flow.stages.rows import Row, each_row
from worldmodel.media.tensors import to_tensor
from worldmodel.models.rounds import RoundEncoder
from worldmodel.models.world_model import WorldModel

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TASKS = ("rounds", "imagine", "describe", "ask")


class Encoder:
    """Runs the stage; for the settings and errors see `Encode`."""

    def __init__(
        self, model: str, tasks: Sequence[str], texts: bool, dtype: str,
        columns: Mapping[str, str] | None, max_frames: int, size: Sequence[int], device: str,
    ) -> None:  # fmt: skip
        if strange := sorted(set(tasks) - set(TASKS)):
            raise ConfigError(f"tasks of the stage encode has {strange[0]!r}; use {', '.join(TASKS)}.")
        if dtype not in DTYPES:
            raise ConfigError(f"dtype of the stage encode is {dtype!r}; use {', '.join(DTYPES)}.")
        self.texts = texts
        loaded = load_parts(model, device, self._parts)
        self.generator, self.config, self.device = loaded.generator, loaded.config, loaded.device
        if size:
            try:
                self.config = self.config.sized((size[0], size[-1]))
            except ConfigError as error:
                raise ConfigError(
                    f"size of the stage encode is {list(size)}, which the model cannot have: {error}"
                ) from None
        self.tasks, self.dtype = tuple(tasks), DTYPES[dtype]
        self.encoder = RoundEncoder.of_codec(loaded.codec, self.config)
        self.reader = ClipReader("encode", SourceConfig(columns=dict(columns or {})), self.config)
        self.max_rounds = (max_frames - 1) // self.config.chunk_frames
        if self.max_rounds < 1:
            raise ConfigError(
                f"max_frames of the stage encode is {max_frames}; a round of the model needs "
                f"{1 + self.config.chunk_frames}."
            )

    def _parts(self, model: WorldModel) -> list[nn.Module]:
        """Return the codec and, if texts are encoded, the text encoder."""
        self.texts = self.texts or model.config.condition_adapter.text
        if not self.texts:
            return [model.codec]
        model.generator.add_text_encoder()
        return [model.codec, model.generator.get_submodule("text_encoder")]

    @torch.no_grad()
    def __call__(self, batch: pa.RecordBatch) -> list[Row]:
        """Encode a batch, clips of equal length together; clips shorter than a round are dropped."""
        clips: dict[str, np.ndarray] = {}

        def read(columns: Row) -> Row:
            clip = read_clip(self.reader, columns)
            frames = clips[columns[CLIP]] = clip.read_rounds(self.max_rounds)
            return {"text_states": self.text_states(clip, len(frames) // self.config.chunk_frames)}

        rows = dict(zip(batch.column(CLIP).to_pylist(), each_row(batch, read), strict=True))
        for length in sorted({len(frames) for frames in clips.values()}):
            chosen = [name for name, frames in clips.items() if len(frames) == length]
            made = self.latents([clips[name] for name in chosen])
            for index, name in enumerate(chosen):
                rows[name]["latents"] = save({part: self._stored(x[index]) for part, x in made.items()})
        return list(rows.values())

    def latents(self, clips: Sequence[np.ndarray]) -> dict[str, Tensor]:
        """Encode clips of equal length."""
        return self.encoder.chunks(to_tensor(clips, self.device), self.tasks)

    def text_states(self, clip: Clip, rounds: int) -> bytes | None:
        """Encode the texts of a clip's actions, and no text; None if the generator takes none."""
        if not self.texts:
            return None
        texts = dict.fromkeys(["", *(action.text or "" for action in clip.actions(rounds))])
        states = self.generator.compute_text_states(list(texts))
        return save({f"{TEXT}{text}": self._stored(state) for text, state in states.items()})

    def _stored(self, tensor: Tensor) -> Tensor:
        return tensor.to("cpu", self.dtype).contiguous()
