"""Turn a checkpoint into a model folder.

python -m worldmodel.train.export runs/mine/checkpoints/00007-state-400 mine

What LoRA learned is added to the weights, and weights that have an average are replaced by it: the folder
holds a model like any other, for `WorldModel.from_pretrained`.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from worldmodel import config as configs
from worldmodel import hub
from worldmodel.config import TrainConfig, TrainedConfig
from worldmodel.errors import ModelError, WorldModelError
from worldmodel.models.world_model import WorldModel
from worldmodel.train import lora
from worldmodel.train.checkpoint import load, module_state
from worldmodel.train.language import build_tokenizer
from worldmodel.train.manifest import Manifest, verify


def main(argv: list[str] | None = None) -> int:
    """Export the checkpoint that the arguments name; returns the exit code."""
    parser = argparse.ArgumentParser(description="Turn a checkpoint of a run into a model folder.")
    parser.add_argument("checkpoint", type=Path, help="a folder in RUN_DIR/checkpoints")
    parser.add_argument("folder", type=Path, help="model folder to write")
    args = parser.parse_args(argv)
    try:
        export(args.checkpoint, args.folder)
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
    lora.add(model, {name: TrainedConfig(**how) for name, how in manifest.progress["train"].items()})
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
