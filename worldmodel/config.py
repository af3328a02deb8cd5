"""Every setting of a model and of its training: frozen dataclasses, filled from YAML and `key=value`.

Order of precedence: the defaults below < the YAML file < overrides. The result is plain dataclasses;
OmegaConf checks types and spelling on the way in and is seen nowhere else.
"""

import dataclasses
import importlib.resources
from dataclasses import dataclass, field
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

from worldmodel.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class CodecConfig:
    """The video autoencoder."""

    image_size: int = 64
    """Height and width of a frame, in pixels; a multiple of 8."""
    temporal_factor: int = 2
    """Frames that become one latent frame."""
    latent_channels: int = 16
    widths: tuple[int, int] = (64, 128)
    """Channels at a quarter and at an eighth of the resolution."""
    num_blocks: int = 3
    """Residual blocks per resolution in the decoder; the encoder has one fewer."""

    @property
    def grid(self) -> int:
        """Latent cells along one side of a frame."""
        return self.image_size // 8

    def __post_init__(self) -> None:
        if self.image_size % 8 or self.image_size < 16:
            raise ConfigError(f"codec.image_size is {self.image_size}; use a multiple of 8 from 16 up.")


@dataclass(frozen=True)
class BackboneConfig:
    """The decoder language model that predicts states and text."""

    pretrained: str | None = None
    """Folder of a transformers checkpoint (safetensors); empty builds `architecture` with random weights."""
    architecture: dict[str, Any] = field(
        default_factory=lambda: {
            "model_type": "qwen3",
            "hidden_size": 256,
            "intermediate_size": 704,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        }
    )
    """Arguments of the transformers configuration class, with its `model_type`."""
    vocab_size: int = 512
    """Tokens learned from the world's own text when there is no pretrained tokenizer."""


@dataclass(frozen=True)
class VisionConfig:
    """The vision adapter: latent cells to backbone tokens."""

    width: int = 128
    num_blocks: int = 2
    merge: int = 2
    """Cells along one side that share one vision token."""
    max_frames: int = 8
    """Latent frames of one observation that the adapter can tell apart."""


@dataclass(frozen=True)
class ActionConfig:
    """What may steer this model; validated wherever an action enters."""

    text: bool = True
    max_text_tokens: int = 96
    keys: tuple[str, ...] = ()
    """Names of the keys the model knows."""
    vector_size: int = 0
    """Numbers in a continuous action; 0 means the model takes none."""


@dataclass(frozen=True)
class ConditionConfig:
    """The generator adapter: states at the query positions to what the generator is conditioned on."""

    width: int = 256
    num_layers: int = 3
    num_heads: int = 4


@dataclass(frozen=True)
class GeneratorConfig:
    """The flow-matching diffusion transformer."""

    width: int = 192
    num_layers: int = 4
    num_heads: int = 3
    condition_dropout: float = 0.1
    """Share of training samples whose condition is replaced by the learned empty one."""


