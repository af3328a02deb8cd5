"""Low-rank additions to a component's linear layers (Hu et al. 2021, arXiv:2106.09685), by peft."""

from collections.abc import Mapping

from peft import LoraConfig
from peft.tuners.lora import LoraLayer, LoraModel
from torch import nn

from worldmodel.config import TrainedConfig
from worldmodel.errors import ConfigError
from worldmodel.models.world_model import WorldModel

NAME = "stage"


def add(model: WorldModel, train: Mapping[str, TrainedConfig]) -> None:
    """Give the components that a stage trains by LoRA (`stage.train`) their additions, in place.

    Raises:
        ConfigError: a component has no linear layer.
    """
    for component, how in train.items():
        if not how.lora_rank:
            continue
        part = getattr(model, component)
        names = [
            name
            for name, module in part.named_modules()
            if type(module) is nn.Linear and "lm_head" not in name
        ]
        if not names:
            raise ConfigError(
                f"{component} has no linear layers for LoRA; leave it out of stages.NAME.train."
            )
        config = LoraConfig(r=how.lora_rank, lora_alpha=how.lora_alpha, target_modules=names)
        LoraModel(part, config, NAME)


def merge(model: nn.Module) -> None:
    """Add what was learned to the weights and take the additions out again, in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LoraLayer):
                child.merge(adapter_names=[NAME])
                setattr(parent, name, child.get_base_layer())
