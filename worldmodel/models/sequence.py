"""The backbone's sequence of rounds: vision tokens, the action, queries, round after round."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from worldmodel.actions import Action
from worldmodel.models.action import EncodedAction
from worldmodel.models.conditioning import Codes
from worldmodel.models.state import StateHead
from worldmodel.models.vision.adapter import EncodedObservation, Observation


@runtime_checkable
class RoundModel(Protocol):
    """The parts of a world model that rounds are embedded with."""

    state: StateHead | None

    def unseen(self, context: Tensor) -> Tensor:
        """Return the frames of a round's context that the backbone has not seen in an earlier round."""
        ...

    def encode_observation(
        self, observation: Observation, history: Tensor | None = None
    ) -> EncodedObservation:
        """Map an observation to vision tokens and queries."""
        ...

    def encode_action(self, actions: Sequence[Action]) -> EncodedAction:
        """Map actions to tokens."""
        ...


def embed_rounds(
    model: RoundModel,
    context: Float[Tensor, "b r s c h w"],
    actions: Sequence[Action],
    frames: Float[Tensor, "b r f 3 H W"] | None = None,
    codes: Codes | None = None,
) -> tuple[list[Float[Tensor, "_ d"]], Int[Tensor, "b r"]]:
    """Return the backbone's sequence of every episode, and where in it each round ends.

    `actions` are those of all rounds of the first episode, then of the next (`ActionAdapter.of_rounds`).
    """
    past, pixels = context.flatten(0, 1), None if frames is None else frames.flatten(0, 1)
    history = None
    if codes is not None and model.state is not None:
        history = model.state.history(codes.following().flatten(0, 1))
    seen = model.encode_observation(Observation(model.unseen(past), pixels), history)
    parts = model.encode_action(actions).rows(seen.tokens, seen.queries)
    ends = torch.tensor([sum(map(len, each)) for each in parts]).view(context.shape[:2]).cumsum(dim=1)
    # One concatenation: a GPU computes it faster than the host could start one for every round.
    whole = torch.cat([part for each in parts for part in each])
    return list(whole.split(ends[:, -1].tolist())), ends
