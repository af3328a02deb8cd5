"""The distinct futures of a world after an action, with their probabilities.

The code of a predicted state decides between futures, so they are told apart before any is rendered: codes
are drawn from the prior, those with the same forecast are one future, and the generator renders each once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from worldmodel import batch
from worldmodel.actions import Action
from worldmodel.diffusion.sampler import Chunk
from worldmodel.episodes import Outcome, PredictedState
from worldmodel.errors import InputError
from worldmodel.models.code import CodeSampling
from worldmodel.models.conditioning import Condition
from worldmodel.models.state import State, StateHead
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout.round import (
    CODE_STREAM,
    Engine,
    RoundInputs,
    SamplingParams,
    draw_uniform,
    finish,
    prepare,
    start_chunks,
)
from worldmodel.rollout.state import WorldState

ALIKE = 0.1
"""Mean squared difference of a latent cell (whose variance is 1) up to which two futures are one."""


@dataclass(frozen=True)
class Future:
    """A possible next observation of a world."""

    probability: float
    """Share of the codes drawn that lead to it."""
    frames: UInt8[np.ndarray, "t h w 3"]
    """Its frames."""
    outcome: Outcome | None
    """Predicted reward and end; None for models without outcomes."""
    state: PredictedState
    """The predicted state, with the code that was drawn most often."""
    action: Action
    """The action after which it may happen."""
    world: WorldState
    """The world after it, from which a session can go on (`Session.choose`)."""


@dataclass(frozen=True)
class Foreseen:
    """Futures that are told apart and not yet rendered, the most probable first."""

    inputs: RoundInputs
    """The round, once per future."""
    state: State
    probabilities: tuple[float, ...]

    def futures(self, worlds: Sequence[WorldState]) -> list[Future]:
        """Return the futures, given the worlds after them (`worldmodel.rollout.round.finish`)."""
        rows = zip(self.probabilities, self.inputs.actions, worlds, strict=True)
        return [
            Future(
                probability=probability,
                frames=world.frames[0],
                outcome=world.outcomes[0] if world.outcomes else None,
                state=world.states[0],
                action=action,
                world=world,
            )
            for probability, action, world in rows
        ]


@torch.no_grad()
def futures(
    model: WorldModel,
    engine: Engine,
    world: WorldState,
    action: Action,
    params: SamplingParams,
    num_draws: int,
    max_futures: int,
) -> list[Future]:
    """Return the futures of one world, the most probable first; see `Session.futures`.

    Raises:
        InputError: the states of the model have no code, or the model does not take the action.
    """
    check_futures(model)
    inputs = prepare(model, [world], [action])
    hidden = engine.predict_states(inputs.histories, model.config.num_queries)
    foreseen, chunks = foresee(model, inputs, hidden, params, num_draws, max_futures)
    worlds = finish(model, foreseen.inputs, foreseen.state, chunks, model.denoise(chunks))
    return foreseen.futures(worlds)


def check_futures(model: WorldModel) -> None:
    """Check that a model can tell futures apart.

    Raises:
        InputError: its states have no code.
    """
    if not model.config.has_code:
        raise InputError(
            "This model's states have no code to choose between futures (state.code_groups); step forks "
            "of the session with different seeds instead."
        )


@torch.no_grad()
def foresee(
    model: WorldModel,
    inputs: RoundInputs,
    hidden: Float[Tensor, "b n d"],
    params: SamplingParams,
    num_draws: int,
    max_futures: int,
) -> tuple[Foreseen, list[Chunk[Condition]]]:
    """Tell the futures of one world's round apart; return them, and their chunks before denoising."""
    head = model.state
    assert head is not None, "checked before"
    codes, counts = _drawn(head, inputs, hidden, params, num_draws)
    count = len(codes)
    state = model.read_state(
        hidden.expand(count, -1, -1),
        inputs.context.expand(count, -1, -1, -1, -1),
        inputs.actions * count,
        code=codes,
    )
    chosen, shares = _distinct(state, counts)
    chosen, shares = chosen[:max_futures], shares[:max_futures]
    rows = len(chosen)
    state = batch.take(state, torch.tensor(chosen, device=hidden.device))
    inputs = RoundInputs(inputs.worlds * rows, inputs.actions * rows, inputs.histories * rows)
    condition = model.condition(state, inputs.context, inputs.actions)
    chunks = start_chunks(model, inputs, condition, params)
    return Foreseen(inputs, state, tuple(share / num_draws for share in shares)), chunks


def _drawn(
    head: StateHead, inputs: RoundInputs, hidden: Tensor, params: SamplingParams, num_draws: int
) -> tuple[Float[Tensor, "m v k"], list[int]]:
    """Draw codes; return the different ones and how often each was drawn.

    The first draw is that of `play_round`, so what a step would make is among the futures.
    """
    (world,) = inputs.worlds
    assert head.code is not None
    own = draw_uniform([(world.seeds[0], world.round)], head.code.length)
    # A stream of its own: seeds of worlds are not used up.
    others = draw_uniform([(world.seeds[0] + CODE_STREAM, world.round)], (num_draws - 1) * head.code.length)
    draws = torch.cat([own, others.view(-1, head.code.length)])[None].to(hidden)
    sampling = CodeSampling(params.temperature, params.top_k)
    codes = head.draw(hidden, inputs.context, draws, sampling)[0]
    distinct, counts = codes.unique(dim=0, return_counts=True)
    return distinct, counts.tolist()


def _distinct(state: State, counts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return a row per distinct forecast, and how many codes lead to it, the most frequent first.

    Two forecasts are one future if no cell of them differs as much as a cell that an action changes.
    """
    assert state.forecast is not None
    chosen: list[int] = []
    shares: list[int] = []
    for row in sorted(range(len(counts)), key=lambda row: -counts[row]):
        for place, other in enumerate(chosen):
            difference = (state.forecast[row] - state.forecast[other]).pow(2).mean(dim=1)
            if bool((difference <= ALIKE).all()):
                shares[place] += counts[row]
                break
        else:
            chosen.append(row)
            shares.append(counts[row])
    order = sorted(range(len(chosen)), key=lambda place: -shares[place])
    return [chosen[place] for place in order], [shares[place] for place in order]


def one_hot_code(model: WorldModel, code: Sequence[int]) -> Float[Tensor, "1 v k"]:
    """Return a code that a user names by its values.

    Raises:
        InputError: the model's states have no such code.
    """
    check_futures(model)
    assert model.state is not None and model.state.code is not None, "checked before"
    length, classes = model.state.code.length, model.state.code.classes
    if len(code) != length or not all(0 <= value < classes for value in code):
        raise InputError(
            f"The code has {len(code)} values; use {length} from 0 to {classes - 1}, as futures have them."
        )
    values = torch.tensor([list(code)], device=model.device)
    return F.one_hot(values, classes).to(model.dtype)
