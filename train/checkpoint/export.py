"""Export of checkpoints as model folders, or as LoRA adapters.

worldmodel export runs/mine/checkpoints/00007-state-400 mine

LoRA weights are merged and averaged weights are used where there are any, so `WorldModel.from_pretrained`
reads the folder like any other. With --adapters only what the stage has trained is written, LoRA weights in
the format of peft, for use with the model that the run started from.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from worldmodel import config as configs
from worldmodel.config import TrainConfig, TrainedConfig
from worldmodel.errors import ModelError, OutputError
from worldmodel.models import factory, lora
from worldmodel.models.backbone import reference
from worldmodel.models.backbone.reference import Reference
from worldmodel.models.conditioning import NoAdapter
from worldmodel.models.loading import deferred, model_folder
from worldmodel.models.world_model import WorldModel
from worldmodel.parallel.mesh import Mesh
from worldmodel.train import start
from worldmodel.train.checkpoint.checkpointer import load, module_state
from worldmodel.train.checkpoint.manifest import Manifest, chain, verify
from worldmodel.train.checkpoint.storage import State
from worldmodel.train.components import is_trained, settings_of
from worldmodel.train.tokenizer import with_stored


def export(
    checkpoint: Path,
    folder: Path,
    rank: int | None = None,
    average_with: str | None = None,
    without_generator: bool = False,
) -> Path:
    """Write the model of a checkpoint; returns its folder.

    Args:
        checkpoint: A checkpoint of a run.
        folder: The folder to write.
        rank: Rank to which the LoRA weights of a backbone by reference are reduced; None keeps the sum of
            the ranks of all stages.
        average_with: A model of the same sizes; the mean of its weights and the checkpoint's is written.
        without_generator: Leave the generator out; the model then shows the forecast of its states.

    Raises:
        ConfigError: `without_generator`, and the model has no forecast.
        ModelError: the checkpoint is damaged, or is not in its run's folder, or `rank` is given and the
            backbone has no LoRA weights by reference, or the model to average with has other sizes.
        OutputError: the folder cannot be written.
    """
    verify(checkpoint)
    config = run_config(checkpoint)
    model = load_model(config, checkpoint)
    if average_with is not None:
        average(model, WorldModel.from_pretrained(average_with))
    if rank is not None:
        whole = model.backbone.reference
        if whole is None or not whole.factors:
            raise ModelError(
                f"The backbone of {checkpoint} has no LoRA weights beside a base model; leave out --rank."
            )
        model.backbone.reference = whole.reduced(rank)
    if without_generator:
        model.config = replace(model.config, generator=None, num_inference_steps=0)
        model.generator = factory.generator(model.config, model.codec, None)
        model.condition_adapter = NoAdapter(model.config.chunk_latents)
    return model.save_pretrained(folder, training=configs.to_dict(config))


@torch.no_grad()
def average(model: WorldModel, other: WorldModel) -> None:
    """Replace the weights of a model by their mean with the weights of another model.

    A fine-tuned model keeps more of what it was able to do before if it is averaged with itself before that.
    Source: WiSE-FT (Wortsman et al. 2021, arXiv:2109.01903), eq. 1 with alpha 0.5.

    Raises:
        ModelError: they have other weights or sizes, or other base models.
    """
    ours = dict(model.named_parameters())
    theirs = dict(other.named_parameters())
    if {name: weight.shape for name, weight in ours.items()} != {
        name: weight.shape for name, weight in theirs.items()
    }:
        raise ModelError("The model to average with has other weights or sizes; use one of the same config.")
    first = model.backbone.reference
    second = other.backbone.reference
    if first != second:  # factors are not compared
        raise ModelError("The model to average with has another base model; use one with the same.")
    for name, weight in ours.items():
        weight.lerp_(theirs[name].to(weight), 0.5)
    if first is not None and second is not None:
        model.backbone.reference = first.scaled(0.5).extended(second.scaled(0.5).factors)


def export_adapters(checkpoint: Path, folder: Path) -> Path:
    """Write what the stage of a checkpoint trained: LoRA weights in the format of peft, and whole weights.

    Averaged weights are used where there are any. Returns the folder.

    Raises:
        ModelError: the checkpoint is damaged, or has no LoRA weights.
        OutputError: the folder cannot be written.
    """
    verify(checkpoint)
    config = run_config(checkpoint)
    train = train_settings(checkpoint)
    if not any(settings.lora_rank for settings in train.values()):
        raise ModelError(f"{checkpoint} has no LoRA weights; export it without --adapters.")
    model = start.build_model(with_stored(config, run_folder(checkpoint)))
    lora.add(model, train)
    deferred.materialize(model, torch.device("cpu"))
    weights = module_state(model)
    tensors = Manifest.read(checkpoint).tensors
    load(checkpoint, {name: tensor for name, tensor in weights.items() if name in tensors})
    averaged = [name for name in tensors if name.startswith("ema.")]
    load(checkpoint, {name: weights[name.replace("ema.", "model.", 1)] for name in averaged})
    whole = {
        deferred.base_name(name): weight.detach().contiguous()
        for name, weight in model.named_parameters()
        if is_trained(name, train) and ".lora_" not in name
    }
    try:
        folder.mkdir(parents=True)
        lora.save(model, train, folder)
        if whole:
            save_file(whole, folder / lora.WHOLE)
    except OSError as error:
        raise OutputError(f"{folder} cannot be written: {error.strerror}; choose another folder.") from None
    return folder


def train_settings(checkpoint: Path) -> dict[str, TrainedConfig]:
    """Return the `train` of the stage of a checkpoint."""
    train = Manifest.read(checkpoint).progress["train"]
    return {name: TrainedConfig(**settings) for name, settings in train.items()}


def run_folder(checkpoint: Path) -> Path:
    """Return the folder of the run that a checkpoint belongs to."""
    return checkpoint.resolve().parents[1]


def run_config(checkpoint: Path) -> TrainConfig:
    """Read the config of the run that a checkpoint belongs to.

    Raises:
        ModelError: it is missing or damaged.
    """
    file = run_folder(checkpoint) / "config.json"
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
        ModelError: the checkpoint is of another model, or a file that the run started from has changed; the
            message names the first tensor or the file.
    """
    config = with_stored(config, run_folder(checkpoint))
    model = start.build_model(config)
    files = start.Files.of(model, config)
    start.check_files(checkpoint, files.digests(Mesh()))
    deferred.materialize(model, torch.device("cpu"))
    deferred.load_shards(model)
    additions = load_weights(model, checkpoint, files.names)
    weights = [name for name in model.state_dict() if name.startswith("backbone.")]
    if not any(is_trained(name, stage.train) for stage in config.stages.values() for name in weights):
        model.backbone.reference = _reference(config, additions)
    return model


