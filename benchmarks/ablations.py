"""Ablations: world models with and without each part, trained for the same time.

backbone   the first ten layers of a pretrained language model with LoRA, against the same layers with random
           weights, which are all trained
layers     the first 10 of its layers against all 30
alignment  state alignment before the generator meets the states, against the generator's loss alone
states     predicted states at query positions, against text states: the language model writes what happens
           next, and the generator reads it (as in PAN 2)
queries    a query for every latent cell, against one for 2 x 2 of them (`query_merge`)

The time of a step is measured first, so both models train for `--minutes` on the same machine. They are
judged on sentences in the grammar (held-out combinations of colour, shape and verb) and in other words.

    python benchmarks/ablations.py backbone --minutes 20 --out runs/ablations
"""

import argparse
import copy
import dataclasses
import importlib.resources
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from worldmodel.actions import Action
from worldmodel.eval.action_following import action_following
from worldmodel.eval.judge import Case
from worldmodel.eval.runner import Clips, Images, ModelSubject, Worlds
from worldmodel.eval.table import Table, flat_rows
from worldmodel.models.loading import base_models
from worldmodel.models.loading.location import resolve
from worldmodel.models.world_model import WorldModel
from worldmodel.shapes.evaluation import cases
from worldmodel.shapes.evaluation.paraphrases import kinds, paraphrase_cases

Settings = dict[str, Any]
CALIBRATION_STEPS = 8
LORA = {"lora_rank": 64, "lora_alpha": 64, "lr": 1.0e-3}
PRETRAINED = "smollm2-135m-instruct"
GENERATOR = {"width": 256, "num_layers": 4, "num_heads": 4}
RATES = {"lr": 2.0e-3, "muon_lr": 0.02, "warmup_steps": 20, "constant_fraction": 0.5}
GENERATED = {"lr": 1.0e-3, "muon_lr": 0.01, "warmup_steps": 20, "constant_fraction": 0.5, "ema_decay": 0.99}


@dataclasses.dataclass(frozen=True)
class Variant:
    """One model of an ablation."""

    settings: Settings
    """A config whose stages have no numbers of steps."""
    shares: dict[str, float]
    """Share of the time that each stage gets."""
    writes: bool = False
    """Whether the language model writes the text that the generator reads."""


def shipped() -> Settings:
    """Return the config `shapes_smol` with one stage of alignment and one of states, on single acts.

    The forecast is judged, since no generator is trained. The batch is half as large, so that models with
    slow steps take more than a hundred of them.
    """
    text = importlib.resources.files("worldmodel.configs").joinpath("shapes_smol.yaml").read_text("utf-8")
    settings = yaml.safe_load(text)
    stages = settings["stages"]
    settings["stages"] = {name: stages[name] for name in ("alignment", "single")}
    settings["stages"]["single"] |= {"constant_fraction": 0.5, "batch_size": 24}
    for name in ("generator", "condition_adapter.to_cells"):  # of another kind than the one here
        del settings["init_from"][name]
    settings["model"] |= {"num_inference_steps": 0, "condition_adapter": {}, "generator": GENERATOR}
    return settings


def backbone() -> dict[str, Variant]:
    """Pretrained weights against random ones, which all have to be trained."""
    shares = {"alignment": 0.15, "single": 0.85}
    random = shipped()
    model = random["model"]["backbone"]
    architecture = json.loads((base_folder() / "config.json").read_text())
    kept = ("model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    kept += (
        "vocab_size",
        "max_position_embeddings",
        "rope_parameters",
        "rms_norm_eps",
        "tie_word_embeddings",
    )
    architecture = {key: architecture[key] for key in kept if key in architecture}
    random["tokenizer"] = str(base_folder())
    random["model"]["backbone"] = {"architecture": {**architecture, "num_hidden_layers": model["num_layers"]}}
    random["stages"]["single"]["train"] = {"backbone": {}, "adapters": {}}
    random["stages"]["single"] |= RATES
    return {"pretrained, LoRA": Variant(shipped(), shares), "random, trained whole": Variant(random, shares)}


def layers() -> dict[str, Variant]:
    """10 against 30 layers."""
    deep = shipped()
    deep["model"]["backbone"]["num_layers"] = 30
    shares = {"alignment": 0.15, "single": 0.85}
    return {"10 layers": Variant(shipped(), shares), "30 layers": Variant(deep, shares)}


