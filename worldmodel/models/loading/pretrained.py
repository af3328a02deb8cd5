"""Loading of checkpoints of transformers, from local folders or pinned commits of the Hub.

Only JSON and safetensors are read, never pickles or remote code. Folders are read without network access;
names on the Hub require a commit.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import WeightRenaming, rename_source_key

from worldmodel.errors import ConfigError, ModelError
from worldmodel.models.loading import deferred
from worldmodel.models.loading.location import FETCHED, first_line, is_folder

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Data types of weights, by their names in configs."""

LOAD_ERRORS = (
    OSError,
    KeyError,
    TypeError,
    RuntimeError,
    ValueError,
    SafetensorError,
    StrictDataclassError,
)
"""Errors of transformers for files that are missing, damaged or of another shape."""

Renaming = Mapping[str, str | None]
"""Prefixes of names in a checkpoint and their replacements in the model; the first match is used.
Tensors whose replacement is None, or without a match, belong to other components and are not read."""


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype of a name in a config.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}; use one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def resolve_folder(name: str | Path, revision: str | None, part: str) -> Path:
    """Return the local folder of a checkpoint, downloading a commit from the Hub if necessary.

    `part` is its name in error messages.

    Raises:
        ModelError: the folder or commit does not exist, or the name of a repository has no commit.
    """
    if is_folder(Path(name)):
        return Path(name)
    if revision is None or not re.fullmatch("[0-9a-f]{40}", revision):
        raise ModelError(
            f"There is no {part} folder {str(name)!r}; pass a folder written by transformers, or a name on "
            f"the Hub with the 40 hex digits of a commit as revision (not {revision!r})."
        )
    try:
        return Path(snapshot_download(str(name), revision=revision, allow_patterns=list(FETCHED)))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"The {part} {str(name)!r} at {revision} cannot be downloaded: {first_line(error)}"
        ) from None


def read_json(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """Read a JSON file of a checkpoint.

    Raises:
        ModelError: the file cannot be read, or is not a mapping.
    """
    try:
        values = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder / name} cannot be read: {first_line(error)}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{folder / name} is not a mapping; pass a folder written by transformers.")
    return values


def build_config(architecture: Mapping[str, Any], part: str, **further: Any) -> PreTrainedConfig:
    """Build a configuration of transformers; the caller has checked `model_type`.

    Raises:
        ConfigError: an argument is invalid for the model type.
    """
    try:
        return AutoConfig.for_model(**architecture, **further)
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise ConfigError(f"{part}.architecture: {' '.join(str(error).split())}") from None


def read_config(folder: Path) -> PreTrainedConfig:
    """Read the configuration of a checkpoint; the caller has checked `model_type`.

    Raises:
        ModelError: the configuration is invalid.
    """
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except LOAD_ERRORS as error:
        raise ModelError(f"The config of {str(folder)!r} cannot be read: {first_line(error)}") from None


def load_model(
    model_class: Any,
    folder: Path,
    dtype: torch.dtype,
    attention: str,
    config: PreTrainedConfig | None = None,
    renaming: Renaming | None = None,
) -> Any:
    """Load a model of transformers; with `config` and `renaming`, a component of a larger checkpoint.

    Files are memory-mapped, so that loading needs no more memory than the model, and almost none within
    `deferred.loading`. The caller has checked `model_type`.

    Raises:
        ModelError: the weights cannot be read, or do not match the configuration.
    """
    if (folder / "adapter_config.json").exists():  # transformers would load the model that it refers to
        raise ModelError(f"{folder} is a LoRA adapter (adapter_config.json); merge it into its model first.")
    source: dict[str, Any] = {"pretrained_model_name_or_path": folder, "local_files_only": True}
    try:
        if renaming is not None:
            source = {
                "pretrained_model_name_or_path": None,
                "config": config,
                "state_dict": open_slices(folder, renaming)[0],
            }
        else:
            open_slices(folder, {"": ""})  # for the check of the files
        if deferred.enabled():
            source["device_map"] = {"": "meta"}
        model, report = model_class.from_pretrained(
            **source,
            output_loading_info=True,
            use_safetensors=True,
            trust_remote_code=False,
            attn_implementation=attention,
            dtype=dtype,
        )
    except LOAD_ERRORS as error:
        raise ModelError(f"{str(folder)!r} cannot be loaded: {first_line(error)}") from None
    # transformers initialises missing weights randomly and only warns.
    wrong = sorted({*report["missing_keys"], *report["unexpected_keys"]})
    wrong += [str(entry[0]) for entry in report["mismatched_keys"]]
    if wrong:
        raise ModelError(f"The weights in {str(folder)!r} do not match its config.json at {wrong[0]!r}.")
    assert isinstance(model, PreTrainedModel)
    if deferred.enabled():
        _defer(model, *open_slices(folder, renaming or {"": ""}))
    return model


