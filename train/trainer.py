"""What moves in a stage, and one step of it: the same step on any mesh."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from worldmodel import hub
from worldmodel.config import StageConfig, TrainConfig
from worldmodel.data.loader import Batch
from worldmodel.errors import ConfigError
from worldmodel.models import lora
from worldmodel.models.loading import deferred
from worldmodel.models.world_model import WorldModel
from worldmodel.parallel.mesh import Mesh
from worldmodel.train import distributed, optim
from worldmodel.train.checkpoint import export
from worldmodel.train.checkpoint.checkpointer import (
    Checkpoints,
    load,
    load_optimizer_state,
    module_state,
    optimizer_state,
)
from worldmodel.train.checkpoint.storage import State
from worldmodel.train.distributed import Root
from worldmodel.train.objectives.base import Losses, Prepared, SampleRng
from worldmodel.train.objectives.registry import OBJECTIVES
from worldmodel.train.tokenizer import build_tokenizer
from worldmodel.train.watchdog import check_finite, check_same


@dataclass(frozen=True)
class Progress:
    """Where a run stands, as its checkpoints remember it; all chance and data of a step follow from it."""

    stage: str
    step: int
    """Steps of the stage that are done."""
    ended: bool
    train: dict[str, Any]
    """The stage's `train`, from which the additions of LoRA are made again."""
    seed: int
    bad: dict[str, int] = field(default_factory=dict)
    """Clips of the stage that could not be used so far, by source."""

    @classmethod
    def of(cls, checkpoint: Path | None) -> "Progress | None":
        """Read where a checkpoint stands."""
        return cls(**load(checkpoint, {})) if checkpoint else None


@dataclass(frozen=True)
class Outcome:
    """What one step came to, over all processes."""

    terms: dict[str, float]
    amounts: dict[str, float]
    stop: bool
    """Whether some process was asked to stop."""
    bad: dict[str, int]
    """Clips that could not be used in the step, by source."""
    prepared: list[Prepared]


