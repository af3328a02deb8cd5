"""Settings of a training run."""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from worldmodel.config.checks import check_literals, check_numbers
from worldmodel.config.imports import check_extension
from worldmodel.config.model import WorldModelConfig
from worldmodel.errors import ConfigError

OBJECTIVES = ("codec", "language", "alignment", "state", "prompt", "prompt_kl", "generator", "joint")
OPTIMIZERS = ("muon",)
SCHEDULES = ("warmup_stable_decay", "cosine")

LONGEST_HANG_S = 1e7
"""Greatest `hang_timeout_s`; the clocks of some platforms end soon after."""


@dataclass(frozen=True)
class TrainedConfig:
    """Training of one component or group of components in a stage."""

    lr: float | None = None
    """Peak learning rate of AdamW; null takes the stage's."""
    muon_lr: float | None = None
    """Peak learning rate of Muon; null takes the stage's, and trains LoRA by AdamW."""
    lora_rank: int = 0
    """Above 0, only low-rank additions (LoRA) of this rank to the component's linear layers are trained."""
    lora_alpha: int = 32
    """Scale of LoRA: additions are multiplied by `lora_alpha / lora_rank`."""

    def __post_init__(self) -> None:
        check_numbers(self, "lora_rank", "lr", "muon_lr", least=0, of=" of a component")
        check_numbers(self, "lora_alpha", least=1, of=" of a component")


