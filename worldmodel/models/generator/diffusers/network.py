"""A transformer of diffusers with an optional state stream, in memory and on disk."""

from pathlib import Path
from typing import Any

import torch
from diffusers.models.modeling_utils import ModelMixin
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor, nn

from worldmodel.errors import ModelError
from worldmodel.models.generator.diffusers.state_cross_attention import StateStream
from worldmodel.models.loading import deferred, pipeline_folder, pretrained

STREAM = "stream.safetensors"


class Network(nn.Module):
    """A transformer of diffusers, and the stream of states added to it, if any."""

    stream: StateStream | None

    def __init__(self, transformer: ModelMixin, stream: StateStream | None = None) -> None:
        super().__init__()
        self.transformer = transformer
        self.stream = stream

    def forward(self, states: Float[Tensor, "b n d"] | None, **inputs: Any) -> Tensor:
        """Call the transformer with its native arguments."""
        if self.stream is None:
            return self.transformer(**inputs, return_dict=False)[0]
        assert states is not None, "a stream needs states"
        return self.stream.run(self.transformer, states, **inputs)

    def save_pretrained(self, folder: Path, dtype: torch.dtype) -> None:
        """Write the transformer in the format of diffusers, and the stream to a file in the same folder."""
        pipeline_folder.save_model(self.transformer, folder, dtype)
        if self.stream is not None:
            save_file(pretrained.cast(self.stream.state_dict(), dtype), folder / STREAM)

    def load_stream(self, folder: Path) -> None:
        """Load the weights of the stream from the transformer's folder, if it has any.

        Raises:
            ModelError: the file is damaged or does not fit, or this network has no stream.
        """
        file = folder / STREAM
        if not file.is_file():
            return
        if self.stream is None:
            raise ModelError(f"{file} is a stream of states; set condition_adapter.kind to stream.")
        expected = {name: list(tensor.shape) for name, tensor in self.stream.state_dict().items()}
        try:
            slices, files = pretrained.open_slices(folder, {"": ""}, file.stem)
            if {name: list(each.get_shape()) for name, each in slices.items()} != expected:
                raise ValueError
        except pretrained.LOAD_ERRORS:
            raise ModelError(
                f"{file} is damaged or does not fit its transformer; download the model again."
            ) from None
        deferred.attach(self.stream, slices, files)
        if not deferred.enabled():
            deferred.load_shards(self.stream)