def _defer(model: PreTrainedModel, opened: dict[str, Any], files: tuple[Path, ...]) -> None:
    """Attach open files to a model on the meta device, and compute its buffers, which are not in files."""
    prefix, expected = model.base_model_prefix, model.state_dict()
    used: Any = model._weight_conversions
    renamings = [each for each in used if isinstance(each, WeightRenaming)]
    renamed = {rename_source_key(name, renamings, [], prefix, expected)[0]: opened[name] for name in opened}
    slices = {name: source for name, source in renamed.items() if name in expected}
    # Tie weights that are equal in the files, which transformers cannot compare on the meta device.
    for name, other in list(model.all_tied_weights_keys.items()):
        if name in slices and other in slices:
            if torch.equal(slices[name][:], slices[other][:]):
                model.tie_weights(missing_keys={name}, recompute_mapping=False)
                del slices[name]
            else:
                del model.all_tied_weights_keys[name]
    state = model.state_dict(keep_vars=True)
    found = {id(state[name]) for name in slices}
    assert all(id(tensor) in found for tensor in state.values()), "weights are renamed, never converted"
    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False))
        for name, buffer in buffers.items():
            setattr(module, name, torch.empty_like(buffer, device="cpu"))
        if buffers:
            model._init_weights(module)
    deferred.attach(model, slices, files)


def open_slices(
    folder: Path, renaming: Renaming, stem: str = "model"
) -> tuple[dict[str, Any], tuple[Path, ...]]:
    """Open the tensors of a component in a checkpoint.

    Args:
        folder: The checkpoint: one file, several with an index, or any safetensors.
        renaming: Names in the checkpoint and in the component.
        stem: Name of the file without its suffix.

    Returns:
        Lazy slices by the names in the component, and the files that they are in.

    Raises:
        OSError: there are none.
        ModelError: a tensor is in two files.
    """
    files = sorted(folder.glob("*.safetensors"))
    if (folder / f"{stem}.safetensors").exists():
        files = [folder / f"{stem}.safetensors"]
    elif (folder / f"{stem}.safetensors.index.json").exists():
        names = set(read_json(folder, f"{stem}.safetensors.index.json")["weight_map"].values())
        files = [folder / Path(name).name for name in sorted(names)]
    found: dict[str, Any] = {}
    used = []
    for file in files:
        opened = safe_open(file, framework="pt")
        before = len(found)
        for name in opened.keys():  # noqa: SIM118 -- not a mapping
            prefix = next((prefix for prefix in renaming if name.startswith(prefix)), "")
            replacement = renaming.get(prefix)
            if replacement is None:
                continue
            key = replacement + name.removeprefix(prefix)
            if key in found:  # of which the last one read would be taken, here and by transformers
                raise ModelError(
                    f"The weight {name!r} is in {file.name!r} and in another file of {str(folder)!r}; "
                    "download them again, into an empty folder."
                )
            found[key] = opened.get_slice(name)
        used += [file] if len(found) > before else []
    if not found:
        raise OSError("it has no safetensors with these weights")
    return found, tuple(used)


def cast(state: dict[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Convert weights to a dtype, if given."""
    return {name: tensor.detach().to(dtype).contiguous() for name, tensor in state.items()}