@dataclass
class Learner:
    """Weights, what the optimizers remember, and the average of the weights."""

    config: TrainConfig
    name: str
    mesh: Mesh
    root: Root
    optimizers: optim.Optimizers
    average: optim.Average | None

    @property
    def stage(self) -> StageConfig:
        """The settings of the stage."""
        return self.config.stages[self.name]

    @classmethod
    def start(
        cls, config: TrainConfig, name: str, mesh: Mesh, newest: Path | None
    ) -> tuple["Learner", Progress]:
        """Begin a stage, or go on where its newest checkpoint stands; returns what is done of it."""
        at, stage = Progress.of(newest), config.stages[name]
        resumed = at is not None and at.stage == name
        model = start_model(config)
        lora.add(model, stage.train)
        torch.manual_seed(config.seed)
        root = Root(model, OBJECTIVES[stage.objective](model))
        freeze(model, stage)
        distributed.spread(root, config, mesh)
        if newest is None:
            deferred.read(root)
        elif not resumed:
            export.fill(root.model, newest)
        average = optim.Average(root.model.named_parameters(), stage.ema_decay) if stage.ema_decay else None
        learner = cls(config, name, mesh, root, optim.build(root, stage), average)
        if not resumed:
            return learner, Progress(name, 0, False, {}, config.seed)
        assert newest and at
        if at.step >= stage.steps:
            raise ConfigError(
                f"The run stands at step {at.step} of {name}; raise stages.{name}.steps above {stage.steps}."
            )
        load(newest, learner._weights())
        load_optimizer_state(newest, learner.optimizers, root)
        return learner, at

    def save(self, checkpoints: Checkpoints, step: int, bad: dict[str, int], ended: bool = False) -> None:
        """Write a checkpoint in the background; of the end of a stage, only the model."""
        train = {name: vars(how) for name, how in self.stage.train.items()}
        progress = Progress(self.name, step, ended, train, self.config.seed, bad)
        state = module_state(self.root.model, "model")
        if not ended:
            state = self._weights() | optimizer_state(self.optimizers, self.root)
        checkpoints.save(f"{self.name}-{step}", state, vars(progress), lasting=ended)

    def _weights(self) -> State:
        state = module_state(self.root.model, "model") | module_state(self.root.objective, "objective")
        averages = self.average.weights if self.average else {}
        return state | {f"ema.{name}": tensor for name, tensor in averages.items()}

    def step(self, batches: Sequence[Batch], stop: bool, left_out: Sequence[tuple[str, str]] = ()) -> Outcome:
        """Do one step on this process's microbatches of it.

        Args:
            batches: The same on processes that share sequences.
            stop: Whether this process was asked to stop.
            left_out: Source of each clip that could not be used in the step, and why.

        Raises:
            ConfigError: processes that share sequences have other batches, or the gradient is not finite; no
                weight has moved then, on any process.
        """
        step = batches[0].step
        check_same(batches, left_out, self.mesh)
        optim.set_rates(self.optimizers, self.stage, step)
        prepared = self.prepare(batches)
        totals, most, bad, stop = self._agree(prepared, Counter(source for source, _ in left_out), stop)
        sums: Losses = {}
        losses = []
        for index in range(most):
            spare = index >= len(prepared)  # others have more: gradients are exchanged in the same places
            each = prepared[min(index, len(prepared) - 1)]
            distributed.accumulate(self.root, last=index == most - 1)
            with self._autocast():
                made = self.root(lambda each=each: self.root.objective(self.root.model, each))
            loss = self._loss(made, totals)
            losses.append(loss.detach())
            (loss * (0.0 if spare else self.mesh.dp_size)).backward()
            for name in {} if spare else made:
                sums[name] = sums.get(name, 0.0) + made[name].detach()
        trained = [p for p in self.root.parameters() if p.grad is not None]
        norm = distributed.whole(nn.utils.clip_grad_norm_(trained, self.stage.max_gradient_norm))
        check_finite(norm, self.name, step, [each.batch for each in prepared], self.mesh, losses)
        for optimizer in self.optimizers.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if self.average:
            self.average.update(step)
        return Outcome(*self._report(prepared, sums, totals, float(norm)), stop, bad, prepared)

    def prepare(self, batches: Sequence[Batch]) -> list[Prepared]:
        """Run the frozen parts over microbatches."""
        seed, device = self.config.seed, self.mesh.device
        objective, model = self.root.objective, self.root.model

        def work() -> list[Prepared]:
            keys = [[(seed, index) for index in batch.indices] for batch in batches]
            chances = [SampleRng(each, device, model.dtype) for each in keys]
            return [objective.prepare(model, *each) for each in zip(batches, chances, strict=True)]

        with torch.no_grad(), self._autocast():
            return self.root(work)

    def pictures(self, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """Return truth and what the model makes of a microbatch, `[b, t, 3, h, w]`, if that can be seen."""
        (prepared,) = self.prepare([batch])
        with torch.no_grad(), self._autocast():
            return self.root(lambda: self.root.objective.pictures(self.root.model, prepared))

    def finish(self, prepared: Sequence[Prepared]) -> None:
        """End the stage after its last step."""
        if self.average:
            self.average.swap()
        with torch.no_grad():
            self.root(lambda: self.root.objective.finish(self.root.model, prepared, self.mesh.sum))

    def _agree(
        self, prepared: Sequence[Prepared], bad: Counter[str], stop: bool
    ) -> tuple[dict[str, float], int, dict[str, int], bool]:
        """Add up counts and bad clips of all processes; tell the most microbatches of any, and if to stop."""
        mesh, names, sources = self.mesh, sorted(prepared[0].counts), sorted(self.config.data.sources)
        counts = [sum(each.counts[name] for each in prepared) for name in names]
        microbatches = [len(prepared) * (rank == mesh.dp_rank) for rank in range(mesh.dp_size)]
        own = [*counts, *(bad[source] for source in sources), *microbatches, stop]
        vector = torch.tensor(own, dtype=torch.float64, device=mesh.device)
        if mesh.sequence.rank:  # processes that share a sequence hold the same counts
            vector[:-1] = 0
        dist.all_reduce(vector)
        values = vector.tolist()
        totals, rest = dict(zip(names, values, strict=False)), values[len(names) :]
        left_out = {source: int(count) for source, count in zip(sources, rest, strict=False) if count}
        return totals, int(max(rest[len(sources) : -1])), left_out, rest[-1] > 0

    def _loss(self, sums: Losses, totals: dict[str, float]) -> Tensor:
        """Weigh the terms, each divided by its count over all processes."""
        weights = self.root.objective.weights
        terms = [weights[name] / max(totals[name], 1.0) * sums[name] for name in sums if name in weights]
        return torch.stack([term.reshape(()) for term in terms]).sum()

    def _report(
        self, prepared: Sequence[Prepared], sums: Losses, totals: dict[str, float], norm: float
    ) -> tuple[dict[str, float], dict[str, float]]:
        names = sorted(sums)
        samples = sum(len(each.batch.episodes) for each in prepared)
        amounts = [float(samples), float(sum(each.tokens for each in prepared))]
        vector = torch.stack([sums[name].double().reshape(()) for name in names])
        vector = self.mesh.sum(torch.cat([vector, vector.new_tensor(amounts)])).tolist()
        means = {name: value / max(totals[name], 1.0) for name, value in zip(names, vector, strict=False)}
        weights = self.root.objective.weights
        loss = sum(weights[name] * value for name, value in means.items() if name in weights)
        terms = {"loss": loss, **means, "gradient_norm": norm}
        return terms, {"samples": vector[-2], "tokens": vector[-1]}

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.mesh.device.type, torch.bfloat16, enabled=self.config.precision == "bf16")


def start_model(config: TrainConfig) -> WorldModel:
    """Build the model that a run starts from, that of `init_from` or a random one.

    What comes from files of other libraries is left there, for `deferred.read`.
    """
    torch.manual_seed(config.seed)
    with deferred.weights():
        model = WorldModel.from_config(config.model, build_tokenizer(config))
    if config.init_from:
        hub.load_weights(model, config.init_from)
    return model


def freeze(model: WorldModel, stage: StageConfig) -> None:
    """Let only parameters below the named components move; of those learned by LoRA, only its additions.

    A component may be a part of one (`vision.adapter`); the longest name that fits a parameter decides. A
    generator's encoders of text and of pictures give the spaces that it was trained in, so they never move.

    Raises:
        ConfigError: a name is not a component of the model.
    """
    names = [name for name, _ in model.named_parameters()]
    for given in stage.train:
        if not any(f"{name}.".startswith(f"{given}.") for name in names):
            tops = sorted({name.split(".")[0] for name in names})
            raise ConfigError(f"train names {given!r}; components are {', '.join(tops)}, or a part of one.")
    for name, parameter in model.named_parameters():
        how = optim.component(name, stage.train)
        moves = how is not None and (not how.lora_rank or ".lora_" in name)
        parameter.requires_grad_(moves and not any(part in name for part in lora.FIXED))
