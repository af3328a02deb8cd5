"""Every setting of a model."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from worldmodel.config.literals import check_literals
from worldmodel.errors import ConfigError

ImageSize = int | tuple[int, int]
"""Side of a square frame, or height and width, in pixels."""


def height_width(size: ImageSize) -> tuple[int, int]:
    """Return both sides of a frame."""
    return (size, size) if isinstance(size, int) else size


@dataclass(frozen=True)
class CodecConfig:
    """The video autoencoder: ours, or one of diffusers (`pretrained` or `architecture`)."""

    pretrained: str | None = None
    """Folder of a diffusers video autoencoder, or of a pipeline that has one."""
    architecture: dict[str, Any] = field(default_factory=dict)
    """Arguments of a diffusers autoencoder class, with its `_class_name`: random weights."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the weights of one of diffusers; ours are always in fp32."""
    image_size: Any = 64
    """[height, width] of a frame in pixels, or the side of a square; multiples of `spatial_factor`."""
    spatial_factor: int = 8
    """Pixels along one side of a latent cell; ours has 8."""
    temporal_factor: int = 2
    """Frames that become one latent frame."""
    latent_channels: int = 16
    widths: tuple[int, int] = (64, 128)
    """Channels at a quarter and at an eighth of the resolution."""
    num_blocks: int = 3
    """Residual blocks per resolution in the decoder; the encoder has one fewer."""

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of latent cells in a frame."""
        height, width = height_width(self.image_size)
        return height // self.spatial_factor, width // self.spatial_factor

    @property
    def cells(self) -> int:
        """Latent cells of a frame."""
        return math.prod(self.grid)

    @property
    def is_ours(self) -> bool:
        """Whether the autoencoder is the one of models/codec/autoencoder.py."""
        return not (self.pretrained or self.architecture)

    def __post_init__(self) -> None:
        check_literals(self)
        if self.is_ours and self.dtype != "fp32":
            raise ConfigError(
                f"codec.dtype is {self.dtype!r}; our own codec is held in fp32, so leave it out."
            )
        if self.is_ours and self.spatial_factor != 8:
            raise ConfigError(f"codec.spatial_factor is {self.spatial_factor}; our own codec has 8.")
        # A list where it comes from a file; a square is one number however it is written.
        given = self.image_size if isinstance(self.image_size, list | tuple) else [self.image_size] * 2
        if len(given) != 2 or not all(
            type(side) is int and side >= 16 and side % self.spatial_factor == 0 for side in given
        ):
            raise ConfigError(
                f"codec.image_size is {self.image_size}; use one number or [height, width], each a multiple "
                f"of {self.spatial_factor} from 16 up."
            )
        height, width = given
        object.__setattr__(self, "image_size", height if height == width else (height, width))


SMALL_DECODER: dict[str, Any] = {
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
"""The decoder that is built where none is named: that of the shipped model."""


@dataclass(frozen=True)
class BackboneConfig:
    """The decoder language model that predicts states and text."""

    pretrained: str | None = None
    """Folder of a transformers checkpoint (safetensors), or a name on the Hub with `revision`; empty builds
    `architecture` with random weights."""
    revision: str | None = None
    """Commit of a name on the Hub: 40 hex digits, so that the weights are always the same."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the weights; full training needs fp32."""
    architecture: dict[str, Any] = field(default_factory=dict)
    """Arguments of the transformers configuration class, with its `model_type`; empty is `SMALL_DECODER`."""
    vocab_size: int = 512
    """Size of the vocabulary that is learned if there is no pretrained tokenizer."""

    def __post_init__(self) -> None:
        check_literals(self)


