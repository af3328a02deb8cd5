"""Settings of a model."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from worldmodel.actions import ActionConfig
from worldmodel.config.checks import check_literals, check_numbers
from worldmodel.config.generator import ConditionAdapterConfig, GeneratorConfig
from worldmodel.config.state import StateConfig
from worldmodel.errors import ConfigError

MAX_GUIDANCE = 100.0
"""Largest magnitude of a guidance scale; much larger ones overflow."""
MAX_TEMPERATURE = 100.0
"""Largest temperature of the code of states."""
MAX_CONTEXT_LATENTS = 64
ImageSize = int | tuple[int, int]
"""Side of a square frame, or height and width, in pixels."""


def height_width(size: ImageSize) -> tuple[int, int]:
    """Return both sides of a frame."""
    return (size, size) if isinstance(size, int) else size


@dataclass(frozen=True)
class CodecConfig:
    """The video autoencoder: ours, or one of diffusers (`pretrained` or `architecture`)."""

    pretrained: str | None = None
    """Folder of a diffusers video autoencoder, or of a pipeline that contains one; empty for our own."""
    architecture: dict[str, Any] = field(default_factory=dict)
    """Instead of `pretrained`: `_class_name` of a diffusers autoencoder and its arguments, to start from
    random weights."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type of the weights of a diffusers autoencoder; our own is always in fp32."""
    image_size: Any = 64
    """[height, width] of a frame in pixels, or the side of a square; multiples of `spatial_factor`."""
    spatial_factor: int = 8
    """Pixels along each side of a latent cell; 4 or 8 for our own autoencoder. With 4, what moves by a few
    pixels moves by whole cells, and there are four times as many: halve `widths`, and let several cells share
    a query (`query_merge`) and a vision token (`vision.merge`)."""
    temporal_factor: int = 2
    """Frames that are encoded into one latent frame."""
    latent_channels: int = 16
    """Channels of a latent cell."""
    widths: tuple[int, int] = (64, 128)
    """Our own autoencoder: channels of its layers at half a cell and at a cell."""
    num_blocks: int = 3
    """Our own autoencoder: residual blocks per resolution in the decoder; the encoder has one fewer."""

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
        """Whether the autoencoder is our own (models/codec/autoencoder.py)."""
        return not (self.pretrained or self.architecture)

    def __post_init__(self) -> None:
        check_literals(self)
        if self.is_ours and self.dtype != "fp32":
            raise ConfigError(
                f"codec.dtype is {self.dtype!r}; our own codec is held in fp32, so leave it out."
            )
        if self.is_ours and self.spatial_factor not in (4, 8):
            raise ConfigError(f"codec.spatial_factor is {self.spatial_factor}; our own codec has 4 or 8.")
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
"""Default architecture of the backbone, as in the shipped model."""


@dataclass(frozen=True)
class BackboneConfig:
    """The decoder language model that predicts states and text."""

    pretrained: str | None = None
    """Folder of a transformers checkpoint (safetensors), a GGUF file, a base model that `worldmodel download`
    fetched, or a repository on the Hub together with `revision`; empty builds `architecture` with random
    weights."""
    revision: str | None = None
    """Commit of a repository on the Hub, as 40 hex digits, so that the weights cannot change."""
    repository: str | None = None
    """Repository on the Hub that the folder `pretrained` was downloaded from, by which others find the base
    of a finished model; known by itself for a folder of the Hub's cache."""
    num_layers: int = 0
    """Number of layers of `pretrained` that are used, the first ones; 0 uses all. Lower layers already
    distinguish meanings, and cost less."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type of the weights; training all weights (without LoRA) needs fp32."""
    architecture: dict[str, Any] = field(default_factory=dict)
    """Instead of `pretrained`: `model_type` of a transformers decoder and the arguments of its config class;
    empty takes the small decoder of the shipped model."""
    vocab_size: int = 512
    """Size of the vocabulary of a tokenizer that is learned because there is no pretrained one."""

    def __post_init__(self) -> None:
        check_literals(self)
        check_numbers(self, "num_layers", least=0, of=" of the backbone")


