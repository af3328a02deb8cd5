"""Video generators of diffusers: the parts that Wan, LTX-Video and CogVideoX share.

Nothing is reparametrised: the transformer gets its native timesteps, its predictions go to its own scheduler,
and without states a chunk equals the output of the unmodified pipeline.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from diffusers.models.modeling_utils import ModelMixin
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from worldmodel.batch import to_device
from worldmodel.config import WorldModelConfig
from worldmodel.errors import ConfigError, InputError, ModelError
from worldmodel.models.codec.autoencoder import VideoCodec
from worldmodel.models.conditioning import Condition
from worldmodel.models.generator.base import Context, Latents, LossOutput, PerFrame, VideoGenerator
from worldmodel.models.generator.diffusers.network import Network
from worldmodel.models.generator.diffusers.scheduler import DiffusersSolver, NoisePath, Scheduler
from worldmodel.models.generator.diffusers.self_attention import Processor, install
from worldmodel.models.generator.diffusers.state_channels import StateChannels, as_channels
from worldmodel.models.generator.diffusers.state_cross_attention import StateStream
from worldmodel.models.generator.diffusers.tensor_parallel import divide_attention, divide_block
from worldmodel.models.loading import pipeline_folder, pretrained
from worldmodel.models.vision.vit import PatchEncoder
from worldmodel.parallel.tensor_parallel import Part


@dataclass(frozen=True)
class Clip:
    """The size of a generated clip: context and chunk, in latent frames."""

    context_latents: int
    chunk_latents: int
    grid: tuple[int, int]
    """Rows and columns of latent cells in a frame."""
    temporal_factor: int
    spatial_factor: int
    fps: int

    @classmethod
    def of(cls, config: WorldModelConfig) -> "Clip":
        """Return the clip of a world model."""
        codec = config.codec
        return cls(
            context_latents=config.context_latents,
            chunk_latents=config.chunk_latents,
            grid=codec.grid,
            temporal_factor=codec.temporal_factor,
            spatial_factor=codec.spatial_factor,
            fps=config.fps,
        )

    @property
    def latents(self) -> int:
        """Latent frames of context and chunk."""
        return self.context_latents + self.chunk_latents

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of a frame, in pixels."""
        return self.grid[0] * self.spatial_factor, self.grid[1] * self.spatial_factor