@dataclass(frozen=True)
class WorldModelConfig:
    """One world model: its five parts and how they meet."""

    codec: CodecConfig = field(default_factory=CodecConfig)
    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    vision: VisionConfig = field(default_factory=VisionConfig)
    action: ActionConfig = field(default_factory=ActionConfig)
    condition: ConditionConfig = field(default_factory=ConditionConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    fps: int = 8
    """Frames per second of what the model makes."""
    chunk_frames: int = 8
    """Frames generated in one round."""
    history_rounds: int = 3
    """Rounds the backbone can look back on in a session; then the window moves on."""
    num_inference_steps: int = 1
    guidance_scale: float = 1.0

    @property
    def chunk_latents(self) -> int:
        """Latent frames generated in one round."""
        return self.chunk_frames // self.codec.temporal_factor

    @property
    def num_queries(self) -> int:
        """Query positions: one per latent cell."""
        return self.codec.grid**2

    def __post_init__(self) -> None:
        if self.chunk_frames < 1 or self.chunk_frames % self.codec.temporal_factor:
            raise ConfigError(
                f"chunk_frames is {self.chunk_frames}; use a multiple of codec.temporal_factor "
                f"({self.codec.temporal_factor})."
            )
        if self.codec.grid % self.vision.merge:
            raise ConfigError(
                f"vision.merge is {self.vision.merge}; use a divisor of {self.codec.grid} cells."
            )
        if self.history_rounds < 1:
            raise ConfigError(f"history_rounds is {self.history_rounds}; use 1 or more.")


@dataclass(frozen=True)
class TrainedConfig:
    """How one component learns in a stage."""

    lr: float | None = None
    """Peak rate of AdamW for this component; empty takes the stage's."""
    muon_lr: float | None = None
    """Peak rate of Muon for this component; empty takes the stage's."""
    lora_rank: int = 0
    """Above 0, the component's linear layers are frozen and low-rank additions to them are learned (peft)."""
    lora_alpha: int = 32
    """The additions are scaled by `lora_alpha / lora_rank`."""

    def __post_init__(self) -> None:
        if self.lora_rank < 0:
            raise ConfigError(
                f"lora_rank is {self.lora_rank}; use 0 (all weights) or the rank, for example 16."
            )


@dataclass(frozen=True)
class StageConfig:
    """One stage of training: what is learned, on what, for how long."""

    objective: str = "state"
    """language | codec | alignment | state | generator | joint (see train/objectives.py)."""
    steps: int = 1000
    batch_size: int = 48
    """Episodes a step, over all processes."""
    microbatch_size: int = 0
    """Episodes a process takes through the model at once; more are accumulated. 0 takes all at once."""
    lr: float = 2e-3
    """Peak rate of AdamW: adapters, embeddings, norms, convolutions."""
    muon_lr: float = 0.02
    """Peak rate of Muon: the matrices of the transformer blocks. 0 leaves them to AdamW."""
    weight_decay: float = 0.01
    max_gradient_norm: float = 1.0
    warmup_steps: int = 60
    constant_fraction: float = 0.45
    """Share of the steps before the linear decay to 1 % of the peak."""
    ema_decay: float = 0.0
    """Above 0, the stage ends with an average of its weights, which forgets at this rate a step."""
    rounds: int = 2
    """Rounds of one episode, predicted in one pass of the backbone."""
    self_rollout: tuple[float, float] = (0.0, 0.0)
    """Share of steps, at the stage's start and end, that continue from the model's own predictions."""
    tasks: dict[str, float] = field(default_factory=dict)
    """Sampling weights of the kinds of episode (see data/sources.py)."""
    train: dict[str, TrainedConfig] = field(default_factory=dict)
    """Components whose weights move, and how; the others are frozen."""

    def __post_init__(self) -> None:
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
            raise ConfigError("A stage names no tasks; give stages.NAME.tasks, for example {rounds: 1.0}.")


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
    """Which column holds what: {video, text, keys, vector, start, end, name: column}; see data/columns.py."""
    preset: str = ""
    """Columns of a known table instead: webvid | panda70m | openvid."""
    split: str = "train"
    weight: float = 1.0
    """Share of the mixture."""


@dataclass(frozen=True)
class DataConfig:
    """How episodes stream."""

    sources: dict[str, SourceConfig] = field(default_factory=lambda: {"shapes": SourceConfig()})
    """Sources by name, mixed by weight; a stage's tasks are asked of those that offer them."""
    num_workers: int = 0
    """Processes that read and decode beside the training; 0 reads between the steps."""
    prefetch: int = 2
    """Batches that are kept ready, with num_workers above 0."""
    window: int = 1024
    """Clips of a source that are shuffled among each other; larger mixes better and seeks more."""
    max_bad_fraction: float = 0.01
    """Share of clips that may be unreadable (each is named in the log and replaced) before the run fails."""
    timeout_s: float = 300.0
    """Longest wait for a batch before the run fails instead of hanging."""


@dataclass(frozen=True)
class MeshConfig:
    """How the processes are arranged; the product of the axes is the number of processes."""

    dp_replicate: int = 0
    """Copies of the model that see different episodes; 0 takes what the other axes leave."""
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
                f"sp {self.sp}; use 1 or more (dp_replicate: 0 for what is left)."
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
    """Model name or folder to start from instead of random weights; `model` may then be left out."""
    run_dir: str = "runs/shapes-tiny"
    seed: int = 0
    checkpoint_every: int = 200
    keep_checkpoints: int = 2
    """Checkpoints within a stage that are kept; the end of every stage always is."""
    log_every: int = 20
    sample_every: int = 0
    """Steps between pictures of what the model makes, in RUN_DIR/samples; 0 makes none."""
    precision: str = "bf16"
    """bf16 (autocast) | fp32."""
    attention: str = "auto"
    """auto | reference | sdpa | flex | flash (see models/attention.py)."""
    activations: str = "keep"
    """What the backward pass needs of a layer: keep | recompute | offload (to the CPU's memory)."""
    compile: bool = False
    """Compile every transformer layer (torch.compile)."""
    hang_timeout_s: float = 600.0
    """A step that takes longer writes every thread's stack and ends the run."""

    def __post_init__(self) -> None:
        for name, value, known in (
            ("precision", self.precision, ("bf16", "fp32")),
            ("attention", self.attention, ("auto", "reference", "sdpa", "flex", "flash")),
            ("activations", self.activations, ("keep", "recompute", "offload")),
        ):
            if value not in known:
                raise ConfigError(f"{name} is {value!r}; use one of {', '.join(known)}.")
        if self.keep_checkpoints < 2:
            raise ConfigError(f"keep_checkpoints is {self.keep_checkpoints}; use 2 or more.")


def build(schema: type[T], values: dict[str, Any]) -> T:
    """Fill a dataclass from nested plain values, checking names and types.

    Raises:
        ConfigError: a key is unknown or a value has the wrong type; the sentence names it.
    """
    return _merge(schema, [values])


def load(path: str | Path, overrides: list[str] | None = None, schema: type[T] = TrainConfig) -> T:
    """Read a YAML file into `schema` and apply `key=value` overrides.

    `path` is a file or the name of a shipped config (`shapes_tiny`).

    Raises:
        ConfigError: the file, a key or a value is wrong.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    source: Traversable = Path(path)
    if not source.is_file():
        source = importlib.resources.files("worldmodel.configs").joinpath(f"{Path(path).stem}.yaml")
        if not source.is_file():
            raise ConfigError(
                f"There is no config file {str(path)!r}; `worldmodel config` lists the shipped ones."
            )
    try:
        text = source.read_text(encoding="utf-8")
        layers = [OmegaConf.create(text), OmegaConf.from_dotlist(list(overrides or []))]
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a readable config: {str(error).splitlines()[0]}") from None
    return _merge(schema, layers)


def _merge(schema: type[T], layers: list[Any]) -> T:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), *layers)
        return OmegaConf.to_object(merged)  # type: ignore[return-value]
    except (OmegaConfBaseException, TypeError) as error:  # the latter where a list stands for a mapping
        raise ConfigError(f"config: {' '.join(str(error).split())}") from None


def to_dict(config: Any) -> dict[str, Any]:
    """Return a dataclass as nested plain values, as `build` takes them."""
    return dataclasses.asdict(config)
