"""Vision encoders of transformers, from pixels of an observation to backbone tokens.

SigLIP, SigLIP 2, CLIP and DINO encode single frames; the encoders of Qwen-VL models encode pairs (see
`models.vision.qwen_vl`). An adapter maps their features to the width of the backbone: pooling and a two-layer
perceptron (LLaVA 1.5, arXiv:2310.03744), or learned queries (`models.layers.resampler`).
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel

from worldmodel.config import ImageSize, VisionConfig, WorldModelConfig, height_width
from worldmodel.errors import ConfigError, ModelError
from worldmodel.models.layers.norm import RMSNorm
from worldmodel.models.layers.resampler import Resampler
from worldmodel.models.loading import pretrained
from worldmodel.models.vision import qwen_vl, vit
from worldmodel.models.vision.adapter import Observation, VisionAdapter, VisionFeatures
from worldmodel.models.vision.preprocessing import Encoder, Family, frames_wanted, read_settings
from worldmodel.models.vision.qwen_vl import QwenVisionEncoder
from worldmodel.models.vision.vit import PatchEncoder
from worldmodel.parallel.layout import Layout

ADAPTER = "adapter.safetensors"

FAMILIES = {**vit.FAMILIES, **qwen_vl.FAMILIES}
"""Supported encoders, by `model_type`."""

MULTIMODAL = {
    "clip": "clip_vision_model",
    "siglip": "siglip_vision_model",
    "siglip2": "siglip2_vision_model",
    "qwen2_5_vl": "qwen2_5_vl_vision",
    "qwen3_vl": "qwen3_vl_vision",
}
"""Multimodal models, and the `model_type` of the vision encoder inside, which alone is loaded."""

WEIGHTS = {"vision_model.": "", "model.visual.": "", "visual.": ""}
"""Prefixes of the names of an encoder's weights in a multimodal checkpoint."""


def build_encoder(config: VisionConfig, image_size: ImageSize, folder: Path | None = None) -> Encoder:
    """Load the encoder from `folder` or `config.encoder`, or build `config.architecture` with random weights.

    Raises:
        ConfigError: the architecture is not in `FAMILIES`, or has no layer `config.select_layer`.
        ModelError: the folder has no readable safetensors checkpoint of a supported family.
    """
    if folder is None and not config.encoder:
        _family(config.architecture.get("model_type"))
        architecture = pretrained.build_config(config.architecture, "vision")
        return _wrap(AutoModel.from_config(architecture, attn_implementation="sdpa"), {}, config, image_size)
    folder = folder or pretrained.resolve_folder(str(config.encoder), config.revision, "vision encoder")
    model_type = pretrained.read_json(folder).get("model_type")
    inside = MULTIMODAL.get(model_type) if isinstance(model_type, str) else None
    model_class = _family(inside or model_type).model_class
    if inside is None:
        model = pretrained.load_model(model_class, folder, torch.float32, "sdpa")
    else:
        vision_config = pretrained.read_config(folder).vision_config
        model = pretrained.load_model(model_class, folder, torch.float32, "sdpa", vision_config, WEIGHTS)
    return _wrap(model, read_settings(folder), config, image_size)


def _wrap(
    model: PreTrainedModel, settings: Mapping[str, Any], config: VisionConfig, image_size: ImageSize
) -> Encoder:
    if model.config.model_type in vit.FAMILIES:
        return PatchEncoder(model, settings, config.select_layer, height_width(image_size))
    if config.select_layer != -1:
        raise ConfigError(
            f"vision.select_layer is {config.select_layer}; {model.config.model_type} supports only -1."
        )
    return QwenVisionEncoder(model, settings, height_width(image_size))


def _family(model_type: object) -> Family:
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join([*FAMILIES, *MULTIMODAL])
        raise ConfigError(f"Vision encoder type {model_type!r} is not supported; use one of {known}.")
    return FAMILIES[model_type]


class Projection(nn.Module):
    """Average pooling of `pool` x `pool` features of a frame, and a two-layer perceptron.

    If a language model of this width was already trained on the features, the perceptron is a residual branch
    that starts at zero.
    """

    def __init__(self, encoder: Encoder, out_width: int, pool: int) -> None:
        super().__init__()
        in_width = encoder.width
        self.pool, self.adds = pool, encoder.aligned and in_width == out_width
        self.up, self.down = nn.Linear(in_width, out_width), nn.Linear(out_width, out_width)
        if self.adds:
            nn.init.zeros_(self.down.weight)
            nn.init.zeros_(self.down.bias)

    def forward(self, features: Float[Tensor, "b u m e"], rows: int) -> Float[Tensor, "b n d"]:
        """Return the tokens of features whose frames have so many rows."""
        x = rearrange(features, "b u (h w) e -> (b u) e h w", h=rows)
        x = F.avg_pool2d(x, self.pool, ceil_mode=True)  # windows at the edge average fewer features
        x = rearrange(x, "(b u) e h w -> b (u h w) e", b=features.shape[0])
        change = self.down(F.gelu(self.up(x)))
        return x + change if self.adds else change


