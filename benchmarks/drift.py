"""Drift with Causal Swin-DPM: rollouts chunk after chunk, and the same rollouts in a sliding window.

Rounds are judged against the simulator's own continuation; worlds, actions and noise are the same for both.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from worldmodel.eval.examples import Album
from worldmodel.eval.metrics import Figure
from worldmodel.eval.runner import ModelSubject
from worldmodel.eval.suite import EvalSettings, suite_of
from worldmodel.eval.tables import text_table
from worldmodel.models.world_model import WorldModel

Rounds = Mapping[str, Sequence[Figure]]


def draw(rows: Mapping[str, Rounds], path: Path) -> None:
    """Draw both ways of sampling side by side, round by round."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(9, 3.4), layout="constrained")
    for axes, name, factor, label in zip(
        canvas.subplots(1, 2),
        ("strict", "psnr"),
        (100, 1),
        ("whole last frame right, % of rollouts", "PSNR, dB"),
        strict=True,
    ):
        for (title, by_round), style in zip(rows.items(), ("o-", "s--"), strict=True):
            figures = by_round[name]
            places = range(1, len(figures) + 1)
            (line,) = axes.plot(places, [factor * each["value"] for each in figures], style, label=title)
            ends = [[factor * each[end] for each in figures] for end in ("low", "high")]
            axes.fill_between(places, *ends, color=line.get_color(), alpha=0.13, linewidth=0)
            axes.set_xticks(places)
        axes.set_xlabel("round")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", alpha=0.3)
    canvas.axes[0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(path, dpi=150)


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="shapes-tiny")
    parser.add_argument("--num-samples", type=int, default=200, help="rollouts")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--num-inference-steps", type=int, default=2, help="of both; an even number")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--plot", type=Path, help="file of a plot")
    args = parser.parse_args()
    model, steps = WorldModel.from_pretrained(args.model), args.num_inference_steps
    settings = EvalSettings(num_samples=args.num_samples, rounds=args.rounds, seed=args.seed)
    parts = suite_of(model.config).parts(settings, model.config, Album())
    rollouts = next(part for part in parts if part.name == "rollouts")
    rows: dict[str, Any] = {}
    for name in ("chunk", "swin"):
        model.config = replace(model.config, sampler=name, num_inference_steps=steps)
        rows[name] = rollouts.measure(ModelSubject(model, steps))
        for number in range(args.rounds):
            figures = {key: values[number] for key, values in rows[name].items()}
            print(text_table(f"{name}, round {number + 1}", figures), flush=True)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"settings": vars(args), "figures": rows}, indent=1, default=str))
    if args.plot:
        draw(rows, args.plot)


if __name__ == "__main__":
    main()
