"""Train a world model, stage after stage: `torchrun --nproc-per-node 2 train/finetune.py CONFIG key=value …`.

The file reads from top to bottom: config, processes, then for every stage its model, optimizers, loader and
loop. A run that is started again, on any number of processes, continues where its newest checkpoint stands.
"""

import argparse
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from worldmodel import config as configs
from worldmodel import hub
from worldmodel.config import TrainConfig, WorldModelConfig
from worldmodel.data import loader
from worldmodel.errors import ConfigError, WorldModelError
from worldmodel.media.tensors import to_frames
from worldmodel.models.layers import attention
from worldmodel.parallel.mesh import Mesh
from worldmodel.report import RunLog
from worldmodel.train import distributed, summary
from worldmodel.train.checkpoint import export
from worldmodel.train.checkpoint.checkpointer import Checkpoints
from worldmodel.train.objectives.base import Prepared
from worldmodel.train.objectives.registry import OBJECTIVES
from worldmodel.train.trainer import Learner, Progress
from worldmodel.train.watchdog import Stragglers, Watchdog


def main(argv: list[str] | None = None) -> int:
    """Run the training that a config describes; returns the exit code."""
    parser = argparse.ArgumentParser(prog="worldmodel train", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", help="a YAML file, or the name of a shipped one (shapes_tiny)")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="e.g. seed=1 mesh.sp=2 stages.state.steps=100"
    )
    args = parser.parse_args(argv)
    try:
        config = settled(configs.load(args.config, args.overrides))
        result = train(config, command_line(args.config, *args.overrides))
    except WorldModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if int(os.environ.get("RANK", 0)) == 0:
        ended = (result / "config.json").is_file() and result.name == "model"
        print(f"model: {result}" if ended else f"stopped; the same command goes on from {result}/checkpoints")
    return 0


def train(config: TrainConfig, command: str | None = None) -> Path:
    """Train every stage and export the model; returns its folder, or the run's when asked to stop before.

    `command` is what a person typed to get here; it is kept with the run and told by the model's card.

    Raises:
        ConfigError: the mesh does not fit the processes, a stage does not fit the model, or the gradient
            is not finite.
    """
    check(config)
    mesh = distributed.start(config)
    stop = StopSignal()
    try:
        enough(config, mesh)
        attention.use(config.attention)
        torch.set_num_threads(1 if mesh.world_size > 1 else torch.get_num_threads())
        run = Path(config.run_dir)
        with Checkpoints(run, config.keep_checkpoints) as checkpoints:
            newest = checkpoints.latest()
            at = Progress.of(newest)
            if at and at.stage not in config.stages:
                raise ConfigError(
                    f"{run} stands in stage {at.stage!r}, which is not in stages; choose another run_dir."
                )
            if mesh.first:
                write_config(config, run, {"command": command, "num_processes": mesh.world_size})
            order = list(config.stages)
            for name in order[order.index(at.stage) + at.ended if at else 0 :]:
                if not run_stage(config, name, mesh, checkpoints, newest, stop):
                    return run
                newest = checkpoints.latest()
            if mesh.first:
                assert newest, "there is at least one stage"
                model = export.trained(config, newest)
                hub.save_pretrained(model, run / "model", training=configs.to_dict(config))
            mesh.barrier()
        return run / "model"
    finally:
        stop.forget()
        distributed.stop()


