"""Settings of the video generator and of the condition adapter before it."""

from dataclasses import dataclass, field
from typing import Any, Literal

from worldmodel.config.checks import check_literals, check_numbers
from worldmodel.errors import ConfigError

LEAST_HEAD_WIDTH = 16
"""Of narrower heads, no part encodes time and rows (`worldmodel.models.layers.spatial.rope_table`)."""


@dataclass(frozen=True)
class ConditionAdapterConfig:
    """The condition adapter, which translates the predicted state for one kind of generator."""

    kind: Literal["grid", "text", "prompt", "stream"] = "grid"
    """Kind of the adapter. grid: a feature per latent cell and a token per query (for our own generator).
    text: our own generator reads the words of the action, as the language model represents them, and no
    predicted state (text to image, text to video). prompt: a Q-Former maps states to tokens in place of the
    text embeddings (as in Pandora). stream: every block of the generator gets a cross-attention to them (as
    in PAN)."""
    forecast: Literal["residual", "none"] = "residual"
    """grid: how the generator uses the state's regressed latents. residual: it predicts a correction to
    them, for which one step is enough where the future is certain. none: it reads the states alone, by plain
    flow matching, so that several possible futures stay apart."""
    width: int = 256
    """prompt: width of the Q-Former."""
    num_layers: int = 3
    """prompt: number of its layers."""
    num_heads: int = 4
    """prompt: number of its attention heads."""
    num_tokens: int = 77
    """prompt: number of tokens that the generator gets."""
    text: bool = False
    """prompt, stream: whether the generator also gets the text of the action, through its own text
    encoder."""

    def __post_init__(self) -> None:
        check_literals(self)
        sizes = ("width", "num_layers", "num_heads", "num_tokens")
        check_numbers(self, *sizes, least=1, of=" of the condition adapter")


@dataclass(frozen=True)
class GeneratorConfig:
    """The video generator: our flow-matching transformer, or one of diffusers."""

    pretrained: str | None = None
    """Folder of a diffusers pipeline (Wan, LTX-Video, CogVideoX) or of its transformer; empty for our own."""
    architecture: dict[str, Any] = field(default_factory=dict)
    """Instead of `pretrained`: `_class_name` of a diffusers transformer and its arguments, to start from
    random weights. A transformer that reads image features (`image_dim`) also needs `image_encoder`, the
    arguments of a CLIP vision model, and one that reads text `text_encoder`, the arguments of a T5 or
    UMT5."""
    scheduler: dict[str, Any] = field(default_factory=dict)
    """`_class_name` of a diffusers scheduler and its arguments; empty takes that of the pipeline or
    family."""
    causal: bool = False
    """Wan text-to-video or TI2V: whether context frames do not attend to the chunk, as in our own generator,
    so that its steps share their keys and values. A model that was trained otherwise has to learn it."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type of the weights of a diffusers transformer, except those that diffusers keeps in fp32.
    Training all weights (without LoRA) needs fp32; our own generator is always in fp32."""
    width: int = 192
    """Our own generator: width of its transformer."""
    num_layers: int = 4
    """Our own generator: number of its layers."""
    num_heads: int = 3
    """Our own generator: number of its attention heads."""
    stochastic_sampling: bool = False
    """Our own generator: every denoising step but the last replaces a part of the noise by fresh noise
    (ancestral sampling), for uncertain futures in several steps. One of diffusers has it in its scheduler."""
    condition_dropout: float = 0.1
    """Share of training samples whose condition is replaced by the unconditional one, for guidance."""

    @property
    def takes_guidance(self) -> bool:
        """Whether the unconditional condition was trained, here or with the pretrained generator."""
        return self.condition_dropout > 0 or self.pretrained is not None

    @property
    def is_ours(self) -> bool:
        """Whether the generator is our own (models/generator/dit.py)."""
        return not (self.pretrained or self.architecture)

    def __post_init__(self) -> None:
        check_literals(self)
        if self.is_ours:
            check_heads("generator", self.width, self.num_heads)
        check_numbers(self, "num_layers", least=1, of=" of the generator")
        if not 0 <= self.condition_dropout <= 1:
            raise ConfigError(f"generator.condition_dropout is {self.condition_dropout}; use 0 to 1.")
        if self.is_ours and self.dtype != "fp32":
            raise ConfigError(
                f"generator.dtype is {self.dtype!r}; our own generator is held in fp32, so leave it out."
            )
        if self.is_ours and self.causal:
            raise ConfigError(
                "generator.causal is for a Wan of diffusers; our own generator always is, so leave it out."
            )
        if self.stochastic_sampling and not self.is_ours:
            raise ConfigError(
                "generator.stochastic_sampling is for our own generator; set it in generator.scheduler for "
                "one of diffusers."
            )


def check_heads(part: str, width: int, num_heads: int) -> None:
    """Raise `ConfigError` if a width does not divide into heads that are wide enough for rotary positions."""
    if num_heads < 1 or width % num_heads or width // num_heads % 2 or width // num_heads < LEAST_HEAD_WIDTH:
        raise ConfigError(
            f"{part}.width is {width} and num_heads {num_heads}; use a multiple that gives each head an "
            f"even width of {LEAST_HEAD_WIDTH} or more."
        )
