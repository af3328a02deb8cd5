"""Vision transformers over the patches of single frames: CLIP, SigLIP, SigLIP 2, DINOv2 and DINOv3."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from transformers import (
    CLIPVisionModel,
    Dinov2Model,
    Dinov2WithRegistersModel,
    DINOv3ViTModel,
    PreTrainedModel,
    Siglip2VisionModel,
    SiglipVisionModel,
)
from transformers.models.siglip2.image_processing_pil_siglip2 import get_image_size_for_max_num_patches
from transformers.utils.constants import (
    IMAGENET_DEFAULT_MEAN,
    IMAGENET_DEFAULT_STD,
    IMAGENET_STANDARD_MEAN,
    IMAGENET_STANDARD_STD,
    OPENAI_CLIP_MEAN,
    OPENAI_CLIP_STD,
)

from worldmodel.batch import to_device
from worldmodel.config import height_width
from worldmodel.errors import ConfigError
from worldmodel.models.vision.preprocessing import Encoder, Family

FAMILIES = {
    "clip_vision_model": Family(CLIPVisionModel, OPENAI_CLIP_MEAN, OPENAI_CLIP_STD),
    "dinov2": Family(Dinov2Model, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD),
    "dinov2_with_registers": Family(Dinov2WithRegistersModel, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD),
    "dinov3_vit": Family(DINOv3ViTModel, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, "bilinear"),
    "siglip_vision_model": Family(SiglipVisionModel, IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD),
    "siglip2_vision_model": Family(
        Siglip2VisionModel, IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, "bilinear"
    ),
}
"""Supported encoders, by `model_type`."""


class PatchEncoder(Encoder):
    """A vision transformer over the patches of one frame."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: Mapping[str, Any],
        select_layer: int,
        frame: tuple[int, int],
    ) -> None:
        """Wrap a model whose features are taken from hidden layer `select_layer` (-1 is the output).

        Frames of height and width `frame` are preprocessed by `settings`; by default they are resized to the
        square image size of the model.

        Raises:
            ConfigError: the model has no such layer.
        """
        super().__init__(model, settings)
        config, self.select_layer = model.config, select_layer
        if not -config.num_hidden_layers <= select_layer <= -1:
            raise ConfigError(
                f"vision.select_layer is {select_layer}; this encoder has layers -1 (the last) to "
                f"-{config.num_hidden_layers}."
            )
        self.patch, self.width = int(config.patch_size), int(config.hidden_size)
        self.fit(frame)

    def fit(self, frame: tuple[int, int]) -> None:
        config, settings = self.model.config, self.settings
        if config.model_type == "siglip2_vision_model":  # resizes to a number of patches
            most = int(settings.get("max_num_patches") or config.num_patches)
            size = get_image_size_for_max_num_patches(*frame, self.patch, most)
            settings = {name: x for name, x in settings.items() if name != "size"}
        else:
            size = height_width(int(config.image_size))
        self.preprocess = FAMILIES[config.model_type].preprocessor(size).with_settings(settings, frame)
        height, width = self.preprocess.crop
        self.grid = height // self.patch, width // self.patch

    def forward(self, frames: Float[Tensor, "b t 3 h w"]) -> Float[Tensor, "b u m e"]:
        """Return the features of the patches of every frame, without class and register tokens."""
        return self.everything(frames)[:, :, -math.prod(self.grid) :]

    def everything(self, frames: Float[Tensor, "b t 3 h w"]) -> Float[Tensor, "b t m e"]:
        """Return all features of every frame, class and register tokens first."""
        inputs = self._inputs(self.preprocess(frames))
        if self.select_layer == -1:
            features = self.model(**inputs).last_hidden_state
        else:
            layer = self.model.config.num_hidden_layers + self.select_layer
            features = self.model(**inputs, output_hidden_states=[layer]).hidden_states[layer]
        return rearrange(features, "(b t) m e -> b t m e", b=frames.shape[0])

    def _inputs(self, pixels: Float[Tensor, "n 3 h w"]) -> dict[str, Any]:
        """Return the arguments of the model's forward."""
        model_type = self.model.config.model_type
        if model_type == "siglip2_vision_model":
            patches = rearrange(pixels, "n c (h y) (w x) -> n (h w) (y x c)", y=self.patch, x=self.patch)
            sizes = to_device(torch.tensor([self.grid] * len(pixels)), pixels.device)
            return {
                "pixel_values": patches,
                "pixel_attention_mask": torch.ones(patches.shape[:2], dtype=torch.long, device=pixels.device),
                "spatial_shapes": sizes,
            }
        # Interpolation changes nothing at the image size of the model.
        if model_type in ("clip_vision_model", "siglip_vision_model"):
            return {"pixel_values": pixels, "interpolate_pos_encoding": True}
        return {"pixel_values": pixels}
