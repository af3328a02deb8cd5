"""Estimates of the memory of one GPU in a training step, without allocating weights.

Shards, gradients and states of optimizers are counted; activations and gathered weights are those of a step
of two layers of every stack, played without memory (`play`), and of as many more as a stack has.
"""

from dataclasses import dataclass

from worldmodel.config import StageConfig, TrainConfig
from worldmodel.errors import ConfigError
from worldmodel.parallel.mesh import data_parallel
from worldmodel.train.memory.play import DeviceType, Played, play
from worldmodel.train.objectives.registry import objective_class


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of one GPU at the time of its peak, in bytes."""

    weights: float = 0.0
    """Shards of all weights and buffers, in the data type in which they are stored."""
    gradients: float = 0.0
    optimizer: float = 0.0
    copies: float = 0.0
    """The average of the trained weights, and the weights of a teacher."""
    gathered: float = 0.0
    """Weights that FSDP has gathered, and gradients of a layer before they are reduced."""
    activations: float = 0.0
    """All else: saved activations, temporary tensors, latents."""

    @property
    def total(self) -> float:
        """The sum, without libraries and fragmentation."""
        return sum(vars(self).values())


class StepEstimator:
    """Estimates the steps of one stage on any number of GPUs; the step is played once for a microbatch size.

    Args:
        config: The run.
        name: The stage.
        device_type: cuda, or cpu, whose attention needs other memory.
    """

    def __init__(self, config: TrainConfig, name: str, device_type: DeviceType = "cuda") -> None:
        self.config = config
        self.name = name
        self.device_type: DeviceType = device_type
        self.played: dict[int, Played] = {}

    def estimate(self, num_gpus: int) -> MemoryEstimate:
        """Return the memory of one of `num_gpus` GPUs at the peak of a step.

        Raises:
            ConfigError: the model cannot be built, or the stage or the mesh do not fit the number of GPUs.
        """
        stage = self.config.stages[self.name]
        mesh = self.config.mesh
        replicate, shard = data_parallel(mesh, num_gpus)
        rows, count = microbatches(stage, replicate * shard)
        if rows not in self.played:
            self.played[rows] = play(self.config, self.name, rows, self.device_type)
        played = self.played[rows]
        sequence = mesh.cp * mesh.sp
        weights = played.weights
        shards = shard * sequence
        gradients = weights.trained / shards
        static = {
            "weights": weights.held / shards,
            "optimizer": weights.optimizer / shards,
            "copies": weights.averaged / shards * self.copies,
        }
        candidates = []  # while optimizers step
        for step in weights.optimizers:
            candidates.append((step.gradients / shards, 0.0, step.temporary / shards + step.whole))
        for each in played.moments:
            kept = gradients if count > 1 and each.prepared else each.gradients / shards
            activations = (each.activations + (count - 1) * played.waiting) / sequence
            candidates.append((kept, each.gathered, activations))
        most = max(candidates, key=sum)
        return MemoryEstimate(**static, gradients=most[0], gathered=most[1], activations=most[2])

    @property
    def copies(self) -> int:
        """Copies of the trained weights: their average, and the weights with which the stage began."""
        stage = self.config.stages[self.name]
        return bool(stage.ema_decay) + objective_class(stage).has_teacher


def microbatches(stage: StageConfig, dp_size: int) -> tuple[int, int]:
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