@dataclass(frozen=True)
class VisionConfig:
    """The input of observations to the backbone: codec latents, or the features of a vision encoder."""

    encoder: str | None = None
    """Folder of a vision encoder (SigLIP, CLIP, DINOv2, DINOv3) or of a Qwen-VL model, whose encoder is used;
    or a repository on the Hub together with `revision`. Empty: the backbone reads the codec's latents."""
    revision: str | None = None
    """Commit of a repository on the Hub, as 40 hex digits."""
    architecture: dict[str, Any] = field(default_factory=dict)
    """Instead of `encoder`: `model_type` of an encoder and the arguments of its config class, to start from
    random weights."""
    adapter: Literal["mlp", "resampler"] = "mlp"
    """With an encoder, how its features become tokens: mlp (average pooling and a two-layer perceptron) or
    resampler (a fixed number of learned queries that attend to the features)."""
    pool: int = 2
    """mlp: number of neighbouring features along each side that are averaged into one token."""
    num_tokens: int = 64
    """resampler: number of tokens per observation."""
    select_layer: int = -1
    """Hidden layer of the encoder whose output is used: -1 is the last one; LLaVA uses -2 of CLIP."""
    width: int = 128
    """Channels of the convolutions over latents, or width of the resampler."""
    num_blocks: int = 2
    """Residual blocks over latents, or layers of the resampler."""
    merge: int = 2
    """Without an encoder: number of latent cells along each side that share one vision token."""
    max_frames: int = 8
    """Most frames of an observation that the adapter can distinguish by their position in time; latent frames
    without an encoder. With an encoder, longer observations are subsampled to this number."""

    @property
    def sees_latents(self) -> bool:
        """Whether there is no encoder: the adapter reads the codec's latents."""
        return not (self.encoder or self.architecture)

    def __post_init__(self) -> None:
        check_literals(self)
        check_numbers(self, "pool", "num_tokens", "max_frames", least=1, of=" of vision")


