"""Model folders: safetensors and JSON, one sub-folder per component, with a model card.

config.json          the WorldModelConfig, the version of the format, the training summary
backbone/            in the format of transformers, with the tokenizer; or by reference (reference.py)
codec/ vision/ …     one safetensors file each; components of other libraries in those libraries' formats
tokens.safetensors   the model's own parameters: queries, markers, blank latents
start_images/        images to start from: NUMBER TITLE.png
known.safetensors    which observations it knows (known.py), if that was measured
README.md            the model card
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import ModelHubMixin
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from worldmodel import config as configs
from worldmodel.config import ActionConfig, BackboneConfig, ImageSize, WorldModelConfig
from worldmodel.episodes import StartImage
from worldmodel.errors import ConfigError, InputError, ModelError, OutputError
from worldmodel.io import atomic_folder
from worldmodel.media import read_image, write_image
from worldmodel.models import lora
from worldmodel.models.action import ActionAdapter
from worldmodel.models.backbone import merging, reference
from worldmodel.models.backbone.causal_lm import Backbone
from worldmodel.models.known import KnownObservations
from worldmodel.models.loading import deferred, pretrained
from worldmodel.models.loading.location import BACKBONE, CONFIG, download, is_repository, resolve
from worldmodel.models.loading.model_card import plain_card

FORMAT = 1
COMPONENTS = ("codec", "vision", "action", "state", "condition_adapter", "generator")
"""Folders beside the backbone's; see `components`."""
FOR_GENERATOR = ("generator.", "condition_adapter.")
"""Beginnings of the names of weights that a model without a generator does not have."""
WEIGHTS, TOKENS, START_IMAGES = "model.safetensors", "tokens.safetensors", "start_images"
KNOWN = "known.safetensors"
CARD = "README.md"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")

M = TypeVar("M", bound="PretrainedModel")


class PretrainedModel(nn.Module, ModelHubMixin, library_name="worldmodel", tags=["world-model"]):
    """Loading and saving of model folders, and `push_to_hub`."""

    config: WorldModelConfig
    stored_size: ImageSize
    """Size of the frames to which learned positions belong; `config` may have another (`resize`)."""
    backbone: Backbone
    action: ActionAdapter
    start_images: Sequence[StartImage] = ()
    """Images to start from, saved with the model."""
    tasks: tuple[str, ...] | None = None
    """Those that it was trained on, if its folder says so."""
    known: KnownObservations | None = None
    """Which observations it knows, if its folder says so."""
    card: str | None = None
    """The model card of its folder."""
    record: dict[str, Any] | None = None
    """How it was trained, as its folder says."""

    @classmethod
    def from_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride] -- no arguments of the class
        cls: type[M],
        pretrained_model_name_or_path: str | Path,
        *,
        revision: str | None = None,
        adapters: str | Path | None = None,
        base: str | Path | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        cache_dir: str | Path | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
    ) -> M:
        """Load a model in evaluation mode, without gradients.

        Args:
            pretrained_model_name_or_path: A shipped model, a model folder, or a repository on the Hugging
                Face Hub, such as `user/name`.
            revision: Branch, tag or commit of the repository.
            adapters: Folder of LoRA weights (`worldmodel export --adapters`) to merge into the weights.
            base: Folder of the base language model, for a model that refers to one which is not where it was
                trained, nor on the Hub.
            device: Device of the model; the CPU by default.
            dtype: float32 or bfloat16 for components of other libraries (the backbone, a codec or generator
                of diffusers) instead of what the config says; our own components always have float32.
            cache_dir: Folder of downloaded files.
            token: Token for private repositories.
            local_files_only: Use downloaded files without contacting the Hub.
            force_download: Download again.

        Raises:
            ModelError: there is no such model, or its files are damaged, pickled or do not fit its config.
            ConfigError: the device is not available, or components cannot have this data type.
        """
        where = None if device is None else available_device(device)
        name = pretrained_model_name_or_path
        if is_repository(name):
            name = download(
                str(name),
                revision=revision,
                cache_dir=cache_dir,
                token=token,
                local_files_only=local_files_only,
                force_download=force_download,
            )
        model: Any = load(cls, resolve(name), dtype, base)
        if adapters is not None:
            lora.load(model, Path(adapters))
            model.backbone.reference = None
            model.card = None  # its figures are of other weights
        deferred.check_finite(model.state_dict(), name)
        return model.to(device=where).eval().requires_grad_(False)

    def save_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        save_directory: str | Path,
        *,
        dtype: torch.dtype = torch.bfloat16,
        training: dict[str, Any] | None = None,
        card: str | None = None,
        **_: Any,
    ) -> Path:
        """Write a model folder, completely or not at all, and return its path.

        Args:
            save_directory: The folder; an existing model in it is replaced.
            dtype: Data type of the weights in the files.
            training: Summary of how the model was trained, for config.json and the card.
            card: Text of the model card; by default a card without figures. Without `training`, too, both are
                those with which the model was loaded.
            **_: Arguments of `ModelHubMixin.push_to_hub`, which need no action here.

        Raises:
            OutputError: the folder cannot be written, or has files that do not belong to a model.
        """
        if training is None and card is None:
            training, card = self.record, self.card
        return save(self, Path(save_directory), dtype, training, card)  # pyright: ignore[reportArgumentType]