@dataclass(frozen=True)
class VisionConfig:
    """How the backbone sees: the codec's latents, or an encoder (`encoder`, `architecture`)."""

    encoder: str | None = None
    """Folder of a vision encoder (SigLIP, CLIP, DINOv2/3), or of a Qwen VL model for its own tower."""
    revision: str | None = None
    """Commit of an encoder on the Hub."""
    architecture: dict[str, Any] = field(default_factory=dict)
    """Arguments of an encoder's configuration class, with its `model_type`: random weights."""
    adapter: Literal["mlp", "resampler"] = "mlp"
    """How an encoder's patches become tokens: mlp (each, after pooling) or resampler (learned queries)."""
    pool: int = 2
    """mlp: patches along one side that are averaged into one token."""
    num_tokens: int = 64
    """resampler: tokens of an observation."""
    select_layer: int = -1
    """Hidden layer of the encoder that is read; -2 is the one before the last, as LLaVA reads CLIP."""
    width: int = 128
    num_blocks: int = 2
    """Residual blocks over latents, or layers of the resampler."""
    merge: int = 2
    """Latent cells along one side that share one vision token."""
    max_frames: int = 8
    """Frames (latent ones, without an encoder) of one observation that the adapter can tell apart."""

    @property
    def sees_latents(self) -> bool:
        """Whether there is no encoder: the adapter reads the codec's latents."""
        return not (self.encoder or self.architecture)

    def __post_init__(self) -> None:
        check_literals(self)
        if min(self.pool, self.num_tokens, self.max_frames) < 1:
            raise ConfigError(
                f"vision has pool {self.pool}, num_tokens {self.num_tokens} and max_frames "
                f"{self.max_frames}; each must be 1 or more."
            )


@dataclass(frozen=True)
class ActionConfig:
    """What may steer this model, in any combination; validated wherever an action enters."""

    text: bool = True
    max_text_tokens: int = 96
    keys: tuple[str, ...] = ()
    """Names of the keys the model knows."""
    vector_size: int = 0
    """Numbers in a continuous action; 0 means the model takes none."""
    vector_names: tuple[str, ...] = ()
    """What each number of the vector stands for; may be left empty."""
    vector_low: tuple[float, ...] = ()
    """Least value of each number, if there are bounds; the adapter then sees numbers scaled to [-1, 1]."""
    vector_high: tuple[float, ...] = ()
    """Greatest value of each number."""
    mouse: bool = False
    """Whether the model takes movements of the mouse (see `worldmodel.types.Action`)."""
    camera: bool = False
    """Whether the model takes poses and motions of the camera (see `worldmodel.types.Camera`)."""
    dropout: float = 0.0
    """Share of training actions that are replaced by the null action."""

    @property
    def takes(self) -> dict[str, bool]:
        """Which kinds of action the model takes, by the names of an action's fields."""
        return {
            "text": self.text,
            "keys": bool(self.keys),
            "mouse": self.mouse,
            "vector": self.vector_size > 0,
            "camera": self.camera,
        }

    def __post_init__(self) -> None:
        if self.max_text_tokens < 1 or self.vector_size < 0 or not 0 <= self.dropout < 1:
            raise ConfigError(
                f"action has max_text_tokens {self.max_text_tokens}, vector_size {self.vector_size} and "
                f"dropout {self.dropout}; use 1 or more, 0 or more, and 0 to below 1."
            )
        if not all(self.keys) or len(set(self.keys)) < len(self.keys):
            raise ConfigError(f"action.keys is {list(self.keys)}; give each key a name of its own.")
        for name in ("vector_names", "vector_low", "vector_high"):
            if len(getattr(self, name)) not in (0, self.vector_size):
                raise ConfigError(
                    f"action.{name} has {len(getattr(self, name))} entries; use one for each of the "
                    f"{self.vector_size} numbers of the vector (vector_size), or none."
                )
        low, high = self.vector_low, self.vector_high
        if len(low) != len(high) or not all(
            -math.inf < a < b < math.inf for a, b in zip(low, high, strict=True)
        ):
            raise ConfigError(
                f"action.vector_low is {list(low)} and vector_high {list(high)}; give both, each low below "
                "its high."
            )


@dataclass(frozen=True)
class ConditionConfig:
    """The condition adapter, which turns the states into the generator's condition."""

    kind: Literal["forecast", "prompt", "stream"] = "forecast"
    """forecast (latents and tokens on the grid, for our generator), prompt (a Q-Former that replaces the text
    embeddings, as in Pandora) or stream (an added cross-attention, as in PAN)."""
    width: int = 256
    num_layers: int = 3
    num_heads: int = 4
    num_tokens: int = 77
    """prompt: tokens that the states become."""
    text: bool = False
    """Whether the generator also reads the action's words with its own text encoder."""

    def __post_init__(self) -> None:
        check_literals(self)


