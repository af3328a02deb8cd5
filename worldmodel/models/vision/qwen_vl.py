"""Towers: the vision models inside Qwen2.5-VL and Qwen3-VL, whose features a language model already reads.

Frames become patches as the models' own processors make them: two frames and 2 x 2 patches share a feature.
What the towers give to deeper layers of their language model (Qwen3-VL's DeepStack), and the positions in
three axes, are left out: the backbone is a plain language model and reads one sequence.

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

from worldmodel.models.vision.preprocessing import Encoder, Family

FAMILIES = {
    "qwen2_5_vl_vision": Family(Qwen2_5_VisionTransformerPretrainedModel, OPENAI_CLIP_MEAN, OPENAI_CLIP_STD),
    "qwen3_vl_vision": Family(Qwen3VLVisionModel, IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD),
}
"""Towers that may be loaded, by `model_type`."""

MIN_PIXELS, MAX_PIXELS = 56 * 56, 28 * 28 * 1280
"""Bounds of a frame, where a checkpoint says nothing: those of the family's image processor."""


class Tower(Encoder):
    """A vision tower, with the merging of patches that its language model was trained with."""

    aligned = True

    def __init__(self, model: PreTrainedModel, settings: Mapping[str, Any], frame: tuple[int, int]) -> None:
        """Set the resolution: that of the world's frames, as near as whole features and the bounds allow."""
        super().__init__(model, settings)
        config = model.config
        self.patch, self.merge = int(config.patch_size), int(config.spatial_merge_size)
        self.stride, self.width = int(config.temporal_patch_size), int(config.out_hidden_size)
        size = settings.get("size") or {}
        height, width = fitting_size(
            frame,
            self.patch * self.merge,
            settings.get("min_pixels") or size.get("shortest_edge") or MIN_PIXELS,
            settings.get("max_pixels") or size.get("longest_edge") or MAX_PIXELS,
        )
        colours = {name: x for name, x in settings.items() if name not in ("size", "crop_size")}
        self.preparation = FAMILIES[config.model_type].preparation((height, width)).adopt(colours, frame)
        self.grid = height // (self.patch * self.merge), width // (self.patch * self.merge)

    def forward(self, frames: Float[Tensor, "b t 3 h w"]) -> Float[Tensor, "b u m e"]:
        """Return merged features; where a frame lacks for a pair, the last is repeated, as for images."""
        batch = frames.shape[0]
        missing = -frames.shape[1] % self.stride
        frames = torch.cat([frames, frames[:, -1:].expand(-1, missing, -1, -1, -1)], dim=1)
        pixels = rearrange(self.preparation(frames), "(b t) c h w -> b t c h w", b=batch)
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
        sizes = torch.tensor([patched] * batch, device=frames.device)
        merged = self.model(patches, grid_thw=sizes).pooler_output
        return rearrange(merged, "(b u m) e -> b u m e", b=batch, u=steps)


def fitting_size(frame: tuple[int, int], factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Return the height and width nearest to those of `frame`: multiples of `factor`, within the bounds.

    Outside the bounds, of the frame scaled to the bound: rounded down where it is too large, up where it is
    too small, as the family's image processor does.
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
