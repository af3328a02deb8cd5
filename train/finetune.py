"""Train a world model: `torchrun --nproc-per-node 2 -m worldmodel train CONFIG key=value …`.

Every stage builds its model, optimizers and data stream and runs its steps. A run that is started again
resumes from its newest checkpoint, on any number of processes.
"""

import dataclasses
import gc
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from worldmodel import config as configs
from worldmodel.config import TrainConfig, WorldModelConfig
from worldmodel.config.literals import did_you_mean
from worldmodel.data import loader
from worldmodel.data.lerobot import with_action_spec
from worldmodel.errors import ConfigError
from worldmodel.models.layers import attention
from worldmodel.models.loading import model_folder
from worldmodel.parallel.mesh import Mesh
from worldmodel.train import distributed, run_folder
from worldmodel.train.checkpoint import export
from worldmodel.train.checkpoint.checkpointer import Checkpoints
from worldmodel.train.objectives.registry import OBJECTIVES
from worldmodel.train.stage import run_stage
from worldmodel.train.timing import record_collectives
from worldmodel.train.tokenizer import with_tokenizer
from worldmodel.train.trainer import Progress
from worldmodel.train.validation import check_validation, start_images


def train(config: TrainConfig, command: str | None = None, stop: Callable[[], bool] = lambda: False) -> Path:
    """Train every stage and export the model, which the first process writes while the others end.

    Args:
        config: The run.
        command: The command line that started it, which is stored with the run and in the model card.
        stop: Asked after every step whether to save a checkpoint and return.

    Returns:
        Folder of the model, or of the run if it was stopped before its end.

    Raises:
        ConfigError: the mesh does not fit the processes, a stage does not fit the model, the run was begun
            with other settings, or the gradient is not finite.
        OutputError: the run's folder cannot be written, or another run uses it.
    """
    config = with_action_spec(config)
    check_stages(config)
    record_collectives()
    mesh, run = distributed.init(config), Path(config.run_dir)
    deterministic = torch.are_deterministic_algorithms_enabled()
    with ExitStack() as lock:
        try:
            check_batch_sizes(config, mesh)
            use_deterministic(config.deterministic or deterministic)
            attention.use(config.attention)
            torch.set_num_threads(1 if mesh.world_size > 1 else torch.get_num_threads())
            lock.enter_context(run_folder.locked(run, mesh, config.hang_timeout_s))
            origin = {"command": command, "num_processes": mesh.world_size}
            newest = run_stages(config, mesh, origin, stop)
            if newest is None:
                return run
            mesh.barrier()  # the last one: processes then end without waiting for the first
        finally:
            torch.use_deterministic_algorithms(deterministic)
            distributed.shutdown()
        if mesh.first:
            model = export.load_model(config, newest)
            model.start_images = start_images(config)
            model.save_pretrained(run / "model", training=configs.to_dict(config))
    return run / "model"


def run_stages(
    config: TrainConfig, mesh: Mesh, origin: dict[str, Any], stop: Callable[[], bool]
) -> Path | None:
    """Run the stages that are left of a run; returns the last checkpoint, or None if it was stopped.

    The config is stored when a stage has begun, so that one which is refused does not replace that of the
    checkpoints.
    """
    run, names = Path(config.run_dir), list(config.stages)

    def begun() -> None:
        if mesh.first:
            run_folder.write_config(config, run, origin)

    with Checkpoints(run, config.keep_checkpoints) as checkpoints:
        newest = checkpoints.latest()
        if progress := Progress.of(newest):
            run_folder.on_first(mesh, lambda: run_folder.check_unchanged(config, run, progress))
            names = names[names.index(progress.stage) + progress.ended :]
        run_config = with_tokenizer(config, mesh, newest is not None)
        for name in names:
            if not run_stage(run_config, name, mesh, checkpoints, newest, stop, begun):
                return None
            gc.collect()  # FSDP's modules refer to themselves: the model would stay beside the next one
            newest = checkpoints.latest()
    assert newest, "there is at least one stage"
    if not (run / run_folder.CONFIG).is_file():  # of a finished run, which was copied without it
        begun()
    return newest


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
        return dataclasses.replace(
            config, model=model_folder.read_config(model_folder.resolve(config.init_from))
        )
    return config


def check_stages(config: TrainConfig) -> None:
    """Check the settings of all stages before the first one runs.

    Raises:
        ConfigError: there are no stages, one trains nothing, has a task that its objective cannot be trained
            on, names a source that does not exist, or is trained on the source of the validation.
    """
    if not config.stages:
        raise ConfigError("The config has no stages; give at least one under `stages`.")
    for name, stage in config.stages.items():
        loader.stage_weights(config.data, stage)
        if not stage.train:
            raise ConfigError(
                f"stages.{name}.train names no component, so the stage would train nothing; give some, for "
                "example {backbone: {}, adapters: {}}."
            )
        suited = OBJECTIVES[stage.objective].tasks
        for task in (task for task, weight in stage.tasks.items() if weight and task not in suited):
            raise ConfigError(
                f"stages.{name}.tasks has {task}{did_you_mean(task, suited)}, on which the objective "
                f"{stage.objective} cannot be trained; use {', '.join(suited)}."
            )
    check_validation(config)


def use_deterministic(enabled: bool) -> None:
    """Use deterministic kernels only, so that a run on GPUs, too, resumes bit for bit."""
    if enabled:  # read when cuBLAS makes its first handle
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(enabled)


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


def command_line(*arguments: str) -> str:
    """Return the command that started this process: torchrun, or the command line alone."""
    launcher = ["worldmodel", "train"]
    if local := os.environ.get("LOCAL_WORLD_SIZE"):
        machines = os.environ.get("GROUP_WORLD_SIZE", "1")
        nodes = ["--nnodes", machines] if machines != "1" else []
        launcher = ["torchrun", *nodes, "--nproc-per-node", local, "-m", "worldmodel.train.finetune"]
    return shlex.join([*launcher, *arguments])


@contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Record SIGTERM and Ctrl-C inside the block, so that a run can save a checkpoint and exit.

    Yields a function that returns whether one was received.
    """
    received: list[int] = []
    signals = (signal.SIGTERM, signal.SIGINT)
    previous = {each: signal.signal(each, lambda number, _: received.append(number)) for each in signals}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    from worldmodel.cli import main

    sys.exit(main(["train", *sys.argv[1:]]))
