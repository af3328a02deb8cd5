"""The figure: six verbs, from an observation and an action to the next observation.

     observation o_i            action a_i
          │ encode_observation       │ encode_action
          └─────► [ v…v  a…a  q…q ] ◄┘     one round of the backbone's sequence
                           │ predict_state       hidden states at the queries = the state ŝ_{i+1}
                           │ condition           generator adapter
     latents of o_i ─► denoise ─► decode ─► o_{i+1} ─► next round

Text comes out of the same prefix by ordinary decoding (`read`). Training runs the same verbs over several
rounds in one pass (`forward`); `worldmodel.rollout.Session` runs them with caches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedTokenizerBase

from worldmodel.config import WorldModelConfig, height_width
from worldmodel.models import factory
from worldmodel.models.action import SLOT, ActionAdapter
from worldmodel.models.backbone.causal_lm import Backbone
from worldmodel.models.codec.autoencoder import newest
from worldmodel.models.conditioning import Condition
from worldmodel.models.vision.adapter import Observation, Vision
from worldmodel.models.vision.preprocessing import frames_wanted
from worldmodel.types import Action, resolve_camera_targets

if TYPE_CHECKING:
    from worldmodel.rollout import Session


@dataclass(frozen=True)
class Prediction:
    """What `forward` predicts for every round."""

    states: Float[Tensor, "b r n d"]
    context: Float[Tensor, "b r s c h w"]
    condition: Condition
    """Batch axis is `b * r`, rounds fastest."""


class WorldModel(nn.Module):
    """An any-to-any world model: backbone, vision, action and generator adapters, generator, codec."""

    def __init__(self, config: WorldModelConfig, backbone: Backbone, folder: Path | None = None) -> None:
        """Build the parts around a backbone; those of other libraries come from `folder`, if it is given."""
        super().__init__()
        self.config = config
        width = backbone.width
        scale = width**-0.5
        self.codec = factory.codec(config, folder)
        self.backbone = backbone
        self.vision = factory.vision(config, width, folder)
        self.action = ActionAdapter(config.action, width)
        self.queries = nn.Parameter(torch.randn(config.num_queries, width) * scale)
        self.unseen = nn.Parameter(torch.randn(config.codec.latent_channels, *config.codec.grid) * 0.1)
        self.ask = nn.Parameter(torch.randn(width) * scale)
        self.answer = nn.Parameter(torch.randn(width) * scale)
        self.generator = factory.generator(config, self.codec, folder)
        self.adapter = factory.adapter(config, width, self.generator)

    @classmethod
    def from_config(
        cls, config: WorldModelConfig, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> "WorldModel":
        """Build a model with random weights (or with the backbone that the config names)."""
        return cls(config, Backbone.from_config(config.backbone, tokenizer))

    @classmethod
    def from_pretrained(
        cls, name: str | Path, revision: str | None = None, adapters: str | Path | None = None
    ) -> "WorldModel":
        """Load a shipped model by name, a model folder, or one on the Hub (see `worldmodel.hub`)."""
        from worldmodel import hub

        return hub.from_pretrained(name, revision, adapters)

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write a model folder that `from_pretrained` reads."""
        from worldmodel import hub

        return hub.save_pretrained(self, folder)

    def session(
        self, seed: int = 0, num_inference_steps: int | None = None, guidance_scale: float | None = None
    ) -> "Session":
        """Open a session: a live rollout."""
        from worldmodel.rollout import Session

        return Session(self, seed, num_inference_steps, guidance_scale)

    # ---- the six verbs -------------------------------------------------------------------------------

    def encode_observation(self, observation: Observation) -> Vision:
        """Turn an observation into tokens (and per-cell features); one without latents is a world unseen."""
        if not observation.latents.shape[1]:
            observation = replace(observation, latents=self._unseen(len(observation.latents)))
        return self.vision(observation)

    def encode_action(self, actions: Sequence[Action]) -> list[Float[Tensor, "_ d"]]:
        """Turn actions into tokens.

        Raises:
            InputError: an action the model does not take.
        """
        return self.action(actions, self.backbone)

    def predict_state(
        self, embeds: Float[Tensor, "b n d"], cache: DynamicCache | None = None
    ) -> Float[Tensor, "b n d"]:
        """Run the backbone over new positions; the last `num_queries` of every round are its state."""
        return self.backbone(embeds, cache)

    def condition(
        self,
        states: Float[Tensor, "b n d"],
        context: Float[Tensor, "b s c h w"],
        actions: Sequence[Action] | None = None,
    ) -> Condition:
        """Turn states and the last seen latent frames into what the generator is conditioned on.

        `actions` are read a second time, by the generator's own text encoder, where the config says so.
        """
        return self._with_words(self.adapter(states, context), actions)

    def denoise(
        self,
        condition: Condition,
        context: Float[Tensor, "b s c h w"],
        noise: Float[Tensor, "b t c h w"],
        num_inference_steps: int,
        guidance_scale: float = 1.0,
    ) -> Float[Tensor, "b t c h w"]:
        """Generate the next chunk's latents from noise.

        With `guidance_scale` other than 1 the prediction is extrapolated away from the unconditional one
        (Ho & Salimans 2022, arXiv:2207.12598, eq. 6).
        """
        guided = guidance_scale != 1.0
        conditions = [condition, self.null_condition(context)] if guided else [condition]
        starts = [self.generator.start(context, each) for each in conditions]
        solver, latents = self.generator.solver(num_inference_steps), noise
        for step in range(solver.num_steps):
            level = noise.new_full(noise.shape[:2], solver.level(step))
            full, *empty = (
                self.generator(latents, level, each, past)
                for each, past in zip(conditions, starts, strict=True)
            )
            prediction = empty[0] + guidance_scale * (full - empty[0]) if guided else full
            latents = solver.step(step, prediction, latents)
        return latents

    def decode(
        self, latents: Float[Tensor, "b t2 c h2 w2"], context: Float[Tensor, "b s c h2 w2"] | None = None
    ) -> Float[Tensor, "b t 3 h w"]:
        """Turn the latents that follow those of `context` into pixels in [-1, 1]."""
        return self.codec.decode(latents, context).clamp(-1, 1)

    # ---- what the verbs start from -------------------------------------------------------------------

    def observe(self, frames: Float[Tensor, "b t 3 h w"]) -> Observation:
        """Return pixels as an observation that nothing came before."""
        given = frames
        if self.codec.causal:  # one frame, then whole groups
            groups = -(-(frames.shape[1] - 1) // self.codec.temporal_factor)
            given = newest(frames, 1 + groups * self.codec.temporal_factor)
        return Observation(self.codec.encode(given), self.look(frames))

    def look(self, frames: Float[Tensor, "b t 3 h w"]) -> Float[Tensor, "b f 3 h w"] | None:
        """Return the frames that the vision encoder looks at: evenly spaced, the newest included.

        A short clip repeats frames, and nothing at all is grey, so that every round has as many tokens. None
        without an encoder.
        """
        if not self.vision.needs_frames:
            return None
        if not frames.shape[1]:
            frames = frames.new_zeros(len(frames), 1, *frames.shape[2:])
        return frames[:, frames_wanted(frames.shape[1], self.config.vision.max_frames).to(frames.device)]

    def context(
        self, latents: Float[Tensor, "b t c h w"], frames: Float[Tensor, "b f 3 H W"] | None
    ) -> Float[Tensor, "b s c h w"]:
        """Return what the next round goes on from: the newest latent frames of an observation.

        A causal codec encodes its pixels anew, since it codes the first frame of a clip as an image; others
        need no pixels.
        """
        count = self.config.context_latents
        if self.codec.causal:
            assert frames is not None, "a causal codec looks at the pixels again"
            return self.codec.context(frames, count)
        missing = max(0, count - latents.shape[1])
        return torch.cat([latents[:, :1].expand(-1, missing, -1, -1, -1), latents[:, -count:]], dim=1)

    def nothing(self, batch: int) -> Observation:
        """Return the observation of a world that nobody has seen yet, from which a text can begin.

        Its latents are learned; where the codec is causal there are none, and the generator makes the
        beginning of a clip.
        """
        unseen, sides = self._unseen(batch), height_width(self.config.codec.image_size)
        frames = self.look(unseen.new_zeros(batch, 0, 3, *sides))
        return Observation(unseen[:, :0] if self.codec.causal else unseen, frames)

    def _unseen(self, batch: int) -> Float[Tensor, "b s c h w"]:
        return self.unseen.expand(batch, self.config.context_latents, -1, -1, -1)

    def null_condition(self, context: Float[Tensor, "b s c h w"]) -> Condition:
        """Return the condition that says nothing, from which guidance leads away."""
        return self._with_words(self.adapter.null(context), [Action()] * len(context))

    def _with_words(self, condition: Condition, actions: Sequence[Action] | None) -> Condition:
        if not self.config.condition.text:
            return condition
        assert actions is not None, "the generator reads the action's words"
        texts = [action.text or "" for action in actions]
        different = list(dict.fromkeys(texts))  # a text encoder can be larger than all the rest
        with torch.no_grad():
            text = self.generator.encode_text(different)
        rows = [different.index(each) for each in texts]
        return replace(condition, text=None if text is None else text[rows])

    @property
    def latent_shape(self) -> tuple[int, int, int, int]:
        """Shape `[t, c, h, w]` of what a round generates."""
        channels, height, width = self.unseen.shape
        return self.config.chunk_latents, channels, height, width

    @property
    def round_tokens(self) -> int:
        """Positions of the sequence that one round takes, if its action fits one slot."""
        return self.vision.round_tokens + SLOT + self.config.num_queries

    # ---- one round, many rounds, text ----------------------------------------------------------------

    def round_embeds(self, observation: Observation, actions: Sequence[Action]) -> list[Float[Tensor, "_ d"]]:
        """Return one round of every row's sequence: vision tokens, action tokens, queries.

        Where there are cells, a query is a learned vector plus the feature of its own newest latent cell, so
        it knows what is there.
        """
        vision = self.encode_observation(observation)
        queries = self.queries.expand(len(actions), -1, -1)
        if vision.cells is not None:
            queries = queries + vision.cells[:, -1]
        rows = zip(vision.tokens, self.encode_action(actions), queries, strict=True)
        return [torch.cat(row) for row in rows]

    def forward(
        self,
        context: Float[Tensor, "b r s c h w"],
        actions: Sequence[Sequence[Action]],
        frames: Float[Tensor, "b r f 3 H W"] | None = None,
    ) -> Prediction:
        """Predict every round's next observation, teacher-forced, in one pass of the backbone.

        `context[:, i]` are the latent frames that round i goes on from, `frames[:, i]` the pixels seen before
        it (for an encoder that wants them); `actions[j][i]` is episode j's action in round i.
        """
        batch, rounds = context.shape[:2]
        flat = [action for episode in actions for action in resolve_camera_targets(episode)]
        pixels = None if frames is None else frames.flatten(0, 1)
        embeds = self.round_embeds(Observation(context.flatten(0, 1), pixels), flat)
        rows = [torch.cat(embeds[first : first + rounds]) for first in range(0, len(embeds), rounds)]
        hidden = self.predict_state(nn.utils.rnn.pad_sequence(rows, batch_first=True))
        ends = torch.tensor([len(each) for each in embeds]).view(batch, rounds).cumsum(dim=1)
        places = (ends[:, :, None] + torch.arange(-self.config.num_queries, 0)).to(hidden.device)
        states = hidden[torch.arange(batch, device=hidden.device)[:, None, None], places]
        condition = self.condition(rearrange(states, "b r n d -> (b r) n d"), context.flatten(0, 1), flat)
        return Prediction(states, context, condition)

    def read_rows(
        self,
        observations: Sequence[Observation],
        prompts: Sequence[str | None],
        answers: Sequence[str] | None = None,
    ) -> list[tuple[Float[Tensor, "_ d"], Int[Tensor, " _"]]]:
        """Return sequences in which the backbone says something about an observation, and their labels.

        Every observation is a batch of one. A row is vision tokens, the prompt's words, and (in training) the
        answer's. A label is the token that a position should predict, or -100.
        """
        tokens = self._vision_tokens(observations)
        rows = []
        for row, prompt in enumerate(prompts):
            seen = tokens[row]
            asked = self.backbone.token_ids(prompt) if prompt else []
            said = [*self.backbone.token_ids(answers[row]), self.backbone.end] if answers is not None else []
            ids = torch.tensor([*asked, *said[:-1]], dtype=torch.long, device=seen.device)
            words = self.backbone.embed(ids)
            parts = [seen, self.ask[None], words[: len(asked)], self.answer[None], words[len(asked) :]]
            silent = len(seen) + 1 + len(asked)
            labels = torch.tensor([-100] * silent + (said or [-100]), device=seen.device)
            rows.append((torch.cat([part.to(seen.dtype) for part in parts]), labels))
        return rows

    def _vision_tokens(self, observations: Sequence[Observation]) -> list[Float[Tensor, "_ d"]]:
        """Encode observations of different lengths, equal lengths together."""
        tokens: dict[int, Tensor] = {}
        for shape in sorted({each.shape for each in observations}):
            chosen = [row for row, each in enumerate(observations) if each.shape == shape]
            seen = self.encode_observation(Observation.stack([observations[row] for row in chosen])).tokens
            tokens |= dict(zip(chosen, seen, strict=True))
        return [tokens[row] for row in range(len(observations))]

    @torch.no_grad()
    def read(self, observation: Observation, prompt: str | None = None, max_tokens: int = 96) -> list[str]:
        """Describe observations, or answer a prompt about them, by greedy decoding."""
        rows = observation.unstack()
        prefix = torch.stack([row for row, _ in self.read_rows(rows, [prompt] * len(rows))])
        return self.backbone.decode_text(prefix, self.backbone.new_cache(), max_tokens)
