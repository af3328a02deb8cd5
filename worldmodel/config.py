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
    num_inference_steps: int = 2
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
class StageConfig:
    """One stage of training: what is learned, on what, for how long."""

    objective: str = "state"
    """language | codec | alignment | state | generator | joint (see train/objectives.py)."""
    steps: int = 1000
    batch_size: int = 24
    """Episodes per process and step."""
    lr: float = 2e-3
    """Peak rate of AdamW: adapters, embeddings, norms, convolutions."""
    muon_lr: float = 0.02
    """Peak rate of Muon: the matrices of the transformer blocks. 0 leaves them to AdamW."""
    weight_decay: float = 0.01
    warmup_steps: int = 60
    constant_fraction: float = 0.45
    """Share of the steps before the linear decay to 1 % of the peak."""
    rounds: int = 2
    """Rounds of one episode, predicted in one pass of the backbone."""
    self_rollout: tuple[float, float] = (0.0, 0.0)
    """Share of steps, at the stage's start and end, that continue from the model's own predictions."""
    tasks: dict[str, float] = field(default_factory=dict)
    """Sampling weights of the kinds of episode (see data/sources.py)."""
    train: tuple[str, ...] = ()
    """Components whose weights move; the others are frozen."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch_size < 1 or self.rounds < 1:
            raise ConfigError(
                f"A stage has steps {self.steps}, batch_size {self.batch_size} and rounds {self.rounds}; "
                "each must be 1 or more."
            )
        if not self.tasks:
            raise ConfigError("A stage names no tasks; give stages.NAME.tasks, for example {rounds: 1.0}.")


@dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    model: WorldModelConfig = field(default_factory=WorldModelConfig)
    stages: dict[str, StageConfig] = field(default_factory=dict)
    """Stages by name, run in this order."""
    init_from: str | None = None
    """Model name or folder to start from instead of random weights."""
    run_dir: str = "runs/shapes-tiny"
    seed: int = 0
    checkpoint_every: int = 200
    log_every: int = 20
    precision: str = "bf16"
    """bf16 (autocast) | fp32."""


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
    except OmegaConfBaseException as error:
        raise ConfigError(f"config: {' '.join(str(error).split())}") from None


def to_dict(config: Any) -> dict[str, Any]:
    """Return a dataclass as nested plain values, as `build` takes them."""
    return dataclasses.asdict(config)