@dataclass(frozen=True)
class WorldModelConfig:
    """A world model: its components, the frames of a round and the defaults of sampling."""

    codec: CodecConfig = field(default_factory=CodecConfig)
    """The video autoencoder: frames to latents and back."""
    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    """The language model that predicts states and text."""
    vision: VisionConfig = field(default_factory=VisionConfig)
    """The input of observations to the backbone."""
    action: ActionConfig = field(default_factory=ActionConfig)
    """The actions that the model takes."""
    state: StateConfig | None = field(default_factory=StateConfig)
    """The state head: hidden states at the queries to the predicted state. null: there is none, and the
    condition adapter reads the hidden states alone (as in Pandora and PAN)."""
    condition_adapter: ConditionAdapterConfig = field(default_factory=ConditionAdapterConfig)
    """The condition adapter: the predicted state to the condition of the generator."""
    generator: GeneratorConfig | None = field(default_factory=GeneratorConfig)
    """The video generator: states to latents of the next frames. null: there is none, and the forecast of the
    state is shown (`num_inference_steps: 0`)."""
    fps: int = 8
    """Frames per second of the generated video."""
    chunk_frames: int = 8
    """Frames per round, a multiple of `codec.temporal_factor`."""
    history_rounds: int = 1
    """Number of rounds that a rollout remembers at least, once it has played as many. The backbone's context
    grows to `context_rounds`; then only the newest `history_rounds` are kept, and computed again."""
    queries: int = 0
    """Number of query positions of a round, whose hidden states are the predicted state; 0 is one per latent
    cell, or per square of them (`query_merge`)."""
    query_merge: int = 1
    """Without a vision encoder: number of latent cells along each side that share one query, whose hidden
    state the state head divides among them; 2 or more for frames of more than 64 pixels."""
    query_actions: bool = False
    """Whether the keys and numbers of a round's actions are also added to its queries. Otherwise the backbone
    first has to learn to carry them there, which takes most of a short training."""
    context_latents: int = 1
    """Number of latent frames before a chunk that the generator continues, and the state head reads: with two
    or more it sees how things move, which one frame does not show. A codec of diffusers encodes them again,
    so they are at most those of a chunk."""
    num_inference_steps: int = 1
    """Denoising steps of a round by default; 0 shows the forecast of the state, without the generator."""
    guidance_scale: float = 1.0
    """Classifier-free guidance by default; 1 disables it."""
    world: str | None = None
    """Name of the world that the model is trained in (shapes, or one that you registered); needed by
    `worldmodel eval`, the suggestions of the demo and some objectives."""
    about: str = ""
    """What the world is and what one wants in it, in a sentence: shown on pages beside it."""
    outcomes: bool = False
    """Whether the model predicts the reward of each round and the end of episodes, as far as its data have
    them."""
    pace: Literal["realtime", "on_action"] = "realtime"
    """Pace of live sessions by default. realtime: the world runs on without actions. on_action: it waits for
    them, as when every frame of the training data has an action."""
    confidence_threshold: float | None = None
    """Value of `Session.confidence` below which the model has probably not understood an action in words;
    null if it was not measured."""
    text_history: bool = False
    """Whether descriptions and answers read the earlier rounds of a world, as predictions do; false for
    models whose texts were trained on one observation."""
    sampler: Literal["chunk", "swin"] = "chunk"
    """chunk: chunks are generated one after the other. swin (an experiment): a chunk starts to be
    denoised while the one before it is still noisy (Causal Swin-DPM), which needs an even
    `num_inference_steps`."""

    @property
    def experiments(self) -> list[str]:
        """Settings in use that are experiments, and so not part of the stable surface."""
        return ["sampler: swin"] if self.sampler == "swin" else []

    def sized(self, image_size: ImageSize) -> "WorldModelConfig":
        """Return the config of the same model with frames of another size.

        Raises:
            ConfigError: its parts do not divide such frames evenly.
        """
        return replace(self, codec=replace(self.codec, image_size=image_size))

    @property
    def latent_shape(self) -> tuple[int, int, int, int]:
        """Shape `[t, c, h, w]` of the latents of a chunk."""
        return self.chunk_latents, self.codec.latent_channels, *self.codec.grid

    @property
    def chunk_latents(self) -> int:
        """Latent frames generated in one round."""
        return self.chunk_frames // self.codec.temporal_factor

    @property
    def unseen_latents(self) -> int:
        """Latent frames of a round's context that the backbone has not seen in an earlier round."""
        return min(self.context_latents, self.chunk_latents)

    @property
    def action_frames(self) -> int:
        """Frames that one action lasts."""
        return self.chunk_frames // self.action.per_round

    @property
    def context_rounds(self) -> int:
        """Rounds in the backbone's context at most, with the one that is played; train with as many."""
        return 2 * self.history_rounds + 1

    @property
    def has_state(self) -> bool:
        """Whether there is a state head; the adapter `text` reads words instead of a state."""
        return self.state is not None and self.condition_adapter.kind != "text"

    @property
    def has_code(self) -> bool:
        """Whether the predicted state contains a sampled code."""
        return self.has_state and self.state is not None and self.state.has_code

    @property
    def least_inference_steps(self) -> int:
        """Fewest denoising steps: 0 if a state makes a forecast."""
        return 0 if self.has_state else 1

    def steps_error(self, num_inference_steps: int, most: int | None = None) -> str | None:
        """Return why a chunk cannot be denoised in so many steps, in a sentence; None if it can."""
        odd, least = self.sampler == "swin" and num_inference_steps % 2, self.least_inference_steps
        if not odd and num_inference_steps >= least and (most is None or num_inference_steps <= most):
            return None
        limit = "or more" if most is None else f"to {most}"
        even = ", an even number" if self.sampler == "swin" else ""
        return f"num_inference_steps is {num_inference_steps}; use {least} {limit}{even}."

    def code_error(self, temperature: float, top_k: int) -> str | None:
        """Return why codes of states cannot be drawn so, in a sentence; None if they can."""
        if not 0 <= temperature <= MAX_TEMPERATURE:  # also if it is not a number
            return f"temperature is {temperature}; use 0 (the most likely future) to {MAX_TEMPERATURE:g}."
        if top_k < 0:
            return f"top_k is {top_k}; use 1 or more values of each variable, or 0 for all."
        if not self.has_code and (temperature, top_k) != (1.0, 0):
            return (
                f"temperature is {temperature:g} and top_k {top_k}, but this model's states have no code to "
                "draw (state.code_groups); omit both."
            )
        return None

    def sampling_error(
        self, num_inference_steps: int, guidance_scale: float, negative_prompt: str | None = None
    ) -> str | None:
        """Return why a model cannot sample so, in a sentence; None if it can."""
        if not abs(guidance_scale) <= MAX_GUIDANCE:  # also if it is not a number
            return (
                f"guidance_scale is {guidance_scale}; use a number up to {MAX_GUIDANCE:g}, 1 for no guidance."
            )
        if negative_prompt and not self.condition_adapter.text:
            return (
                "negative_prompt is for models whose generator reads text (condition_adapter.text), and "
                "that of this one does not; omit it, and use guidance_scale."
            )
        if negative_prompt and guidance_scale == 1.0:
            return "negative_prompt has no effect with guidance_scale 1; set another guidance_scale."
        trained = self.generator is None or self.generator.takes_guidance
        if not trained and guidance_scale not in (1.0, self.guidance_scale):
            return (
                f"guidance_scale is {guidance_scale}; this model was trained without the unconditional "
                "condition that guidance needs: pass 1, or omit it."
            )
        if self.generator is not None or (num_inference_steps, guidance_scale) == (0, 1.0):
            return None
        return (
            f"num_inference_steps is {num_inference_steps} and guidance_scale {guidance_scale:g}, and the "
            "model has no generator (model.generator is null), which would need them; use 0 and 1."
        )

    @property
    def num_queries(self) -> int:
        """Query positions of a round."""
        return self.queries or math.prod(self.query_grid)

    @property
    def query_grid(self) -> tuple[int, int]:
        """Rows and columns of queries, where each has its place."""
        rows, columns = self.codec.grid
        return rows // self.query_merge, columns // self.query_merge

    def __post_init__(self) -> None:
        check_literals(self)
        check_numbers(self, "fps", least=1)
        check_numbers(self, "queries", "history_rounds", least=0)
        if self.chunk_frames < 1 or self.chunk_frames % self.codec.temporal_factor:
            raise ConfigError(
                f"chunk_frames is {self.chunk_frames}; use a multiple of codec.temporal_factor "
                f"({self.codec.temporal_factor})."
            )
        if self.chunk_frames % self.action.per_round:
            raise ConfigError(
                f"action.per_round is {self.action.per_round}; use 1, or a divisor of chunk_frames "
                f"({self.chunk_frames})."
            )
        if self.action.per_round > 1 and self.condition_adapter.text:
            raise ConfigError(
                f"action.per_round is {self.action.per_round} with condition_adapter.text, which gives the "
                "generator one text per round; leave one of them out."
            )
        rows, columns = self.codec.grid
        merges = {"vision.merge": self.vision.merge} if self.vision.sees_latents else {}
        for name, side in {**merges, "query_merge": self.query_merge}.items():
            if side < 1 or math.gcd(rows, columns) % side:
                raise ConfigError(
                    f"{name} is {side}; use a divisor of {rows} rows and {columns} columns of latent cells."
                )
        most = MAX_CONTEXT_LATENTS if self.codec.is_ours else self.chunk_latents
        if not 1 <= self.context_latents <= most:
            raise ConfigError(f"context_latents is {self.context_latents}; use 1 to {most}.")
        self._check_state()
        self._check_generator()
        if self.vision.sees_latents and self.vision.max_frames <= self.chunk_latents:
            raise ConfigError(
                f"vision.max_frames is {self.vision.max_frames}; use more than a chunk's "
                f"{self.chunk_latents} latent frames, so that a round can be seen with the frame before it."
            )
        if self.vision.sees_latents and self.queries not in (0, self.codec.cells // self.query_merge**2):
            raise ConfigError(
                f"queries is {self.queries}, yet without a vision encoder there is one per latent cell; "
                "set vision.encoder, or leave queries out and set query_merge."
            )
        if error := self.steps_error(self.num_inference_steps):
            raise ConfigError(error)

    def _check_state(self) -> None:
        """Check that the state fits the grids of latents and queries, and what reads it."""
        if self.state is None:
            if self.condition_adapter.kind == "grid" or self.outcomes:
                raise ConfigError(
                    "model.state is null, and condition_adapter.kind grid or outcomes would read a state; "
                    "leave state out, or use another kind of adapter and outcomes: false."
                )
            return
        rows, columns = self.codec.grid
        merge, block = self.state.merge, self.state.code_block
        if math.gcd(rows, columns) % merge:
            raise ConfigError(
                f"state.merge is {merge}; use a divisor of {rows} rows and {columns} columns of latent cells."
            )
        if not self.queries and merge % self.query_merge and self.query_merge % merge:
            raise ConfigError(
                f"state.merge is {merge} and query_merge {self.query_merge}; one must divide the other."
            )
        if block and math.gcd(rows // merge, columns // merge) % block:
            raise ConfigError(
                f"state.code_block is {block}; use 0, or a divisor of the {rows // merge} rows and "
                f"{columns // merge} columns of cells of the state."
            )

    def _check_generator(self) -> None:
        """Check that generator and condition adapter fit together."""
        adapter = self.condition_adapter
        if self.generator is None:
            if (adapter.kind, adapter.forecast) != ("grid", "residual"):
                raise ConfigError(
                    f"generator is null, with condition_adapter.kind {adapter.kind} and forecast "
                    f"{adapter.forecast}; leave condition_adapter out: the forecast of the state is shown."
                )
            if error := self.sampling_error(self.num_inference_steps, self.guidance_scale):
                raise ConfigError(error)
        elif self.generator.is_ours != (adapter.kind in ("grid", "text")):
            raise ConfigError(
                f"condition_adapter.kind is {self.condition_adapter.kind!r}; our own generator takes "
                "grid or text, one of diffusers prompt or stream."
            )
        if adapter.kind == "text" and (
            adapter.forecast != "none"
            or adapter.text
            or self.outcomes
            or not self.action.text
            or self.action.per_round > 1
        ):
            raise ConfigError(
                "condition_adapter.kind text reads the words of one action and makes neither forecasts nor "
                "states; set condition_adapter.forecast: none, action.text: true and action.per_round: 1, "
                "and leave out condition_adapter.text and outcomes."
            )
        if adapter.kind == "grid" and adapter.text:
            raise ConfigError(
                "condition_adapter.kind grid is for our own generator, which reads no text; leave out "
                "condition_adapter.text, or choose another generator."
            )
