"""What a run tells a person: a progress bar with the time left, metrics.jsonl, a table of parameters."""

import json
import time
from pathlib import Path

from torch import Tensor, nn
from tqdm import tqdm


class RunLog:
    """Progress and metrics of one stage; silent on every process but the first."""

    def __init__(self, run: Path, stage: str, steps: int, first_step: int, active: bool, every: int) -> None:
        self.stage, self.active, self.every = stage, active, every
        self.busy_s, self.samples, self.since = 0.0, 0, time.perf_counter()
        self.sums: dict[str, list[float]] = {}
        if active:
            self.file = (run / "metrics.jsonl").open("a", encoding="utf-8")
            self.bar = tqdm(total=steps, initial=first_step, desc=stage, unit="step", mininterval=2)

    def parameters(self, model: nn.Module) -> None:
        """Write how many weights each component has, and how many of them move."""
        if not self.active:
            return
        for name, child in model.named_children():
            total = sum(p.numel() for p in child.parameters())
            trained = sum(p.numel() for p in child.parameters() if p.requires_grad)
            self.bar.write(f"  {name:10s} {total / 1e6:7.2f} M parameters, {trained / 1e6:7.2f} M trained")

    def step(
        self, step: int, task: str, losses: dict[str, Tensor], norm: float, samples: int, began: float
    ) -> None:
        """Count one step; write a line of means every `every` steps."""
        if not self.active:
            return
        self.busy_s += time.perf_counter() - began
        self.samples += samples
        for key, value in {
            **{k: float(v.detach()) for k, v in losses.items()},
            "gradient_norm": norm,
        }.items():
            self.sums.setdefault(f"{task}/{key}", []).append(value)
        self.bar.update(1)
        if (step + 1) % self.every:
            return
        elapsed = time.perf_counter() - self.since
        means = {key: round(sum(values) / len(values), 5) for key, values in self.sums.items()}
        line = {
            "stage": self.stage,
            "step": step + 1,
            **means,
            "samples_per_s": round(self.samples / elapsed, 1),
            "data_share": round(1 - self.busy_s / elapsed, 3),
            "time": round(time.time(), 1),
        }
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        shown = {key.split("/")[-1]: value for key, value in means.items() if key.endswith("/loss")}
        self.bar.set_postfix({**shown, "samples/s": line["samples_per_s"]})
        self.busy_s, self.samples, self.since = 0.0, 0, time.perf_counter()
        self.sums.clear()

    def close(self) -> None:
        """Finish the bar and the file."""
        if self.active:
            self.bar.close()
            self.file.close()