class DiffusersGenerator(VideoGenerator):
    """A transformer and a scheduler of diffusers, and a text encoder if the generator takes text.

    States enter as a prompt (`Condition.tokens` after, or in place of, the text embeddings) or as a stream,
    and their forecast and cells as channels on the latent cells that they are about (`state_channels`).
    """

    transformer_class: ClassVar[type[ModelMixin]]
    processor_class: ClassVar[type[Processor]]
    """Self-attention of its blocks, where the transformer's own cannot do what a pass needs."""
    stack: ClassVar[str]
    """Name of the transformer's list of blocks."""
    scheduler_classes: ClassVar[tuple[type, ...]]
    scheduler_default: ClassVar[dict[str, Any]]
    """Config of the scheduler with which the family is published, with its `_class_name`."""

    path: NoisePath
    timestep_per_frame: bool
    """Whether each frame may have its own noise level; otherwise all have the first frame's."""
    causal: bool = False
    """Whether context frames do not attend to the chunk, so that its steps share their keys and values."""
    text_length: int | None = None
    """Length of the text input in tokens; None if it is not fixed."""
    max_text_tokens: int
    """Tokens to which texts are cut or padded."""

    def __init__(
        self,
        transformer: ModelMixin,
        scheduler: Scheduler,
        clip: Clip,
        streamed: bool = False,
        text: tuple[PreTrainedModel, PreTrainedTokenizerBase] | None = None,
        codec: VideoCodec | None = None,
        image_encoder: PatchEncoder | None = None,
        state_channels: int = 0,
    ) -> None:
        """Build a generator around a transformer.

        Args:
            transformer: of the family's class.
            scheduler: of one of the family's classes.
            clip: size of context and chunk.
            streamed: whether states enter as a stream instead of a prompt.
            text: text encoder and tokenizer.
            codec: the model's codec, for generators that encode pixels of their context.
            image_encoder: CLIP encoder, for transformers that also read image features.
            state_channels: channels per latent cell of a state; 0 if there is none.

        Raises:
            ConfigError: the width of the image encoder is not the one that the transformer needs.
        """
        super().__init__()
        self.check_size(transformer.config, clip)
        # Checked here, where the settings to change are known; the transformer would fail in a matrix
        # product.
        wanted, given = image_width(transformer), None if image_encoder is None else image_encoder.width
        if wanted != given:
            raise ConfigError(
                f"The transformer reads image features of width {wanted} (image_dim), and the image encoder "
                f"has width {given}; describe a matching CLIP vision model in "
                "generator.architecture.image_encoder, or set generator.pretrained to a pipeline folder."
            )
        self.clip = clip
        self.scheduler: Any = scheduler
        heads: Any = transformer.config
        self.num_heads: int = heads.num_attention_heads
        self.width = self.num_heads * heads.attention_head_dim
        self.network = Network(transformer)
        install(self.layers, self.processor_class)
        if streamed:
            self.network.stream = self.build_stream(transformer)
        self.state_channels = state_channels
        if state_channels:
            self.network.channels = self.build_channels(transformer)
        self.token_width = self.width if streamed else self.text_width
        self.text_encoder, self.tokenizer = text or (None, None)
        self.image_encoder = image_encoder
        self.source: pipeline_folder.Source | None = None
        """Folders of the components."""
        self.text_architecture: dict[str, Any] | None = None
        """Arguments of a text encoder with random weights."""
        self._codec = (codec,)  # a tuple, so that it is not registered: the world model owns it

    def check_size(self, config: Any, clip: Clip) -> None:
        """Check that a transformer with a config can make frames of the size of a clip.

        Raises:
            ConfigError: it cannot.
        """

    def resize(self, config: WorldModelConfig) -> None:
        clip = Clip.of(config)
        self.check_size(self.transformer.config, clip)
        self.clip = clip
        if self.image_encoder is not None:
            self.image_encoder.fit(clip.image_size)

    @classmethod
    def read_scheduler(cls, values: dict[str, Any], folder: Path | None = None) -> Scheduler:
        """Build the scheduler of `values`, else of a folder, else the family's default.

        Raises:
            ModelError: it is of another class, or its arguments are wrong.
        """
        if not values and folder is not None:
            values = pretrained.read_json(folder, "scheduler_config.json")
        values = dict(values or cls.scheduler_default)
        scheduler_class = pipeline_folder.allowed_class(
            values.get("_class_name"), cls.scheduler_classes, "The scheduler"
        )
        try:
            with torch.device("cpu"):  # schedules are computed even if weights are on the meta device
                return scheduler_class.from_config(values)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise ModelError(f"The scheduler cannot be built: {error}") from None

    def add_second(self, source: pipeline_folder.Source) -> None:
        """Load the second transformer of a folder, if there is one.

        Raises:
            ModelError: the family has no second transformer.
        """
        if source.transformer_2 is not None:
            raise ModelError(
                f"{source.transformer_2} is a second transformer, which only Wan supports; remove the folder."
            )

    @property
    def transformer(self) -> Any:
        """The transformer."""
        return self.network.transformer

    @property
    def networks(self) -> list[nn.Module]:
        """The transformer with what is added to it."""
        return [self.network]

    @property
    def layers(self) -> nn.ModuleList:  # type: ignore[override]
        """Blocks of the transformer."""
        return getattr(self.transformer, self.stack)

    @property
    @abstractmethod
    def text_width(self) -> int:
        """Width of the text embeddings that the transformer reads."""

    def build_stream(self, transformer: Any) -> StateStream:
        """Build a state stream of the transformer's dtype, attached to it; its weights load when those do."""
        stream = self.new_stream(transformer).to(transformer.dtype)
        stream.defer(transformer)
        return stream

    def build_channels(self, transformer: Any) -> StateChannels:
        """Build state channels, which begin as zeros: in fp32, since they are trained whole beside LoRA."""
        embedding, patch = self.patches(transformer)
        made = StateChannels(embedding, self.state_channels, patch, self.width)
        made.defer(transformer)
        return made

    @abstractmethod
    def patches(self, transformer: Any) -> tuple[nn.Module, tuple[int, int, int]]:
        """Return the patch embedding of a transformer, and latent frames, rows and columns of a patch."""

    @abstractmethod
    def new_stream(self, transformer: Any) -> StateStream:
        """Return a state stream, attached to the transformer."""

    def divide(self, part: Part) -> None:
        """Keep a part of the weights of every block, and of its attention to the states."""
        for network in self.networks:
            assert isinstance(network, Network)
            for block in getattr(network.transformer, self.stack):
                divide_block(block, part)
            for branch in network.stream.branches if network.stream is not None else ():
                divide_attention(branch.attention, part)

    def solver(self, num_inference_steps: int) -> DiffusersSolver:
        """Return a solver for one chunk.

        Raises:
            ConfigError: the scheduler does not support so many steps.
        """
        try:
            return DiffusersSolver(self.scheduler, **self.timesteps(num_inference_steps))
        except ValueError as error:
            raise ConfigError(f"num_inference_steps is {num_inference_steps}: {error}") from None

    def step_sigmas(self, num_inference_steps: int) -> list[float]:
        """Return the sigmas at the timesteps of the scheduler."""
        return self.path.sigma(torch.tensor(super().step_sigmas(num_inference_steps))).tolist()

    def timesteps(self, num_inference_steps: int) -> dict[str, Any]:
        """Return the arguments that the family's pipeline passes to `set_timesteps`."""
        return {"num_inference_steps": num_inference_steps}

    def training_loss(
        self,
        clean: Latents,
        noise: Latents,
        sigma: PerFrame,
        condition: Condition,
        context: Context,
        continues_previous: Bool[Tensor, " b"] | None = None,
    ) -> LossOutput:
        """Compare the prediction with the training target of the model.

        `sigma` is noise : (noise + signal); the nearest timestep of the scheduler is used.
        """
        # Training uses the timesteps that sampling uses: the scheduler's, and no values between them.
        timestep = self.path.nearest(sigma if self.timestep_per_frame else sigma[:, :1].expand_as(sigma))
        noisy = self.path.add_noise(clean, noise, timestep)
        if continues_previous is not None:
            prediction = self.predict_windows(context, noisy, timestep, condition, continues_previous)
        elif self.chunkwise:  # one pass, where all frames have levels of their own, also without context
            prediction, _ = self.prefill_chunk(context, noisy, timestep, condition, keep=False)
        else:
            prediction = self(noisy, timestep, condition, self.prefill(context, condition))
        prediction = prediction.to(clean.dtype)
        error = (prediction - self.path.target(clean, noise, timestep)).pow(2).mean(dim=2)
        return LossOutput(error, self.path.clean(noisy, prediction, timestep))

    def require_context(self, context: Context) -> None:
        """Check that there is context, for image-to-video models.

        Raises:
            InputError: there is none.
        """
        if not context.shape[1]:
            raise InputError(
                "This model's generator is image-to-video and cannot start from a text; start from an image "
                "or a video, and train it without the task imagine."
            )

    def channels(self, condition: Condition, frames: int) -> Float[Tensor, "b t k h w"] | None:
        """Return the input of the state channels for the latent frames of a clip, which end in a chunk.

        It is None for conditions without a state, such as a prompt alone.
        """
        if self.network.channels is None or condition.forecast is None or condition.cells is None:
            return None
        return as_channels(frames, condition.forecast, condition.cells)

    def states(self, condition: Condition) -> Tensor | None:
        """Return the input of the stream; None if there is no stream."""
        return condition.tokens if self.network.stream is not None else None

    def prompt(self, condition: Condition) -> Float[Tensor, "b l e"]:
        """Return the text input of the transformer: embedded text, condition tokens, or text and then tokens.

        With a `text_length`, text is cut so that all tokens fit, and the rest is padded with zeros.

        Raises:
            ConfigError: there are more tokens than `text_length`.
        """
        tokens, text, most = condition.tokens, condition.text, self.text_length
        assert tokens is not None, "the adapters of a generator make them"
        if self.network.stream is None:
            # Without a stream the states are part of the prompt, after the text, which gives way to them.
            kept = None if most is None else max(0, most - tokens.shape[1])
            made = tokens if text is None else torch.cat([text[:, :kept].to(tokens.dtype), tokens], dim=1)
        elif text is not None:
            made = text
        else:  # a single embedding of zeros: attention needs a key
            made = tokens.new_zeros(len(tokens), 1, self.text_width)
        if most is None:
            return made
        if made.shape[1] > most:
            raise ConfigError(
                f"condition.num_tokens is {tokens.shape[1]}, but the text input of this transformer has "
                f"{most} tokens; lower it."
            )
        return F.pad(made, (0, 0, 0, most - made.shape[1]))

    def add_text_encoder(self) -> None:
        """Load the text encoder beside the transformer, or build the one of `generator.architecture`.

        Raises:
            ConfigError: there is none.
        """
        if self.text_encoder is not None:
            return
        if self.source is not None and self.source.text_encoder is not None:
            self.text_encoder, self.tokenizer = pipeline_folder.load_text_encoder(self.source)
        elif self.text_architecture is not None:
            self.text_encoder, self.tokenizer = pipeline_folder.build_text_encoder(self.text_architecture)
        else:
            raise ConfigError(
                "This generator has no text encoder; set generator.pretrained to the folder of a whole "
                "pipeline."
            )

    def encode_text(self, texts: Sequence[str]) -> Float[Tensor, "b m e"]:
        """Embed texts exactly as the family's pipeline does."""
        assert self.text_encoder is not None, "condition_adapter.text and add_text_encoder load it"
        return self.embed_text(list(texts)).float()

    def pad_text(self, state: Float[Tensor, "n e"]) -> Float[Tensor, "m e"]:
        """Return one of `text_states` as `encode_text` does.

        Raises:
            ConfigError: it is not of this generator's text encoder.
        """
        length, width = state.shape
        if length > self.max_text_tokens or width != self.text_width:
            raise ConfigError(
                f"A stored text state has {length} tokens of width {width}, and this generator's text "
                f"encoder gives up to {self.max_text_tokens} of width {self.text_width}; run the stage "
                "encode with this model, or set precomputed: false for the source."
            )
        device = next(self.transformer.parameters()).device
        return F.pad(to_device(state, device).float(), (0, 0, 0, self.max_text_tokens - length))

    @abstractmethod
    def embed_text(self, texts: list[str]) -> Float[Tensor, "b m e"]:
        """Embed texts with the family's pipeline."""

    def save_pretrained(self, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write the folder of a diffusers transformer, with the scheduler and encoders in sub-folders.

        Text and image encoders, which are never trained, keep their data type.
        """
        folder = Path(folder)
        self.network.save_pretrained(folder, dtype)
        self.scheduler.save_pretrained(folder / "scheduler")
        if self.text_encoder is not None and self.tokenizer is not None:
            self.text_encoder.save_pretrained(folder / "text_encoder")
            self.tokenizer.save_pretrained(folder / "tokenizer")
        if self.image_encoder is not None:
            self.image_encoder.save_pretrained(folder / "image_encoder")


def image_width(transformer: ModelMixin) -> int | None:
    """Return the width of the image features that a transformer reads; None if it reads none."""
    config: Any = transformer.config
    return config.get("image_dim")