def run_stage(
    config: TrainConfig,
    name: str,
    mesh: Mesh,
    checkpoints: Checkpoints,
    newest: Path | None,
    stop: "StopSignal",
) -> bool:
    """Train one stage, from its start or from `newest` if that is its own; False if asked to stop."""
    stage, run = config.stages[name], Path(config.run_dir)
    learner, at = Learner.start(config, name, mesh, newest)
    done = at.step
    log = RunLog(run, name, stage.steps, done, mesh.first, config.log_every)
    for line in summary.describe(learner.root, stage, mesh):
        log.say(line)
    prepared: list[Prepared] = []
    stream = loader.batches(
        config.data, config.model, stage, config.seed, done, mesh.dp_rank, mesh.dp_size, at.bad
    )
    with stream, Watchdog(config.hang_timeout_s) as watchdog:
        stalled, stragglers = 0.0, Stragglers()
        for batches in stream:
            watchdog.beat(f"step {done}")
            began = time.process_time()
            outcome = learner.step(batches, stop.asked, stream.left_out)
            stream.hear(outcome.bad)
            for rank, slowdown in stragglers.step(time.process_time() - began).items():
                log.say(
                    f"  process {rank} computes {slowdown:.2f} times as long as others: see to its machine"
                )
            prepared, done = outcome.prepared, done + 1
            log.step(done - 1, batches[0].task, outcome.terms, outcome.amounts, stream.stall_s - stalled)
            stalled = stream.stall_s
            if config.sample_every and done % config.sample_every == 0:
                show(learner, batches, log, done)
            if done < stage.steps and (outcome.stop or done % config.checkpoint_every == 0):
                learner.save(checkpoints, done, stream.bad)
            if outcome.stop and done < stage.steps:
                log.close()
                return False
    learner.finish(prepared)
    learner.save(checkpoints, stage.steps, stream.bad, ended=True)
    log.say(f"  at most {summary.peak_memory(mesh.device)} of memory were needed")
    log.close()
    return not stop.asked


def show(learner: Learner, batches: list[loader.Batch], log: RunLog, step: int) -> None:
    """Draw what the model makes of a batch."""
    pair = learner.pictures(batches[0])
    if pair is not None:
        log.picture(step, *(np.stack([to_frames(clip) for clip in clips]) for clips in pair))


def settled(config: TrainConfig) -> TrainConfig:
    """Take the model's settings from the model to start from, where the config says nothing about them."""
    if config.init_from and config.model == WorldModelConfig():
        return dataclasses.replace(config, model=hub.read_config(hub.resolve(config.init_from)))
    return config


def check(config: TrainConfig) -> None:
    """Refuse what would only fail after hours.

    Raises:
        ConfigError: there are no stages, or one names an objective or a source that does not exist.
    """
    if not config.stages:
        raise ConfigError("The config has no stages; give at least one under `stages`.")
    for name, stage in config.stages.items():
        if stage.objective not in OBJECTIVES:
            raise ConfigError(
                f"stages.{name}.objective is {stage.objective!r}; use one of {', '.join(OBJECTIVES)}."
            )
        loader.stage_weights(config.data, stage)


def enough(config: TrainConfig, mesh: Mesh) -> None:
    """Refuse steps in which some process would have no episode.

    Raises:
        ConfigError: a batch is smaller than the number of its parts.
    """
    for name, stage in config.stages.items():
        if stage.batch_size < mesh.dp_size:
            raise ConfigError(
                f"stages.{name}.batch_size is {stage.batch_size}, but mesh.dp_replicate x mesh.dp_shard is "
                f"{mesh.dp_size}; use at least as many episodes a step."
            )


def command_line(*arguments: str) -> str:
    """Return what started this process: torchrun with its numbers, or the command line alone."""
    launcher = ["worldmodel", "train"]
    if local := os.environ.get("LOCAL_WORLD_SIZE"):
        machines = os.environ.get("GROUP_WORLD_SIZE", "1")
        several = ["--nnodes", machines] if machines != "1" else []
        launcher = ["torchrun", *several, "--nproc-per-node", local, "-m", "worldmodel.train.finetune"]
    return shlex.join([*launcher, *arguments])


def write_config(config: TrainConfig, run: Path, origin: dict[str, Any]) -> None:
    """Keep the resolved config beside what it makes; `origin` says where that came from, the commit too."""
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


class StopSignal:
    """Remembers that SIGTERM or Ctrl-C asked the run to save and leave."""

    def __init__(self) -> None:
        self.asked = False
        self.before = {
            number: signal.signal(number, self._receive) for number in (signal.SIGTERM, signal.SIGINT)
        }

    def forget(self) -> None:
        """Give the signals back to who had them."""
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: object) -> None:
        self.asked = True


if __name__ == "__main__":
    sys.exit(main())
