"""Export of checkpoints as model folders, or as LoRA adapters.

worldmodel export runs/mine/checkpoints/00007-state-400 mine

LoRA weights are merged and averaged weights are used where there are any, so `WorldModel.from_pretrained`
reads the folder like any other. With --adapters only the LoRA weights are written, in the format of peft,
for use with the model that the run started from.
"""

import json
from pathlib import Path

import torch

from worldmodel import config as configs
from worldmodel.config import TrainConfig, TrainedConfig
from worldmodel.errors import ModelError, OutputError
from worldmodel.models import lora
from worldmodel.models.loading import deferred
from worldmodel.models.world_model import WorldModel
from worldmodel.train.checkpoint.checkpointer import load, module_state
from worldmodel.train.checkpoint.manifest import Manifest, verify
from worldmodel.train.checkpoint.storage import State
from worldmodel.train.components import settings_of
from worldmodel.train.tokenizer import build_tokenizer


def export(checkpoint: Path, folder: Path) -> Path:
    """Write the model of a checkpoint; returns its folder.

    Raises:
        ModelError: the checkpoint is damaged, or is not in its run's folder.
        OutputError: the folder cannot be written.
    """
    verify(checkpoint)
    config = run_config(checkpoint)
    model = load_model(config, checkpoint)
    return model.save_pretrained(folder, training=configs.to_dict(config))


def export_adapters(checkpoint: Path, folder: Path) -> Path:
    """Write the LoRA weights of a checkpoint in the format of peft; returns the folder.

    Raises:
        ModelError: the checkpoint is damaged, or has no LoRA weights.
        OutputError: the folder cannot be written.
    """
    verify(checkpoint)
    config, train = run_config(checkpoint), train_settings(checkpoint)
    if not any(settings.lora_rank for settings in train.values()):
        raise ModelError(f"{checkpoint} has no LoRA weights; export it without --adapters.")
    model = build_empty(config)
    lora.add(model, train)
    weights = module_state(model)
    load(checkpoint, weights)
    try:
        folder.mkdir(parents=True)
        lora.save(model, train, folder)
    except OSError as error:
        raise OutputError(f"{folder} cannot be written: {error.strerror}; choose another folder.") from None
    return folder


def train_settings(checkpoint: Path) -> dict[str, TrainedConfig]:
    """Return the `train` of the stage of a checkpoint."""
    train = Manifest.read(checkpoint).progress["train"]
    return {name: TrainedConfig(**settings) for name, settings in train.items()}


def run_config(checkpoint: Path) -> TrainConfig:
    """Read the config of the run that a checkpoint belongs to.

    Raises:
        ModelError: it is missing or damaged.
    """
    file = checkpoint.resolve().parents[1] / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        values.pop("origin", None)
    except (OSError, ValueError, AttributeError):
        raise ModelError(
            f"{file} is missing or damaged; pass a checkpoint inside its run's folder."
        ) from None
    return configs.build(TrainConfig, values)


def load_model(config: TrainConfig, checkpoint: Path) -> WorldModel:
    """Build the model of a run with the weights of a checkpoint, averaged and merged.

    Raises:
        ModelError: the checkpoint is of another model; the message names the first tensor that differs.
    """
    model = build_empty(config)
    load_weights(model, checkpoint)
    return model


def build_empty(config: TrainConfig) -> WorldModel:
    """Build a run's model without reading pretrained weights."""
    with deferred.loading():
        model = WorldModel.from_config(config.model, build_tokenizer(config))
    deferred.materialize(model, torch.device("cpu"))
    return model


def load_weights(model: WorldModel, checkpoint: Path) -> None:
    """Load the weights of a checkpoint, with averages in place of weights and LoRA weights merged.

    Each process reads its own shards. LoRA weights of the model itself are not changed.

    Raises:
        ModelError: the checkpoint is of another model; the message names the first tensor that differs.
            Nothing was changed then.
    """
    tensors, train = Manifest.read(checkpoint).tensors, train_settings(checkpoint)
    held = {deferred.base_name(name): x for name, x in module_state(model).items() if ".lora_" not in name}
    state: State = {}
    for name, (dtype, shape) in tensors.items():
        if deferred.base_name(name) in held:
            state[name] = held.pop(deferred.base_name(name))
        elif name.startswith("model.") and ".lora_" in name:
            state[name] = torch.empty(shape, dtype=getattr(torch, dtype))
    load(checkpoint, state | held)
    averaged = [name for name in tensors if name.startswith("ema.")]
    load(checkpoint, {name: state[name.replace("ema.", "model.", 1)] for name in averaged})
    for name, down in state.items():
        settings = settings_of(name.removeprefix("model."), train)
        if settings and ".lora_A." in name:
            up, weight = (state[lora.beside(name, other)] for other in ("lora_B", "base_layer"))
            lora.apply(weight, up, down, settings)
