"""Low-rank additions to a component's linear layers (Hu et al. 2021, arXiv:2106.09685), by peft.

On disk they are folders that peft reads, one a component: FOLDER/backbone/adapter_model.safetensors, ...
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from peft import LoraConfig, PeftConfig
from peft.tuners.lora import LoraLayer, LoraModel
from peft.tuners.tuners_utils import cast_adapter_dtype
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from worldmodel.config import TrainedConfig
from worldmodel.errors import ConfigError, ModelError
from worldmodel.models.loading import deferred
from worldmodel.models.world_model import WorldModel

NAME = "stage"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What peft puts before the names in its files."""
FIXED = ("text_encoder", "image_encoder")
"""Parts of a generator that nobody trains, in full or by LoRA."""


def part(model: WorldModel, component: str) -> nn.Module:
    """Return the module that a component's additions belong to: of the backbone, its language model."""
    return model.backbone.model if component == "backbone" else model.get_submodule(component)


def add(model: WorldModel, train: Mapping[str, TrainedConfig]) -> None:
    """Give the components that a stage trains by LoRA (`stage.train`) their additions, in place.

    Raises:
        ConfigError: a component has no linear layer.
    """
    for component, how in train.items():
        if not how.lora_rank:
            continue
        names = _linear(part(model, component))
        if not names:
            raise ConfigError(
                f"{component} has no linear layers for LoRA; leave it out of stages.NAME.train."
            )
        # Engines that serve language models know their layers by the last part of the name.
        if component == "backbone":
            names = sorted({name.rpartition(".")[2] for name in names})
        config = LoraConfig(r=how.lora_rank, lora_alpha=how.lora_alpha, target_modules=names)
        _add(part(model, component), config)


def merge(model: nn.Module) -> None:
    """Add what was learned to the weights and take the additions out again, in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LoraLayer):
                child.merge(adapter_names=[NAME])
                setattr(parent, name, child.get_base_layer())


def beside(name: str, other: str) -> str:
    """Return the name of another weight of the layer whose first factor (`lora_A`) has a name."""
    return name.replace(f"lora_A.{NAME}", other if other == "base_layer" else f"{other}.{NAME}")


@torch.no_grad()
def apply(weight: Tensor, up: Tensor, down: Tensor, how: TrainedConfig) -> None:
    """Add what two whole factors say to a weight, in place; of a sharded one, to this process's part."""
    mine, place = deferred.part(weight)
    change = (up @ down) * (how.lora_alpha / how.lora_rank)
    mine += change[place].to(mine.device)


def save(model: WorldModel, components: Mapping[str, TrainedConfig], folder: Path) -> None:
    """Write the additions of every component that has some as peft reads them; the weights stay behind."""
    for component, how in components.items():
        if not how.lora_rank:
            continue
        root, place = part(model, component), folder / component
        layers = {name: child for name, child in root.named_modules() if isinstance(child, LoraLayer)}
        targets = {name.rpartition(".")[2] if component == "backbone" else name for name in layers}
        place.mkdir(parents=True)
        config = LoraConfig(
            r=how.lora_rank, lora_alpha=how.lora_alpha, target_modules=sorted(targets), inference_mode=True
        )
        config.save_pretrained(str(place))
        learned = {
            PREFIX + name.replace(f".{NAME}.", "."): tensor.detach().contiguous()
            for name, tensor in root.state_dict().items()
            if ".lora_" in name
        }
        save_file(learned, place / WEIGHTS)


def load(model: WorldModel, folder: Path) -> None:
    """Add the additions in a folder of them to the weights of a model, in place.

    Raises:
        ModelError: there are none, or they belong to another model.
    """
    found = sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
    if not found:
        raise ModelError(f"{folder} has no COMPONENT/{CONFIG}; pass a folder of adapters that export wrote.")
    for place in found:
        try:
            config = PeftConfig.from_pretrained(str(place), local_files_only=True)
            tensors = load_file(place / WEIGHTS)
            root = part(model, place.name)
            if not isinstance(config, LoraConfig):
                raise ValueError("it is no LoRA")
            _add(root, config)
            wanted = {
                PREFIX + name.replace(f".{NAME}.", "."): tensor
                for name, tensor in root.state_dict().items()
                if ".lora_" in name
            }
            if wanted.keys() != tensors.keys():
                raise ValueError("it is of other layers")
            with torch.no_grad():
                for name, tensor in wanted.items():
                    tensor.copy_(tensors[name])
        except (OSError, SafetensorError, AttributeError, RuntimeError, ValueError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ModelError(f"The adapter {place} does not fit this model: {reason}") from None
    merge(model)


def _add(root: nn.Module, config: LoraConfig) -> None:
    """Give a module its additions: in fp32, also beside weights in bf16, which is too coarse to learn in.

    They are real also where the weights still wait on the meta device, to which peft would move them.
    """
    linear = [module for module in root.modules() if type(module) is nn.Linear and module.weight.is_meta]
    waiting = [(module, module.weight) for module in linear]
    for module, weight in waiting:
        module.weight = nn.Parameter(torch.empty(0, dtype=weight.dtype))
    cast_adapter_dtype(LoraModel(root, config, NAME), NAME)
    for module, weight in waiting:
        module.weight = weight


def _linear(root: nn.Module) -> list[str]:
    return [
        name
        for name, module in root.named_modules()
        if type(module) is nn.Linear and not any(part in name for part in ("lm_head", *FIXED))
    ]
