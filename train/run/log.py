"""Log of a training run: progress bar, metrics.jsonl, trackers, sample images and a plot of the losses."""

import importlib
import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from tqdm import tqdm

from worldmodel.errors import ConfigError, ModelError, pip_install
from worldmodel.io import atomic_file
from worldmodel.media import Frames, contact_sheet, write_image, write_video

METRICS = "metrics.jsonl"
MAX_CLIPS = 4
"""Clips on one sample image."""


@dataclass(frozen=True)
class SampleRound:
    """A round as it was recorded and as the model predicts it, uint8 `[t, h, w, 3]`."""

    truth: Frames
    predicted: Frames
    before: UInt8[np.ndarray, "n h w 3"]
    """The frame before it; none where nothing was observed."""
    action: str = ""
    """In words; empty where the frames follow no action."""


class RunLog:
    """Progress and metrics of one stage; does nothing on processes that are not `active`.

    A record of metrics.jsonl holds the means over `every` steps, not rounded, so that runs can be compared
    exactly. A stage that resumes from a checkpoint repeats the records of later steps; the last one counts.
    """

    def __init__(
        self,
        run: Path,
        stage: str,
        steps: int,
        first_step: int,
        active: bool,
        every: int,
        tracker: str = "none",
    ) -> None:
        self.run = run
        self.stage = stage
        self.active = active
        self.every = every
        if active:
            run.mkdir(parents=True, exist_ok=True)
            self.file = (run / METRICS).open("a", encoding="utf-8")
            self.tensorboard = _open_tensorboard(run / "tensorboard" / stage)
            self.tracker_name = tracker
            self.tracker = _open_tracker(tracker, run, stage)
            self.bar = tqdm(total=steps, initial=first_step, desc=stage, unit="step", mininterval=2)
            self._reset()

    def print(self, text: str) -> None:
        """Print text above the progress bar."""
        if self.active:
            self.bar.write(text)

    def step(
        self,
        step: int,
        task: str,
        losses: Mapping[str, float],
        processed: Mapping[str, float],
        stall_s: float,
        figures: Mapping[str, float] | None = None,
    ) -> None:
        """Record one step; writes the means every `every` steps.

        Args:
            step: index of the step, from 0.
            task: task of its episodes; losses are averaged for each task separately.
            losses: losses and other means of this step.
            processed: what was processed, for example samples and tokens; recorded as rates.
            stall_s: seconds that the step waited for data.
            figures: of the steps since the last record, written as they are.
        """
        if not self.active:
            return
        for name, value in losses.items():
            self.losses[f"{task}/{name}"].append(value)
        for name, amount in processed.items():
            self.processed[name] += amount
        self.stall_s += stall_s
        self.bar.update(1)
        if (step + 1) % self.every == 0:
            self._write(step + 1, figures or {})

    def _write(self, step: int, figures: Mapping[str, float]) -> None:
        elapsed = time.perf_counter() - self.started
        means = {name: sum(values) / len(values) for name, values in self.losses.items()}
        rates = {f"{name}_per_s": round(amount / elapsed, 3) for name, amount in self.processed.items()}
        self.scalars(step, {**means, **rates, "stall_share": round(self.stall_s / elapsed, 4), **figures})
        shown = {
            name.split("/")[0]: f"{value:.4g}" for name, value in means.items() if name.endswith("/loss")
        }
        self.bar.set_postfix({**shown, "samples/s": f"{rates.get('samples_per_s', 0):.1f}"})
        self._reset()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write values after `step` steps; a step may have several records."""
        if not self.active:
            return
        record = {"stage": self.stage, "step": step, **values, "time": time.time()}
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        if self.tensorboard:
            for name, value in values.items():
                self.tensorboard.add_scalar(name, value, step)
        if self.tracker:
            self.tracker.log({f"{self.stage}/{name}": value for name, value in values.items()}, step=step)

    def _reset(self) -> None:
        self.losses: dict[str, list[float]] = defaultdict(list)
        self.processed: dict[str, float] = defaultdict(float)
        self.stall_s = 0.0
        self.started = time.perf_counter()

    def write_samples(self, step: int, samples: Sequence[SampleRound], fps: float) -> None:
        """Write rounds into RUN/samples and to the trackers.

        An image has a row for each round of a frame, and two for longer ones: the frame before, what was
        recorded, and what is predicted. A video has recordings beside predictions.
        """
        if not self.active:
            return
        rows, captions, model = list[Frames](), list[str](), f"{self.stage}, step {step}"
        for each in samples[:MAX_CLIPS]:
            before = ["before"] if len(each.before) else []
            action = f"{each.action}: " if each.action else ""
            if len(each.truth) == 1:
                rows.append(np.concatenate([each.before, each.truth, each.predicted]))
                captions.append(f"{action}{' | '.join([*before, 'truth', model])}")
            else:
                rows += [np.concatenate([each.before, clip]) for clip in (each.truth, each.predicted)]
                captions += [f"{action}{' | '.join([*before, name])}" for name in ("truth", model)]
        sheet = contact_sheet(rows, captions)
        image = self.run / "samples" / f"{self.stage}-{step:06d}.png"
        write_image(sheet, image)
        files = {"Image": image}
        if len(samples[0].truth) > 1:
            files["Video"] = image.with_suffix(".mp4")
            pairs = [np.concatenate([each.truth, each.predicted], axis=2) for each in samples[:MAX_CLIPS]]
            write_video(np.concatenate(pairs, axis=1), files["Video"], fps)
        if self.tensorboard:
            self.tensorboard.add_image("samples", np.asarray(sheet), step, dataformats="HWC")
        if self.tracker:
            package = importlib.import_module(self.tracker_name)
            logged = {kind: getattr(package, kind)(str(path)) for kind, path in files.items()}
            self.tracker.log(
                {f"{self.stage}/sample_{kind.lower()}": value for kind, value in logged.items()}, step=step
            )

    def close(self) -> None:
        """Close the bar and the files, and plot the losses of the run so far."""
        if self.active:
            self.bar.close()
            self.file.close()
            if self.tensorboard:
                self.tensorboard.close()
            if self.tracker:
                self.tracker.finish()
            plot_losses(self.run)


def _open_tensorboard(folder: Path) -> Any:
    """Open a TensorBoard event file, or return None where the extra `tensorboard` is not installed."""
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder))


def _open_tracker(name: str, run: Path, stage: str) -> Any:
    """Open a run of Weights & Biases or of trackio, whose calls are the same; None for "none".

    A stage that resumes is continued in its run.

    Raises:
        ConfigError: the package is not installed.
    """
    if name == "none":
        return None
    try:
        package = importlib.import_module(name)
    except ImportError:
        raise ConfigError(
            f"tracker is {name!r}, which is not installed; {pip_install(name)} or use none."
        ) from None
    where = {"dir": str(run), "id": f"{run.name}-{stage}"} if name == "wandb" else {}
    return package.init(project=run.name, name=f"{run.name}-{stage}", resume="allow", **where)


def finished_model(run: Path) -> Path:
    """Return the model folder of a run.

    Raises:
        ModelError: the run is not finished.
    """
    if not (run / "model").is_dir():
        raise ModelError(f"{run} has no finished model; run `worldmodel train` again to resume it.")
    return run / "model"


def read_metrics(run: Path) -> dict[str, dict[int, dict[str, Any]]]:
    """Read metrics.jsonl as {stage: {step: values}}; of repeated values the last one counts.

    An incomplete last line is skipped.
    """
    stages: dict[str, dict[int, dict[str, Any]]] = {}
    for line in (run / METRICS).read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        stages.setdefault(record["stage"], {}).setdefault(record["step"], {}).update(record)
    return {stage: dict(sorted(records.items())) for stage, records in stages.items()}


def _curves(records: Mapping[int, Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Return steps and values of every loss, where a logarithmic axis has them."""
    curves: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for step, record in records.items():
        for name, value in record.items():
            if name.endswith("/loss") and value > 0:
                curves[name].append((step, value))
    return curves


def plot_losses(run: Path) -> None:
    """Plot every stage's losses over its steps into RUN/losses.png."""
    found = {stage: _curves(records) for stage, records in read_metrics(run).items()}
    stages = {stage: curves for stage, curves in found.items() if curves}  # a short one may have none yet
    if not stages:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2 * len(stages)), layout="tight")
    axes = figure.subplots(len(stages), 1, squeeze=False)
    for axis, (stage, curves) in zip(axes[:, 0], stages.items(), strict=True):
        for name, points in sorted(curves.items()):
            axis.plot(*zip(*points, strict=True), label=name.removesuffix("/loss"), linewidth=1.2)
        axis.set(title=stage, xlabel="step", ylabel="loss", yscale="log")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    with atomic_file(run / "losses.png") as temporary:
        figure.savefig(temporary, format="png", dpi=110)
