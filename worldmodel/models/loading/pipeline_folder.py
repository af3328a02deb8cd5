"""Loading and saving of models in the folder format of diffusers.

Only known classes and safetensors are read, and only from local folders.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers.models.modeling_utils import ModelMixin
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from transformers import (
    AutoTokenizer,
    ByT5Tokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    T5EncoderModel,
    UMT5EncoderModel,
)

from worldmodel.errors import ConfigError, ModelError
from worldmodel.models.loading import deferred, pretrained, wan_names

PIPELINES = (
    "WanPipeline",
    "WanImageToVideoPipeline",
    "LTXPipeline",
    "LTXImageToVideoPipeline",
    "CogVideoXPipeline",
    "CogVideoXImageToVideoPipeline",
)
"""Supported pipelines."""

TEXT_ENCODERS = {"t5": T5EncoderModel, "umt5": UMT5EncoderModel}
"""Supported text encoders, by model type."""

T = TypeVar("T", bound=type)

INDEX = "model_index.json"
WEIGHTS = "diffusion_pytorch_model"
"""Name of the file of a model's weights, without its suffix."""
BOUNDARY = "boundary.json"


@dataclass(frozen=True)
class Source:
    """Folders of the components of a generator; None if a component is absent."""

    transformer: Path
    scheduler: Path | None = None
    text_encoder: Path | None = None
    tokenizer: Path | None = None
    image_encoder: Path | None = None
    image_processor: Path | None = None
    transformer_2: Path | None = None
    boundary_ratio: float | None = None

    @classmethod
    def of(cls, folder: str | Path) -> "Source":
        """Find the components in the folder of a pipeline or of a transformer.

        Raises:
            ModelError: the folder does not exist, or has an unsupported pipeline.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise ModelError(
                f"There is no generator folder {str(folder)!r}; pass a folder written by diffusers."
            )
        index: dict[str, Any] = {}
        transformer = folder
        if (folder / INDEX).is_file():
            index = pipeline_index(folder)
            transformer = folder / "transformer"
        second = folder / "transformer_2"
        if (second / BOUNDARY).is_file():
            index |= pretrained.read_json(second, BOUNDARY)
        return cls(
            transformer,
            scheduler=_present(folder / "scheduler"),
            text_encoder=_present(folder / "text_encoder"),
            tokenizer=_present(folder / "tokenizer"),
            image_encoder=_present(folder / "image_encoder"),
            image_processor=_present(folder / "image_processor"),
            transformer_2=_present(second),
            boundary_ratio=index.get("boundary_ratio"),
        )


def pipeline_index(folder: Path) -> dict[str, Any]:
    """Read the index of a pipeline folder.

    Raises:
        ModelError: the index cannot be read, or the pipeline is not in `PIPELINES`.
    """
    index = pretrained.read_json(folder, INDEX)
    if index.get("_class_name") not in PIPELINES:
        raise ModelError(
            f"{folder} has a pipeline of class {index.get('_class_name')!r}; use one of "
            f"{', '.join(PIPELINES)}."
        )
    return index


def _present(folder: Path) -> Path | None:
    return folder if folder.is_dir() else None


def allowed_class(name: Any, allowed: Iterable[T], source: str) -> T:
    """Return the allowed class with a name; `source` is named in the error.

    Raises:
        ModelError: no allowed class has this name.
    """
    classes = {each.__name__: each for each in allowed}
    if name not in classes:
        raise ModelError(f"{source} has class {name!r}; use one of {', '.join(classes)}.")
    return classes[name]


def load_model(
    folder: Path, allowed: Iterable[type[ModelMixin]], dtype: torch.dtype = torch.float32
) -> ModelMixin:
    """Load a transformer or autoencoder in `dtype`, except for weights that diffusers keeps in fp32.

    Those of a Wan may have the names of its own repository. Within `deferred.loading` parameters stay on the
    meta device until `deferred.load_shards`.

    Raises:
        ModelError: the class is not allowed, or the weights cannot be read or do not match config.json.
    """
    values = pretrained.read_json(folder)
    model_class: Any = allowed_class(values.get("_class_name"), allowed, str(folder))
    before = torch.get_default_dtype()
    try:
        slices, files = pretrained.open_slices(folder, {"": ""}, WEIGHTS)
        if model_class.__name__ == WanTransformer3DModel.__name__:
            slices = wan_names.to_diffusers(slices)
        torch.set_default_dtype(dtype)  # for buffers, as diffusers does
        with deferred.empty_parameters():
            model: ModelMixin = model_class.from_config(values)
    except pretrained.LOAD_ERRORS as error:
        raise ModelError(f"{folder} cannot be loaded: {pretrained.first_line(error)}") from None
    finally:
        torch.set_default_dtype(before)
    convert(model, dtype)
    _check_weights(model, slices, folder)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in slices:
                buffer.copy_(slices[name][:])
    expected = model.state_dict()
    deferred.attach(model, {name: x for name, x in slices.items() if name in expected}, files)
    if not deferred.enabled():
        deferred.materialize(model, torch.device("cpu"))
        deferred.load_shards(model)
    return model.eval()


def _check_weights(model: ModelMixin, slices: Mapping[str, Any], folder: Path) -> None:
    """Check that the weights in a folder fit a model.

    Raises:
        ModelError: a weight is missing, has another shape, or is not one of the model.
    """
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    expected = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {
        name: list(each.get_shape())
        for name, each in slices.items()
        if name in expected or not any(re.search(pattern, name) for pattern in ignored)
    }
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        raise ModelError(f"The weights in {folder} do not match its config.json at {wrong[0]!r}.")


def save_model(model: ModelMixin, folder: Path, dtype: torch.dtype) -> None:
    """Write a transformer or autoencoder in the format of diffusers; the model itself is not changed.

    Weights that diffusers keeps in fp32 are written in fp32.
    """
    model_class: Any = type(model)
    with torch.device("meta"):
        copy = model_class.from_config(dict(model.config))
    state = model.state_dict()
    fp32 = {name: tensor for name, tensor in state.items() if keeps_fp32(model, name)}
    copy.load_state_dict(pretrained.cast(state, dtype) | pretrained.cast(fp32, torch.float32), assign=True)
    copy.save_pretrained(str(folder))


def convert(model: ModelMixin, dtype: torch.dtype) -> None:
    """Convert the parameters of a model in place; those that diffusers keeps in fp32 to that."""
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if keeps_fp32(model, name) else dtype)


def keeps_fp32(model: ModelMixin, name: str) -> bool:
    """Return whether diffusers keeps a parameter in fp32, such as the norms of some models."""
    kept: Any = model._keep_in_fp32_modules or []
    return any(part in kept for part in name.split("."))


def load_text_encoder(source: Source) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the text encoder, in its stored dtype, and its tokenizer.

    Raises:
        ModelError: there is no text encoder, or it is not supported, unreadable or incomplete.
    """
    if source.text_encoder is None or source.tokenizer is None:
        raise ModelError(
            f"condition_adapter.text is true, but there are no text_encoder and tokenizer folders beside "
            f"{source.transformer}; pass the folder of a pipeline, or set condition_adapter.text to false."
        )
    folder = source.text_encoder
    values = pretrained.read_json(folder)
    encoder_class = TEXT_ENCODERS.get(str(values.get("model_type")))
    if encoder_class is None:
        raise ModelError(f"{folder} has no text encoder of type {' or '.join(TEXT_ENCODERS)}.")
    dtype = _stored_dtype(values)
    model = pretrained.load_model(encoder_class, folder, dtype, "sdpa")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(source.tokenizer), local_files_only=True, trust_remote_code=False
        )
    except pretrained.LOAD_ERRORS as error:
        raise ModelError(f"{source.tokenizer} cannot be loaded: {pretrained.first_line(error)}") from None
    return model.eval().requires_grad_(False), tokenizer


def build_text_encoder(architecture: Mapping[str, Any]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Build `generator.architecture.text_encoder` with random weights, and a tokenizer of bytes.

    Raises:
        ConfigError: the architecture is not one of `TEXT_ENCODERS`, or an argument is invalid.
    """
    encoder_class = TEXT_ENCODERS.get(str(architecture.get("model_type")))
    if encoder_class is None:
        raise ConfigError(
            f"generator.architecture.text_encoder has model_type {architecture.get('model_type')!r}; use "
            f"{' or '.join(TEXT_ENCODERS)}."
        )
    config = pretrained.build_config(architecture, "generator.architecture.text_encoder")
    model = encoder_class(config).to(_stored_dtype(architecture))
    return model.eval().requires_grad_(False), ByT5Tokenizer()


def _stored_dtype(values: Mapping[str, Any]) -> torch.dtype:
    stored = values.get("dtype") or values.get("torch_dtype")
    return torch.bfloat16 if stored == "bfloat16" else torch.float32
