"""The figure: six verbs, from an observation and an action to the next observation.

     observation o_i            action a_i
          │ encode_observation       │ encode_action
          └─────► [ v…v  a…a  q…q ] ◄┘     one round of the backbone's sequence
                           │ predict_states      hidden states at the queries = the state ŝ_{i+1}
                           │ condition           condition adapter
    context latents ─► denoise ─► decode ─► o_{i+1} ─► next round

`worldmodel.rollout` plays rounds with these verbs; `forward` runs teacher-forced rounds in one pass.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, SupportsIndex

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from worldmodel.config import WorldModelConfig, height_width
from worldmodel.diffusion.sampler import Chunk, Denoiser
from worldmodel.models import factory, text
from worldmodel.models.action import ActionAdapter
from worldmodel.models.backbone.causal_lm import Backbone
from worldmodel.models.conditioning import Condition, Prediction
from worldmodel.models.loading.model_folder import PretrainedMixin
from worldmodel.models.outcome import OutcomeHead
from worldmodel.models.vision.adapter import EncodedObservation, Observation
from worldmodel.parallel.agreement import Agreement
from worldmodel.types import Action

if TYPE_CHECKING:
    from worldmodel.rollout import Session


class WorldModel(nn.Module, PretrainedMixin):
    """An any-to-any world model: backbone, three adapters, video generator, codec."""

    agreement = Agreement()  # the processes that train the model

    def __init__(self, config: WorldModelConfig, backbone: Backbone, folder: Path | None = None) -> None:
        """Build the parts around a backbone; those of other libraries are read from `folder`, if given."""
        super().__init__()
        self.config = config
        width, scale = backbone.width, backbone.width**-0.5
        self.codec = factory.codec(config, folder)
        self.backbone = backbone
        self.vision = factory.vision(config, width, folder)
        self.action = ActionAdapter(config.action, width)
        self.queries = nn.Parameter(torch.randn(config.num_queries, width) * scale)
        self.blank_latents = nn.Parameter(torch.randn(config.codec.latent_channels, *config.codec.grid) * 0.1)
        self.prompt_marker, self.answer_marker = (nn.Parameter(torch.randn(width) * scale) for _ in range(2))
        self.generator = factory.generator(config, self.codec, folder)
        self.condition_adapter = factory.condition_adapter(config, width, self.generator)
        self.outcome = OutcomeHead(width) if config.outcomes else None

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
    ) -> "Session":
        """Open a session: a live rollout."""
        from worldmodel.rollout import Session

        return Session(self, seed, num_inference_steps, guidance_scale, negative_prompt=negative_prompt)

    @property
    def device(self) -> torch.device:
        """Device of the model's own parameters."""
        return self.blank_latents.device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the model's own parameters; parts of other libraries may have another."""
        return self.blank_latents.dtype

    # ---- the six verbs -------------------------------------------------------------------------------

    def encode_observation(self, observation: Observation) -> EncodedObservation:
        """Map an observation to vision tokens and queries; one without latents is a blank one."""
        if not observation.latents.shape[1]:
            observation = replace(observation, latents=self._blank_context(len(observation.latents)))
        vision = self.vision(observation)
        # On a latent grid, a query is a learned vector plus the feature of its newest latent cells.
        queries = self.queries if vision.queries is None else self.queries + vision.queries
        return EncodedObservation(vision.tokens, queries.expand(len(vision.tokens), -1, -1), vision.cells)

    def encode_action(self, actions: Sequence[Action]) -> list[Float[Tensor, "_ d"]]:
        """Map actions to tokens; an InputError says why the model does not take one."""
        return self.action(actions, self.backbone)

    def predict_states(
        self, embeds: Float[Tensor, "b n d"], ends: Int[Tensor, "b r"]
    ) -> Float[Tensor, "b r q d"]:
        """Return the hidden states at the queries that end each round; in a rollout, an engine does this."""
        return self.backbone.predict_states(embeds, ends, self.config.num_queries)

    def condition(
        self,
        states: Float[Tensor, "b n d"],
        context: Float[Tensor, "b s c h w"],
        actions: Sequence[Action] | None = None,
    ) -> Condition:
        """Map states, context latents and, if the generator reads text, actions to its condition."""
        if self.condition_adapter.reads_text:
            states = self.action.text_states(actions or (), self.backbone)
        return self._add_text(self.condition_adapter(states, context), actions)

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

    def _blank_context(self, batch: int) -> Float[Tensor, "b s c h w"]:
        return self.blank_latents.expand(batch, self.config.context_latents, -1, -1, -1)

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
    ) -> Prediction:
        """Predict every round's next observation, teacher-forced, in one pass of the backbone.

        `actions[j][i]` is the action of episode j in round i; `frames` are for encoders that need pixels.
        """
        batch, rounds = context.shape[:2]
        flat = [action for episode in actions for action in self.action.of_rounds(episode)]
        if self.condition_adapter.reads_text:
            states = self.action.text_states(flat, self.backbone)
            condition = self.condition_adapter(states, context.flatten(0, 1))
            return Prediction(states.unflatten(0, (batch, rounds)), context, condition)
        pixels = None if frames is None else frames.flatten(0, 1)
        seen = self.encode_observation(Observation(context.flatten(0, 1), pixels))
        taken = self.encode_action(flat)
        parts = list(zip(seen.tokens, taken, seen.queries, strict=True))
        ends = torch.tensor([sum(map(len, each)) for each in parts]).view(batch, rounds).cumsum(dim=1)
        # One concatenation: a GPU computes it faster than the host could start one for every round.
        rows = list(torch.cat([part for each in parts for part in each]).split(ends[:, -1].tolist()))
        states = self.predict_states(nn.utils.rnn.pad_sequence(rows, batch_first=True), ends)
        condition = self.condition(states.flatten(0, 1), context.flatten(0, 1), flat)
        return Prediction(states, context, condition)

    def generate_text(
        self, observation: Observation, prompt: str | None = None, max_tokens: int = text.MAX_TOKENS
    ) -> list[str]:
        """Describe observations, or answer a prompt about them, by greedy decoding."""
        return text.generate(self, observation, prompt, max_tokens)
