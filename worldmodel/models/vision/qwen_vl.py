"""The vision encoders of Qwen2.5-VL and Qwen3-VL, whose features are aligned with a language model.

Frames are split into patches as in the models' own processors: two frames and 2 x 2 patches share a feature.
Features for deeper layers of the language model (DeepStack of Qwen3-VL) and three-axis positions are not
used, since the backbone is a plain language model.

Source: Qwen2.5-VL (arXiv:2502.13923), sec. 2.1.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from transformers.utils.constants import (
    IMAGENET_STANDARD_MEAN,
    IMAGENET_STANDARD_STD,
    OPENAI_CLIP_MEAN,
    OPENAI_CLIP_STD,
)

from worldmodel.batch import to_device
from worldmodel.models.vision.preprocessing import Encoder, Family

FAMILIES = {
    "qwen2_5_vl_vision": Family(Qwen2_5_VisionTransformerPretrainedModel, OPENAI_CLIP_MEAN, OPENAI_CLIP_STD),
    "qwen3_vl_vision": Family(Qwen3VLVisionModel, IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD),
}
"""Supported encoders, by `model_type`."""

MIN_PIXELS, MAX_PIXELS = 56 * 56, 28 * 28 * 1280
"""Default bounds of a frame, from the family's image processor."""


class QwenVisionEncoder(Encoder):
    """The vision encoder of a Qwen-VL model, with its merging of patches."""

    aligned = True

    def __init__(self, model: PreTrainedModel, settings: Mapping[str, Any], frame: tuple[int, int]) -> None:
        """Choose the resolution nearest to `frame`'s which fits whole features and the bounds."""
        super().__init__(model, settings)
        config = model.config
        self.patch, self.merge = int(config.patch_size), int(config.spatial_merge_size)
        self.stride, self.width = int(config.temporal_patch_size), int(config.out_hidden_size)
        self.fit(frame)

    def fit(self, frame: tuple[int, int]) -> None:
        settings = self.settings
        size = settings.get("size") or {}
        height, width = fit_size(
            frame,
            self.patch * self.merge,
            settings.get("min_pixels") or size.get("shortest_edge") or MIN_PIXELS,
            settings.get("max_pixels") or size.get("longest_edge") or MAX_PIXELS,
        )
        colours = {name: x for name, x in settings.items() if name not in ("size", "crop_size")}
        family = FAMILIES[self.model.config.model_type]
        self.preprocess = family.preprocessor((height, width)).with_settings(colours, frame)
        self.grid = height // (self.patch * self.merge), width // (self.patch * self.merge)

    def forward(self, frames: Float[Tensor, "b t 3 h w"]) -> Float[Tensor, "b u m e"]:
        """Return merged features; the last frame is repeated if it lacks a partner, as for images."""
        batch = frames.shape[0]
        missing = -frames.shape[1] % self.stride
        frames = torch.cat([frames, frames[:, -1:].expand(-1, missing, -1, -1, -1)], dim=1)
        pixels = rearrange(self.preprocess(frames), "(b t) c h w -> b t c h w", b=batch)
        patches = rearrange(
            pixels,
            "b (u p) c (h i y) (w j x) -> (b u h w i j) (c p y x)",
            p=self.stride,
            i=self.merge,
            j=self.merge,
            y=self.patch,
            x=self.patch,
        )
        steps = frames.shape[1] // self.stride
        patched = [steps, *(count * self.merge for count in self.grid)]
        sizes = to_device(torch.tensor([patched] * batch), frames.device)
        merged = self.model(patches, grid_thw=sizes).pooler_output
        return rearrange(merged, "(b u m) e -> b u m e", b=batch, u=steps)


def fit_size(frame: tuple[int, int], factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Return the height and width nearest to `frame`'s that are multiples of `factor`.

    A frame outside the bounds is scaled to the bound, rounding down if it is too large and up if it is too
    small, as in the family's image processor.
    """

    def sides(pixels: float, rounding: Callable[[float], int]) -> tuple[int, int]:
        ratio = frame[0] / frame[1]
        scaled = math.sqrt(pixels * ratio), math.sqrt(pixels / ratio)
        height, width = (max(factor, rounding(side / factor) * factor) for side in scaled)
        return height, width

    nearest = sides(frame[0] * frame[1], round)
    if math.prod(nearest) > max_pixels:
        return sides(max_pixels, math.floor)
    if math.prod(nearest) < min_pixels:
        return sides(min_pixels, math.ceil)
    return nearest
