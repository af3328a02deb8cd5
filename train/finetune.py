"""Train a world model: `torchrun --nproc-per-node 2 -m worldmodel.train.finetune CONFIG key=value …`.

This file reads from top to bottom: `main` reads the command line, `train` goes through the stages of a run,
`run_stage` opens the data of one and builds its model, and `_run_steps` has the loop over its steps. What a
step computes is in `trainer.py`, and the losses are in `objectives/`. A run that is started again resumes
from its newest checkpoint, on any number of processes.
"""

import argparse
import gc
import os
import shlex
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from worldmodel import config as configs
from worldmodel import signals
from worldmodel.config import TrainConfig
from worldmodel.data.examiner import glance
from worldmodel.data.lerobot import with_action_spec
from worldmodel.data.loader import Batch
from worldmodel.data.sequence_loader import SequenceLoader
from worldmodel.errors import exit_code
from worldmodel.models.layers import attention
from worldmodel.parallel.mesh import Mesh
from worldmodel.rollout.observation_score import known_observations
from worldmodel.train import distributed
from worldmodel.train.checkpoint import export
from worldmodel.train.checkpoint.checkpointer import Checkpoints
from worldmodel.train.diagnostics.collective_check import collective_check
from worldmodel.train.diagnostics.throughput import Meter, peak_memory_gib
from worldmodel.train.diagnostics.timing import computing, record_collectives
from worldmodel.train.diagnostics.watchdog import StragglerDetector, Watchdog
from worldmodel.train.memory.out_of_memory import explain_out_of_memory
from worldmodel.train.optim.optimizers import learning_rates
from worldmodel.train.run import folder as run_folder
from worldmodel.train.run import settings, summary
from worldmodel.train.run.callbacks import build_callbacks
from worldmodel.train.run.log import RunLog
from worldmodel.train.stage import Saver, open_stream, peak_tflops, profiler, report_codec, write_preview
from worldmodel.train.tokenizer import with_tokenizer
from worldmodel.train.trainer import Progress, Trainer
from worldmodel.train.validation import known_frames, start_images


def main(argv: list[str]) -> None:
    """Train the stages of a config, or continue a run from its newest checkpoint.

    Args:
        argv: A YAML file or the name of a shipped config, and settings that override it as key=value.
    """
    parser = argparse.ArgumentParser(
        "worldmodel.train.finetune", description=main.__doc__, allow_abbrev=False
    )
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args(argv)
    config = settings.load(args.config, args.overrides)
    if int(os.environ.get("RANK", 0)) == 0 and not Path(config.run_dir, "checkpoints").exists():
        for line in glance(config.data):
            print(line, flush=True)
    with signals.recorded() as received:  # a run that is to stop writes a checkpoint first
        command = command_line(args.config, *args.overrides)
        result = train(config, command, stop=lambda: bool(received))
    if int(os.environ.get("RANK", 0)) == 0:
        if result == Path(config.run_dir):
            print(f"stopped; run the same command to resume from {result}/checkpoints")
        else:
            print(f"model: {result}")
    if "TORCHELASTIC_RUN_ID" in os.environ:  # started by torchrun
        distributed.leave()
    elif signal.SIGINT in received:
        raise KeyboardInterrupt  # the exit code of a command that Ctrl-C ended


def train(config: TrainConfig, command: str | None = None, stop: Callable[[], bool] = lambda: False) -> Path:
    """Train every stage and export the model, which the first process writes while the others end.

    Args:
        config: The run, as `load_config` returns it; without `model`, the settings are those of `init_from`.
        command: The command line that started it, which is stored with the run and in the model card.
        stop: Asked after every step whether to save a checkpoint and return.

    Returns:
        Folder of the model, or of the run if it was stopped before its end.

    Raises:
        ConfigError: the mesh does not fit the processes, a stage does not fit the model, the run was begun
            with other settings, or the gradient is not finite.
        OutputError: the run's folder cannot be written, or another run uses it.
    """
    config = with_action_spec(settings.resolve_model(config))
    settings.check_stages(config)
    record_collectives()  # before the first process group, which would not be recorded
    mesh = distributed.init(config)
    run = Path(config.run_dir)
    deterministic = torch.are_deterministic_algorithms_enabled()
    with ExitStack() as lock:
        try:
            settings.check_batch_sizes(config, mesh)
            use_deterministic(config.deterministic or deterministic)
            attention.use(config.attention)
            # Processes on one machine share its cores; several threads in each would wait for each other.
            torch.set_num_threads(1 if mesh.world_size > 1 else torch.get_num_threads())
            lock.enter_context(run_folder.locked(run, mesh, config.hang_timeout_s))
            newest = run_stages(config, mesh, command, stop)
            if newest is None:
                return run
            mesh.barrier()  # the last one: processes then end without waiting for the first
        finally:
            torch.use_deterministic_algorithms(deterministic)
            distributed.shutdown()
        if mesh.first:
            model = export.load_model(config, newest)
            model.start_images = start_images(config)
            model.known = known_observations(model, known_frames(config, model))
            model.save_pretrained(run / "model", training=configs.to_dict(config))
    return run / "model"