def alignment() -> dict[str, Variant]:
    """State alignment and then the generator, against both parts trained by the generator's loss at once."""
    settings = small()
    state = {"objective": "state", "train": {"backbone": {}, "adapters": {}}, "batch_size": 48, **RATES}
    joint = {
        "objective": "joint",
        "train": {"backbone": {}, "adapters": {}, "generator": {}},
        "batch_size": 32,
        **GENERATED,
    }
    alone = joint | {"loss_weights": dict.fromkeys(("changed", "unchanged", "named"), 0.0)}
    aligned, direct = copy.deepcopy(settings), copy.deepcopy(settings)
    aligned["stages"] |= {"state": rounds(state), "joint": rounds(joint)}
    direct["stages"] |= {"joint": rounds(alone)}
    return {
        "state alignment first": Variant(aligned, {"alignment": 0.05, "state": 0.5, "joint": 0.45}),
        "generator's loss alone": Variant(direct, {"alignment": 0.05, "joint": 0.95}),
    }


def states() -> dict[str, Variant]:
    """Query states against text states, both with a generator from random weights and no forecast."""
    shared = shipped()
    shared["model"] |= {"num_inference_steps": 8, "condition_adapter": {"forecast": "none"}}
    generator = {"objective": "generator", "batch_size": 32, **GENERATED}
    generator["train"] = {"generator": {}, "state": {}, "condition_adapter": {}}
    queries, written = copy.deepcopy(shared), copy.deepcopy(shared)
    queries["stages"]["generator"] = rounds(generator)
    written["model"]["condition_adapter"] |= {"kind": "text"}
    for name in [name for name in written["init_from"] if name.startswith(("state.", "condition_adapter."))]:
        del written["init_from"][name]
    written["data"]["sources"] = {"written": {"kind": "shapes", "split": "written"}}
    trained = {"backbone": LORA, "vision": {}, "prompt_marker": {}, "answer_marker": {}}
    writing = {"objective": "generator", "train": trained, "batch_size": 32, **RATES}
    written["stages"] = {
        "alignment": written["stages"]["alignment"],
        "writing": rounds(writing) | {"tasks": {"ask": 1.0}},
        "generator": rounds(generator),
    }
    return {
        "query states": Variant(queries, {"alignment": 0.1, "single": 0.55, "generator": 0.35}),
        "text states": Variant(written, {"alignment": 0.1, "writing": 0.55, "generator": 0.35}, writes=True),
    }


def queries() -> dict[str, Variant]:
    """One query per latent cell against one per square of cells, as frames beyond 64 pixels need."""
    settings = small()
    settings["model"] |= {"num_inference_steps": 0, "generator": None, "condition_adapter": {}}
    state = {"objective": "state", "train": {"backbone": {}, "adapters": {}}, "batch_size": 48, **RATES}
    settings["stages"]["state"] = rounds(state)
    merged = copy.deepcopy(settings)
    merged["model"]["query_merge"] = 2
    shares = {"alignment": 0.1, "state": 0.9}
    return {"a query per cell": Variant(settings, shares), "a query per 2 x 2 cells": Variant(merged, shares)}


ABLATIONS: dict[str, Callable[[], dict[str, Variant]]] = {
    "backbone": backbone,
    "layers": layers,
    "alignment": alignment,
    "states": states,
    "queries": queries,
}


def small() -> Settings:
    """Return a world with the backbone of shapes-tiny from random weights, on single acts."""
    return {
        "seed": 0,
        "mesh": {"dp_replicate": 2, "dp_shard": 1},
        "init_from": {"codec": "shapes-tiny"},
        "tokenizer": str(resolve("shapes-tiny") / "backbone"),
        "model": {
            "world": "shapes",
            "num_inference_steps": 8,
            "condition_adapter": {"forecast": "none"},
            "generator": GENERATOR,
        },
        "data": {"sources": {"single": {"kind": "shapes", "split": "single"}}},
        "stages": {
            "alignment": rounds(
                {
                    "objective": "alignment",
                    "train": {"vision": {}},
                    "batch_size": 64,
                    "lr": 3.0e-3,
                    "muon_lr": 0,
                }
            )
        },
    }


def rounds(stage: Settings) -> Settings:
    """Return a stage on single rounds."""
    return {**stage, "rounds": 1, "tasks": {"rounds": 1.0}}


def base_folder() -> Path:
    """Return the folder of the pretrained language model."""
    found = base_models.find(PRETRAINED)
    assert found is not None, "one of the base models that `worldmodel download` knows"
    return found


def train(settings: Settings, run: Path, processes: int, overrides: Sequence[str]) -> Path:
    """Run a config in processes of its own; one that was interrupted goes on."""
    run.mkdir(parents=True, exist_ok=True)
    file = run.with_suffix(".yaml")
    settings = {**settings, "run_dir": str(run), "sample_every": 0}
    settings["mesh"] = {"dp_replicate": processes, "dp_shard": 1}
    file.write_text(yaml.safe_dump(settings, sort_keys=False))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    subprocess.run([*launch, "-m", "worldmodel", "train", str(file), *overrides], check=True)
    return run / "model"


