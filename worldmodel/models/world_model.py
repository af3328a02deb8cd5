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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedTokenizerBase

from worldmodel.config import WorldModelConfig
from worldmodel.diffusion.sampler import sample
from worldmodel.diffusion.schedule import sampling_sigmas
from worldmodel.models.action import SLOT, ActionAdapter
from worldmodel.models.backbone import Backbone
from worldmodel.models.codec import Codec
from worldmodel.models.condition import Condition, GeneratorAdapter
from worldmodel.models.dit import Generator
from worldmodel.models.vision import Vision, VisionAdapter
from worldmodel.types import Action

if TYPE_CHECKING:
    from worldmodel.rollout import Session


@dataclass(frozen=True)
class Prediction:
    """What `forward` predicts for every round."""

    states: Float[Tensor, "b r n d"]
    context: Float[Tensor, "b r c h w"]
    condition: Condition
    """Batch axis is `b * r`, rounds fastest."""


class WorldModel(nn.Module):
    """An any-to-any world model: backbone, vision, action and generator adapters, generator, codec."""

    def __init__(self, config: WorldModelConfig, backbone: Backbone) -> None:
        super().__init__()
        self.config = config
        grid, channels, width = config.codec.grid, config.codec.latent_channels, backbone.width
        scale = width**-0.5
        self.codec = Codec(config.codec)
        self.backbone = backbone
        self.vision = VisionAdapter(config.vision, channels, grid, width)
        self.action = ActionAdapter(config.action, width)
        self.queries = nn.Parameter(torch.randn(config.num_queries, width) * scale)
        self.unseen = nn.Parameter(torch.randn(channels, grid, grid) * 0.1)
        self.ask = nn.Parameter(torch.randn(width) * scale)
        self.answer = nn.Parameter(torch.randn(width) * scale)
        self.adapter = GeneratorAdapter(
            config.condition, width, channels, config.chunk_latents, grid, config.generator.width
        )
        self.generator = Generator(config.generator, channels, grid)

    @classmethod
    def from_config(
        cls, config: WorldModelConfig, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> "WorldModel":
        """Build a model with random weights (or with the backbone that the config names)."""
        return cls(config, Backbone.from_config(config.backbone, tokenizer))

    @classmethod
    def from_pretrained(cls, name: str | Path) -> "WorldModel":
        """Load a shipped model by name, or a model folder (see `worldmodel.hub`)."""
        from worldmodel import hub

        return hub.from_pretrained(name)

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

    def encode_observation(self, latents: Float[Tensor, "b t c h w"]) -> Vision:
        """Turn latent frames of an observation into tokens and per-cell features."""
        return self.vision(latents)

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

    def condition(self, states: Float[Tensor, "b n d"], context: Float[Tensor, "b c h w"]) -> Condition:
        """Turn states and the last seen latent frame into what the generator is conditioned on."""
        return self.adapter(states, context)

    def denoise(
        self,
        condition: Condition,
        context: Float[Tensor, "b c h w"],
        noise: Float[Tensor, "b t c h w"],
        num_inference_steps: int,
        guidance_scale: float = 1.0,
    ) -> Float[Tensor, "b t c h w"]:
        """Generate the next chunk's latents from noise.

        With `guidance_scale` other than 1 the velocity is extrapolated away from the unconditional one
        (Ho & Salimans 2022, arXiv:2207.12598, eq. 6).
        """
        guided = guidance_scale != 1.0
        conditions = [condition, self.adapter.null(context)] if guided else [condition]
        caches = [self.generator.context_cache(context[:, None], each) for each in conditions]

        def velocity(latents: Tensor, sigma: Tensor) -> Tensor:
            full, *empty = (
                self.generator(latents, sigma, each.forecast, each, past=past)[0]
                for each, past in zip(conditions, caches, strict=True)
            )
            return empty[0] + guidance_scale * (full - empty[0]) if guided else full

        return sample(velocity, noise, sampling_sigmas(num_inference_steps))

    def decode(self, latents: Float[Tensor, "b t2 c h2 w2"]) -> Float[Tensor, "b t 3 h w"]:
        """Turn latents into pixels in [-1, 1]."""
        return self.codec.decode(latents).clamp(-1, 1)

    @property
    def round_tokens(self) -> int:
        """Positions of the sequence that one round takes, if its action fits one slot."""
        merged = (self.config.codec.grid // self.config.vision.merge) ** 2
        return merged + SLOT + self.config.num_queries

    # ---- one round, many rounds, text ----------------------------------------------------------------

    def round_embeds(
        self, context: Float[Tensor, "b c h w"], actions: Sequence[Action]
    ) -> list[Float[Tensor, "_ d"]]:
        """Return one round of every row's sequence: vision tokens, action tokens, queries.

        A query is a learned vector plus the feature of its own latent cell, so it knows what is there.
        """
        vision = self.encode_observation(context[:, None])
        queries = self.queries + vision.cells[:, 0]
        rows = zip(vision.tokens, self.encode_action(actions), queries, strict=True)
        return [torch.cat(row) for row in rows]

    def forward(self, context: Float[Tensor, "b r c h w"], actions: Sequence[Sequence[Action]]) -> Prediction:
        """Predict every round's next observation, teacher-forced, in one pass of the backbone.

        `context[:, i]` is the last latent frame seen before round i; `actions[j][i]` is episode j's
        action in round i.
        """
        batch, rounds = context.shape[:2]
        flat = [action for episode in actions for action in episode]
        embeds = self.round_embeds(rearrange(context, "b r c h w -> (b r) c h w"), flat)
        rows = [torch.cat(embeds[first : first + rounds]) for first in range(0, len(embeds), rounds)]
        hidden = self.predict_state(nn.utils.rnn.pad_sequence(rows, batch_first=True))
        ends = torch.tensor([len(each) for each in embeds]).view(batch, rounds).cumsum(dim=1)
        places = (ends[:, :, None] + torch.arange(-self.config.num_queries, 0)).to(hidden.device)
        states = hidden[torch.arange(batch, device=hidden.device)[:, None, None], places]
        condition = self.condition(
            rearrange(states, "b r n d -> (b r) n d"), rearrange(context, "b r c h w -> (b r) c h w")
        )
        return Prediction(states, context, condition)

    def read_rows(
        self,
        latents: Sequence[Float[Tensor, "_ c h w"]],
        prompts: Sequence[str | None],
        answers: Sequence[str] | None = None,
    ) -> list[tuple[Float[Tensor, "_ d"], Int[Tensor, " _"]]]:
        """Return sequences in which the backbone says something about an observation, and their labels.

        A row is vision tokens, the prompt's words, and (in training) the answer's. A label is the token
        that a position should predict, or -100.
        """
        tokens = self._vision_tokens(latents)
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

    def _vision_tokens(self, latents: Sequence[Float[Tensor, "_ c h w"]]) -> list[Float[Tensor, "_ d"]]:
        """Encode observations of different lengths, equal lengths together."""
        tokens: dict[int, Tensor] = {}
        for length in sorted({len(clip) for clip in latents}):
            chosen = [row for row, clip in enumerate(latents) if len(clip) == length]
            seen = self.encode_observation(torch.stack([latents[row] for row in chosen])).tokens
            tokens |= dict(zip(chosen, seen, strict=True))
        return [tokens[row] for row in range(len(latents))]

    @torch.no_grad()
    def read(
        self, latents: Float[Tensor, "b t c h w"], prompt: str | None = None, max_tokens: int = 96
    ) -> list[str]:
        """Describe an observation, or answer a prompt about it, by greedy decoding."""
        prefix = torch.stack([row for row, _ in self.read_rows(latents.unbind(), [prompt] * len(latents))])
        return self.backbone.decode_text(prefix, self.backbone.new_cache(), max_tokens)
