"""CLIP image encoders for transformers that also read image features (image-to-video models of Wan 2.1).

The features are computed as in the pipeline: the output of the second-to-last layer, the class token first.
An encoder is never trained; it stays in fp32, as published, and is saved with the generator.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModel, CLIPVisionModel

from worldmodel.errors import ModelError
from worldmodel.models.loading import pretrained
from worldmodel.models.loading.pipeline_folder import Source
from worldmodel.models.vision.preprocessing import read_settings
from worldmodel.models.vision.vit import PatchEncoder

MODEL_TYPE, LAYER = "clip_vision_model", -2


def describe(architecture: Mapping[str, Any], image_size: tuple[int, int]) -> PatchEncoder:
    """Build `generator.architecture.image_encoder`, with random weights, for frames of a height and width.

    Raises:
        ConfigError: the arguments do not fit a CLIP vision model.
    """
    made = pretrained.build_config({**architecture, "model_type": MODEL_TYPE}, "generator")
    model = AutoModel.from_config(made, attn_implementation="sdpa")
    return PatchEncoder(model, {}, LAYER, image_size).requires_grad_(False)


def load(source: Source, image_size: tuple[int, int]) -> PatchEncoder:
    """Load the image encoder and the image processor of a folder, for frames of a height and width.

    Raises:
        ModelError: there is no encoder, or it is of another family, unreadable or incomplete.
    """
    folder = source.image_encoder
    if folder is None:
        raise ModelError(
            f"{source.transformer} reads image features (image_dim), but there is no image_encoder folder "
            "beside it; pass a whole pipeline folder."
        )
    if pretrained.read_json(folder).get("model_type") != MODEL_TYPE:
        raise ModelError(f"{folder} has no image encoder of type {MODEL_TYPE}; pass a CLIP vision model.")
    model = pretrained.load_model(CLIPVisionModel, folder, torch.float32, "sdpa")
    settings = read_settings(source.image_processor or folder)
    return PatchEncoder(model, settings, LAYER, image_size).requires_grad_(False)
