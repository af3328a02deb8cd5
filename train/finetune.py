"""Train a world model, stage after stage: `torchrun --nproc-per-node 2 train/finetune.py CONFIG key=value …`.

The file reads from top to bottom: config, processes, model, then for every stage its objective,
optimizers, loader and loop. A run that is started again continues where its newest checkpoint stands.
"""

import argparse
import json
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

from worldmodel import config as configs
from worldmodel import hub
from worldmodel.config import StageConfig, TrainConfig
from worldmodel.data import loader
from worldmodel.data.sources import ShapesSource
from worldmodel.errors import ConfigError, WorldModelError
from worldmodel.models.world_model import WorldModel
from worldmodel.report import RunLog
from worldmodel.train import checkpoint, distributed, optim
from worldmodel.train.language import build_tokenizer
from worldmodel.train.objectives import OBJECTIVES, Objective


def main(argv: list[str] | None = None) -> int:
    """Run the training that a config describes; returns the exit code."""
    parser = argparse.ArgumentParser(prog="worldmodel train", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", help="a YAML file, or the name of a shipped one (shapes_tiny)")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="e.g. seed=1 stages.state.steps=100"
    )
    args = parser.parse_args(argv)
    try:
        train(configs.load(args.config, args.overrides))
    except WorldModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def train(config: TrainConfig) -> Path:
    """Train every stage and export the model; returns the exported folder."""
    processes = distributed.start()
    torch.set_num_threads(1 if processes.world_size > 1 else torch.get_num_threads())
    torch.manual_seed(config.seed)
    run = Path(config.run_dir)
    model = WorldModel.from_config(config.model, build_tokenizer(config))
    if config.init_from:
        hub.load_weights(model, config.init_from)
    if processes.first:
        run.mkdir(parents=True, exist_ok=True)
        (run / "config.json").write_text(json.dumps(configs.to_dict(config), indent=2), encoding="utf-8")
    stop = StopSignal()
    started = checkpoint.latest(run)
    done = list(config.stages).index(started[1]["stage"]) if started else -1
    for index, (name, stage) in enumerate(config.stages.items()):
        if index < done:
            continue
        resume = started if started and index == done else None
        objective = run_stage(config, name, stage, model, processes, resume, stop)
        del objective
        if stop.asked:
            break
    distributed.barrier(processes)
    distributed.stop(processes)
    if stop.asked:
        return run
    if processes.first:
        hub.save_pretrained(model, run / "model", training=configs.to_dict(config))
    return run / "model"


def run_stage(
    config: TrainConfig,
    name: str,
    stage: StageConfig,
    model: WorldModel,
    processes: distributed.Processes,
    resume: tuple[Path, dict] | None,
    stop: "StopSignal",
) -> Objective:
    """Train one stage from its start or from a checkpoint."""
    if stage.objective not in OBJECTIVES:
        raise ConfigError(
            f"stages.{name}.objective is {stage.objective!r}; use one of {', '.join(OBJECTIVES)}."
        )
    torch.manual_seed(config.seed)
    objective = OBJECTIVES[stage.objective](model)
    both = nn.ModuleDict({"model": model, "objective": objective})
    freeze(model, stage.train)
    optimizers = optim.build(both, stage)
    first_step = 0
    if resume:
        folder, state = resume
        ended = state["end_of_stage"]
        checkpoint.restore(folder, model if ended else both, None if ended else optimizers)
        first_step = stage.steps if ended else state["step"]
    distributed.broadcast(both, processes)
    if first_step >= stage.steps:
        return objective
    log = RunLog(Path(config.run_dir), name, stage.steps, first_step, processes.first, config.log_every)
    log.parameters(model)
    stream = loader.batches(
        ShapesSource(), stage, config.seed, first_step, processes.rank, processes.world_size
    )
    noise = torch.Generator()
    batch = None
    for batch in stream:
        began = time.perf_counter()
        step = batch.step
        noise.manual_seed((config.seed * 1_000_003 + step) * 64 + processes.rank)
        optim.set_rates(optimizers, stage, step)
        with torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bf16"):
            losses = objective(model, batch, noise)
        losses["loss"].backward()
        distributed.average_gradients(both, processes)
        norm = nn.utils.clip_grad_norm_([p for p in both.parameters() if p.requires_grad], 1.0)
        if not torch.isfinite(norm):
            raise ConfigError(
                f"The gradient of stage {name!r} is not finite at step {step} ({batch.episodes[0].name} …); "
                f"lower stages.{name}.lr or muon_lr and start again: the last checkpoint is kept."
            )
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        log.step(step, batch.task, losses, float(norm), len(batch.episodes) * processes.world_size, began)
        asked = stop.agreed(processes)
        if (
            processes.first
            and step + 1 < stage.steps
            and ((step + 1) % config.checkpoint_every == 0 or asked)
        ):
            checkpoint.save(Path(config.run_dir), name, step + 1, both, optimizers, keep=False)
        if asked:
            log.close()
            return objective
    assert batch is not None
    objective.finish(model, batch)
    distributed.broadcast(model, processes)
    log.close()
    if processes.first:
        checkpoint.save(Path(config.run_dir), name, stage.steps, model, {}, keep=True)
    return objective


def freeze(model: WorldModel, trained: tuple[str, ...]) -> None:
    """Let only parameters below the named components move.

    Raises:
        ConfigError: a name is not a component of the model.
    """
    names = {name.split(".")[0] for name, _ in model.named_parameters()}
    unknown = set(trained) - names
    if unknown:
        raise ConfigError(f"train names {sorted(unknown)[0]!r}; components are {', '.join(sorted(names))}.")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.split(".")[0] in trained)


class StopSignal:
    """Remembers that SIGTERM or Ctrl-C asked the run to save and leave."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: object) -> None:
        self.asked = True

    def agreed(self, processes: distributed.Processes) -> bool:
        """Tell whether any process was asked, the same answer on all."""
        if processes.world_size > 1:
            flag = torch.tensor(int(self.asked))
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
            self.asked = bool(flag)
        return self.asked


if __name__ == "__main__":
    sys.exit(main())
