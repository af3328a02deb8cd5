"""The stage `encode`: latents and text states, so that training runs neither codec nor text encoder."""

from collections.abc import Mapping, Sequence
from typing import Literal

import pyarrow as pa

from worldmodel.flow.catalog.clips import COLUMNS
from worldmodel.flow.stages.base import Resources, stage
from worldmodel.flow.stages.rows import result_of
from worldmodel.flow.stages.weights import weights_digest

PARTS = ("codec", "generator/text_encoder", "generator/tokenizer")
"""Folders of a model whose files decide latents and text states."""
SETTINGS = ("codec", "fps", "chunk_frames", "context_latents", "action", "condition_adapter")
"""Settings of a model that do."""
OUTPUTS = pa.schema({"latents": pa.large_binary(), "text_states": pa.large_binary()})


@stage(
    version="1",
    inputs=["video", *COLUMNS],
    outputs=OUTPUTS.names,
    uncounted=["device", "max_frames"],
    resources=Resources(cpu=1.0, gpu=1.0, memory_gb=8.0),
    batch_size=4,
    timeout_s=600.0,
    weights=lambda *, model, **_: weights_digest(model, PARTS, SETTINGS),
)
class Encode:
    """Encodes clips and the texts of their actions with the codec and the text encoder of a model.

    Args:
        model: a shipped model, a model folder, or a repository on the Hub.
        tasks: tasks for which there will be latents, of rounds, imagine, describe and ask. Latents of our own
            codec are the same for all; latents of causal codecs (of diffusers) are stored for each.
        texts: whether texts are also encoded if the model's generator takes none, for the objective prompt.
        dtype: bfloat16, float16 or float32, of latents and text states.
        columns: as `data.sources.NAME.columns` of the training.
        max_frames: longest clip that is encoded, in frames of the model; the rest of longer ones is left out.
        size: height and width of the frames, one of `data.buckets` of the training; by default the model's.
        device: where the model runs; empty takes a GPU if there is one.

    Raises:
        ConfigError: a setting is wrong.
        ModelError: there is no such model.
    """

    def __init__(
        self,
        *,
        model: str,
        tasks: Sequence[str] = ("rounds",),
        texts: bool = False,
        dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
        columns: Mapping[str, str] | None = None,
        max_frames: int = 1000,
        size: Sequence[int] = (),
        device: str = "",
    ) -> None:
        from worldmodel.flow.stages.encoder import Encoder  # imports torch, which other workers need not

        self.run = Encoder(model, tasks, texts, dtype, columns, max_frames, size, device)

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return result_of(batch, OUTPUTS, self.run(batch))
