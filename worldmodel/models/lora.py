"""LoRA (Hu et al. 2021, arXiv:2106.09685) for the components of a model, by peft.

A folder of adapters has one folder of peft per component, FOLDER/backbone/adapter_model.safetensors, ..., and
the weights that were trained whole beside them (queries, for example) in FOLDER/trained.safetensors. That of
a generator of diffusers is one of diffusers as well: `pipeline.load_lora_weights(FOLDER/generator)`.
"""

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import (
    LoraConfig,
    PeftConfig,
    PeftModel,
    get_peft_model_state_dict,
    inject_adapter_in_model,
)
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import cast_adapter_dtype
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from worldmodel.config import TrainedConfig
from worldmodel.errors import ConfigError, ModelError
from worldmodel.models.loading import base_models, deferred, pretrained

NAME = "stage"
"""Name of the adapter that a stage trains."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
DIFFUSERS = "pytorch_lora_weights.safetensors"
"""File in which `load_lora_weights` of diffusers looks for the LoRA weights of a pipeline's transformer."""
WHOLE = "trained.safetensors"
"""Weights that were trained whole, by their names in the model."""
PREFIX = "base_model.model."
"""Prefix of all names in files of peft."""
Factors = dict[str, tuple[Tensor, Tensor]]
"""Factors `[out, rank]` and `[rank, in]` by the name of the layer to whose weight their product is added."""
FIXED = ("text_encoder", "image_encoder")
"""Parts of a generator that are never trained."""
NEW = "channels"
"""Part of a generator that begins as zeros, and so is trained whole beside the LoRA of what is pretrained."""


def is_new(name: str) -> bool:
    """Return whether a module or weight is a part that is trained whole beside LoRA."""
    return NEW in name.split(".")


def root_of(model: nn.Module, component: str) -> nn.Module:
    """Return the module whose layers a component's adapter changes: of the backbone, its language model."""
    return model.get_submodule("backbone.model" if component == "backbone" else component)


def add(model: nn.Module, train: Mapping[str, TrainedConfig]) -> None:
    """Add adapters to the components that a stage trains by LoRA (`stage.train`), in place.

    Raises:
        ConfigError: a component has no linear layer.
    """
    for component, how in train.items():
        if not how.lora_rank:
            continue
        root = root_of(model, component)
        names = [name for name in _linear(root) if not is_new(name)]
        if not names:
            raise ConfigError(f"{component} has no linear layers for LoRA; remove it from stages.NAME.train.")
        # Serving engines match the layers of language models by the last part of the name.
        if component == "backbone":
            names = sorted({name.rpartition(".")[2] for name in names})
        _inject(root, LoraConfig(r=how.lora_rank, lora_alpha=how.lora_alpha, target_modules=names))


