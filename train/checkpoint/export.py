"""Turn a checkpoint into a model folder.

worldmodel export runs/mine/checkpoints/00007-state-400 mine

What LoRA learned is added to the weights, and weights that have an average are replaced by it: the folder
holds a model like any other, for `WorldModel.from_pretrained`. With --adapters only what LoRA learned is
written, as peft reads it, to be used with the model that the run began from.
"""

import json
import sys
from pathlib import Path

import torch

from worldmodel import config as configs
from worldmodel import hub
from worldmodel.cli.parser import Parser
from worldmodel.config import TrainConfig, TrainedConfig
from worldmodel.errors import ModelError, OutputError, WorldModelError
from worldmodel.models import lora
from worldmodel.models.loading import deferred
from worldmodel.models.world_model import WorldModel
from worldmodel.train import optim
from worldmodel.train.checkpoint.checkpointer import load, module_state
from worldmodel.train.checkpoint.manifest import Manifest, verify
from worldmodel.train.checkpoint.storage import State
from worldmodel.train.tokenizer import build_tokenizer


def main(argv: list[str] | None = None) -> int:
    """Export the checkpoint that the arguments name; returns the exit code."""
    parser = Parser(
        "worldmodel export",
        "Turn a checkpoint of a run into a model folder, or what LoRA learned in it into adapters.",
        "worldmodel export runs/mine/checkpoints/00007-state-400 mine",
    )
    parser.add_argument("checkpoint", type=Path, help="a folder in RUN_DIR/checkpoints")
    parser.add_argument("folder", type=Path, help="folder to write")
    parser.add_argument(
        "--adapters", action="store_true", help="write only what LoRA learned, one folder a component"
    )
    try:
        args = parser.parse_args(argv)
        (export_adapters if args.adapters else export)(args.checkpoint, args.folder)
    except WorldModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def export(checkpoint: Path, folder: Path) -> Path:
    """Write the model of a checkpoint; returns its folder.

    Raises:
        ModelError: the checkpoint is damaged, or no longer lies in its run's folder.
        OutputError: the folder cannot be written.
    """
    verify(checkpoint)
    config = run_config(checkpoint)
    model = trained(config, checkpoint)
    return hub.save_pretrained(model, folder, training=configs.to_dict(config))


def export_adapters(checkpoint: Path, folder: Path) -> Path:
    """Write what LoRA learned, as peft reads it; returns the folder.

    Raises:
        ModelError: the checkpoint is damaged, or nothing in it was learned by LoRA.
        OutputError: the folder cannot be written.
    """
    verify(checkpoint)
    config, train = run_config(checkpoint), learned_by(checkpoint)
    if not any(how.lora_rank for how in train.values()):
        raise ModelError(f"{checkpoint} was not learned by LoRA; export it without --adapters.")
    model = empty(config)
    lora.add(model, train)
    weights = module_state(model)
    load(checkpoint, weights)
    try:
        folder.mkdir(parents=True)
        lora.save(model, train, folder)
    except OSError as error:
        raise OutputError(f"{folder} cannot be written: {error.strerror}; choose another folder.") from None
    return folder


def learned_by(checkpoint: Path) -> dict[str, TrainedConfig]:
    """Return how each component learned in the stage of a checkpoint."""
    train = Manifest.read(checkpoint).progress["train"]
    return {name: TrainedConfig(**how) for name, how in train.items()}


def run_config(checkpoint: Path) -> TrainConfig:
    """Read the config of the run that a checkpoint belongs to.

    Raises:
        ModelError: there is none where the run put it.
    """
    file = checkpoint.resolve().parents[1] / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        values.pop("origin", None)
    except (OSError, ValueError, AttributeError):
        raise ModelError(
            f"{file} is missing or damaged; pass a checkpoint that lies in its run's folder."
        ) from None
    return configs.build(TrainConfig, values)


def trained(config: TrainConfig, checkpoint: Path) -> WorldModel:
    """Return the model of a checkpoint, whole, with its weights as they are used.

    Raises:
        ModelError: the checkpoint is of another model; the sentence names the first tensor that differs.
    """
    model = empty(config)
    fill(model, checkpoint)
    return model


def empty(config: TrainConfig) -> WorldModel:
    """Build a run's model for a checkpoint to fill; nothing is read from files of other libraries."""
    with deferred.weights():
        model = WorldModel.from_config(config.model, build_tokenizer(config))
    deferred.make(model, torch.device("cpu"))
    return model


def fill(model: WorldModel, checkpoint: Path) -> None:
    """Give a model the weights of a checkpoint, as they are used: averaged and with LoRA's additions merged.

    Of a sharded model each process reads its own part. Additions that the model has itself stay as they are.

    Raises:
        ModelError: the checkpoint is of another model; the sentence names the first tensor that differs.
            Nothing was changed then.
    """
    tensors, train = Manifest.read(checkpoint).tensors, learned_by(checkpoint)
    held = {deferred.plain(name): x for name, x in module_state(model).items() if ".lora_" not in name}
    state: State = {}
    for name, (dtype, shape) in tensors.items():
        if deferred.plain(name) in held:
            state[name] = held.pop(deferred.plain(name))
        elif name.startswith("model.") and ".lora_" in name:
            state[name] = torch.empty(shape, dtype=getattr(torch, dtype))
    load(checkpoint, state | held)
    averaged = [name for name in tensors if name.startswith("ema.")]
    load(checkpoint, {name: state[name.replace("ema.", "model.", 1)] for name in averaged})
    for name, down in state.items():
        how = optim.component(name.removeprefix("model."), train)
        if how and ".lora_A." in name:
            up, weight = (state[lora.beside(name, other)] for other in ("lora_B", "base_layer"))
            lora.apply(weight, up, down, how)


if __name__ == "__main__":
    sys.exit(main())
