"""Checkpoints of transformers: where they lie, and reading each tensor once, straight to where it stays.

A checkpoint is JSON and safetensors: pickles and code of its own are never touched. A folder is read without
the network; a name on the Hub needs the commit it means.
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
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import WeightRenaming, rename_source_key

from worldmodel.errors import ConfigError, ModelError
from worldmodel.models.loading import deferred

FETCHED = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
"""Files of a repository on the Hub that are fetched: settings, weights, tokenizers."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""What weights are held in, by the name that configs use."""

UNREADABLE = (
    OSError,
    KeyError,
    TypeError,
    RuntimeError,
    ValueError,
    SafetensorError,
    StrictDataclassError,
)
"""What transformers raises about files that are missing, damaged or of another shape."""

Renaming = Mapping[str, str | None]
"""Beginnings of names in a checkpoint, and what replaces them in the model; the first that fits counts.
Tensors with None, or whose names begin otherwise, belong to other parts and are not read."""


def dtype_of(name: str) -> torch.dtype:
    """Return the type that a config names.

    Raises:
        ConfigError: there is no such type.
    """
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}; use one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def locate(name: str | Path, revision: str | None, part: str) -> Path:
    """Return the folder of a checkpoint; a commit of a repository on the Hub is fetched, once.

    `part` is what error messages call it.

    Raises:
        ModelError: there is no such folder or commit, or the name of a repository comes without a commit.
    """
    try:
        if Path(name).is_dir():
            return Path(name)
    except OSError:  # a name longer than a path can be
        pass
    if revision is None or not re.fullmatch("[0-9a-f]{40}", revision):
        raise ModelError(
            f"There is no {part} folder {str(name)!r}; pass one that transformers wrote, or a name on the "
            f"Hub with its revision (the 40 hex digits of a commit, not {revision!r})."
        )
    try:
        return Path(snapshot_download(str(name), revision=revision, allow_patterns=list(FETCHED)))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"The {part} {str(name)!r} at {revision} cannot be fetched: {reason(error)}"
        ) from None


def read_json(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """Read one of a checkpoint's JSON files.

    Raises:
        ModelError: there is no such file, or no mapping in it.
    """
    try:
        values = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder / name} cannot be read: {reason(error)}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{folder / name} holds no settings; pass a folder that transformers wrote.")
    return values


def describe(architecture: Mapping[str, Any], part: str, **further: Any) -> PreTrainedConfig:
    """Return the configuration that arguments in a config describe; the caller has checked `model_type`.

    Raises:
        ConfigError: an argument is not what its family takes.
    """
    try:
        return AutoConfig.for_model(**architecture, **further)
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise ConfigError(f"{part}.architecture: {' '.join(str(error).split())}") from None


def read_config(folder: Path) -> PreTrainedConfig:
    """Read a checkpoint's configuration; the caller has checked `model_type`.

    Raises:
        ModelError: it is not one of its family.
    """
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except UNREADABLE as error:
        raise ModelError(f"The config of {str(folder)!r} cannot be read: {reason(error)}") from None


def load(
    kind: Any,
    folder: Path,
    dtype: torch.dtype,
    attention: str,
    config: PreTrainedConfig | None = None,
    renaming: Renaming | None = None,
) -> Any:
    """Load a model of class `kind`; with `config` and `renaming`, a part of a larger checkpoint as that.

    Tensors are mapped, not read into memory first, and each becomes a weight at once, so that loading takes
    no more memory than the model; inside `deferred.weights`, none at all. The caller has checked
    `model_type`.

    Raises:
        ModelError: the weights cannot be read, or are not those of the configuration.
    """
    if (folder / "adapter_config.json").exists():  # transformers would go and load what it refers to
        raise ModelError(f"{folder} holds an adapter (adapter_config.json); merge it into its model first.")
    source: dict[str, Any] = {"pretrained_model_name_or_path": folder, "local_files_only": True}
    try:
        if renaming is not None:
            source = {
                "pretrained_model_name_or_path": None,
                "config": config,
                "state_dict": _opened(folder, renaming),
            }
        if deferred.wanted():
            source["device_map"] = {"": "meta"}
        model, report = kind.from_pretrained(
            **source,
            output_loading_info=True,
            use_safetensors=True,
            trust_remote_code=False,
            attn_implementation=attention,
            dtype=dtype,
        )
    except UNREADABLE as error:
        raise ModelError(f"{str(folder)!r} cannot be loaded: {reason(error)}") from None
    # transformers fills gaps with random weights and only warns.
    gaps = sorted({*report["missing_keys"], *report["unexpected_keys"]})
    gaps += [str(entry[0]) for entry in report["mismatched_keys"]]
    if gaps:
        raise ModelError(f"The weights in {str(folder)!r} do not fit its config.json at {gaps[0]!r}.")
    assert isinstance(model, PreTrainedModel)
    if deferred.wanted():
        _leave(model, _opened(folder, renaming or {"": ""}))
    return model


def _leave(model: PreTrainedModel, opened: dict[str, Any]) -> None:
    """Leave the weights of a model on the meta device in their files; what is computed is computed."""
    prefix, wanted = model.base_model_prefix, model.state_dict()
    used: Any = model._weight_conversions
    renamings = [each for each in used if isinstance(each, WeightRenaming)]
    renamed = {rename_source_key(name, renamings, [], prefix, wanted)[0]: opened[name] for name in opened}
    slices = {name: source for name, source in renamed.items() if name in wanted}
    # Two that are tied are one if they are equal, which transformers cannot see on the meta device.
    for name, other in list(model.all_tied_weights_keys.items()):
        if name in slices and other in slices:
            if torch.equal(slices[name][:], slices[other][:]):
                model.tie_weights(missing_keys={name}, recompute_mapping=False)
                del slices[name]
            else:
                del model.all_tied_weights_keys[name]
    held = model.state_dict(keep_vars=True)
    found = {id(held[name]) for name in slices}
    assert all(id(tensor) in found for tensor in held.values()), "tensors of known families are but renamed"
    for module in model.modules():
        computed = dict(module.named_buffers(recurse=False))
        for name, buffer in computed.items():
            setattr(module, name, torch.empty_like(buffer, device="cpu"))
        if computed:
            model._init_weights(module)
    deferred.leave(model, slices)


def _opened(folder: Path, renaming: Renaming) -> dict[str, Any]:
    """Open the tensors of one part of a checkpoint, under the names that the part has for itself."""
    files = sorted(folder.glob("*.safetensors"))
    if (folder / "model.safetensors").exists():
        files = [folder / "model.safetensors"]
    elif (folder / "model.safetensors.index.json").exists():
        names = set(read_json(folder, "model.safetensors.index.json")["weight_map"].values())
        files = [folder / Path(name).name for name in sorted(names)]
    found: dict[str, Any] = {}
    for file in files:
        opened = safe_open(file, framework="pt")
        for name in opened.keys():  # noqa: SIM118 -- not a mapping
            start = next((start for start in renaming if name.startswith(start)), "")
            replaced = renaming.get(start)
            if replaced is not None:
                found[replaced + name.removeprefix(start)] = opened.get_slice(name)
    if not found:
        raise OSError("it holds no safetensors with these weights")
    return found


def reason(error: Exception) -> str:
    """Return the first line of an error's message, or else its kind."""
    return (str(error).splitlines() or [type(error).__name__])[0]
