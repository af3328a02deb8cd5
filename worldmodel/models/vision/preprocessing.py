"""Preprocessing of frames for vision encoders, and the interface of encoders."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from worldmodel.errors import ModelError
from worldmodel.models.loading import pretrained

SETTINGS = "preprocessor_config.json"
RESAMPLING = {2: "bilinear", 3: "bicubic"}
"""PIL's resampling numbers, which image processors store, and torch's names for them."""


def frames_wanted(clip_length: int, max_frames: int) -> Int[Tensor, " f"]:
    """Return the indices of `max_frames` evenly spaced frames of a clip, the last included.

    They are the last frames of equal parts of the clip. A shorter clip, such as an image, repeats frames.
    """
    ends = torch.arange(1, max_frames + 1) * clip_length
    return (ends + max_frames - 1) // max_frames - 1


@dataclass(frozen=True)
class Preprocessor:
    """Resizes frames, crops their centre and normalises colours."""

    resize: tuple[int, int]
    """Height and width before the crop, in pixels."""
    crop: tuple[int, int]
    """Height and width of the crop, in pixels."""
    mean: tuple[float, ...]
    """Of red, green and blue in [0, 1]."""
    std: tuple[float, ...]
    mode: str = "bicubic"
    """bicubic | bilinear"""

    def with_settings(self, settings: Mapping[str, Any], frame: tuple[int, int]) -> "Preprocessor":
        """Return a copy with the settings of an image processor.

        A size given by the shortest edge keeps the aspect ratio of `frame` (height, width).

        Raises:
            ModelError: the size or the resampling method is not supported.
        """
        size = settings.get("size")
        if isinstance(size, int) and settings.get(
            "do_center_crop"
        ):  # a single number is the shortest edge then
            size = {"shortest_edge": size}
        resize = _sides(size, self.resize, frame)
        top, left = _sides(settings.get("crop_size"), resize, (1, 1))
        crop = min(resize[0], top), min(resize[1], left)
        resample = settings.get("resample")
        if resample is not None and resample not in RESAMPLING:
            raise ModelError(
                f"The image processor uses resampling method {resample!r}; only 2 (bilinear) and 3 (bicubic) "
                "are supported."
            )
        return replace(
            self,
            resize=resize,
            crop=crop if settings.get("do_center_crop") else resize,
            mean=tuple(settings.get("image_mean") or self.mean),
            std=tuple(settings.get("image_std") or self.std),
            mode=RESAMPLING.get(resample, self.mode),  # type: ignore[arg-type]
        )

    def __call__(self, frames: Float[Tensor, "b t 3 h w"]) -> Float[Tensor, "n 3 y x"]:
        """Return the pixels of all frames; frames are in [-1, 1]."""
        x = rearrange(frames, "b t c h w -> (b t) c h w").float()
        if x.shape[2:] != self.resize:
            # Antialiased as in PIL; clamped, since bicubic resampling overshoots.
            x = F.interpolate(x, size=self.resize, mode=self.mode, antialias=True).clamp(-1, 1)
        height, width = self.crop
        top, left = (self.resize[0] - height) // 2, (self.resize[1] - width) // 2
        x = x[:, :, top : top + height, left : left + width]
        mean, std = (x.new_tensor(part)[:, None, None] for part in (self.mean, self.std))
        return ((x + 1) / 2 - mean) / std


@dataclass(frozen=True)
class Family:
    """A family of encoders, and its preprocessing if a checkpoint has no settings."""

    model_class: type[PreTrainedModel]
    mean: Sequence[float]
    std: Sequence[float]
    mode: str = "bicubic"

    def preprocessor(self, size: tuple[int, int]) -> Preprocessor:
        """Return the preprocessor for frames of a height and width."""
        return Preprocessor(size, size, tuple(self.mean), tuple(self.std), self.mode)


class Encoder(nn.Module, ABC):
    """A vision model that maps frames to features on a grid.

    It always stays in eval mode, also when it is trained, because dropout would make a sample depend on more
    than its own seed.
    """

    width: int
    """Size of a feature."""
    grid: tuple[int, int]
    """Rows and columns of features per frame."""
    stride: int = 1
    """Frames per feature."""
    aligned: bool = False
    """Whether a language model of this width was trained on the features."""

    def __init__(self, model: PreTrainedModel, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.model, self.settings = model, dict(settings)
        model.eval()

    @abstractmethod
    def fit(self, frame: tuple[int, int]) -> None:
        """Choose how frames of a height and width are preprocessed, and the grid of their features."""

    @abstractmethod
    def forward(self, frames: Float[Tensor, "b t 3 h w"]) -> Float[Tensor, "b u m e"]:
        """Return the features of frames in [-1, 1], row by row; `u` is `t / stride`, rounded up."""

    def train(self, mode: bool = True) -> "Encoder":
        super().train(mode)
        self.model.eval()
        return self

    def save_pretrained(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Write the model and the settings of its image processor in the format of transformers."""
        state = {name: x.detach().to(dtype) for name, x in self.model.state_dict().items()}
        self.model.save_pretrained(folder, state_dict=state)
        if self.settings:
            (folder / SETTINGS).write_text(json.dumps(self.settings, indent=1) + "\n", encoding="utf-8")


def read_settings(folder: Path) -> dict[str, Any]:
    """Read the settings of a checkpoint's image processor; empty if there are none.

    Raises:
        ModelError: the file cannot be read.
    """
    if (folder / SETTINGS).exists():
        return pretrained.read_json(folder, SETTINGS)
    # Newer versions of transformers store the settings of multimodal models in this file.
    if (folder / "processor_config.json").exists():
        return dict(pretrained.read_json(folder, "processor_config.json").get("image_processor") or {})
    return {}


def _sides(size: Any, default: tuple[int, int], frame: tuple[int, int]) -> tuple[int, int]:
    """Return the height and width of an image processor's size; a shortest edge scales `frame`."""
    if size is None:
        return default
    if isinstance(size, int):
        return size, size
    if size.get("height") and size.get("width"):
        return int(size["height"]), int(size["width"])
    if not (edge := size.get("shortest_edge")):
        raise ModelError(
            f"The image processor has size {size}; only a height and width, or a shortest edge, are "
            "supported."
        )
    height, width = (int(edge * side / min(frame)) for side in frame)
    return height, width
