"""A transformer of diffusers with optional inputs for the state, in memory and on disk."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from diffusers.models.modeling_utils import ModelMixin
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor, nn

from worldmodel.errors import ModelError
from worldmodel.models.generator.diffusers.state_channels import Add, StateChannels
from worldmodel.models.generator.diffusers.state_cross_attention import StateStream
from worldmodel.models.loading import deferred, pipeline_folder, pretrained

STREAM, CHANNELS = "stream.safetensors", "channels.safetensors"


class Network(nn.Module):
    """A transformer of diffusers, with the stream of states and the state channels added to it, if any."""

    stream: StateStream | None
    channels: StateChannels | None

    def __init__(self, transformer: ModelMixin, stream: StateStream | None = None) -> None:
        super().__init__()
        self.transformer = transformer
        self.stream = stream
        self.channels = None

    def forward(
        self,
        states: Float[Tensor, "b n d"] | None,
        channels: Float[Tensor, "b t k h w"] | None,
        add: Add,
        **inputs: Any,
    ) -> Tensor:
        """Call the transformer with its native arguments.

        Args:
            states: Input of the stream.
            channels: Input of the state channels.
            add: Adds their tokens to the output of the transformer's patch embedding.
            **inputs: The native arguments.
        """
        given = nullcontext()
        if self.channels is not None and channels is not None:
            given = self.channels.given(channels, add)
        with given:
            if self.stream is None:
                return self.transformer(**inputs, return_dict=False)[0]
            assert states is not None, "a stream needs states"
            return self.stream.run(self.transformer, states, **inputs)

    def save_pretrained(self, folder: Path, dtype: torch.dtype) -> None:
        """Write the transformer in the format of diffusers, and what is added to files in the same folder."""
        pipeline_folder.save_model(self.transformer, folder, dtype)
        for part, name in ((self.stream, STREAM), (self.channels, CHANNELS)):
            if part is not None:
                save_file(pretrained.cast(part.state_dict(), dtype), folder / name)

    def load_added(self, folder: Path) -> None:
        """Load the weights of stream and channels from the transformer's folder, if it has any.

        Raises:
            ModelError: a file is damaged or does not fit, or this network has no such part.
        """
        remedies = {
            STREAM: (self.stream, "set condition_adapter.kind to stream"),
            CHANNELS: (self.channels, "leave model.state out of the config"),
        }
        for name, (part, remedy) in remedies.items():
            file = folder / name
            if not file.is_file():
                continue
            if part is None:
                raise ModelError(
                    f"{file} reads predicted states, and this model makes none for it; {remedy}."
                )
            _load(part, file)


def _load(part: nn.Module, file: Path) -> None:
    expected = {name: list(tensor.shape) for name, tensor in part.state_dict().items()}
    try:
        slices, files = pretrained.open_slices(file.parent, {"": ""}, file.stem)
        if {name: list(each.get_shape()) for name, each in slices.items()} != expected:
            raise ValueError
    except pretrained.LOAD_ERRORS:
        raise ModelError(
            f"{file} is damaged or does not fit its transformer; download the model again."
        ) from None
    deferred.attach(part, slices, files)
    if not deferred.enabled():
        deferred.load_shards(part)
