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
from worldmodel.models.world_model import WorldModel
from worldmodel.train.checkpoint import load, module_state
from worldmodel.train.language import build_tokenizer
from worldmodel.train.manifest import Manifest, verify


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
    model = WorldModel.from_config(config.model, build_tokenizer(config))
    fill(model, checkpoint)
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
    model = WorldModel.from_config(config.model, build_tokenizer(config))
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
        values.pop("commit", None)
    except (OSError, ValueError, AttributeError):
        raise ModelError(
            f"{file} is missing or damaged; pass a checkpoint that lies in its run's folder."
        ) from None
    return configs.build(TrainConfig, values)


def fill(model: WorldModel, checkpoint: Path) -> None:
    """Give a model the weights of a checkpoint, as they are used: averaged and with LoRA's additions merged.

    Raises:
        ModelError: the checkpoint is of another model; the sentence names the first tensor that differs.
    """
    manifest = Manifest.read(checkpoint)
    lora.add(model, learned_by(checkpoint))
    weights = module_state(model)
    load(checkpoint, weights)
    averaged = [name for name in manifest.tensors if name.startswith("ema.")]
    if averaged:
        parameters = dict(model.named_parameters())
        load(checkpoint, {name: parameters[name.removeprefix("ema.")].detach() for name in averaged})
    with torch.no_grad():
        lora.merge(model)


if __name__ == "__main__":
    sys.exit(main())
