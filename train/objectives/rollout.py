"""Rounds of a self-rollout, one after the other."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from worldmodel.actions import Action
from worldmodel.models.vision.adapter import Observation
from worldmodel.models.world_model import WorldModel


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
        self.cache = None

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
        seen = model.encode_observation(Observation(context, frames), history)
        parts = zip(seen.tokens, model.encode_action(actions), seen.queries, strict=True)
        rows = [torch.cat(each) for each in parts]
        if index % model.config.context_rounds == 0:
            self.window, self.cache = [[] for _ in rows], model.backbone.new_cache()
        for before, row in zip(self.window, rows, strict=True):
            before.append(row)
        if len({len(row) for row in rows}) > 1:
            self.cache = None  # until the next window
        if self.cache is not None:
            ends = torch.full((len(rows), 1), len(rows[0]))
            hidden = model.backbone.predict_states(
                torch.stack(rows), ends, model.config.num_queries, self.cache
            )
        else:
            whole = [torch.cat(before) for before in self.window]
            ends = torch.tensor([[len(row)] for row in whole])
            hidden = model.predict_states(nn.utils.rnn.pad_sequence(whole, batch_first=True), ends)
        return hidden[:, 0]
