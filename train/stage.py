"""One stage of a run: its steps, and the checkpoints, validations and images between them."""

import math
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
from torch.profiler import ProfilerActivity, profile, schedule

from worldmodel.config import TrainConfig
from worldmodel.data import loader
from worldmodel.data.sequence_loader import SequenceLoader
from worldmodel.data.staging import FrameStager
from worldmodel.media.tensors import to_frames
from worldmodel.parallel.mesh import Mesh
from worldmodel.train import codec_ceiling, summary, validation
from worldmodel.train.checkpoint.checkpointer import Checkpoints
from worldmodel.train.collective_check import collective_check
from worldmodel.train.distributed import PRECISIONS
from worldmodel.train.out_of_memory import explain_out_of_memory
from worldmodel.train.run_log import RunLog
from worldmodel.train.throughput import Meter, measured_tflops, peak_memory_gib
from worldmodel.train.timing import computing
from worldmodel.train.trainer import Progress, Trainer
from worldmodel.train.watchdog import StragglerDetector, Watchdog

SHUTDOWN_TIMEOUT_S = 30.0
"""Seconds that torchrun leaves its processes after SIGTERM, unless --shutdown-timeout says otherwise."""


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
    stage, run = config.stages[name], Path(config.run_dir)
    with explain_out_of_memory(name):
        trainer, progress = Trainer.start(config, name, mesh, newest)
    begun()
    config = trainer.config  # with the precision that `auto` stands for
    log = RunLog(run, name, stage.steps, progress.step, mesh.first, config.log_every, config.tracker)
    for line in summary.describe(trainer.root, stage, mesh):
        log.print(line)
    meter = Meter(mesh.device, mesh.world_size, peak_tflops(config, mesh, log), trainer.phases)
    stragglers, done, stalled = StragglerDetector(mesh), progress.step, 0.0
    batches: list[loader.Batch] = []
    with (
        open_stream(config, name, mesh, progress) as stream,
        Watchdog(config.hang_timeout_s) as watchdog,
        profiler(config, name, mesh) as profiling,
        collective_check(config),
    ):
        saver = Saver(trainer, checkpoints, stream, log, meter, watchdog)
        report_codec(trainer, log, watchdog, done)
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
            figures = meter.take() if done % config.log_every == 0 else {}
            log.step(
                done - 1, batches[0].task, result.losses, result.processed, stream.stall_s - stalled, figures
            )
            stalled = stream.stall_s
            if config.sample_every and done % config.sample_every == 0:
                with watchdog.during(trainer.root.model, f"sample images of step {done}"):
                    write_preview(trainer, batches, log, done)
            saver.after_step(done, result.stop)
            if profiling:
                profiling.step()
            if result.stop and done < stage.steps:
                log.close()
                return False
            trainer.phases.begin("data")
        trainer.finish(batches)
        report_codec(trainer, log, watchdog, done, ended=True)
        saver.at_end()
    log.print(f"  peak memory: {peak_memory_gib(mesh.device):.2f} GiB of {mesh.device.type}")
    log.close()
    (stopped,) = trainer.root.model.agreement.most(int(stop()))  # a signal may have reached only some
    return not stopped


class Saver:
    """Validates and writes checkpoints after steps, and keeps the best.

    Warns if a step and a checkpoint take longer than torchrun waits after SIGTERM before it kills the
    processes.
    """

    def __init__(
        self,
        trainer: Trainer,
        checkpoints: Checkpoints,
        stream: SequenceLoader,
        log: RunLog,
        meter: Meter,
        watchdog: Watchdog,
    ) -> None:
        self.trainer, self.checkpoints, self.stream = trainer, checkpoints, stream
        self.log, self.meter, self.watchdog = log, meter, watchdog
        self.settings = trainer.config.validation
        self.best = validation.best_loss(checkpoints.root, trainer.name)
        self.validates = bool(self.settings.source)
        self.saves: list[float] = []
        """Seconds that complete checkpoints took, from the call to their name on the disk."""
        self.warned = False

    def after_step(self, done: int, stop: bool) -> None:
        """Validate and save, if it is time for that; the end of the stage is left to `at_end`."""
        config, steps = self.trainer.config, self.trainer.stage.steps
        if done == steps:
            return
        loss = self._validate(done) if done % self.settings.every == 0 else None
        if stop or done % config.checkpoint_every == 0 or (loss is not None and loss < self.best):
            self._save(done, False, loss)
        self._warn()

    def at_end(self) -> None:
        """Save the final weights and validate them: if that fails, the stage has ended nevertheless."""
        steps = self.trainer.stage.steps
        saved = self._save(steps, True, None)
        loss = self._validate(steps, ended=True)
        if loss is not None and loss < self.best and self.trainer.mesh.first:
            saved.add_done_callback(lambda done: validation.keep_best(done.result(), loss))

    def _validate(self, done: int, ended: bool = False) -> float | None:
        """Return the loss of the weights that a checkpoint is exported with: their average, if there is one.

        None, and a line in the log, if the source has no episodes for this stage.
        """
        if not self.validates:
            return None
        trainer = self.trainer
        averaged = trainer.ema is not None and not ended  # at the end the average is in place
        if averaged:
            trainer.before_update()
        try:
            with (
                self.watchdog.during(trainer.root.model, f"validation after step {done}"),
                trainer.ema.in_place() if trainer.ema and averaged else nullcontext(),
            ):
                losses = validation.validate(trainer)
        except validation.NothingToValidateError as error:
            self.validates = False
            self.log.print(f"  validation none in this stage: {error}")
            return None
        self.log.scalars(done, losses)
        return losses[validation.NAME]

    def _save(self, done: int, ended: bool, loss: float | None) -> Future[Path]:
        began, saves = time.perf_counter(), self.saves  # not self: the future would keep the model alive
        saved = self.trainer.save(self.checkpoints, done, self.stream, ended, loss)
        saved.add_done_callback(lambda _: saves.append(time.perf_counter() - began))
        if loss is not None and loss < self.best:
            self.best = loss
            if self.trainer.mesh.first:  # in the thread that writes, before it removes old checkpoints
                saved.add_done_callback(lambda done: validation.keep_best(done.result(), loss))
        return saved

    def _warn(self) -> None:
        advice = shutdown_advice(self.meter.step_s, self.saves[-1]) if self.saves else None
        if advice and not self.warned and "TORCHELASTIC_RUN_ID" in os.environ:
            self.warned = True
            self.log.print(f"  {advice}")


