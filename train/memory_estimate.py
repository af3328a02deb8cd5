"""Estimates of the memory of one GPU, in a training step and in a rollout.

The step of the trainer itself is played on tensors without memory (`train.allocations`), on a process group
without other processes, so that all that a run allocates is counted: shards, gathered weights, gradients,
optimizer states, averages, text encoders, codecs and activations.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from worldmodel.config import StageConfig, TrainConfig, WorldModelConfig
from worldmodel.errors import ConfigError
from worldmodel.models.layers import attention
from worldmodel.models.loading import deferred
from worldmodel.models.world_model import WorldModel
from worldmodel.parallel.mesh import Mesh
from worldmodel.rollout.round import SamplingParams, prepare, start_chunks
from worldmodel.rollout.state import WorldState, observed_frames
from worldmodel.train import distributed, optim, start, synthetic
from worldmodel.train.activations import Offload
from worldmodel.train.allocations import Allocations, peak
from worldmodel.train.trainer import Trainer, build_root
from worldmodel.types import Action

SHARDED = ("weights", "gradients", "optimizer", "ema")
"""What FSDP divides over processes."""
DeviceType = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of one GPU at the time of its peak, in bytes."""

    weights: float = 0.0
    """Shards of all weights and buffers, in the data type in which they are stored."""
    gradients: float = 0.0
    optimizer: float = 0.0
    ema: float = 0.0
    gathered: float = 0.0
    """Weights that FSDP has gathered, and their gradients before they are reduced, in the precision of the
    computation."""
    activations: float = 0.0
    """All else: saved activations, temporary tensors, latents, caches of keys and values."""

    @property
    def total(self) -> float:
        """The sum, without libraries and fragmentation."""
        return sum(vars(self).values())


class Step:
    """A training step of a stage that was played once; `estimate` returns its memory for any `dp_shard`.

    Args:
        config: The run; settings that read weights are replaced (`without_weights`).
        name: The stage.
        num_processes: Processes of the run.
        device_type: cuda, or cpu, whose attention and AdamW need other temporary memory.

    Raises:
        ConfigError: the stage, the model or the mesh do not fit each other.
    """

    def __init__(
        self, config: TrainConfig, name: str, num_processes: int = 1, device_type: DeviceType = "cuda"
    ) -> None:
        config = replace(config, model=without_weights(config.model), init_from=None, compile=False)
        stage, self.config = config.stages[name], config
        kernel = "unmasked" if device_type == "cuda" else config.attention
        with fake_processes(num_processes), attention.using(kernel), deferred.empty_parameters():
            mesh = Mesh.build(config.mesh, torch.device("cpu"))
            self.shards = mesh.fsdp.size(-1)
            root = build_root(config, name)
            self.allocations = Allocations()
            with self.allocations:
                self.allocations.hold(root.buffers())
                on_host = self.allocations.uncounted if device_type == "cuda" else None
                offload = Offload(mesh.device, on_host)
                distributed.parallelize(root, config, mesh, offload)
                trained = root.model.named_parameters()
                ema = optim.EMA(trained, stage.ema_decay) if stage.ema_decay else None
                optimizers = optim.build_optimizers(root, stage, device_type)
                trainer = Trainer(config, name, mesh, root, optimizers, ema)
                self._play(trainer)

    def _play(self, trainer: Trainer) -> None:
        """Play one microbatch of every task, with what earlier steps and microbatches have left."""
        allocations, stage, root = self.allocations, trainer.stage, trainer.root
        rows, microbatches = microbatch(stage, trainer.mesh.dp_size)
        for parameter in root.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        states = trainer.optimizers.values()
        for optimizer in states:
            optimizer.step()
            if microbatches == 1:
                optimizer.zero_grad(set_to_none=True)
        gradients = set[int]()

        def before_update() -> None:
            gradients.update(allocations.mark(p.grad for p in root.parameters() if p.grad is not None))

        trainer.before_update = before_update
        self.kinds = {"weights": allocations.mark((*root.parameters(), *root.buffers()))}
        self.kinds["optimizer"] = allocations.mark(tensors(each.state for each in states))
        self.kinds["ema"] = allocations.mark(trainer.ema.weights.values() if trainer.ema else ())
        self.kinds["gradients"] = gradients
        self.since, self.waiting = allocations.time, 0.0
        for task, weight in stage.tasks.items():
            if weight:
                batch = synthetic.batch(trainer.config, trainer.name, task, rows)
                # Microbatches are prepared together and wait for their forward pass.
                others = [trainer.prepare([batch])[0].content for _ in range(microbatches > 1)]
                waiting = sum(
                    each.nbytes for each in tensors(vars(x) for x in others if hasattr(x, "__dict__"))
                )
                self.waiting = max(self.waiting, (microbatches - 1) * waiting)
                del others
                trainer.step([batch], False)

    def estimate(self, shards: int | None = None) -> MemoryEstimate:
        """Return the memory of the step, its weights divided over `shards` processes instead of its own."""
        factor = self.shards / (shards or self.shards)
        held = peak(self.allocations, self.kinds, self.since, dict.fromkeys(SHARDED, factor))
        held["activations"] += self.waiting
        return MemoryEstimate(**held)