def merge(model: nn.Module) -> None:
    """Merge adapters into the weights and remove them, in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LoraLayer):
                child.merge(adapter_names=[NAME])
                setattr(parent, name, child.get_base_layer())


def beside(name: str, other: str) -> str:
    """Return the name of another weight of the layer to which the factor `name` (`lora_A`) belongs."""
    return name.replace(f"lora_A.{NAME}", other if other == "base_layer" else f"{other}.{NAME}")


@torch.no_grad()
def apply(weight: Tensor, up: Tensor, down: Tensor, how: TrainedConfig) -> None:
    """Merge two factors into a weight, in place; if it is sharded, into the shard of this process."""
    shard, index = deferred.local_shard(weight)
    change = (up @ down) * (how.lora_alpha / how.lora_rank)
    shard += change[index].to(shard.device)


def save(model: nn.Module, components: Mapping[str, TrainedConfig], folder: Path) -> None:
    """Write the adapters of all components in the format of peft, without the weights that they change."""
    for component, how in components.items():
        if not how.lora_rank:
            continue
        root: Any = root_of(model, component)
        target = folder / component
        target.mkdir(parents=True)
        config = root.peft_config[NAME]
        config.inference_mode, config.target_modules = True, sorted(config.target_modules)
        config.save_pretrained(str(target))
        weights = get_peft_model_state_dict(root, adapter_name=NAME, save_embedding_layers=False)
        save_file({PREFIX + name: x.contiguous() for name, x in weights.items()}, target / WEIGHTS)
        if layers := _of_pipeline(weights, how):
            save_file(layers, target / DIFFUSERS)


def _of_pipeline(weights: Mapping[str, Tensor], how: TrainedConfig) -> dict[str, Tensor]:
    """Return the LoRA weights of a pipeline's transformer, by the names that diffusers gives them.

    What was added to the transformer (the stream of states) is not a part of the pipeline. The scale is in
    the weights, since the format has no place for it.
    """
    found = {}
    for name, weight in weights.items():
        parts = name.split(".")
        if "transformer" in parts and "network_2" not in parts:
            scale = how.lora_alpha / how.lora_rank if ".lora_B." in name else 1.0
            found[".".join(parts[parts.index("transformer") :])] = (scale * weight).contiguous()
    return found


def load(model: nn.Module, folder: Path) -> None:
    """Merge the adapters in a folder into the weights of a model, in place.

    Raises:
        ModelError: the folder has no adapters, or they do not fit the model.
    """
    found, whole = parts(model, folder), read_whole(dict(model.named_parameters()), folder)
    with torch.no_grad():
        for name, weight in whole.items():
            model.get_parameter(name).copy_(weight)
    for component, path in found.items():
        attach(root_of(model, component), NAME, path).merge_and_unload()


def parts(model: nn.Module, folder: Path) -> dict[str, Path]:
    """Return the folders of peft in a folder of adapters, by component; one of peft itself is the backbone's.

    Raises:
        ModelError: there is none, or the model lacks a component.
    """
    if (folder / CONFIG).is_file():
        return {"backbone": folder}
    found = {path.parent.name: path.parent for path in sorted(folder.glob(f"*/{CONFIG}"))}
    if not found:
        raise ModelError(
            f"{folder} has no COMPONENT/{CONFIG}; pass a folder written by `worldmodel export --adapters`."
        )
    for component, path in found.items():
        try:
            root_of(model, component)
        except AttributeError:
            raise ModelError(f"The adapter {path} does not fit this model: it has no {component}") from None
    return found


def digest(folder: Path, found: Mapping[str, Path]) -> str:
    """Return a digest of all files of a folder of adapters, whose `parts` are `found`."""
    files = {
        f"{component}/{name}": path / name for component, path in found.items() for name in (CONFIG, WEIGHTS)
    }
    files[WHOLE] = folder / WHOLE
    sums = (f"{base_models.sha256(file)}  {name}\n" for name, file in sorted(files.items()) if file.is_file())
    return hashlib.sha256("".join(sums).encode()).hexdigest()


def read_whole(
    known: Mapping[str, nn.Parameter], folder: Path, elsewhere: Collection[str] = ()
) -> dict[str, nn.Parameter]:
    """Read the weights in a folder of adapters that were trained whole; `known` are the model's by name.

    Raises:
        ModelError: the file is damaged, does not fit the model, or has weights of a component that runs
            `elsewhere`.
    """
    file = folder / WHOLE
    if not file.is_file():
        return {}
    try:
        stored = load_file(file)
    except (OSError, SafetensorError):
        raise ModelError(f"{file} is damaged; export the adapters again.") from None
    for name, weight in stored.items():
        if name not in known or known[name].shape != weight.shape:
            raise ModelError(f"{file} does not fit this model at {name!r}; pass adapters of this model.")
        if name.partition(".")[0] in elsewhere:
            raise ModelError(f"{file} replaces {name!r}, which vLLM cannot; use --engine in-process.")
    return {name: nn.Parameter(weight.to(known[name]), False) for name, weight in stored.items()}


def attach(root: nn.Module, name: str, folder: Path, attached: Any = None) -> Any:
    """Add a saved adapter to a module, unmerged; an error leaves the module as it was.

    Args:
        root: The module.
        name: Name of the adapter.
        folder: A folder of peft.
        attached: What this function returned for the adapters that the module has already.

    Returns:
        The `PeftModel` that switches between the adapters of the module.

    Raises:
        ModelError: the folder has no LoRA adapter in safetensors, or it does not fit the module.
    """
    if not (folder / WEIGHTS).is_file():  # peft would also read pickled weights
        raise ModelError(f"The adapter {name!r} has no {WEIGHTS} in {str(folder)!r}; pass a folder of peft.")
    try:
        config = PeftConfig.from_pretrained(str(folder), local_files_only=True)
        if not isinstance(config, LoraConfig):
            raise ValueError(f"its type is {config.peft_type}, not LORA")
        config.inference_mode = True
        attached = attached or PeftModel(root, config, name)
        result = attached.load_adapter(str(folder), name, torch_device="cpu")
        if keys := [*result.missing_keys, *result.unexpected_keys]:
            raise ValueError(f"its layers are different ones, for example {keys[0]}")
    except (OSError, RuntimeError, ValueError, TypeError, KeyError, SafetensorError) as error:
        detach(root, name)
        reason = pretrained.first_line(error)
        raise ModelError(f"The adapter {str(folder)!r} does not fit this model: {reason}") from None
    return attached


def detach(root: nn.Module, name: str) -> bool:
    """Remove an adapter that `attach` added; layers without another one are again what they were.

    Returns whether the module has others.
    """
    for parent in list(root.modules()):
        for key, child in list(parent.named_children()):
            if isinstance(child, LoraLayer):
                child.set_adapter([])  # type: ignore[attr-defined] - else peft makes another one active
                child.delete_adapter(name)  # type: ignore[attr-defined]
                if not child.r:
                    setattr(parent, key, child.get_base_layer())
    configs = getattr(root, "peft_config", {})
    configs.pop(name, None)
    if not configs and hasattr(root, "peft_config"):
        del root.peft_config
    return bool(configs)


def _inject(root: nn.Module, config: LoraConfig) -> None:
    """Add an adapter in fp32, also to weights in bf16, which is too coarse for training.

    peft would create it on the meta device beside weights there, so those are replaced meanwhile.
    """
    linear = [module for module in root.modules() if type(module) is nn.Linear and module.weight.is_meta]
    deferred_weights = [(module, module.weight) for module in linear]
    for module, weight in deferred_weights:
        module.weight = nn.Parameter(torch.empty(0, dtype=weight.dtype))
    inject_adapter_in_model(config, root, NAME)
    cast_adapter_dtype(root, NAME)
    for module, weight in deferred_weights:
        module.weight = weight


def _linear(root: nn.Module) -> list[str]:
    return [
        name
        for name, module in root.named_modules()
        if type(module) is nn.Linear and not any(part in name for part in ("lm_head", *FIXED))
    ]
