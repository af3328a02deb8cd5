"""Rounds of a self-rollout, one after the other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import DynamicCache

from worldmodel.actions import Action
from worldmodel.batch import map_tensors
from worldmodel.models.conditioning import Prediction
from worldmodel.models.state import State
from worldmodel.models.vision.adapter import Observation
from worldmodel.models.world_model import WorldModel


@dataclass(frozen=True)
class SelfRollout:
    """What was observed in the rounds of a self-rollout and, if gradients flow, predicted."""

    model: WorldModel
    actions: Sequence[Sequence[Action]]
    context: Float[Tensor, "b r s c h w"]
    frames: Float[Tensor, "b r f 3 H W"] | None
    hidden: Sequence[Float[Tensor, "b n d"]]
    """Hidden states at the queries, by round."""
    states: Sequence[State]

    def prediction(self) -> Prediction:
        """Return the predictions that were made on the way."""
        state = map_tensors(lambda *rounds: torch.stack(rounds, dim=1).flatten(0, 1), *self.states)
        actions = [action for episode in self.actions for action in episode]
        condition = self.model.condition(state, self.context.flatten(0, 1), actions)
        return Prediction(torch.stack(list(self.hidden), dim=1), self.context, state, condition)


class RolloutWindow:
    """Plays rounds of a batch of episodes in order, in windows of `context_rounds` rounds.

    As in a session, the backbone keeps the keys and values of the rounds before, and computes a new round
    alone. Where rounds of the batch have different lengths, which cannot share a cache, it computes the
    window again.
    """

    def __init__(self, model: WorldModel, episodes: Sequence[Sequence[Action]]) -> None:
        """Begin before the first round; `episodes` are the actions of all rounds."""
        self.model = model
        self.actions = [model.action.of_rounds(episode) for episode in episodes]
        self.window: list[list[Tensor]] = []
        """Embeddings of the rounds of the window, by episode."""
        self.cache: RoundCache | None = None

    def play(
        self,
        index: int,
        context: Float[Tensor, "b s c h w"],
        frames: Tensor | None,
        history: Float[Tensor, "b d"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """Return the hidden states at the queries of round `index`, which follows those that were played.

        Args:
            index: Number of the round.
            context: What it observes.
            frames: Frames for vision encoders that need pixels.
            history: What the state remembers of the code that led to the observation.
        """
        model = self.model
        actions = [episode[index] for episode in self.actions]
        seen = model.encode_observation(Observation(model.unseen(context), frames), history)
        parts = model.encode_action(actions).rows(seen.tokens, seen.queries)
        rows = [torch.cat(each) for each in parts]
        if index % model.config.context_rounds == 0:
            self.window, self.cache = [[] for _ in rows], RoundCache()
        for before, row in zip(self.window, rows, strict=True):
            before.append(row)
        if len({len(row) for row in rows}) > 1:
            self.cache = None  # until the next window
        if self.cache is not None:
            self.cache = RoundCache(self.cache.present)
            ends = torch.full((len(rows), 1), len(rows[0]))
            hidden = model.backbone.predict_states(
                torch.stack(rows), ends, model.config.num_queries, self.cache
            )
        else:
            whole = [torch.cat(before) for before in self.window]
            ends = torch.tensor([[len(row)] for row in whole])
            hidden = model.predict_states(nn.utils.rnn.pad_sequence(whole, batch_first=True), ends)
        return hidden[:, 0]


class RoundCache(DynamicCache):
    """Keys and values of the rounds before, and of one round whose layers may run again.

    They do where activations are recomputed for the backward pass; another cache would then be longer than in
    the forward pass.
    """

    def __init__(self, past: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        """Begin with the keys and values of each layer; without them, with the first round."""
        super().__init__(list(past) or None)
        self.past = past
        self.computed: set[int] = set()

    @property
    def present(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer, with those of the round."""
        layers: list[Any] = self.layers
        return [(layer.keys, layer.values) for layer in layers]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append to a layer, or return the same once more."""
        if layer_idx not in self.computed:
            self.computed.add(layer_idx)
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if not self.past:
            return key_states, value_states
        keys, values = self.past[layer_idx]
        return torch.cat([keys, key_states], dim=2), torch.cat([values, value_states], dim=2)