def load(cls: type, folder: Path, dtype: torch.dtype | None = None, base: str | Path | None = None) -> Any:
    """Load the model of a folder.

    Raises:
        ModelError: files are damaged, pickled or do not fit the config.
    """
    pickles = sorted(path.name for path in folder.rglob("*") if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise ModelError(
            f"{folder} has pickled weights ({pickles[0]}), which can run code; convert them to safetensors."
        )
    config = read_config(folder)
    config = config if dtype is None else _with_dtype(config, dtype)
    backbone = Backbone.from_pretrained(backbone_folder(folder, base), dtype=config.backbone.dtype)
    backbone.reference = reference.read(folder / "backbone")
    model = cls(config, backbone, folder)
    for name in components(config):
        component = getattr(model, name)
        # Those of other libraries are read when they are built.
        if not hasattr(component, "save_pretrained"):
            _fill(component.state_dict(), folder / name / WEIGHTS)
    _fill(dict(model.named_parameters(recurse=False)), folder / TOKENS)
    model.start_images = read_start_images(folder, config)
    model.tasks, model.record = read_tasks(folder), _read_record(folder)
    if (folder / CARD).is_file():
        model.card = (folder / CARD).read_text(encoding="utf-8")
    model.known = KnownObservations.read(folder / KNOWN, model.backbone.width)
    return model


def components(config: WorldModelConfig) -> list[str]:
    """Return the folders of a model beside its backbone's."""
    without_generator = config.generator is None
    absent = {
        "state": not config.has_state,
        "condition_adapter": without_generator,
        "generator": without_generator,
    }
    return [name for name in COMPONENTS if not absent.get(name)]


def backbone_folder(folder: Path, base: str | Path | None = None) -> Path:
    """Return the folder with all weights of a model's backbone, in the format of transformers.

    Of a backbone by reference it is in the user's cache; `base` is the folder of its base model.

    Raises:
        ModelError: there is none, or it refers to a base model that is missing or another one.
    """
    if not (folder / BACKBONE).is_dir():
        raise ModelError(
            f"{folder} has no {BACKBONE}; the model is not complete, but training can start from its "
            "components (init_from: {codec: …})."
        )
    return merging.resolve(folder / BACKBONE, base)


def read_start_images(folder: Path, config: WorldModelConfig) -> tuple[StartImage, ...]:
    """Read the images of a model folder, in the order of their names, at the model's size.

    Raises:
        ModelError: one is damaged.
    """
    try:
        return tuple(
            StartImage(
                re.sub(r"^\d+\s*", "", file.stem) or file.stem, read_image(file, config.codec.image_size)
            )
            for file in sorted((folder / START_IMAGES).glob("*.png"))
        )
    except InputError as error:
        raise ModelError(f"{folder / START_IMAGES} cannot be read: {error}") from None


def read_tasks(folder: Path) -> tuple[str, ...] | None:
    """Return the tasks of all stages in which a model was trained; None if its config.json does not say."""
    training = _read_record(folder)
    stages = _mapping(_mapping(_mapping(training).get("config") or training).get("stages"))
    weights = [_mapping(_mapping(stage).get("tasks")) for stage in stages.values()]
    return tuple(dict.fromkeys(task for each in weights for task, share in each.items() if share)) or None


def _read_record(folder: Path) -> dict[str, Any] | None:
    """Return the record of a model's training; None without a usable one."""
    record = json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("training")
    return record if isinstance(record, dict) else None


def _mapping(value: object) -> Mapping[str, Any]:
    """Return a value of a file that anyone may have written; an empty mapping if it is none."""
    return value if isinstance(value, dict) else {}


def load_weights(
    model: PretrainedModel, name: str | Path, wanted: Callable[[str], bool] | None = None
) -> None:
    """Copy the weights of a saved model; those for its actions as far as the model takes the same.

    Those of components of other libraries stay in their files, for `deferred.load_shards`.

    Args:
        model: The model that gets the weights.
        name: A shipped model, a model folder, or a folder with some components of our own and no backbone.
        wanted: Whether to copy a parameter or buffer, by its name; None copies all.

    Raises:
        ModelError: there is no such model, or its components do not fit those of `model`.
    """
    if not is_repository(name) and not (folder := resolve(name)).joinpath(BACKBONE).is_dir():
        return _load_components(model, folder, wanted or (lambda _: True))
    with deferred.loading():
        other = type(model).from_pretrained(name)
    own, theirs = model.state_dict(), other.state_dict()
    if wanted is not None:
        theirs = {key: tensor for key, tensor in theirs.items() if wanted(key)}
    theirs = _with_actions(model, theirs, other.config.action, wanted or (lambda _: True))
    waiting = {key for key, x in theirs.items() if x.is_meta and key in own and own[key].shape == x.shape}
    kept = {key: own[key] for key in own if key in waiting or (wanted is not None and not wanted(key))}
    if model.config.generator is None:
        theirs = {key: x for key, x in theirs.items() if key in own or not key.startswith(FOR_GENERATOR)}
    elif other.config.generator is None:
        if wanted is None or wanted("generator"):
            raise ModelError(
                f"{name} has no generator; start with a random one (init_from: {{all: …, generator: null}}), "
                "or set model.generator to null."
            )
        kept |= {key: x for key, x in own.items() if key.startswith(FOR_GENERATOR)}
    try:
        model.load_state_dict(theirs | kept)
    except RuntimeError as error:
        raise ModelError(f"{name} does not fit this config: {str(error).splitlines()[1].strip()}") from None
    for path, module in other.named_modules():
        if (wanted is None or wanted(path)) and (slices := deferred.attached(module)):
            deferred.attach(model.get_submodule(path), slices, deferred.attached_files(module))


def _with_actions(
    model: PretrainedModel, theirs: dict[str, Tensor], former: ActionConfig, wanted: Callable[[str], bool]
) -> dict[str, Tensor]:
    """Return the weights of another model, its action adapter's converted to this model's actions."""
    prefix = "action."
    actions = {key.removeprefix(prefix): x for key, x in theirs.items() if key.startswith(prefix)}
    adapted = model.action.adapted(actions, former, lambda name: wanted(prefix + name))
    rest = {key: x for key, x in theirs.items() if not key.startswith(prefix)}
    return rest | {prefix + name: x for name, x in adapted.items()}


def _load_components(model: PretrainedModel, folder: Path, wanted: Callable[[str], bool]) -> None:
    """Copy the wanted weights of a folder without a backbone."""
    paths = {name: folder / name / WEIGHTS for name in COMPONENTS}
    found = {name: path for name, path in paths.items() if path.is_file()}
    missing = {key.split(".")[0] for key in model.state_dict() if wanted(key)} - set(found)
    if missing:
        raise ModelError(
            f"{folder} has no {', '.join(sorted(missing))}; take only its {', '.join(found)} "
            f"(init_from: {{{': …, '.join(found)}: {folder.name}}})."
        )
    for name in filter(wanted, found):
        try:
            stored = load_file(found[name])
            model.get_submodule(name).load_state_dict(stored)
        except (RuntimeError, SafetensorError) as error:
            reason = str(error).splitlines()[-1].strip()
            raise ModelError(f"The {name} of {folder} does not fit this config: {reason}") from None
        deferred.check_finite(stored, folder / name)


def available_device(name: torch.device | str) -> torch.device:
    """Return the device of a name.

    Raises:
        ConfigError: it is not available.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        raise ConfigError(f"The device {str(name)!r} is not available; use cpu.") from None
    return device


def read_config(folder: Path) -> WorldModelConfig:
    """Read the configuration of a model folder.

    Raises:
        ModelError: config.json is damaged, or of a format that this version cannot read.
        ConfigError: a setting is unknown or has a wrong value.
    """
    try:
        values = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ModelError(f"{folder / CONFIG} is not readable JSON; download the model again.") from None
    values = values if isinstance(values, dict) else {}
    version, settings = values.get("format"), values.get("model")
    if version != FORMAT or not isinstance(settings, dict):
        raise ModelError(
            f"{folder / CONFIG} has format {version!r}, and this version reads format {FORMAT}; update "
            "worldmodel or download the model again."
        )
    if misplaced := sorted(values.keys() & {field.name for field in fields(WorldModelConfig)}):
        raise ConfigError(
            f"{folder / CONFIG} has {misplaced[0]!r} beside 'model'; write it inside of 'model'."
        )
    return configs.build(WorldModelConfig, settings)


def _with_dtype(config: WorldModelConfig, dtype: torch.dtype) -> WorldModelConfig:
    """Return a config whose components of other libraries have another data type."""
    names = {value: name for name, value in pretrained.DTYPES.items()}
    if dtype not in names:
        raise ConfigError(f"dtype is {dtype}; use one of {', '.join(map(str, names))}.")
    parts = {"backbone": config.backbone, "codec": config.codec, "generator": config.generator}
    changed = {
        name: replace(part, dtype=names[dtype])
        for name, part in parts.items()
        if isinstance(part, BackboneConfig) or (part is not None and not part.is_ours)
    }
    return replace(config, **changed)


def _is_model(folder: Path) -> bool:
    """Return whether a folder holds one of our models, of any version; run folders have a config, too."""
    try:
        values = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and isinstance(values.get("format"), int) and "model" in values


def save(
    model: PretrainedModel,
    folder: Path,
    dtype: torch.dtype,
    training: dict[str, Any] | None,
    card: str | None,
) -> Path:
    """Write a model folder; see `PretrainedModel.save_pretrained`."""
    folder, config = folder.resolve(), model.config.sized(model.stored_size)
    if folder.is_dir() and any(folder.iterdir()) and not _is_model(folder):
        raise OutputError(f"{folder} has files that are not those of a model; choose a new folder.")
    try:
        with atomic_folder(folder) as temporary:
            model.backbone.save_pretrained(temporary / "backbone", dtype)
            for name in components(model.config):
                component: Any = getattr(model, name)
                if hasattr(component, "save_pretrained"):
                    component.save_pretrained(temporary / name, dtype)
                    continue
                (temporary / name).mkdir()
                save_file(pretrained.cast(component.state_dict(), dtype), temporary / name / WEIGHTS)
            own: dict[str, Tensor] = dict(model.named_parameters(recurse=False))
            save_file(pretrained.cast(own, dtype), temporary / TOKENS)
            values = {"format": FORMAT, "model": configs.to_dict(config), "training": training}
            (temporary / CONFIG).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
            if model.known is not None:
                model.known.write(temporary / KNOWN)
            if model.start_images:
                (temporary / START_IMAGES).mkdir()
            for number, start in enumerate(model.start_images):
                title = re.sub(r"[^\w -]", "", start.title)
                write_image(
                    Image.fromarray(start.image), temporary / START_IMAGES / f"{number:02} {title}.png"
                )
            text = card or plain_card(model, config, folder.name, training)
            (temporary / CARD).write_text(text, encoding="utf-8")
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OutputError(
            f"The model cannot be written to {folder}: {reason}; choose another folder."
        ) from None
    return folder


@torch.no_grad()
def _fill(tensors: dict[str, Tensor], file: Path) -> None:
    """Fill tensors from a file whose names and shapes must all fit."""
    try:
        stored = load_file(file)
    except (OSError, SafetensorError):
        raise ModelError(f"{file} is missing or damaged; download the model again.") from None
    for name in tensors.keys() | stored.keys():
        if name not in stored or name not in tensors or stored[name].shape != tensors[name].shape:
            raise ModelError(f"{file} does not fit its {CONFIG} at {name!r}; download the model again.")
    for name, tensor in tensors.items():
        tensor.copy_(stored[name])
