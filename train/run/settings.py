"""The settings of a run: read with the model that it starts from, and checked before the first stage."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from worldmodel import config as configs
from worldmodel.config import TrainConfig, WorldModelConfig
from worldmodel.data.sources import stage_weights
from worldmodel.errors import ConfigError, did_you_mean
from worldmodel.models.loading import model_folder
from worldmodel.parallel.mesh import Mesh
from worldmodel.train.objectives.registry import objective_class
from worldmodel.train.optim.optimizers import optimizer_of
from worldmodel.train.optim.schedule import schedule_of
from worldmodel.train.run.callbacks import callback_classes
from worldmodel.train.validation import check_validation


def load(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a config with the model settings of `init_from`, if it has none of its own; overrides come last.

    Raises:
        ConfigError: the file, a key or a value is wrong.
        ModelError: there is no model of that name.
    """
    own = [each for each in overrides if each.startswith(("model.", "model="))]
    if not own:
        return resolve_model(configs.load(path, list(overrides)))
    try:
        plain = configs.load(path, [each for each in overrides if each not in own])
    except ConfigError:  # it may need what the overrides say of the model
        return configs.load(path, list(overrides))
    named = resolve_model(plain)
    if named is plain:
        return configs.load(path, list(overrides))
    with TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(json.dumps(configs.to_dict(named)), encoding="utf-8")
        return configs.load(file, list(overrides))


def resolve_model(config: TrainConfig) -> TrainConfig:
    """Return the config with the model settings of `init_from`, if it has no `model` of its own."""
    if isinstance(config.init_from, str) and config.model == WorldModelConfig():
        model = model_folder.read_config(model_folder.resolve(config.init_from))
        return dataclasses.replace(config, model=model)
    return config


def check_stages(config: TrainConfig) -> None:
    """Check the settings of all stages before the first one runs.

    Raises:
        ConfigError: there are no stages, one trains nothing, has a task that its objective cannot be trained
            on, names a source that does not exist, or is trained on the source of the validation; or an
            objective, optimizer, schedule or callback of the user cannot be imported.
    """
    if not config.stages:
        raise ConfigError("The config has no stages; give at least one under `stages`.")
    callback_classes(config)
    check_buckets(config)
    for name, stage in config.stages.items():
        stage_weights(config.data, stage)
        if not stage.train:
            raise ConfigError(
                f"stages.{name}.train names no component, so the stage would train nothing; give some, for "
                "example {backbone: {}, adapters: {}}."
            )
        optimizer_of(stage)
        schedule_of(stage)
        suited = objective_class(stage).tasks
        for task, weight in stage.tasks.items():
            if weight and task not in suited:
                raise ConfigError(
                    f"stages.{name}.tasks has {task}{did_you_mean(task, suited)}, on which the objective "
                    f"{stage.objective} cannot be trained; use {', '.join(suited)}."
                )
    check_validation(config)


def check_buckets(config: TrainConfig) -> None:
    """Check that the model can have the sizes of `data.buckets`.

    Raises:
        ConfigError: it cannot.
    """
    if not config.data.buckets:
        return
    if config.model.state is not None and config.model.state.code_block:
        raise ConfigError(
            f"model.state.code_block is {config.model.state.code_block}, by which frames of other sizes have "
            "other numbers of variables; set it to 0, or leave out data.buckets."
        )
    for size in config.data.buckets:
        try:
            config.model.sized(size)
        except ConfigError as error:
            raise ConfigError(f"data.buckets has {list(size)}, and the model cannot: {error}") from None


def check_batch_sizes(config: TrainConfig, mesh: Mesh) -> None:
    """Check that every process has an episode in every step.

    Raises:
        ConfigError: a batch is smaller than the number of its parts.
    """
    for name, stage in config.stages.items():
        if stage.batch_size < mesh.dp_size:
            raise ConfigError(
                f"stages.{name}.batch_size is {stage.batch_size}, but mesh.dp_replicate x mesh.dp_shard is "
                f"{mesh.dp_size}; use a batch_size of at least that."
            )
