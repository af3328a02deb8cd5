"""What a run tells a person: a progress bar with the time left, metrics.jsonl, pictures and plots."""

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from worldmodel.io import atomic_file
from worldmodel.media import contact_sheet, write_image

METRICS = "metrics.jsonl"
PICTURES = 4
"""Clips on one picture of samples."""


class RunLog:
    """Progress and metrics of one stage; silent on every process but the first.

    A line of metrics.jsonl holds the means over `every` steps, not rounded, so that two runs can be compared
    exactly. A stage that goes on from a checkpoint writes the steps after it again; the last line of a step
    counts.
    """

    def __init__(self, run: Path, stage: str, steps: int, first_step: int, active: bool, every: int) -> None:
        self.run, self.stage, self.active, self.every = run, stage, active, every
        if active:
            run.mkdir(parents=True, exist_ok=True)
            self.file = (run / METRICS).open("a", encoding="utf-8")
            self.board = _board(run / "tensorboard" / stage)
            self.bar = tqdm(total=steps, initial=first_step, desc=stage, unit="step", mininterval=2)
            self._restart()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self.active:
            self.bar.write(text)

    def step(
        self, step: int, task: str, terms: Mapping[str, float], amounts: Mapping[str, float], stall_s: float
    ) -> None:
        """Count one step; write a line of means every `every` steps.

        Args:
            step: The step that was done, counted from 0.
            task: What its episodes asked for; terms are averaged for each task apart.
            terms: Losses and other means of this step.
            amounts: What went through, for example samples and tokens; told as rates.
            stall_s: Seconds that the step waited for data.
        """
        if not self.active:
            return
        for name, value in terms.items():
            self.terms.setdefault(f"{task}/{name}", []).append(value)
        for name, amount in amounts.items():
            self.amounts[name] = self.amounts.get(name, 0.0) + amount
        self.stall_s += stall_s
        self.bar.update(1)
        if (step + 1) % self.every == 0:
            self._write(step + 1)

    def _write(self, step: int) -> None:
        elapsed = time.perf_counter() - self.since
        means = {name: sum(values) / len(values) for name, values in self.terms.items()}
        rates = {f"{name}_per_s": round(amount / elapsed, 3) for name, amount in self.amounts.items()}
        share = round(self.stall_s / elapsed, 4)
        line = {
            "stage": self.stage,
            "step": step,
            **means,
            **rates,
            "stall_share": share,
            "time": time.time(),
        }
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        for name, value in {**means, **rates, "stall_share": share}.items():
            if self.board:
                self.board.add_scalar(name, value, step)
        shown = {
            name.split("/")[0]: f"{value:.4g}" for name, value in means.items() if name.endswith("/loss")
        }
        self.bar.set_postfix({**shown, "samples/s": f"{rates.get('samples_per_s', 0):.1f}"})
        self._restart()

    def _restart(self) -> None:
        self.terms: dict[str, list[float]] = {}
        self.amounts: dict[str, float] = {}
        self.stall_s, self.since = 0.0, time.perf_counter()

    def picture(self, step: int, truth: np.ndarray, made: np.ndarray) -> None:
        """Draw clips `[b, t, h, w, 3]`, the truth above what the model makes, into RUN/samples."""
        if not self.active:
            return
        clips = [clip for pair in zip(truth[:PICTURES], made[:PICTURES], strict=True) for clip in pair]
        captions = ["truth" if row % 2 == 0 else f"{self.stage}, step {step}" for row in range(len(clips))]
        folder = self.run / "samples"
        folder.mkdir(exist_ok=True)
        sheet = contact_sheet(clips, captions, scale=1)
        write_image(sheet, folder / f"{self.stage}-{step:06d}.png")
        if self.board:
            self.board.add_image("samples", np.asarray(sheet), step, dataformats="HWC")

    def close(self) -> None:
        """Finish the bar and the files, and draw the losses of the run so far."""
        if self.active:
            self.bar.close()
            self.file.close()
            if self.board:
                self.board.close()
            draw_losses(self.run)


def _board(folder: Path) -> Any:
    """Open TensorBoard's event file, where it is installed (worldmodel[tensorboard])."""
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder))


def read_metrics(run: Path) -> dict[str, dict[int, dict[str, Any]]]:
    """Read metrics.jsonl: the last line of every step, by stage; a half-written last line is left out."""
    stages: dict[str, dict[int, dict[str, Any]]] = {}
    for text in (run / METRICS).read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        stages.setdefault(line["stage"], {})[line["step"]] = line
    return {stage: dict(sorted(lines.items())) for stage, lines in stages.items()}


def draw_losses(run: Path) -> None:
    """Draw every stage's terms against its steps into RUN/losses.png."""
    stages = {stage: lines for stage, lines in read_metrics(run).items() if lines}
    if not stages:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2 * len(stages)), layout="tight")
    axes = figure.subplots(len(stages), 1, squeeze=False)
    for axis, (stage, lines) in zip(axes[:, 0], stages.items(), strict=True):
        names = sorted({name for line in lines.values() for name in line if re.search(r"/loss$", name)})
        for name in names:
            points = [(step, line[name]) for step, line in lines.items() if name in line]
            axis.plot(*zip(*points, strict=True), label=name.removesuffix("/loss"), linewidth=1.2)
        axis.set(title=stage, xlabel="step", ylabel="loss", yscale="log")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    with atomic_file(run / "losses.png") as temporary:
        figure.savefig(temporary, format="png", dpi=110)