@dataclass(frozen=True)
class GeneratorConfig:
    """The video generator: our flow-matching transformer, or one of diffusers."""

    pretrained: str | None = None
    """Folder of a diffusers pipeline (Wan, LTX-Video, CogVideoX), or of one of its transformers."""
    architecture: dict[str, Any] = field(default_factory=dict)
    """Arguments of a diffusers transformer class, with its `_class_name`: random weights. Beside them, where
    it reads what CLIP sees in a picture (`image_dim`), `image_encoder`: arguments of that vision model."""
    scheduler: dict[str, Any] = field(default_factory=dict)
    """Arguments of the diffusers scheduler class, with its `_class_name`; empty takes the family's."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the weights of one of diffusers, except those that diffusers keeps in fp32; full training
    needs fp32, and ours are always in fp32."""
    width: int = 192
    num_layers: int = 4
    num_heads: int = 3
    condition_dropout: float = 0.1
    """Share of training samples whose condition is replaced by the learned empty one."""

    @property
    def is_ours(self) -> bool:
        """Whether the generator is the one of models/generator/dit.py."""
        return not (self.pretrained or self.architecture)

    def __post_init__(self) -> None:
        check_literals(self)
        if self.is_ours and self.dtype != "fp32":
            raise ConfigError(
                f"generator.dtype is {self.dtype!r}; our own generator is held in fp32, so leave it out."
            )


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
    queries: int = 0
    """Query positions of a round; 0 is one per latent cell."""
    context_latents: int = 1
    """Latent frames that a round goes on from."""
    num_inference_steps: int = 1
    guidance_scale: float = 1.0
    world: str | None = None
    """Name of the world (worldmodel/worlds) that the model learned, which can judge its frames."""
    sampler: Literal["chunk", "swin"] = "chunk"
    """chunk (one after the other) or swin (each joins the one before while that is still noisy)."""

    @property
    def latent_shape(self) -> tuple[int, int, int, int]:
        """Shape `[t, c, h, w]` of the latents of a chunk."""
        return self.chunk_latents, self.codec.latent_channels, *self.codec.grid

    @property
    def chunk_latents(self) -> int:
        """Latent frames generated in one round."""
        return self.chunk_frames // self.codec.temporal_factor

    @property
    def num_queries(self) -> int:
        """Query positions of a round."""
        return self.queries or self.codec.cells

    def __post_init__(self) -> None:
        check_literals(self)
        if self.chunk_frames < 1 or self.chunk_frames % self.codec.temporal_factor:
            raise ConfigError(
                f"chunk_frames is {self.chunk_frames}; use a multiple of codec.temporal_factor "
                f"({self.codec.temporal_factor})."
            )
        rows, columns = self.codec.grid
        if self.vision.sees_latents and math.gcd(rows, columns) % self.vision.merge:
            raise ConfigError(
                f"vision.merge is {self.vision.merge}; use a divisor of {rows} rows and {columns} columns of "
                "latent cells."
            )
        if self.queries < 0 or not 1 <= self.context_latents <= self.chunk_latents:
            raise ConfigError(
                f"queries is {self.queries} and context_latents {self.context_latents}; use 0 or more, and "
                f"1 to {self.chunk_latents} (the latent frames of a chunk)."
            )
        if self.generator.is_ours != (self.condition.kind == "forecast"):
            raise ConfigError(
                f"condition.kind is {self.condition.kind!r}; our own generator takes forecast, one of "
                "diffusers prompt or stream."
            )
        if self.condition.kind == "forecast" and (
            self.num_queries != self.codec.cells or self.condition.text
        ):
            raise ConfigError(
                "condition.kind forecast reads one state per latent cell and no text; leave out queries and "
                "condition.text, or choose another generator."
            )
        if self.vision.sees_latents and self.vision.max_frames <= self.chunk_latents:
            raise ConfigError(
                f"vision.max_frames is {self.vision.max_frames}; use more than a chunk's "
                f"{self.chunk_latents} latent frames, so that a round can be seen with the frame before it."
            )
        if self.vision.sees_latents and self.num_queries != self.codec.cells:
            raise ConfigError(
                f"queries is {self.queries}, yet without a vision encoder there is one per latent cell; "
                "set vision.encoder or leave queries out."
            )
        if self.sampler == "swin" and self.num_inference_steps % 2:
            raise ConfigError(
                f"num_inference_steps is {self.num_inference_steps} with sampler: swin; use an even "
                "number or sampler: chunk."
            )
        if self.history_rounds < 1:
            raise ConfigError(f"history_rounds is {self.history_rounds}; use 1 or more.")
