"""Settings of a training run."""

import math
from dataclasses import dataclass, field
from typing import Literal

from worldmodel.config.literals import check_literals
from worldmodel.config.model import WorldModelConfig
from worldmodel.errors import ConfigError

ObjectiveName = Literal[
    "codec", "language", "alignment", "state", "prompt", "prompt_kl", "generator", "joint"
]

RENAMED = {"adapter": "condition", "unseen": "adapters", "ask": "adapters", "answer": "adapters"}
"""Old keys of `StageConfig.train` and the groups that replace them."""


@dataclass(frozen=True)
class TrainedConfig:
    """How one component or group of components is trained in a stage."""

    lr: float | None = None
    """Peak learning rate of AdamW; empty takes the stage's."""
    muon_lr: float | None = None
    """Peak learning rate of Muon; empty takes the stage's."""
    lora_rank: int = 0
    """Above 0, the component's linear layers are trained by LoRA of this rank (peft)."""
    lora_alpha: int = 32
    """LoRA is scaled by `lora_alpha / lora_rank`."""

    def __post_init__(self) -> None:
        if self.lora_rank < 0:
            raise ConfigError(
                f"lora_rank is {self.lora_rank}; use 0 (train all weights) or a rank, for example 16."
            )


@dataclass(frozen=True)
class StageConfig:
    """One stage of training."""

    objective: ObjectiveName = "state"
    """The loss; see train/objectives."""
    steps: int = 1000
    batch_size: int = 48
    """Episodes per step, over all processes."""
    microbatch_size: int = 0
    """Episodes per forward pass of a process; gradients of more are accumulated. 0 takes all at once."""
    lr: float = 2e-3
    """Peak learning rate of AdamW: adapters, embeddings, norms, convolutions."""
    muon_lr: float = 0.02
    """Peak learning rate of Muon: the matrices of transformer layers. 0 uses AdamW for those, too."""
    weight_decay: float = 0.01
    max_gradient_norm: float = 1.0
    warmup_steps: int = 60
    constant_fraction: float = 0.45
    """Share of the steps before the linear decay to 1 % of the peak."""
    ema_decay: float = 0.0
    """Above 0, the stage ends with an exponential moving average of its weights with this decay."""
    rounds: int = 2
    """Rounds per episode, predicted in one pass of the backbone."""
    self_rollout: tuple[float, float] = (0.0, 0.0)
    """Share of steps, at the stage's start and end, that continue from the model's own predictions."""
    tasks: dict[str, float] = field(default_factory=dict)
    """Sampling weights of the kinds of episode (see `ShapesSource` for an example)."""
    sources: dict[str, float] = field(default_factory=dict)
    """Weights of `data.sources` in this stage; empty takes `weight` of each source."""
    train: dict[str, TrainedConfig] = field(default_factory=dict)
    """What is trained, and how; the rest is frozen.

    Keys are groups or module names of the model such as `vision.adapter`; the most specific key decides.
    Groups: backbone, generator, codec, condition (the condition adapter), adapters (all but backbone,
    generator, codec and a pretrained vision encoder), all.
    """

    def __post_init__(self) -> None:
        check_literals(self)
        for old in self.train.keys() & RENAMED.keys():
            raise ConfigError(f"A stage trains {old!r}, which is now called {RENAMED[old]!r}.")
        if self.steps < 1 or self.batch_size < 1 or self.rounds < 1:
            raise ConfigError(
                f"A stage has steps {self.steps}, batch_size {self.batch_size} and rounds {self.rounds}; "
                "each must be 1 or more."
            )
        if self.microbatch_size < 0 or not 0 <= self.ema_decay < 1:
            raise ConfigError(
                f"A stage has microbatch_size {self.microbatch_size} and ema_decay {self.ema_decay}; "
                "use 0 or more, and 0 to below 1."
            )
        if not self.tasks:
            raise ConfigError("A stage has no tasks; give stages.NAME.tasks, for example {rounds: 1.0}.")
        for name, weights in (("tasks", self.tasks), ("sources", self.sources)):
            if not all(0 <= weight < math.inf for weight in weights.values()):
                raise ConfigError(f"A stage has weights {weights} for its {name}; use 0 or more.")
            if weights and not any(weights.values()):
                raise ConfigError(f"A stage gives no weight to any of its {name}; raise one above 0.")


