"""How unlike an observation is to what a model knows."""

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float, UInt8
from torch import Tensor

from worldmodel.actions import Action
from worldmodel.errors import ConfigError, InputError
from worldmodel.media.tensors import to_tensor
from worldmodel.models.known import KnownObservations
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout.round import Engine, LocalEngine, RoundInputs, prepare
from worldmodel.rollout.state import WorldState

Images = UInt8[np.ndarray, "b h w 3"]
BATCH = 16


@torch.no_grad()
def look(model: WorldModel, images: Images) -> tuple[Float[Tensor, " b"], RoundInputs]:
    """Return the errors of the codec in grey levels, and the inputs of a round without an action.

    The backbone makes the states of the latter (`states_of`).
    """
    pixels = to_tensor(list(images[:, None]), model.device)
    latents = model.observe(pixels).latents
    decoded = model.decode(latents)[:, :1].clamp(-1, 1)
    errors = rearrange((decoded - pixels).abs().float(), "b t c h w -> b (t c h w)").mean(dim=1) * 127.5
    world = WorldState.from_latents(model, latents, images[:, None], (0,) * len(images))
    return errors, prepare(model, [world], [Action()] * len(images))


def states_of(hidden: Float[Tensor, "b n d"]) -> Float[Tensor, "b d"]:
    """Return the states that `KnownObservations` compares, from the hidden states at the queries."""
    return hidden.float().mean(dim=1)


def observation_scores(model: WorldModel, engine: Engine, images: Images) -> list[float] | None:
    """Return for each image how unlike what the model knows it is; None if its folder does not say.

    1 is the limit that 99 % of held-out frames keep; what is far above it, such as a photograph for a model
    of a game, becomes something else within a round.
    """
    if model.known is None:
        return None
    errors, states = _measured(model, engine, images)
    return model.known.score(errors.cpu(), states.cpu()).tolist()


def known_observations(model: WorldModel, images: Images) -> KnownObservations | None:
    """Return what a model knows, by frames of its world that it was not trained on; None if they are few."""
    engine = LocalEngine(model.backbone, max_cache_bytes=0)
    parts = [
        _measured(model, engine, images[first : first + BATCH]) for first in range(0, len(images), BATCH)
    ]
    if not parts:
        return None
    errors, states = (torch.cat(each).cpu() for each in zip(*parts, strict=True))
    return KnownObservations.of(errors, states)


def _measured(model: WorldModel, engine: Engine, images: Images) -> tuple[Tensor, Tensor]:
    errors, inputs = look(model, images)
    return errors, states_of(engine.predict_states(inputs.histories, model.config.num_queries))


def check_score(score: float | None, limit: float | None) -> None:
    """Check a score against the limit that was asked for, if any.

    Raises:
        ConfigError: the limit is not above 0.
        InputError: the score is above it, or the model has none.
    """
    if limit is None:
        return
    if not limit > 0:
        raise ConfigError(f"max_observation_score is {limit:g}; use a number above 0, such as 2.")
    if score is None:
        raise InputError(
            "This model does not say which observations it knows; leave max_observation_score out, or train "
            "it with validation.source, which measures that."
        )
    if score > limit:
        raise InputError(
            f"This world does not know that picture: its observation score is {score:.1f}, above {limit:g} "
            "(1 is the limit of held-out frames); start from one that looks like its data."
        )


def warning(score: float | None) -> str | None:
    """Return a sentence for users where an observation is unlike what a model knows; None where it is not."""
    if score is None or score <= 1:
        return None
    return (
        f"this world does not know that picture, and will make something else of it (observation score "
        f"{score:.1f}; 99 % of held-out frames have at most 1)."
    )
