"""The trainer of one stage, and its training step, which gives the same result on any mesh."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from worldmodel.batch import to_device
from worldmodel.config import StageConfig, TrainConfig
from worldmodel.data.loader import Batch, Bookmarks
from worldmodel.data.sequence_loader import SequenceLoader
from worldmodel.errors import ConfigError
from worldmodel.models import lora
from worldmodel.models.loading import deferred
from worldmodel.models.world_model import WorldModel
from worldmodel.parallel.mesh import Mesh
from worldmodel.train import distributed, start
from worldmodel.train.checkpoint import export
from worldmodel.train.checkpoint.checkpointer import (
    Checkpoints,
    load,
    load_optimizer_state,
    module_state,
    optimizer_state,
)
from worldmodel.train.checkpoint.manifest import Manifest, Origin, digest_of
from worldmodel.train.checkpoint.storage import State
from worldmodel.train.components import check_components, is_trained
from worldmodel.train.diagnostics.throughput import Work, faster_precision
from worldmodel.train.diagnostics.timing import Phases
from worldmodel.train.diagnostics.watchdog import check_finite
from worldmodel.train.distributed import Root
from worldmodel.train.episodes import text_states
from worldmodel.train.objectives.base import Losses, SampleRng, StageBatch
from worldmodel.train.objectives.registry import objective_class
from worldmodel.train.optim.average import EMA, WeightCopy
from worldmodel.train.optim.optimizers import Optimizers, build_optimizers, trained_parameters
from worldmodel.train.optim.schedule import set_learning_rates

T = TypeVar("T")


@dataclass(frozen=True)
class Progress:
    """The position of a run, saved with its checkpoints; data and random numbers are functions of it."""

    stage: str
    step: int
    """Completed steps of the stage."""
    ended: bool
    train: dict[str, Any]
    """The stage's `train`, from which LoRA modules are built again."""
    seed: int
    precision: Literal["bf16", "fp32"]
    """Precision of the run."""
    bad: dict[str, int] = field(default_factory=dict)
    """Unreadable clips of the stage so far, by source."""
    bookmarks: Bookmarks = field(default_factory=dict)
    """Positions in the streams of sources, from which a resumed run reads on."""
    validation_loss: float | None = None
    """Loss on held-out episodes with these weights, or what else chooses the best, if it was computed."""

    @classmethod
    def of(cls, checkpoint: Path | None) -> "Progress | None":
        """Read the progress that a checkpoint was saved with."""
        return cls(**load(checkpoint, {})) if checkpoint else None

    @classmethod
    def within(cls, checkpoint: Path | None, stage: str) -> "Progress | None":
        """Read the progress of a checkpoint, if it is of that stage."""
        progress = cls.of(checkpoint)
        return progress if progress and progress.stage == stage else None


@dataclass(frozen=True)
class StepResult:
    """The result of one step, over all processes."""

    losses: dict[str, float]
    processed: dict[str, float]
    """Samples and tokens."""
    flops: float
    """FLOPs in the layers of the backbone and of the generator; see `throughput.Work`."""
    stop: bool
    """Whether any process was asked to stop."""


