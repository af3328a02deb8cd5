"""What surrounds the steps of a stage: its data, checkpoints, validations, profile and images."""

import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from torch import Tensor
from torch.profiler import ProfilerActivity, profile, schedule

from worldmodel.actions.words import say
from worldmodel.config import TrainConfig
from worldmodel.data import loader
from worldmodel.data.sequence_loader import SequenceLoader
from worldmodel.data.staging import FrameStager
from worldmodel.episodes import Episode
from worldmodel.errors import ConfigError
from worldmodel.media import Frames
from worldmodel.media.tensors import to_frames
from worldmodel.parallel.mesh import Mesh
from worldmodel.train import validation
from worldmodel.train.checkpoint.checkpointer import Checkpoints
from worldmodel.train.diagnostics import codec_ceiling
from worldmodel.train.diagnostics.throughput import Meter, measured_tflops
from worldmodel.train.diagnostics.watchdog import Watchdog
from worldmodel.train.distributed import PRECISIONS
from worldmodel.train.run.log import RunLog, SampleRound
from worldmodel.train.trainer import Progress, Trainer

SHUTDOWN_TIMEOUT_S = 30.0
"""Seconds that torchrun leaves its processes after SIGTERM, unless --shutdown-timeout says otherwise."""


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
        self.trainer = trainer
        self.checkpoints = checkpoints
        self.stream = stream
        self.log = log
        self.meter = meter
        self.watchdog = watchdog
        self.settings = trainer.config.validation
        self.best = validation.best_loss(checkpoints.root, trainer.name)
        self.validates = bool(self.settings.source)
        self.saves: list[float] = []
        """Seconds that complete checkpoints took, from the call to their name on the disk."""
        self.warned = False

    def after_step(self, done: int, stop: bool) -> None:
        """Validate and save, if it is time for that; the end of the stage is left to `at_end`."""
        config = self.trainer.config
        steps = self.trainer.stage.steps
        if done == steps:
            return
        loss = self._validate(done) if done % self.settings.every == 0 else None
        is_best = loss is not None and loss < self.best
        if stop or done % config.checkpoint_every == 0 or is_best:
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
        """Return the criterion of the weights that are exported: their average, if there is one.

        None, and a line in the log, if the source has no episodes for this stage.
        """
        if not self.validates:
            return None
        trainer = self.trainer
        averaged = trainer.ema is not None and not ended  # at the end the average is in place
        if averaged:  # a checkpoint may still be copying the weights, which the average replaces
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
        return validation.criterion(losses)

    def _save(self, done: int, ended: bool, loss: float | None) -> Future[Path]:
        began = time.perf_counter()
        saves = self.saves  # not self: the future would keep the model alive
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


def open_stream(config: TrainConfig, name: str, mesh: Mesh, progress: Progress | None) -> SequenceLoader:
    """Open the data of a stage, from its start or from the step of its `progress` on.

    Frames are staged ahead of their step, but not for processes that share sequences, which are sent them in
    it, and not for the codec, which is trained on a few frames of each clip.

    Raises:
        ConfigError: a setting or a source is wrong, or a task of this stage or a later one has no source.
    """
    ahead = mesh.sequence.size == 1 and config.stages[name].objective != "codec"
    names = list(config.stages)

    def open_loader() -> loader.BatchLoader:
        batches = loader.batches(
            config.data,
            config.model,
            config.stages[name],
            config.seed,
            progress.step if progress else 0,
            mesh.dp_rank,
            mesh.dp_size,
            progress.bad if progress else None,
            mesh.sum_counts,
            progress.bookmarks if progress else None,
            FrameStager(mesh.device) if ahead else None,
        )
        try:  # what a later stage lacks is said now, and not after the days of this one
            for later in names[names.index(name) + 1 :]:
                loader.check_tasks(batches.sources, config.data, config.stages[later])
        except ConfigError:
            batches.close()
            raise
        return batches

    return SequenceLoader(open_loader, mesh)


def peak_tflops(config: TrainConfig, mesh: Mesh, log: RunLog) -> float:
    """Return the peak of a device, given by the config or measured by all processes at once."""
    if config.diagnostics.peak_tflops:
        return config.diagnostics.peak_tflops
    mesh.barrier()
    (peak,) = measured_tflops(mesh.device, (PRECISIONS[config.precision],))
    log.print(f"  peak       {peak:.3g} TFLOP/s in {config.precision}, measured; mfu is relative to it")
    return peak


def profiler(config: TrainConfig, name: str, mesh: Mesh) -> AbstractContextManager[profile | None]:
    """Profile `profile_steps` steps after the first two, each process into a trace of its own."""
    if not config.diagnostics.profile_steps:
        return nullcontext()
    folder = Path(config.run_dir) / "profile"

    def write(profiled: profile) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        profiled.export_chrome_trace(str(folder / f"{name}-{mesh.rank}.json.gz"))

    cuda = [ProfilerActivity.CUDA] * (mesh.device.type == "cuda")
    return profile(
        activities=[ProfilerActivity.CPU, *cuda],
        schedule=schedule(wait=1, warmup=1, active=config.diagnostics.profile_steps, repeat=1),
        on_trace_ready=write,
    )


def report_codec(trainer: Trainer, log: RunLog, watchdog: Watchdog, done: int, ended: bool = False) -> None:
    """Print what the codec alone returns, once in a run: before anything is trained on it."""
    begins = not done and not ended
    if (begins or ended) and codec_ceiling.measured_in(trainer.config) == (trainer.name, ended):
        with watchdog.during(trainer.root.model, "the codec alone"):
            codec_ceiling.report(trainer, log, done)


def write_preview(trainer: Trainer, batches: list[loader.Batch], log: RunLog, step: int) -> None:
    """Write what was recorded and what the model predicts for a batch."""
    pair = trainer.preview(batches[0])
    if pair is not None:
        rounds = sample_rounds(batches[0].episodes, pair, trainer.root.objective.previews_rounds)
        log.write_samples(step, rounds, trainer.root.model.config.fps)


def sample_rounds(
    episodes: Sequence[Episode], videos: tuple[Tensor, Tensor], of_rounds: bool
) -> list[SampleRound]:
    """Return true and predicted videos with what led to them; a codec's are of no round."""
    clips = zip(*(map(to_frames, each) for each in videos), strict=True)
    if of_rounds:
        return [sample_round(*each) for each in zip(episodes, clips, strict=True)]
    return [SampleRound(truth, predicted, truth[:0]) for truth, predicted in clips]


def sample_round(episode: Episode, pair: tuple[Frames, Frames]) -> SampleRound:
    """Return the last round of an episode, of which encoded data have no frames but those of the codec."""
    decoded, predicted = pair
    *earlier, last = episode.observations or (decoded[:0],)
    recorded = last.shape == decoded.shape
    before = earlier[-1][-1:] if recorded and earlier and len(earlier[-1]) else decoded[:0]
    action = say(episode.actions[-1]) if episode.actions else ""
    return SampleRound(last if recorded else decoded, predicted, before, action)