def shutdown_advice(step_s: float, save_s: float) -> str | None:
    """Return what to change if SIGTERM leaves no time for a step and a checkpoint, or None.

    After SIGTERM a run ends its step, writes a checkpoint and leaves; torchrun kills it after
    --shutdown-timeout, which a process cannot see unless it is given by the environment.
    """
    limit = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_TIMEOUT_S))
    needed = step_s + save_s
    if needed <= limit:
        return None
    return (
        f"a step and a checkpoint take {needed:.0f} s, but torchrun kills processes {limit:.0f} s after "
        f"SIGTERM; start it with --shutdown-timeout {math.ceil(2 * needed)}, or a stopped run loses what it "
        "did since the last checkpoint"
    )


def open_stream(config: TrainConfig, name: str, mesh: Mesh, progress: Progress) -> SequenceLoader:
    """Open the data of a stage, from the step of the progress on.

    Frames are staged ahead of their step, but not for processes that share sequences, which are sent them in
    it, and not for the codec, which is trained on a few frames of each clip.
    """
    ahead = mesh.sequence.size == 1 and config.stages[name].objective != "codec"
    return SequenceLoader(
        lambda: loader.batches(
            config.data,
            config.model,
            config.stages[name],
            config.seed,
            progress.step,
            mesh.dp_rank,
            mesh.dp_size,
            progress.bad,
            mesh.sum_counts,
            progress.bookmarks,
            FrameStager(mesh.device) if ahead else None,
        ),
        mesh,
    )


def peak_tflops(config: TrainConfig, mesh: Mesh, log: RunLog) -> float:
    """Return the peak of a device, given by the config or measured by all processes at once."""
    if config.peak_tflops:
        return config.peak_tflops
    mesh.barrier()
    peak = measured_tflops(mesh.device, PRECISIONS[config.precision])
    log.print(f"  peak       {peak:.3g} TFLOP/s in {config.precision}, measured; mfu is relative to it")
    return peak


def profiler(config: TrainConfig, name: str, mesh: Mesh) -> AbstractContextManager[profile | None]:
    """Profile `profile_steps` steps after the first two, each process into a trace of its own."""
    if not config.profile_steps:
        return nullcontext()
    folder = Path(config.run_dir) / "profile"

    def write(profiled: profile) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        profiled.export_chrome_trace(str(folder / f"{name}-{mesh.rank}.json.gz"))

    cuda = [ProfilerActivity.CUDA] * (mesh.device.type == "cuda")
    return profile(
        activities=[ProfilerActivity.CPU, *cuda],
        schedule=schedule(wait=1, warmup=1, active=config.profile_steps, repeat=1),
        on_trace_ready=write,
    )


def report_codec(trainer: Trainer, log: RunLog, watchdog: Watchdog, done: int, ended: bool = False) -> None:
    """Print what the codec alone returns, once in a run: before anything is trained on it."""
    begins = not done and not ended
    if (begins or ended) and codec_ceiling.measured_in(trainer.config) == (trainer.name, ended):
        with watchdog.during(trainer.root.model, "the codec alone"):
            codec_ceiling.report(trainer, log, done)


def write_preview(trainer: Trainer, batches: list[loader.Batch], log: RunLog, step: int) -> None:
    """Write true and predicted videos of a batch."""
    pair = trainer.preview(batches[0])
    if pair is not None:
        log.write_samples(step, *(np.stack([to_frames(clip) for clip in clips]) for clips in pair))