@dataclass
class Trainer:
    """Weights of the model and the objective, optimizers, and the average of the weights."""

    config: TrainConfig
    name: str
    mesh: Mesh
    root: Root
    optimizers: Optimizers
    ema: EMA | None
    origin: Origin = Origin()  # noqa: RUF009 -- it never changes
    """Location of the weights that checkpoints of the stage do not hold."""
    random: frozenset[str] = frozenset()
    """Names of the frozen weights that checkpoints hold, because nothing else does."""
    teacher: WeightCopy | None = None
    """The weights with which the stage began, if its objective learns from them."""
    before_update: Callable[[], None] = lambda: None
    """Waits until the newest checkpoint has copied the weights."""
    work: Work = field(init=False)
    phases: Phases = field(init=False)
    """Times of the phases of `step`: prepare, forward, backward, optimizer, and other after that."""

    def __post_init__(self) -> None:
        self.work = Work(self.root.model, self.stage)
        self.phases = Phases(self.mesh.device)

    @property
    def stage(self) -> StageConfig:
        """The settings of the stage."""
        return self.config.stages[self.name]

    @classmethod
    def start(
        cls, config: TrainConfig, name: str, mesh: Mesh, newest: Path | None
    ) -> tuple["Trainer", Progress]:
        """Begin a stage, or resume it from its newest checkpoint; returns the progress in it, too."""
        progress = Progress.of(newest)
        stage = config.stages[name]
        resumed = progress is not None and progress.stage == name
        if config.precision == "auto":
            # A resumed run keeps its precision, and all processes take what the first one measured: they
            # could differ, and then compute different steps.
            chosen = progress.precision if progress else mesh.all_gather(faster_precision(mesh.device))[0]
            config = replace(config, precision=chosen)

        # Weights in files are not read yet: parameters are on the meta device until each process knows its
        # shard, so that no process ever holds the whole model.
        root = build_root(config, name)
        model = root.model
        for size in (*config.data.buckets, config.model.codec.image_size):  # or it is an error now
            model.resize(size)
        files = start.Files.of(model, config)
        origin = Origin(files=files.digests(mesh))
        if newest:
            origin = Origin(files=start.check_files(newest, origin.files))
            # Within a stage the base is that of the stage; a new stage builds on the end of the one before.
            base = Manifest.read(newest).origin.base if resumed else {newest.name: digest_of(newest)}
            origin = replace(origin, base=base)
        distributed.parallelize(root, config, mesh)
        deferred.load_shards(root)
        for folder in origin.base:
            assert newest
            export.load_weights(model, newest.parent / folder, files.names)

        # Random weights are in no file, so checkpoints must hold them even where they are frozen.
        random = frozenset() if origin.base else model.state_dict().keys() - files.names
        # Copies and optimizers come last: they refer to the sharded parameters.
        ema = EMA(model.named_parameters(), stage.ema_decay) if stage.ema_decay else None
        optimizers = build_optimizers(root, stage, distributed.PRECISIONS[config.precision])
        teacher = WeightCopy(model.named_parameters()) if root.objective.has_teacher else None
        trainer = cls(config, name, mesh, root, optimizers, ema, origin, frozenset(random), teacher)
        if not resumed:
            assert config.precision != "auto"
            return trainer, Progress(name, 0, False, {}, config.seed, config.precision)
        assert newest and progress
        if progress.step >= stage.steps:
            raise ConfigError(
                f"The run is at step {progress.step} of stage {name}; raise stages.{name}.steps above "
                f"{stage.steps}."
            )
        load(newest, trainer._weights())
        load_optimizer_state(newest, trainer.optimizers, root)
        return trainer, progress

    def save(
        self,
        checkpoints: Checkpoints,
        step: int,
        stream: SequenceLoader,
        ended: bool = False,
        validation_loss: float | None = None,
    ) -> Future[Path]:
        """Write a checkpoint in the background; at the end of a stage, only the model."""
        train = {name: vars(settings) for name, settings in self.stage.train.items()}
        bookmarks: Bookmarks = {}
        for own in self.mesh.all_gather(stream.bookmarks()):
            for source, marks in own.items():
                bookmarks.setdefault(source, {}).update(marks)
        assert self.config.precision != "auto", "start chooses one"
        progress = Progress(
            self.name,
            step,
            ended,
            train,
            self.config.seed,
            self.config.precision,
            dict(stream.bad),
            bookmarks,
            validation_loss,
        )
        state = self._held() if ended else self._weights() | optimizer_state(self.optimizers, self.root)
        saved = checkpoints.save(f"{self.name}-{step}", state, vars(progress), ended, self.origin)
        self.before_update = checkpoints.wait_until_staged
        return saved

    def _weights(self) -> State:
        state = self._held() | module_state(self.root.objective, "objective")
        for kind, copied in (("ema", self.ema), ("teacher", self.teacher)):
            state |= {f"{kind}.{name}": tensor for name, tensor in (copied.weights if copied else {}).items()}
        return state

    def _held(self) -> State:
        """Return the weights of the model that checkpoints hold: all that are not in files or a base."""
        trained = {name for name, parameter in self.root.model.named_parameters() if parameter.requires_grad}
        # Buffers of our own are small, and an objective may set them.
        buffers = {name for name, _ in self.root.model.codec.named_buffers(prefix="codec")}
        held = {f"model.{name}" for name in trained | self.random | buffers}
        return {name: x for name, x in module_state(self.root.model, "model").items() if name in held}

    def step(self, batches: Sequence[Batch], stop: bool) -> StepResult:
        """Run one step on this process's microbatches of it.

        Args:
            batches: The same on processes that share sequences.
            stop: Whether this process was asked to stop.

        Raises:
            ConfigError: the gradient is not finite; no weight has changed then, on any process.
        """
        # All processes run the same collectives in the same order, whatever samples they have: the numbers of
        # microbatches are agreed on, and losses and counts travel as one vector whose order is sorted.
        step = batches[0].step
        self.phases.begin("prepare")
        set_learning_rates(self.optimizers, self.stage, step)
        prepared = self.prepare(batches)
        most, stopped = self.root.model.agreement.most(len(prepared), int(stop))
        counts = self._counts(prepared)
        sums: Losses = {}
        totals = []
        for index in range(most):
            spare = index >= len(prepared)  # repeated without effect: all processes run equally many
            inputs = prepared[min(index, len(prepared) - 1)]
            self.phases.begin("forward")
            with self._precision():
                losses = self.root(inputs)
            total = self._total_loss(losses, counts)
            self._check_trains(total, batches[0].task)
            totals.append(total.detach())
            self.phases.begin("backward")
            # FSDP averages gradients over processes, but losses are already divided by counts over all of
            # them: times their number, the average is the sum that one process would compute.
            (total * (0.0 if spare else self.mesh.dp_size)).backward()
            for name in {} if spare else losses:
                sums[name] = sums.get(name, 0.0) + losses[name].detach()
        self.phases.begin("optimizer")
        trained = [p for p in self.root.parameters() if p.grad is not None]
        logged = (step + 1) % self.config.log_every == 0
        norms = self._norms() if logged else {}  # of gradients that are not yet clipped
        norms["gradient_norm"] = distributed.full_tensor(
            nn.utils.clip_grad_norm_(trained, self.stage.max_gradient_norm)
        )
        # The only time that a step waits for the device; what follows it on the host runs ahead of it again.
        report = self._report(prepared, sums, counts, norms)
        norm = torch.tensor(report[0]["gradient_norm"])
        check_finite(norm, self.name, step, [each.batch for each in prepared], self.mesh, totals)
        self.before_update()  # a checkpoint may still be copying the weights
        for optimizer in self.optimizers.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if self.ema:
            self.ema.update(step)
        self.phases.begin("other")
        return StepResult(*report, bool(stopped))

    def _norms(self) -> dict[str, Tensor]:
        """Return the norm of the gradient of each part of the model; a collective call."""
        parts: dict[str, list[Tensor]] = {}
        for name, parameter in trained_parameters(self.root):
            if parameter.grad is not None:
                parts.setdefault(name.split(".")[0], []).append(parameter.grad)
        return {
            f"gradient_norm_{part}": distributed.full_tensor(nn.utils.get_total_norm(gradients))
            for part, gradients in parts.items()
        }

    def prepare(self, batches: Sequence[Batch]) -> list[StageBatch]:
        """Run the frozen parts over microbatches."""
        seed = self.config.seed
        device = self.mesh.device
        objective = self.root.objective
        model = self.root.model
        model.generator.text_states = text_states(batches)
        model.resize(batches[0].image_size or self.config.model.codec.image_size)

        def work() -> list[StageBatch]:
            # Seeds depend on the global indices of samples alone, so that any process draws the same numbers.
            keys = [[(seed, index) for index in batch.indices] for batch in batches]
            rngs = [SampleRng(each, device, model.dtype) for each in keys]
            made = []
            for index, (batch, rng) in enumerate(zip(batches, rngs, strict=True)):
                for frames in (each.frames for each in batches[index : index + 2]):
                    if frames is not None:  # the next microbatch's are copied meanwhile
                        frames.start()
                made.append(objective.prepare(model, batch, rng))
            return made

        prepared = self.without_gradients(work)
        if self.teacher is None:
            return prepared
        with self.teacher.in_place():
            return self.without_gradients(lambda: [objective.teach(model, each) for each in prepared])

    def preview(self, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """Return true and predicted videos of a microbatch, `[b, t, 3, h, w]`, if there are any."""
        (inputs,) = self.prepare([batch])
        return self.without_gradients(lambda: self.root.objective.preview(self.root.model, inputs))

    def evaluate(self, batches: Sequence[Batch]) -> tuple[dict[str, float], dict[str, float]]:
        """Return the sums of the losses of a step over all processes, and their counts, without training."""
        prepared = self.prepare(batches)
        (most,) = self.root.model.agreement.most(len(prepared))
        counts = self._counts(prepared)
        sums: Losses = {}
        for index in range(most):
            inputs = prepared[min(index, len(prepared) - 1)]
            losses = self.without_gradients(
                lambda inputs=inputs: self.root.objective(self.root.model, inputs)
            )
            for name in losses if index < len(prepared) else {}:
                sums[name] = sums.get(name, 0.0) + losses[name]
        names = sorted(sums)
        vector = self.mesh.sum(self._vector([sums[name] for name in names]))
        values = torch.cat([vector, torch.stack([counts[name] for name in names])]).tolist()
        return (
            dict(zip(names, values[: len(names)], strict=True)),
            dict(zip(names, values[len(names) :], strict=True)),
        )

    def finish(self, batches: Sequence[Batch]) -> None:
        """End the stage after its last step, whose microbatches are `batches`."""
        self.before_update()
        if self.ema:
            self.ema.swap()
        self.without_gradients(lambda: self.root.objective.finish(self.root.model, batches, self.mesh.sum))

    def _counts(self, prepared: Sequence[StageBatch]) -> dict[str, Tensor]:
        """Return the counts of all processes, on the device."""
        names = sorted(prepared[0].counts)
        vector = self._vector([sum(each.counts[name] for each in prepared) for name in names])
        # Processes that share a sequence hold the same counts, which must be added up once.
        if self.mesh.sequence.rank:
            vector.zero_()
        dist.all_reduce(vector)
        return dict(zip(names, vector.unbind(), strict=True))

    def _vector(self, values: Sequence[float | Tensor]) -> Tensor:
        """Return numbers, and tensors on the device, as a vector in fp64 on the device."""
        # The host's numbers are copied to the device together, and tensors there are never read by the host.
        known = [0.0 if isinstance(value, Tensor) else value for value in values]
        numbers = to_device(torch.tensor(known, dtype=torch.float64), self.mesh.device)
        return torch.stack(
            [
                value.double().reshape(()) if isinstance(value, Tensor) else number
                for value, number in zip(values, numbers, strict=True)
            ]
        )

    def _total_loss(self, losses: Losses, counts: dict[str, Tensor]) -> Tensor:
        """Add up the weighted losses, each divided by its count over all processes."""
        weights = self.root.objective.weights
        terms = [
            (weights[name] / counts[name].clamp(min=1.0)).to(losses[name].dtype) * losses[name]
            for name in losses
            if name in weights
        ]
        return torch.stack([term.reshape(()) for term in terms]).sum()

    def _check_trains(self, total: Tensor, task: str) -> None:
        """Check that a loss depends on what the stage trains; the same on all processes.

        Raises:
            ConfigError: it does not.
        """
        if not total.requires_grad:
            raise ConfigError(
                f"The loss of the task {task} depends on nothing that stages.{self.name}.train names "
                f"({', '.join(self.stage.train)}); add a component, or leave out the task."
            )

    def _report(
        self,
        prepared: Sequence[StageBatch],
        sums: Losses,
        counts: dict[str, Tensor],
        norms: Mapping[str, Tensor],
    ) -> tuple[dict[str, float], dict[str, float], float]:
        """Return mean losses over all processes, how many samples and tokens they processed, and FLOPs."""
        names = sorted(sums)
        samples = sum(len(each.batch.episodes) for each in prepared)
        tokens = sum(each.tokens for each in prepared)
        flops = sum(map(self.work.of, prepared))
        summed = self.mesh.sum(self._vector([*(sums[name] for name in names), samples, tokens, flops]))
        # One copy to the host for everything, since each of them waits for the device.
        others = self._vector([*(counts[name] for name in names), *norms.values()])
        values = torch.cat([summed, others]).tolist()
        totals = values[: len(names)]
        amounts = values[len(names) : len(names) + 3]
        divisors = values[len(names) + 3 :]
        losses = self.mean_losses(
            dict(zip(names, totals, strict=True)), dict(zip(names, divisors, strict=False))
        )
        losses |= dict(zip(norms, values[-len(norms) :], strict=True))
        return losses, {"samples": amounts[0], "tokens": amounts[1]}, amounts[2]

    def mean_losses(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """Divide losses by their counts; `loss` is the weighted total."""
        means = {name: total / max(counts[name], 1.0) for name, total in sums.items()}
        weights = self.root.objective.weights
        total = sum(weights[name] * value for name, value in means.items() if name in weights)
        return {"loss": total, **means}

    def without_gradients(self, work: Callable[[], T]) -> T:
        """Call a function with gathered weights, in the precision of the run; every process must do so."""
        with torch.no_grad(), self._precision():
            result = self.root.gathered(work)
        distributed.free_gathered(self.root)
        return result

    def _precision(self) -> torch.autocast:
        return distributed.compute_precision(self.config.precision, self.mesh.device)


def build_root(config: TrainConfig, name: str) -> Root:
    """Build the model of a stage with LoRA and the heads of its objective, frozen where it is not trained.

    Raises:
        ConfigError: the stage does not fit the model.
    """
    stage = config.stages[name]
    model = start.build_model(config)
    check_components(model, stage.train)
    lora.add(model, stage.train)
    # Again, so that the heads do not depend on how many random weights the model has.
    torch.manual_seed(config.seed)
    with deferred.loading():
        objective = objective_class(stage)(model, **stage.objective_args)
        if unknown := stage.loss_weights.keys() - objective.weights.keys():
            raise ConfigError(
                f"stages.{name}.loss_weights: the objective {stage.objective} has no loss {min(unknown)!r}; "
                f"its losses are {', '.join(objective.weights)}."
            )
        objective.weights = {**objective.weights, **stage.loss_weights}
        root = Root(model, objective)
    freeze(model, stage)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"stages.{name}.train ({', '.join(stage.train) or 'empty'}) names no weight that can be trained; "
            "give components, for example {backbone: {}, adapters: {}}."
        )
    return root


def freeze(model: WorldModel, stage: StageConfig) -> None:
    """Set which parameters require gradients: those that the stage trains."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained(name, stage.train))