def _reference(config: TrainConfig, additions: Sequence[lora.Factors]) -> Reference | None:
    """Return the backbone as a base model and LoRA factors, if any; None if it has no base."""
    if not config.model.backbone.pretrained:
        return None
    source = settings_of("backbone.model", config.init_sources)
    before = reference.read(model_folder.resolve(source) / "backbone") if source else None
    if source and before is None:
        return None
    whole = before or Reference.of(config.model.backbone, {})
    for factors in additions:
        prefix = "model.backbone.model."
        whole = whole.extended(
            {layer.removeprefix(prefix): pair for layer, pair in factors.items() if layer.startswith(prefix)}
        )
    return whole


def load_weights(model: WorldModel, checkpoint: Path, known: Collection[str] = ()) -> list[lora.Factors]:
    """Load the weights of a checkpoint, with averages in place of weights and LoRA weights merged.

    Each process reads its own shards. LoRA weights of the model itself are not changed. A checkpoint holds
    what its stage trains, so checkpoints of earlier stages are loaded first.

    Args:
        model: The model, with the weights that its run started from.
        checkpoint: A checkpoint of the run.
        known: Names of the weights that the run read from files, which checkpoints need not hold.

    Returns:
        The LoRA factors of every stage, which are in the weights now.

    Raises:
        ModelError: the checkpoint is of another model; the message names the first tensor that differs.
    """
    folders = chain(checkpoint)
    held = {deferred.base_name(name) for name in module_state(model) if ".lora_" not in name}
    found = {deferred.base_name(name) for folder in folders for name in Manifest.read(folder).tensors}
    if missing := held - found - {f"model.{deferred.base_name(name)}" for name in known}:
        raise ModelError(
            f"The checkpoint {checkpoint} is of another model: {min(missing)} is absent there; choose "
            "another run_dir."
        )
    return [_load_stage(model, folder) for folder in folders]


def _load_stage(model: WorldModel, checkpoint: Path) -> lora.Factors:
    """Load the weights that one checkpoint holds; nothing is changed if one of them does not fit."""
    tensors = Manifest.read(checkpoint).tensors
    train = train_settings(checkpoint)
    held = {deferred.base_name(name): x for name, x in module_state(model).items() if ".lora_" not in name}
    state: State = {}
    for name, (dtype, shape) in tensors.items():
        if deferred.base_name(name) in held:
            state[name] = held[deferred.base_name(name)]
        elif name.startswith("model.") and ".lora_" in name:
            state[name] = torch.empty(shape, dtype=getattr(torch, dtype))
    load(checkpoint, state)
    averaged = [name for name in tensors if name.startswith("ema.")]
    load(checkpoint, {name: state[name.replace("ema.", "model.", 1)] for name in averaged})
    factors: lora.Factors = {}
    for name, down in state.items():
        settings = settings_of(name.removeprefix("model."), train)
        if settings and ".lora_A." in name:
            weight = deferred.base_name(lora.beside(name, "base_layer"))
            up = state[lora.beside(name, "lora_B")]
            lora.apply(held[weight], up, down, settings)
            factors[weight.removesuffix(".weight")] = up * (settings.lora_alpha / settings.lora_rank), down
    return factors