def run_stages(config: TrainConfig, mesh: Mesh, command: str | None, stop: Callable[[], bool]) -> Path | None:
    """Run the stages that are left of a run; returns the last checkpoint, or None if it was stopped."""
    run = Path(config.run_dir)
    names = list(config.stages)

    def begun() -> None:
        # Only when a stage has begun, so that a config which is refused does not replace that of the
        # checkpoints.
        if mesh.first:
            origin = {"command": command, "num_processes": mesh.world_size}
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


def run_stage(
    config: TrainConfig,
    name: str,
    mesh: Mesh,
    checkpoints: Checkpoints,
    newest: Path | None,
    stop: Callable[[], bool],
    begun: Callable[[], None],
) -> bool:
    """Train one stage, from its start or from `newest` if that is of this stage; False if stopped.

    Every process calls `begun` when its model is built and before the first step.
    """
    # The data first: opening them takes seconds, and reading the weights of a large model minutes.
    with open_stream(config, name, mesh, Progress.within(newest, name)) as stream:
        # The model, its optimizers, and how far the stage has come.
        with explain_out_of_memory(name):
            trainer, progress = Trainer.start(config, name, mesh, newest)
        begun()
        return _run_steps(trainer, progress.step, stream, checkpoints, stop)


def _run_steps(
    trainer: Trainer, done: int, stream: SequenceLoader, checkpoints: Checkpoints, stop: Callable[[], bool]
) -> bool:
    """Run the steps that are left of a stage; False if stopped."""
    config = trainer.config  # with the precision that `auto` stands for
    name, stage, mesh = trainer.name, trainer.stage, trainer.mesh
    callbacks = build_callbacks(config)

    # What a reader sees of the run.
    run, tracker = Path(config.run_dir), config.diagnostics.tracker
    log = RunLog(run, name, stage.steps, done, mesh.first, config.log_every, tracker)
    for line in summary.describe(trainer.root, stage, mesh):
        log.print(line)
    meter = Meter(mesh.device, mesh.world_size, peak_tflops(config, mesh, log), trainer.phases)
    stragglers = StragglerDetector(mesh)

    # The loop: each element of the stream is the microbatches that this process has in one step.
    stalled = 0.0
    batches: list[Batch] = []
    with (
        Watchdog(config.hang_timeout_s) as watchdog,
        profiler(config, name, mesh) as profiling,
        collective_check(config),
    ):
        saver = Saver(trainer, checkpoints, stream, log, meter, watchdog)
        report_codec(trainer, log, watchdog, done)
        for callback in callbacks:
            callback.on_stage_begin(trainer, done)
        trainer.phases.begin("data")
        for batches in stream:
            watchdog.beat(f"step {done}")
            explained = explain_out_of_memory(name, trainer.root, trainer.phases)
            with computing(mesh.device) as computed, explained:
                result = trainer.step(batches, stop())
            for rank, slowdown in stragglers.step(computed).items():
                log.print(f"  process {rank} is {slowdown:.1f}x slower than the others; check that machine")
            done += 1

            meter.step(result.flops)
            figures = {}
            if done % config.log_every == 0:
                figures = meter.take() | learning_rates(trainer.root, trainer.optimizers)
            waited = stream.stall_s - stalled
            log.step(done - 1, batches[0].task, result.losses, result.processed, waited, figures)
            stalled = stream.stall_s
            if config.sample_every and done % config.sample_every == 0:
                with watchdog.during(trainer.root.model, f"sample images of step {done}"):
                    write_preview(trainer, batches, log, done)
            for callback in callbacks:
                callback.on_step_end(trainer, done - 1, result)
            saver.after_step(done, result.stop)
            if profiling:
                profiling.step()
            if result.stop and done < stage.steps:
                log.close()
                return False
            trainer.phases.begin("data")
        trainer.finish(batches)
        report_codec(trainer, log, watchdog, done, ended=True)
        for callback in callbacks:
            callback.on_stage_end(trainer)
        saver.at_end()
    log.print(f"  peak memory: {peak_memory_gib(mesh.device):.2f} GiB of {mesh.device.type}")
    log.close()
    (stopped,) = trainer.root.model.agreement.most(int(stop()))  # a signal may have reached only some
    return not stopped


def use_deterministic(enabled: bool) -> None:
    """Use deterministic kernels only, so that a run on GPUs, too, resumes bit for bit."""
    if enabled:  # read when cuBLAS makes its first handle
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(enabled)


def command_line(*arguments: str) -> str:
    """Return the command that started this process: torchrun, or the command line alone."""
    launcher = ["worldmodel", "train"]
    if local := os.environ.get("LOCAL_WORLD_SIZE"):
        machines = os.environ.get("GROUP_WORLD_SIZE", "1")
        nodes = ["--nnodes", machines] if machines != "1" else []
        launcher = ["torchrun", *nodes, "--nproc-per-node", local, "-m", "worldmodel.train.finetune"]
    return shlex.join([*launcher, *arguments])


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