def rollout(config: TrainConfig, worlds: int = 1) -> MemoryEstimate:
    """Estimate a round of live worlds at the end of their history: its prefill, and two denoising steps.

    Weights have the data types of the config; keys and values are counted twice, in use and in the cache of
    prefixes.

    Raises:
        ConfigError: the model cannot be built.
    """
    config = replace(config, model=without_weights(config.model), init_from=None)
    allocations = Allocations()
    with attention.using("unmasked"), deferred.empty_parameters(), torch.no_grad():
        built = start.build_model(config).requires_grad_(False).eval()
    with attention.using("unmasked"), allocations, torch.no_grad():
        materialize(built)
        allocations.hold(built.buffers())
        kinds = {"weights": allocations.mark((*built.parameters(), *built.buffers()))}
        play_round(built, worlds)
    return MemoryEstimate(**peak(allocations, kinds, 0, {}))


def play_round(model: WorldModel, worlds: int) -> None:
    """Compute the longest round of worlds, verb by verb."""
    config, seeds = model.config, tuple(range(worlds))
    episode = synthetic.synthetic_episode(config, "rounds", 1)
    frames = torch.from_numpy(episode.observations[0]).expand(worlds, -1, -1, -1, -1).numpy()
    state = WorldState.from_frames(model, frames[:, -observed_frames(config) :], seeds)
    actions = [Action(text=each.text) for each in episode.actions * worlds]
    inputs = prepare(model, [state], actions)
    embeds = torch.stack([torch.cat(history * config.history_rounds) for history in inputs.histories])
    ends, cache = torch.full((worlds, 1), embeds.shape[1]), model.backbone.new_cache()
    states = model.backbone.predict_states(embeds, ends, config.num_queries, cache)[:, 0]
    layers: list[Any] = cache.layers
    kept = [(layer.keys.clone(), layer.values.clone()) for layer in layers]
    condition = model.condition(states, inputs.context, inputs.actions)
    params = SamplingParams(2, config.guidance_scale)
    chunks = start_chunks(model, inputs, condition, params)
    model.decode(torch.cat(list(model.denoise(chunks))), inputs.context)
    del kept


def microbatch(stage: StageConfig, dp_size: int) -> tuple[int, int]:
    """Return the episodes of a microbatch, and the number of microbatches of a process in a step.

    Raises:
        ConfigError: there are more processes than episodes.
    """
    if stage.batch_size < dp_size:
        raise ConfigError(
            f"batch_size is {stage.batch_size}, but mesh.dp_replicate x mesh.dp_shard is {dp_size}; use a "
            "batch_size of at least that."
        )
    episodes = -(-stage.batch_size // dp_size)
    rows = min(stage.microbatch_size or episodes, episodes)
    return rows, -(-episodes // rows)


def without_weights(model: WorldModelConfig) -> WorldModelConfig:
    """Return the config with random weights in place of files, for the components that it describes."""
    changed: dict[str, Any] = {}
    for part in ("codec", "vision", "generator", "backbone"):
        settings: Any = getattr(model, part)
        described = "vocab_size" in settings.architecture if part == "backbone" else settings.architecture
        if described:
            changed[part] = replace(settings, **{"encoder" if part == "vision" else "pretrained": None})
    return replace(model, **changed)


@contextmanager
def fake_processes(count: int) -> Iterator[None]:
    """Initialise a process group of `count` processes, of which only this one exists."""
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def materialize(model: nn.Module) -> None:
    """Replace parameters on the meta device by fake ones; tied weights stay tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in made:
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                    made[parameter] = nn.Parameter(empty, requires_grad=False)
                module._parameters[name] = made[parameter]


def tensors(values: Any) -> list[Tensor]:
    """Return the tensors in a structure."""
    plain = [dict(value) if isinstance(value, Mapping) else value for value in values]
    return [leaf for leaf in tree_leaves(plain) if isinstance(leaf, Tensor)]
