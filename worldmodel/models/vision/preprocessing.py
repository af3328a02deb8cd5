"""Frames as a vision encoder was trained to see them, and what all encoders have in common."""

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
"""PIL's numbers, which image processors keep, as torch names them."""


def frames_wanted(clip_length: int, max_frames: int) -> Int[Tensor, " f"]:
    """Return which frames of a clip an encoder looks at: `max_frames`, evenly spaced, the last included.

    They end the equal parts of the clip. A shorter clip, such as an image, repeats frames.
    """
    ends = torch.arange(1, max_frames + 1) * clip_length
    return (ends + max_frames - 1) // max_frames - 1


@dataclass(frozen=True)
class Preparation:
    """How frames become pixels of an encoder: resized, cut from the middle, normalised."""

    resize: tuple[int, int]
    """Height and width of a frame before it is cut, in pixels."""
    crop: tuple[int, int]
    """Height and width of a frame after it is cut."""
    mean: tuple[float, ...]
    """Of red, green and blue in [0, 1]."""
    std: tuple[float, ...]
    mode: str = "bicubic"
    """bicubic | bilinear"""

    def adopt(self, settings: Mapping[str, Any], frame: tuple[int, int]) -> "Preparation":
        """Return the same as the settings of an image processor have it, where they say something.

        What gives the shortest edge alone keeps the shape of `frame`, the height and width of what is seen.

        Raises:
            ModelError: they ask for frames of an unknown size, or for another kind of resampling.
        """
        size = settings.get("size")
        if isinstance(size, int) and settings.get("do_center_crop"):  # one number is then an edge
            size = {"shortest_edge": size}
        resize = _sides(size, self.resize, frame)
        top, left = _sides(settings.get("crop_size"), resize, (1, 1))
        crop = min(resize[0], top), min(resize[1], left)
        resample = settings.get("resample")
        if resample is not None and resample not in RESAMPLING:
            raise ModelError(
                f"The image processor resizes by method {resample!r}; only 2 (bilinear) and 3 (bicubic) are "
                "known."
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
        """Return pixels of the frames one after the other; frames are in [-1, 1]."""
        x = rearrange(frames, "b t c h w -> (b t) c h w").float()
        if x.shape[2:] != self.resize:
            # Antialiased, as PIL does it; bicubic overshoots, which bytes cannot.
            x = F.interpolate(x, size=self.resize, mode=self.mode, antialias=True).clamp(-1, 1)
        height, width = self.crop
        top, left = (self.resize[0] - height) // 2, (self.resize[1] - width) // 2
        x = x[:, :, top : top + height, left : left + width]
        mean, std = (x.new_tensor(part)[:, None, None] for part in (self.mean, self.std))
        return ((x + 1) / 2 - mean) / std


@dataclass(frozen=True)
class Family:
    """A family of encoders, and how it sees frames where a checkpoint says nothing."""

    kind: type[PreTrainedModel]
    mean: Sequence[float]
    std: Sequence[float]
    mode: str = "bicubic"

    def preparation(self, size: tuple[int, int]) -> Preparation:
        """Return how frames are brought to a height and width."""
        return Preparation(size, size, tuple(self.mean), tuple(self.std), self.mode)


class Encoder(nn.Module, ABC):
    """A vision model that turns frames into features on a grid.

    It is never in training mode, whether its weights move or not: what it drops or jitters there would make a
    sample depend on more than its own seed.
    """

    width: int
    """Numbers in a feature."""
    grid: tuple[int, int]
    """Rows and columns of features of a frame."""
    stride: int = 1
    """Frames that share their features."""
    aligned: bool = False
    """Whether features are already what a language model of that width was trained to read."""

    def __init__(self, model: PreTrainedModel, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.model, self.settings = model, dict(settings)
        model.eval()

    @abstractmethod
    def forward(self, frames: Float[Tensor, "b t 3 h w"]) -> Float[Tensor, "b u m e"]:
        """Return the features of frames in [-1, 1], row after row; `u` is `t` over `stride`, rounded up."""

    def train(self, mode: bool = True) -> "Encoder":
        super().train(mode)
        self.model.eval()
        return self

    def save_pretrained(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Write the model and the settings of its image processor as transformers reads them."""
        state = {name: x.detach().to(dtype) for name, x in self.model.state_dict().items()}
        self.model.save_pretrained(folder, state_dict=state)
        if self.settings:
            (folder / SETTINGS).write_text(json.dumps(self.settings, indent=1) + "\n", encoding="utf-8")


def read_settings(folder: Path) -> dict[str, Any]:
    """Read the settings of a checkpoint's image processor; empty where there are none.

    Raises:
        ModelError: the file is there but cannot be read.
    """
    if (folder / SETTINGS).exists():
        return pretrained.read_json(folder, SETTINGS)
    if (
        folder / "processor_config.json"
    ).exists():  # where newer versions keep those of models that also read
        return dict(pretrained.read_json(folder, "processor_config.json").get("image_processor") or {})
    return {}


def _sides(size: Any, default: tuple[int, int], frame: tuple[int, int]) -> tuple[int, int]:
    """Read height and width as image processors write them; a shortest edge is that of `frame`, scaled."""
    if size is None:
        return default
    if isinstance(size, int):
        return size, size
    if size.get("height") and size.get("width"):
        return int(size["height"]), int(size["width"])
    if not (edge := size.get("shortest_edge")):
        raise ModelError(
            f"The image processor makes frames of size {size}; only a height and width, or a shortest edge, "
            "are known."
        )
    height, width = (int(edge * side / min(frame)) for side in frame)
    return height, width