@dataclass(frozen=True)
class StageConfig:
    """One stage of training."""

    objective: str = "state"
    """Name of the loss: codec (video autoencoder), language (next token), alignment (vision features and
    words), state (states regress the next latents), prompt, prompt_kl (states imitate the text embeddings of
    a pretrained generator), generator (flow matching), joint (all parts), or MODULE:NAME of your own; see
    docs/how-to/extend-training.md."""
    objective_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of an objective that takes any."""
    steps: int = 1000
    """Number of optimizer steps."""
    batch_size: int = 48
    """Episodes per step, over all processes."""
    microbatch_size: int = 0
    """Most episodes per forward pass of a process, whose gradients are accumulated; 0 is no limit."""
    lr: float = 2e-3
    """Peak learning rate of AdamW: adapters, embeddings, norms, convolutions."""
    muon_lr: float = 0.02
    """Peak learning rate of Muon: the matrices of transformer layers. 0 uses AdamW for those, too."""
    weight_decay: float = 0.01
    """Decoupled weight decay of both optimizers."""
    max_gradient_norm: float = 1.0
    """Norm to which larger gradients are clipped."""
    optimizer: str = "muon"
    """muon (Muon for the matrices of transformer layers, AdamW for the rest), or MODULE:NAME of a class of
    torch.optim.Optimizer such as torch.optim:SGD, or of a function that builds optimizers."""
    optimizer_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of an optimizer of your own beside lr and weight_decay."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Decay of AdamW's averages of gradients and of their squares."""
    schedule: str = "warmup_stable_decay"
    """The factor on the peak learning rates in a step: warmup_stable_decay (see `warmup_steps` and
    `constant_fraction`), cosine (after the warm-up, half a cosine to 1 % of the peak), or MODULE:NAME of a
    function of the step and this stage."""
    schedule_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of a schedule of your own."""
    warmup_steps: int = 60
    """Steps of linear increase to the peak learning rate."""
    constant_fraction: float = 0.45
    """Share of all steps after which the learning rate decays linearly to 1 % of its peak."""
    ema_decay: float = 0.0
    """Above 0, the stage ends with an exponential moving average of its weights with this decay."""
    rounds: int = 2
    """Most rounds per episode, predicted in one pass of the backbone."""
    self_rollout: tuple[float, float] = (0.0, 0.0)
    """Share of steps in which rounds continue from the model's own predictions instead of the true frames, at
    the start and at the end of the stage; interpolated in between. The objective `state` is then trained
    through time: errors of a round reach the predictions that led to it."""
    loss_weights: dict[str, float] = field(default_factory=dict)
    """Weights of single losses, which override the objective's, by their names in metrics.jsonl
    (changed, unchanged, named, nll, flow, pixel, …); 0 disables one."""
    tasks: dict[str, float] = field(default_factory=dict)
    """Tasks and their sampling weights. A source offers some of: rounds (actions and the clips after them),
    imagine (a text and the clip that it describes), describe, ask (text about an observation), inverse (the
    action between two observations), document (text only). The objective language is trained on document
    alone, codec on all others, alignment on all but imagine and document."""
    sources: dict[str, float] = field(default_factory=dict)
    """Weights of `data.sources` in this stage; empty takes the `weight` of each source."""
    train: dict[str, TrainedConfig] = field(default_factory=dict)
    """The trained components and their settings, at least one; all others are frozen.

    Keys are groups or module names of the model such as `vision.adapter`; the most specific key decides.
    Groups: adapters (all but backbone, generator, codec and a pretrained vision encoder), all.
    """

    def __post_init__(self) -> None:
        check_extension("objective", self.objective, "worldmodel.objectives", OBJECTIVES)
        check_extension("optimizer", self.optimizer, "worldmodel.optimizers", OPTIMIZERS)
        check_extension("schedule", self.schedule, "worldmodel.schedules", SCHEDULES)
        of = " of a stage"
        check_numbers(self, "steps", "batch_size", "rounds", least=1, of=of)
        check_numbers(self, "lr", "muon_lr", "weight_decay", "microbatch_size", least=0, of=of)
        check_numbers(self, "betas", "ema_decay", least=0, below=1, of=of)
        if not 0 < self.max_gradient_norm < math.inf:
            raise ConfigError(
                f"A stage has max_gradient_norm {self.max_gradient_norm}; use a number above 0, a large one "
                "to clip nothing."
            )
        if not math.isfinite(self.constant_fraction):
            raise ConfigError(f"A stage has constant_fraction {self.constant_fraction}; use a finite number.")
        if not all(0 <= share <= 1 for share in self.self_rollout):
            raise ConfigError(f"A stage has self_rollout {list(self.self_rollout)}; use shares from 0 to 1.")
        if not self.tasks:
            raise ConfigError("A stage has no tasks; give stages.NAME.tasks, for example {rounds: 1.0}.")
        if not all(0 <= weight < math.inf for weight in self.loss_weights.values()):
            raise ConfigError(f"A stage has loss_weights {self.loss_weights}; use 0 or more.")
        for name, weights in (("tasks", self.tasks), ("sources", self.sources)):
            if not all(0 <= weight < math.inf for weight in weights.values()):
                raise ConfigError(f"A stage has weights {weights} for its {name}; use 0 or more.")
            if weights and not any(weights.values()):
                raise ConfigError(f"A stage gives no weight to any of its {name}; raise one above 0.")


@dataclass(frozen=True)
class SourceConfig:
    """A source of episodes."""

    kind: str = ""
    """clips (video files with a table), text (documents), webdataset (tar files), huggingface (a
    streamed dataset), lerobot (a LeRobot dataset), flow (the log of a data flow), or the name of
    a world that generates its episodes, such as shapes."""
    path: str = ""
    """clips, text: the csv, parquet or jsonl table; clips: or a folder of videos, or of folders of numbered
    images, with the text of NAME.mp4 in NAME.txt. webdataset: a tar file or a pattern such as data/*.tar.
    huggingface, lerobot, text: name of the dataset on the Hub, or a local folder. flow: folder or address
    of its log."""
    root: str = ""
    """clips: the folder to which paths in the table are relative; empty takes the folder of the table."""
    columns: dict[str, str] = field(default_factory=dict)
    """Columns of the table by content: a mapping from video, question, answer, start, end, name and the kinds
    of action (text, keys, ...) to names of columns; see data/columns.py."""
    numbers: tuple[str, ...] = ()
    """Names of the numbers of its vectors, in their order, as in `names` of `model.action.vector`; an empty
    name leaves a number out, such as padding. By default those that a recording states, or its own order."""
    preset: str = ""
    """Instead of `columns`, the name of a published table: webvid, panda70m, koala36m, openvid
    or opendv."""
    split: str = "train"
    """huggingface, shapes: name of the split. lerobot: train, held-out or all."""
    streams: int = 8
    """huggingface: streams into which the files are divided, so that data-parallel processes read different
    ones. As many as those processes is best; the order of samples depends on it, but not on the processes."""
    size: tuple[int, int] | None = None
    """Height and width of the bucket of all its clips, one of `data.buckets`: for sources that do not know
    the sizes of their clips beforehand, and for latents, which `worldmodel encode` computes in one size."""
    precomputed: bool = True
    """flow: use the latents and text states that its stage `encode` computed; false decodes and encodes the
    videos in the training step."""
    weight: float = 1.0
    """Weight of the source in the mixture of all sources; 0 leaves it out."""

    @property
    def video_root(self) -> Path:
        """Folder to which paths in a table of clips are relative."""
        path = Path(self.path).expanduser()
        return Path(self.root).expanduser() if self.root else path if path.is_dir() else path.parent


@dataclass(frozen=True)
class DataConfig:
    """The data sources and their loader."""

    sources: dict[str, SourceConfig] = field(default_factory=dict)
    """Sources by name, mixed by weight; each task of a stage is drawn from those that offer it."""
    num_workers: int = 0
    """Processes that read and decode; 0 reads in the training process, between steps."""
    prefetch: int = 2
    """Batches that are read ahead, with `num_workers` above 0."""
    window: int = 1024
    """Size of the shuffle window in clips; larger windows mix better and seek more."""
    length_buckets: bool = False
    """Draw the episodes of a step from episodes of about equal length in the window, so that processes with
    few episodes each finish together; steps are then less mixed."""
    buckets: list[Any] = field(default_factory=list)
    """Sizes of frames, [[height, width], ...]: every clip is read in the one nearest to its own aspect ratio,
    and all episodes of a step in one of them. The finished model has `model.codec.image_size`. Empty: all
    clips are cropped to that."""
    max_bad_fraction: float = 0.01
    """Share of a stage's clips that may be unreadable (each is logged and replaced) before the run fails."""
    timeout_s: float = 300.0
    """Longest wait for a batch before the run fails instead of hanging."""

    def __post_init__(self) -> None:
        for size in self.buckets:
            sides = size if isinstance(size, list | tuple) else ()
            if len(sides) != 2 or not all(type(side) is int and side > 0 for side in sides):
                raise ConfigError(
                    f"data.buckets has {size!r}; use pairs of height and width, for example "
                    "[[64, 64], [48, 80]]."
                )
        sizes = [tuple(size) for size in self.buckets]
        if twice := next((size for size in sizes if sizes.count(size) > 1), None):
            raise ConfigError(f"data.buckets has {list(twice)} twice; leave one out.")
        object.__setattr__(self, "buckets", sizes)


@dataclass(frozen=True)
class ValidationConfig:
    """Episodes that are held out of training, and how often the loss on them is computed."""

    source: str = ""
    """One of `data.sources`, with weight 0; empty: no validation."""
    every: int = 500
    """Steps between validations; the end of a stage has one, too."""
    batches: int = 8
    """Batches of the stage's size: the first of the source, the same in every validation."""
    twins: int = 24
    """Pairs of twin futures, where they were recorded beside the source, that are played in every validation
    of a stage that trains rounds: the best checkpoint is the one that obeys best. 0: none."""
    codec_frames: int = 256
    """Frames, of the source or else of the training data, that show once in a run what the codec alone
    returns: when its stage ends, or at the start if it is not trained. 0: none."""

    def __post_init__(self) -> None:
        check_numbers(self, "every", "batches", least=1, of=" of validation")
        check_numbers(self, "twins", "codec_frames", least=0, of=" of validation")


@dataclass(frozen=True)
class MeshConfig:
    """The mesh of training processes; the product of its axes is the number of processes."""

    dp_replicate: int = 1
    """Data-parallel copies of the weights."""
    dp_shard: int = 0
    """Data-parallel processes that share one copy of the weights (FSDP); 0 uses the processes that the other
    axes leave."""
    cp: int = 1
    """Context parallelism: processes that share each sequence by gathering keys and values; suits several
    machines."""
    sp: int = 1
    """Sequence parallelism (Ulysses): processes that share each sequence by exchanging heads; suits the GPUs
    of one machine."""

    def __post_init__(self) -> None:
        check_numbers(self, "dp_shard", least=0, of=" of the mesh")
        check_numbers(self, "dp_replicate", "cp", "sp", least=1, of=" of the mesh")


@dataclass(frozen=True)
class DiagnosticsConfig:
    """Measurements and checks of a run that do not change what it learns."""

    tracker: Literal["none", "wandb", "trackio"] = "none"
    """Where metrics are sent, besides metrics.jsonl and TensorBoard: Weights & Biases or trackio."""
    peak_tflops: float = 0.0
    """Peak of a device, to which `mfu` in the metrics is relative; 0 takes a measured matrix product."""
    profile_steps: int = 0
    """Steps of every stage, after the first two, whose profile is written to RUN_DIR/profile."""
    check_collectives: bool = False
    """For debugging: compare each collective of a step between processes before it runs. A difference ends
    the run with an error that names the modules; steps take about twice as long."""

    def __post_init__(self) -> None:
        check_literals(self)
        check_numbers(self, "peak_tflops", "profile_steps", least=0)


@dataclass(frozen=True)
class TrainConfig:
    """A training run."""

    model: WorldModelConfig = field(default_factory=WorldModelConfig)
    """The model."""
    stages: dict[str, StageConfig] = field(default_factory=dict)
    """Stages by name, run in this order."""
    data: DataConfig = field(default_factory=DataConfig)
    """The data sources and their loader."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """The mesh of training processes."""
    init_from: Any = None
    """Name or folder of a model to start from instead of random weights; `model` may then be omitted.

    A mapping takes components of several models, by the keys of `StageConfig.train`, of which the most
    specific decides: `{all: shapes-tiny, generator: null}` starts with a generator of random weights.
    """
    tokenizer: str = ""
    """Folder of a tokenizer for a backbone from scratch. Empty: one is learned from the texts of the data and
    stored in RUN_DIR/tokenizer, which a resumed run reads."""
    run_dir: str = "runs/shapes-tiny"
    """Folder of the run: checkpoints, metrics and the finished model. A run that exists is resumed, with the
    model, data, seed and finished stages that it began with."""
    seed: int = 0
    """Seed of weights, data order and noise."""
    checkpoint_every: int = 200
    """Steps between checkpoints."""
    keep_checkpoints: int = 2
    """Number of checkpoints within a stage to keep; that at the end of a stage is always kept."""
    log_every: int = 20
    """Steps between records of metrics.jsonl, which hold the means over these steps."""
    sample_every: int = 0
    """Steps between images of predicted videos in RUN_DIR/samples; 0 writes none."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    """The checkpoint of a stage with the lowest loss, or with twin futures the one that obeys best, is kept
    as RUN_DIR/checkpoints/best."""
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Callbacks of your own by name (an entry point, or MODULE:NAME), each with its arguments, which may be
    {}: they are called when a stage begins and ends and after every step."""
    diagnostics: DiagnosticsConfig = field(default_factory=DiagnosticsConfig)
    """Measurements and checks that do not change what is learned."""
    deterministic: bool = False
    """Use deterministic kernels on GPUs, where a resumed run is otherwise not equal bit for bit; slower."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Precision of the forward pass and of Muon's products: bf16 gathers the weights of layers, adapters and
    embeddings in bf16; shards, gradients and optimizers stay in fp32, and codecs keep the data type of their
    weights. `auto` measures a matrix product in both when a run begins and takes the faster: bf16 on GPUs,
    fp32 on most CPUs. A resumed run keeps its precision."""
    attention: Literal["auto", "reference", "sdpa", "flex", "flash"] = "auto"
    """The attention kernel: auto chooses one by device and length; for the others see
    models/layers/attention.py."""
    activations: Literal["keep", "recompute", "selective", "offload"] = "keep"
    """Activations of layers until the backward pass: keep them, recompute them, recompute all but the outputs
    of attention and of exchanges between processes (selective), or offload them to CPU memory."""
    compile: bool = False
    """Whether to compile the transformer layers (torch.compile)."""
    hang_timeout_s: float = 600.0
    """Seconds without progress after which a process prints the stacks of its threads and ends the run."""

    @property
    def init_sources(self) -> dict[str, str | None]:
        """`init_from` as a mapping."""
        return self.init_from if isinstance(self.init_from, dict) else {"all": self.init_from}

    def __post_init__(self) -> None:
        check_literals(self)
        for name in self.callbacks:
            check_extension("callbacks", name, "worldmodel.callbacks", ())
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed is {self.seed}; use 0 or more, below 2^63.")
        check_numbers(self, "checkpoint_every", "log_every", least=1)
        check_numbers(self, "sample_every", least=0)
        check_numbers(self, "keep_checkpoints", least=2)
        if not 0 < self.hang_timeout_s <= LONGEST_HANG_S:
            raise ConfigError(
                f"hang_timeout_s is {self.hang_timeout_s:g}; use a number of seconds above 0, at most "
                f"{LONGEST_HANG_S:g}."
            )
        for name, stage in self.stages.items():
            if not re.fullmatch(r"\w[\w .-]{0,99}", name):
                raise ConfigError(
                    f"A stage is named {name!r}, which cannot be a part of a file's name; use letters, "
                    "digits, - and _."
                )
            generates = stage.objective in ("generator", "joint")
            if generates and self.model.generator is None:
                raise ConfigError(
                    f"stages.{name}.objective is {stage.objective}, and model.generator is null; set it, or "
                    "use the objective state."
                )
            windows = generates and "rounds" in stage.tasks
            if self.model.sampler == "swin" and windows and stage.rounds < 2:
                raise ConfigError(
                    f"stages.{name}.rounds is 1; use 2 or more, because sampler: swin is trained on windows "
                    "of two chunks."
                )
        if not isinstance(self.init_from, str | dict | None):
            raise ConfigError(
                f"init_from is {self.init_from!r}; use the name of a model or a mapping from components to "
                "names."
            )
        for name, source in self.init_sources.items():
            if not isinstance(source, str | None):
                raise ConfigError(f"init_from.{name} is {source!r}; use the name of a model, or null.")