def calibrated(
    variant: Variant, run: Path, minutes: float, processes: int, overrides: Sequence[str]
) -> Settings:
    """Return the config with as many steps as fit into the time, by steps that are timed here."""
    probe = copy.deepcopy(variant.settings)
    for stage in probe["stages"].values():
        stage["steps"] = CALIBRATION_STEPS
    train({**probe, "log_every": CALIBRATION_STEPS // 2}, run, processes, overrides)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    settings = copy.deepcopy(variant.settings)
    for name, stage in settings["stages"].items():
        seconds = [each["step_s"] for each in records if each["stage"] == name and "step_s" in each][-1]
        stage["steps"] = max(1, round(60 * minutes * variant.shares[name] / seconds))
        print(f"{run.name}, {name}: {stage['steps']} steps of {seconds:.2f} s", flush=True)
    return settings


class WritingSubject(ModelSubject):
    """A model that writes what happens next, and generates from what it wrote."""

    def open(self, starts: Images | Clips, seeds: Sequence[int]) -> Worlds:
        """Start a world from every image; only the round after it is played."""
        worlds, subject = super().open(starts, seeds), self

        class Written:
            def step(self, actions: Sequence[Action]) -> Clips:
                seen = [(start[None],) for start in starts]
                texts = subject.read(seen, [action.text or "nothing happens" for action in actions])
                return worlds.step([Action(text or "nothing happens") for text in texts])

        return Written()


def figures(model: Path, writes: bool, num_samples: int, seed: int) -> dict[str, dict[str, Any]]:
    """Judge a model on held-out combinations, and on paraphrases by the words that they use."""
    world = WorldModel.from_pretrained(model).to("cuda" if torch.cuda.is_available() else "cpu")
    subject = (WritingSubject if writes else ModelSubject)(world)

    def measured(chosen: Sequence[Case]) -> dict[str, Any]:
        found = action_following(subject, chosen, cases.judge_frame, seed)
        return {name: found[name] for name in ("named", "strict", "copy_named")}

    said = paraphrase_cases(seed, 2 * num_samples)
    by_kind = {kind: [case for case in said if kind in case.kinds] for kind in kinds()}
    return {
        "held-out combinations": measured(cases.cases_of("held-out", seed, num_samples)),
        **{f"paraphrases: {kind}": measured(chosen) for kind, chosen in by_kind.items() if chosen},
    }


def draw(name: str, runs: dict[str, Path], file: Path) -> None:
    """Draw the losses of both variants over minutes of training."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = {
        label: [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for label, run in runs.items()
    }
    measured = {key for each in records.values() for record in each for key in record}
    losses = ("ask/nll", "rounds/named", "rounds/changed", "rounds/flow")
    shown = [loss for loss in losses if loss in measured]
    figure, axes = pyplot.subplots(
        1, len(shown), figsize=(4 * len(shown), 3.2), layout="constrained", squeeze=False
    )
    for label, each in records.items():
        for axis, loss in zip(axes[0], shown, strict=True):
            found = [record for record in each if loss in record]
            minutes = [(record["time"] - each[0]["time"]) / 60 for record in found]
            if found:
                axis.plot(minutes, [record[loss] for record in found], label=label)
    for axis, loss in zip(axes[0], shown, strict=True):
        axis.set(title=loss.split("/")[1], xlabel="minutes", ylim=(0, None))
    axes[0][-1].legend(fontsize=8)
    figure.suptitle(name)
    figure.savefig(file, dpi=120)


def main() -> None:
    """Train, judge and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=list(ABLATIONS))
    parser.add_argument("--minutes", type=float, default=20, help="training of each model")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of the trainings")
    parser.add_argument("--out", type=Path, default=Path("runs/ablations"))
    parser.add_argument("--num-processes", type=int, default=2)
    parser.add_argument("--num-samples", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()
    variants = ABLATIONS[args.name]()
    runs = {label: args.out / args.name / re.sub(r"\W+", "-", label) for label in variants}
    all_figures: dict[str, Any] = {}
    for label, variant in variants.items():
        run = runs[label]
        plan = run.with_suffix(".json")
        if not plan.is_file():
            plan.parent.mkdir(parents=True, exist_ok=True)
            probe = run.with_name(f"{run.name}-timing")
            settings = calibrated(variant, probe, args.minutes, args.num_processes, args.set)
            plan.write_text(json.dumps(settings, indent=1))
        model = run / "model"
        if not model.is_dir():
            model = train(json.loads(plan.read_text()), run, args.num_processes, args.set)
        all_figures[label] = figures(model, variant.writes, args.num_samples, args.seed)
        for what, each in all_figures[label].items():
            print(f"{what}; {label}", Table("", list(flat_rows(each, {}))).text(), sep="\n", flush=True)
    (args.out / args.name / "figures.json").write_text(json.dumps(all_figures, indent=1))
    draw(args.name, runs, args.out / args.name / "curves.png")
    print(f"wrote {args.out / args.name}")


if __name__ == "__main__":
    main()