class Adapter(nn.Module):
    """Maps features of an encoder to backbone tokens; the trained part if the encoder is frozen."""

    def __init__(self, config: VisionConfig, encoder: Encoder, width: int) -> None:
        super().__init__()
        self.config, self.steps = config, -(-config.max_frames // encoder.stride)
        self.frame_position = nn.Parameter(torch.zeros(self.steps, 1, encoder.width))
        """Added to features, the newest frames last; initialised to zero."""
        self.resamples = config.adapter == "resampler"
        if self.resamples:
            self.read: nn.Module = Resampler(
                encoder.width,
                config.width,
                width,
                config.num_tokens,
                config.num_blocks,
                max(1, config.width // 64),
            )
        else:
            self.read = Projection(encoder, width, config.pool)
        self.token_norm = None
        if not (isinstance(self.read, Projection) and self.read.adds):
            self.token_norm = RMSNorm(width)
            nn.init.constant_(self.token_norm.weight, 2 * width**-0.5)  # twice the scale of word embeddings

    def num_tokens(self, grid: tuple[int, int]) -> int:
        """Return the number of tokens of a round whose frames have features on a grid."""
        if self.resamples:
            return self.config.num_tokens
        return self.steps * math.prod(math.ceil(side / self.config.pool) for side in grid)

    def forward(self, features: Float[Tensor, "b u m e"], rows: int) -> Float[Tensor, "b n d"]:
        """Return the tokens of frames with so many rows of features; fewer frames may have fewer tokens."""
        features = features + self.frame_position[-features.shape[1] :].to(features.dtype)
        tokens = self.read(features.flatten(1, 2)) if self.resamples else self.read(features, rows)
        return tokens if self.token_norm is None else self.token_norm(tokens)


class EncoderVision(VisionAdapter):
    """An encoder of transformers, and the adapter from its features to backbone tokens."""

    needs_frames = True

    def __init__(self, config: VisionConfig, encoder: Encoder, width: int) -> None:
        super().__init__()
        self.config, self.encoder = config, encoder
        self.adapter = Adapter(config, encoder, width)
        self.round_tokens = self.adapter.num_tokens(encoder.grid)

    def resize(self, config: WorldModelConfig) -> None:
        self.encoder.fit(height_width(config.codec.image_size))
        self.round_tokens = self.adapter.num_tokens(self.encoder.grid)

    @classmethod
    def from_config(
        cls, config: VisionConfig, width: int, folder: Path | None = None, image_size: ImageSize = 224
    ) -> "EncoderVision":
        """Build from the config with a new adapter, or load a folder written by `save_pretrained`.

        Args:
            config: the encoder and the adapter.
            width: width of the backbone's tokens.
            folder: folder written by `save_pretrained`.
            image_size: size of the world's frames.

        Raises:
            ConfigError: the encoder is not supported.
            ModelError: the encoder or the adapter cannot be loaded.
        """
        encoder = build_encoder(config, image_size, folder and folder / "encoder")
        vision = cls(config, encoder, width)
        if folder is not None:
            _load_adapter(vision.adapter, folder / ADAPTER)
        return vision

    def select_frames(self, frames: Float[Tensor, "b t 3 h w"]) -> Float[Tensor, "b f 3 h w"]:
        """Return `max_frames` evenly spaced frames, the newest included.

        A short clip repeats frames, and an empty one is grey, so that every round has equally many tokens.
        """
        if not frames.shape[1]:
            frames = frames.new_zeros(len(frames), 1, *frames.shape[2:])
        return frames[:, frames_wanted(frames.shape[1], self.config.max_frames).to(frames.device)]

    def forward(self, observation: Observation) -> VisionFeatures:
        """Return `round_tokens` tokens for `max_frames` frames; more frames are subsampled."""
        frames = observation.frames
        assert frames is not None, "an encoder needs pixels"
        if frames.shape[1] > self.config.max_frames:
            frames = frames[:, frames_wanted(frames.shape[1], self.config.max_frames)]
        return VisionFeatures(self.adapter(self._features(frames), self.encoder.grid[0]))

    def _features(self, frames: Float[Tensor, "b t 3 h w"]) -> Float[Tensor, "b u m e"]:
        """Return the encoder's features; processes with the same frames encode some each."""
        stride = self.encoder.stride
        count = len(frames) * -(-frames.shape[1] // stride)
        shared = Layout.items(count, self.sequence)
        if shared.shards is None:
            return self.encoder(frames)
        missing = -frames.shape[1] % stride  # as the encoder does it for a frame without a partner
        frames = torch.cat([frames, frames[:, -1:].expand(-1, missing, -1, -1, -1)], dim=1)
        groups = rearrange(frames, "b (u s) c h w -> (b u) s c h w", s=stride)
        features = shared.gather(self.encoder(shared.take(groups, 0)), 0)
        return rearrange(features, "(b u) 1 m e -> b u m e", b=len(frames))

    def save_pretrained(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Write the encoder to `encoder/` in the format of transformers, and the adapter beside it.

        Weights are converted to `dtype`, if given.
        """
        self.encoder.save_pretrained(folder / "encoder", dtype)
        save_file(pretrained.cast(self.adapter.state_dict(), dtype), folder / ADAPTER)


def _load_adapter(adapter: Adapter, file: Path) -> None:
    try:
        adapter.load_state_dict(load_file(file))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ModelError(
            f"{file} cannot be loaded ({' '.join(str(error).split())}); download the model again."
        ) from None
