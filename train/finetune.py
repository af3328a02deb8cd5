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
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from worldmodel import config as configs
from worldmodel.config import TrainConfig, WorldModelConfig
from worldmodel.data import loader
from worldmodel.errors import ConfigError
from worldmodel.media.tensors import to_frames
from worldmodel.models.layers import attention
from worldmodel.models.loading import model_folder
from worldmodel.parallel.mesh import Mesh
from worldmodel.train import distributed, summary
from worldmodel.train.checkpoint import export
from worldmodel.train.checkpoint.checkpointer import Checkpoints
from worldmodel.train.collective_check import collective_check
from worldmodel.train.run_log import RunLog
from worldmodel.train.trainer import Progress, Trainer
from worldmodel.train.watchdog import StragglerDetector, Watchdog


def train(config: TrainConfig, command: str | None = None, stop: Callable[[], bool] = lambda: False) -> Path:
    """Train every stage and export the model, which the first process writes while the others end.

    Args:
        config: The run.
        command: The command line that started it, which is stored with the run and in the model card.
        stop: Asked after every step whether to save a checkpoint and return.

    Returns:
        Folder of the model, or of the run if it was stopped before its end.

    Raises:
        ConfigError: the mesh does not fit the processes, a stage does not fit the model, or the gradient
            is not finite.
    """
    check_stages(config)
    mesh, run = distributed.init(config), Path(config.run_dir)
    try:
        check_batch_sizes(config, mesh)
        attention.use(config.attention)
        torch.set_num_threads(1 if mesh.world_size > 1 else torch.get_num_threads())
        with Checkpoints(run, config.keep_checkpoints) as checkpoints:
            newest = checkpoints.latest()
            progress = Progress.of(newest)
            if progress and progress.stage not in config.stages:
                raise ConfigError(
                    f"{run} is at stage {progress.stage!r}, which is not in stages "
                    f"({', '.join(config.stages)}); choose another run_dir."
                )
            if mesh.first:
                write_config(config, run, {"command": command, "num_processes": mesh.world_size})
            names = list(config.stages)
            for name in names[names.index(progress.stage) + progress.ended if progress else 0 :]:
                if not run_stage(config, name, mesh, checkpoints, newest, stop):
                    return run
                gc.collect()  # FSDP's modules refer to themselves: the model would stay beside the next one
                newest = checkpoints.latest()
        mesh.barrier()  # the last one: processes then end without waiting for the first
    finally:
        distributed.shutdown()
    if mesh.first:
        assert newest, "there is at least one stage"
        model = export.load_model(config, newest)
        model.save_pretrained(run / "model", training=configs.to_dict(config))
    return run / "model"


def run_stage(
    config: TrainConfig,
    name: str,
    mesh: Mesh,
    checkpoints: Checkpoints,
    newest: Path | None,
    stop: Callable[[], bool],
) -> bool:
    """Train one stage, from its start or from `newest` if that is of this stage; False if stopped."""
    stage, run = config.stages[name], Path(config.run_dir)
    trainer, progress = Trainer.start(config, name, mesh, newest)
    done = progress.step
    log = RunLog(run, name, stage.steps, done, mesh.first, config.log_every)
    for line in summary.describe(trainer.root, stage, mesh):
        log.print(line)
    batches: list[loader.Batch] = []
    stream = loader.batches(
        config.data,
        config.model,
        stage,
        config.seed,
        done,
        mesh.dp_rank,
        mesh.dp_size,
        progress.bad,
        mesh.sum_counts,
    )
    with stream, Watchdog(config.hang_timeout_s) as watchdog, collective_check(config):
        stalled, stragglers = 0.0, StragglerDetector()
        for batches in stream:
            watchdog.beat(f"step {done}")
            began = time.process_time()
            result = trainer.step(batches, stop(), stream.unreadable)
            for rank, slowdown in stragglers.step(time.process_time() - began).items():
                log.print(f"  process {rank} is {slowdown:.1f}x slower than the others; check that machine")
            done += 1
            log.step(done - 1, batches[0].task, result.losses, result.processed, stream.stall_s - stalled)
            stalled = stream.stall_s
            if config.sample_every and done % config.sample_every == 0:
                log_preview(trainer, batches, log, done)
            if done < stage.steps and (result.stop or done % config.checkpoint_every == 0):
                trainer.save(checkpoints, done, stream.bad)
            if result.stop and done < stage.steps:
                log.close()
                return False
    trainer.finish(batches)
    trainer.save(checkpoints, stage.steps, stream.bad, ended=True)
    log.print(f"  peak memory: {summary.peak_memory(mesh.device)}")
    log.close()
    return not stop()


def log_preview(trainer: Trainer, batches: list[loader.Batch], log: RunLog, step: int) -> None:
    """Write true and predicted videos of a batch."""
    pair = trainer.preview(batches[0])
    if pair is not None:
        log.write_samples(step, *(np.stack([to_frames(clip) for clip in clips]) for clips in pair))


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
        ConfigError: there are no stages, or one names a source that does not exist.
    """
    if not config.stages:
        raise ConfigError("The config has no stages; give at least one under `stages`.")
    for stage in config.stages.values():
        loader.stage_weights(config.data, stage)


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


def write_config(config: TrainConfig, run: Path, origin: dict[str, Any]) -> None:
    """Write the resolved config into the run's folder, with its origin and the commit of the code."""
    run.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(  # noqa: S603
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    )
    origin = {**origin, "commit": commit.stdout.strip() or None}
    written = {"origin": origin, **configs.to_dict(config)}
    (run / "config.json").write_text(json.dumps(written, indent=2), encoding="utf-8")


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
