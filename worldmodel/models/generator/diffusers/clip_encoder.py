"""Encoders for transformers that also read what CLIP sees in a picture (Wan 2.1 image-to-video).

The features are those that the pipeline reads: of all layers but the last, the class's in front. Nobody
trains an encoder: it is held in fp32, as published, and saved with the generator.
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
        ConfigError: these are no arguments of a CLIP vision model.
    """
    made = pretrained.build_config({**architecture, "model_type": MODEL_TYPE}, "generator")
    model = AutoModel.from_config(made, attn_implementation="sdpa")
    return PatchEncoder(model, {}, LAYER, image_size).requires_grad_(False)


def load(source: Source, image_size: tuple[int, int]) -> PatchEncoder:
    """Load the image encoder of a folder, and how its image processor shows it frames of a height and width.

    Raises:
        ModelError: there is none, or it is of another family, not readable or incomplete.
    """
    folder = source.image_encoder
    if folder is None:
        raise ModelError(
            f"{source.transformer} also reads features of a picture (image_dim), but there is no "
            "image_encoder folder beside it; pass a whole pipeline folder."
        )
    if pretrained.read_json(folder).get("model_type") != MODEL_TYPE:
        raise ModelError(f"{folder} holds no image encoder of type {MODEL_TYPE}.")
    model = pretrained.load_model(CLIPVisionModel, folder, torch.float32, "sdpa")
    settings = read_settings(source.image_processor or folder)
    return PatchEncoder(model, settings, LAYER, image_size).requires_grad_(False)