@dataclass(frozen=True)
class SourceConfig:
    """Where episodes come from."""

    kind: str = "shapes"
    """shapes (the procedural world) | clips (a table of video files) | webdataset (tar files) |
    huggingface (a streamed dataset)."""
    path: str = ""
    """clips: the csv, parquet or jsonl table. webdataset: a tar file or a pattern such as data/*.tar.
    huggingface: name of the dataset on the Hub, or a local folder."""
    root: str = ""
    """clips: the folder that paths in the table start from; empty means the table's own."""
    columns: dict[str, str] = field(default_factory=dict)
    """Which column holds what: {video, text, keys, mouse, vector, camera, start, end, name: column}; see
    data/columns.py."""
    preset: str = ""
    """Columns of a known table instead: webvid | panda70m | openvid."""
    split: str = "train"
    weight: float = 1.0
    """Share of the mixture."""


@dataclass(frozen=True)
class DataConfig:
    """The data sources and how they are read."""

    sources: dict[str, SourceConfig] = field(default_factory=dict)
    """Sources by name, mixed by weight; each task of a stage is drawn from those that offer it."""
    num_workers: int = 0
    """Processes that read and decode; 0 reads in the training process, between steps."""
    prefetch: int = 2
    """Batches that are read ahead, with num_workers above 0."""
    window: int = 1024
    """Size of the shuffle window in clips; larger ones mix better and seek more."""
    max_bad_fraction: float = 0.01
    """Share of a stage's clips that may be unreadable (each is logged and replaced) before the run fails."""
    timeout_s: float = 300.0
    """Longest wait for a batch before the run fails instead of hanging."""


@dataclass(frozen=True)
class MeshConfig:
    """How the processes are arranged; the product of the axes is the number of processes."""

    dp_replicate: int = 0
    """Copies of the model that see different episodes; 0 takes the processes that other axes leave."""
    dp_shard: int = 1
    """Processes that see different episodes and share one copy of the weights (FSDP)."""
    cp: int = 1
    """Processes that share each sequence by gathering keys and values: between machines."""
    sp: int = 1
    """Processes that share each sequence by exchanging heads (Ulysses): within a machine."""

    def __post_init__(self) -> None:
        if self.dp_replicate < 0 or min(self.dp_shard, self.cp, self.sp) < 1:
            raise ConfigError(
                f"mesh is dp_replicate {self.dp_replicate}, dp_shard {self.dp_shard}, cp {self.cp}, "
                f"sp {self.sp}; use 1 or more (dp_replicate: 0 for the remaining processes)."
            )


@dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    model: WorldModelConfig = field(default_factory=WorldModelConfig)
    stages: dict[str, StageConfig] = field(default_factory=dict)
    """Stages by name, run in this order."""
    data: DataConfig = field(default_factory=DataConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    init_from: str | None = None
    """Name or folder of a model to start from instead of random weights; `model` may then be omitted."""
    run_dir: str = "runs/shapes-tiny"
    seed: int = 0
    checkpoint_every: int = 200
    keep_checkpoints: int = 2
    """Checkpoints within a stage to keep; that of the end of every stage always is."""
    log_every: int = 20
    sample_every: int = 0
    """Steps between images of predicted videos in RUN_DIR/samples; 0 writes none."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """bf16 is autocast."""
    attention: Literal["auto", "reference", "sdpa", "flex", "flash"] = "auto"
    """The attention kernel; see models/layers/attention.py."""
    activations: Literal["keep", "recompute", "offload"] = "keep"
    """What happens to activations until the backward pass; offload moves them to CPU memory."""
    compile: bool = False
    """Compile every transformer layer (torch.compile)."""
    hang_timeout_s: float = 600.0
    """A step that takes longer prints the stack of every thread and ends the run."""

    def __post_init__(self) -> None:
        check_literals(self)
        for name, stage in self.stages.items():
            windows = stage.objective in ("generator", "joint") and "rounds" in stage.tasks
            if self.model.sampler == "swin" and windows and stage.rounds < 2:
                raise ConfigError(
                    f"stages.{name}.rounds is 1; use 2 or more, because sampler: swin is trained on windows "
                    "of two chunks."
                )
        if self.keep_checkpoints < 2:
            raise ConfigError(f"keep_checkpoints is {self.keep_checkpoints}; use 2 or more.")
