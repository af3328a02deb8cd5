"""The figure: seven verbs, from an observation and an action to the next observation.

     observation o_i            action a_i
          │ encode_observation       │ encode_action
          └─────► [ v…v  a…a  q…q ] ◄┘     one round of the backbone's sequence
                           │ predict_states      hidden states at the queries
                           │ read_state          the predicted state ŝ_{i+1}: features, code, forecast
                           │ condition           condition adapter
    context latents ─► denoise ─► decode ─► o_{i+1} ─► next round

`worldmodel.rollout` plays rounds with these verbs; `forward` runs teacher-forced rounds in one pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, SupportsIndex

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from worldmodel.actions import Action
from worldmodel.config import ImageSize, WorldModelConfig, height_width
from worldmodel.diffusion.sampler import Chunk, Denoiser, StepCache
from worldmodel.models import factory, frame_size, text
from worldmodel.models.action import ActionAdapter, EncodedAction
from worldmodel.models.backbone.causal_lm import Backbone
from worldmodel.models.code import CodeSampling
from worldmodel.models.conditioning import Codes, Condition, Prediction
from worldmodel.models.layers.spatial import resample, resample_rows
from worldmodel.models.loading.model_folder import PretrainedModel
from worldmodel.models.sequence import embed_rounds
from worldmodel.models.state import State, StateHead
from worldmodel.models.vision.adapter import EncodedObservation, Observation
from worldmodel.parallel.agreement import Agreement

if TYPE_CHECKING:
    from worldmodel.rollout import Session


class WorldModel(PretrainedModel):
    """An any-to-any world model: backbone, three adapters, state head, video generator, codec."""

    agreement = Agreement()  # the processes that train the model

    make_step_cache: Callable[[], StepCache] | None = None
    """Makes what decides which denoising steps of a chunk reuse a prediction; None computes every step."""

    def __init__(self, config: WorldModelConfig, backbone: Backbone, folder: Path | None = None) -> None:
        """Build the parts around a backbone; parts of other libraries are read from `folder`, if given."""
        super().__init__()
        self.config = config
        self.stored_size = config.codec.image_size
        self.query_grids = (config.query_grid, config.query_grid)  # for which queries are stored, and now
        width, scale = backbone.width, backbone.width**-0.5
        self.codec = factory.codec(config, folder)
        self.backbone = backbone
        self.vision = factory.vision(config, width, folder)
        self.action = ActionAdapter(config.action, width, config.query_actions)
        self.queries = nn.Parameter(torch.randn(config.num_queries, width) * scale)
        self.blank_latents = nn.Parameter(torch.randn(config.codec.latent_channels, *config.codec.grid) * 0.1)
        self.prompt_marker, self.answer_marker = (nn.Parameter(torch.randn(width) * scale) for _ in range(2))
        self.state = StateHead.from_config(config, width)
        self.generator = factory.generator(config, self.codec, folder)
        self.condition_adapter = factory.condition_adapter(config, width, self.generator, self.state)

    @classmethod
    def from_config(
        cls, config: WorldModelConfig, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> "WorldModel":
        """Build a model with random weights (or the pretrained backbone of the config)."""
        return cls(config, Backbone.from_config(config.backbone, tokenizer))

    def session(
        self,
        seed: SupportsIndex = 0,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        negative_prompt: str | None = None,
        temperature: float = 1.0,
        top_k: int = 0,
    ) -> "Session":
        """Open a session: a live rollout; see `Session`."""
        from worldmodel.rollout import Session

        return Session(
            self,
            seed,
            num_inference_steps,
            guidance_scale,
            negative_prompt=negative_prompt,
            temperature=temperature,
            top_k=top_k,
        )

    def __repr__(self) -> str:
        config = self.config
        (height, width), kinds = height_width(config.codec.image_size), ", ".join(config.action.kinds)
        count = sum(parameter.numel() for parameter in self.parameters()) / 1e6
        return f"WorldModel({count:.1f} M parameters, {width} x {height} pixels at {config.fps} fps, {kinds})"

    @property
    def device(self) -> torch.device:
        """Device of the model's own parameters."""
        return self.blank_latents.device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the model's own parameters; parts of other libraries may have another."""
        return self.blank_latents.dtype

    def resize(self, image_size: ImageSize) -> None:
        """Observe and predict frames of another size from now on; a ConfigError says which part cannot."""
        frame_size.resize(self, image_size)

    # ---- the seven verbs -----------------------------------------------------------------------------

    def encode_observation(
        self, observation: Observation, history: Float[Tensor, "b d"] | None = None
    ) -> EncodedObservation:
        """Map an observation to vision tokens and queries; one without latents is a blank one.

        `history` is what the state remembers of the code that led to the observation (`StateHead.history`).
        """
        if not observation.latents.shape[1]:
            observation = replace(observation, latents=self._blank_context(len(observation.latents)))
        vision = self.vision(observation)
        # On a latent grid, a query is a learned vector plus the feature of its newest latent cells.
        queries = resample_rows(self.queries, *self.query_grids)
        queries = queries if vision.queries is None else queries + vision.queries
        tokens = vision.tokens if history is None else vision.tokens + history[:, None].to(vision.tokens)
        return EncodedObservation(tokens, queries.expand(len(tokens), -1, -1), vision.cells)

    def encode_action(self, actions: Sequence[Action]) -> EncodedAction:
        """Map actions to tokens; an InputError says why the model does not take one."""
        return self.action(actions, self.backbone)

    def predict_states(
        self, embeds: Float[Tensor, "b n d"], ends: Int[Tensor, "b r"]
    ) -> Float[Tensor, "b r q d"]:
        """Return the hidden states at the queries that end each round; in a rollout, an engine does this."""
        return self.backbone.predict_states(embeds, ends, self.config.num_queries)

    def read_state(
        self,
        hidden: Float[Tensor, "b n d"],
        context: Float[Tensor, "b s c h w"],
        actions: Sequence[Action] | None = None,
        *,
        code: Float[Tensor, "b v k"] | None = None,
        draws: Float[Tensor, "b v"] | None = None,
        sampling: CodeSampling | None = None,
    ) -> State:
        """Map hidden states and context latents to the predicted state; see `StateHead.forward`.

        Where the generator reads words in place of a state (`condition_adapter.kind: text`), these are the
        hidden states of the actions' texts.
        """
        if self.condition_adapter.reads_text:
            return State(self.action.text_states(actions or (), self.backbone))
        if self.state is None:
            return State(hidden)
        return self.state(hidden, context, code, draws, sampling)

    def condition(
        self,
        state: State,
        context: Float[Tensor, "b s c h w"],
        actions: Sequence[Action] | None = None,
    ) -> Condition:
        """Map a state, context latents and, if the generator reads text, actions to its condition."""
        return self._add_text(self.condition_adapter(state, context), actions)

    def denoise(self, chunks: Sequence[Chunk[Condition]]) -> list[Float[Tensor, "b t c h w"]]:
        """Generate the latents of chunks from noise."""
        denoiser = Denoiser(self.generator)
        while live := [chunk for chunk in chunks if not chunk.finished]:
            denoiser.step(live)
        return [chunk.latents for chunk in chunks]

    def decode(
        self, latents: Float[Tensor, "b t2 c h2 w2"], context: Float[Tensor, "b s c h2 w2"] | None = None
    ) -> Float[Tensor, "b t 3 h w"]:
        """Decode latents that follow those of `context` to pixels in [-1, 1]."""
        return self.codec.decode(latents, context).clamp(-1, 1)

    # ---- inputs of the verbs -------------------------------------------------------------------------

    def observe(self, frames: Float[Tensor, "b t 3 h w"]) -> Observation:
        """Encode pixels in [-1, 1] as an observation that nothing precedes."""
        return Observation(self.codec.encode(frames), self.vision.select_frames(frames))

    def blank_observation(self, batch: int) -> Observation:
        """Return the observation of a world before its first frame, from which a text starts it.

        Its latents are learned; a causal codec has none, and the generator makes the beginning of a clip.
        """
        latents = self._blank_context(batch)[:, : 0 if self.codec.causal else None]
        frames = latents.new_zeros(batch, 0, 3, *height_width(self.config.codec.image_size))
        return Observation(latents, self.vision.select_frames(frames))

    def null_condition(self, context: Float[Tensor, "b s c h w"], negative_prompt: str = "") -> Condition:
        """Return what guidance extrapolates away from: no state, with no text or a negative one."""
        return self._add_text(self.condition_adapter.null(context), [Action(negative_prompt)] * len(context))

    def _add_text(self, condition: Condition, actions: Sequence[Action] | None) -> Condition:
        if not self.config.condition_adapter.text:
            return condition
        texts = [each.text or "" for each in actions or ()]
        return replace(condition, text=self.generator.encode_distinct(texts))

    def unseen(self, context: Float[Tensor, "b s c h w"]) -> Float[Tensor, "b u c h w"]:
        """Return the frames of a round's context that the backbone has not seen in an earlier round."""
        return context[:, -self.config.unseen_latents :]

    def _blank_context(self, batch: int) -> Float[Tensor, "b s c h w"]:
        blank = resample(self.blank_latents, self.config.codec.grid)
        return blank.expand(batch, self.config.context_latents, -1, -1, -1)

    @property
    def round_tokens(self) -> int:
        """Positions of one round in the sequence, if its action fits one slot."""
        return self.vision.round_tokens + self.action.slot + self.config.num_queries

    # ---- many rounds in one pass, text ----------------------------------------------------------------

    def forward(
        self,
        context: Float[Tensor, "b r s c h w"],
        actions: Sequence[Sequence[Action]],
        frames: Float[Tensor, "b r f 3 H W"] | None = None,
        codes: Codes | None = None,
    ) -> Prediction:
        """Predict every round's next observation, teacher-forced, in one pass of the backbone.

        `actions[j][i]` is the action of episode j in round i; `frames` are for encoders that need pixels.
        Without `codes` the most likely ones are taken, and later rounds do not know which.
        """
        batch, rounds = context.shape[:2]
        flat = [action for episode in actions for action in self.action.of_rounds(episode)]
        past = context.flatten(0, 1)
        if self.condition_adapter.reads_text:
            state = State(self.action.text_states(flat, self.backbone))
            hidden = state.hidden.unflatten(0, (batch, rounds))
            return Prediction(hidden, context, state, self.condition_adapter(state, past))
        rows, ends = embed_rounds(self, context, flat, frames, codes)
        hidden = self.predict_states(nn.utils.rnn.pad_sequence(rows, batch_first=True), ends)
        code = codes.code.flatten(0, 1) if codes is not None and self.state is not None else None
        state = self.read_state(hidden.flatten(0, 1), past, code=code)
        return Prediction(hidden, context, state, self.condition(state, past, flat))

    def generate_text(
        self, observation: Observation, prompt: str | None = None, max_tokens: int = text.MAX_TOKENS
    ) -> list[str]:
        """Describe observations, or answer a prompt about them, by greedy decoding."""
        return text.generate(self, observation, prompt, max_tokens)
