"""Inputs of objectives from episodes: latents, encoded here or before training, pixels, text states."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from worldmodel.batch import from_array, to_device
from worldmodel.data.loader import Batch
from worldmodel.episodes import Episode
from worldmodel.errors import ConfigError
from worldmodel.media.tensors import to_pixels, to_tensor
from worldmodel.models.rounds import RoundEncoder
from worldmodel.models.state import CHANGED
from worldmodel.models.vision.adapter import Observation
from worldmodel.models.world_model import WorldModel
from worldmodel.train.objectives.base import Rounds

REMEDY = "run the stage encode with this model, or set precomputed: false for the source"


def encode_rounds(model: WorldModel, batch: Batch) -> Rounds:
    """Encode the observations of a batch whose episodes have actions, or take their latents.

    Raises:
        ConfigError: the latents were made by another model.
    """
    clips = list(pixels_of(model, batch))
    blank = model.blank_observation(len(batch.episodes)).latents
    if batch.episodes[0].encoded is None:
        first, *following = clips
        context, target = RoundEncoder.of(model).rounds(first, following, blank)
    else:
        context, target = stored_rounds(model, batch.episodes, blank)
    pixels = [model.vision.select_frames(before) for before in clips[:-1]]
    changed = (
        (target - context[:, :, -1:]).pow(2).mean(dim=3) > CHANGED
        if context.shape[2]
        else (torch.ones_like(target[:, :, :, 0], dtype=torch.bool))
    )
    frames = [each for each in pixels if each is not None]
    observed = torch.tensor([episode.observed for episode in batch.episodes])
    scored = to_device(torch.arange(target.shape[1]) >= observed[:, None], target.device)
    return Rounds(context, target, changed, scored, torch.stack(frames, dim=1) if frames else None)


def pixels_of(model: WorldModel, batch: Batch) -> Iterator[Float[Tensor, "b t 3 h w"]]:
    """Yield the observations of a batch by position, in [-1, 1] and in the model's dtype."""
    if batch.frames is not None:
        for clip in batch.frames.take():
            yield to_pixels(clip).to(model.dtype)
        return
    for column in zip(*(episode.observations for episode in batch.episodes), strict=True):
        yield to_tensor(list(column), model.device).to(model.dtype)


def stored_rounds(
    model: WorldModel, episodes: Sequence[Episode], blank: Float[Tensor, "b _ c h w"]
) -> tuple[Float[Tensor, "b r s c h w"], Float[Tensor, "b r t c h w"]]:
    """Return the latents that episodes were encoded to before training.

    Raises:
        ConfigError: they were made by another model.
    """
    config = model.config
    given = [episode.encoded for episode in episodes]
    rounds = len(episodes[0].actions)
    context = blank[:, None]
    if given[0] is not None and given[0].context is not None:
        shape = (rounds, config.context_latents, *config.latent_shape[1:])
        context = stored(model, episodes, [each and each.context for each in given], shape)
    shape = (rounds, *config.latent_shape)
    return context, stored(model, episodes, [each and each.target for each in given], shape)


def stored(
    model: WorldModel, episodes: Sequence[Episode], arrays: Sequence[np.ndarray | None], shape: Sequence[int]
) -> Float[Tensor, "b ..."]:
    """Stack stored latents of episodes on the model's device; -1 in `shape` is any number.

    Raises:
        ConfigError: an array is missing or has another shape.
    """
    found = []
    for episode, array in zip(episodes, arrays, strict=True):
        expected = array is not None and tuple(
            given if size < 0 else size for given, size in zip(array.shape, shape, strict=False)
        )
        if array is None or array.shape != expected:
            raise ConfigError(
                f"The latents of {episode.name} have shape {None if array is None else list(array.shape)}, "
                f"and this model needs {list(shape)}; {REMEDY}."
            )
        found.append(array)
    return to_device(from_array(np.stack(found)), model.device).to(model.dtype)


def encode_observations(model: WorldModel, batch: Batch) -> list[Observation]:
    """Encode the concatenated clips of each episode, or take their latents, as batches of one.

    Of an episode with actions, that is the last clip; the ones before are of earlier rounds.

    Raises:
        ConfigError: the latents were made by another model.
    """
    episodes = batch.episodes
    if episodes[0].encoded is None:
        clips = [each.observations[len(each.actions) :] for each in episodes]
        columns = zip(*clips, strict=True)
        encoded = zip(*(encode_clips(model, list(column)) for column in columns), strict=True)
        rows = [torch.cat(each)[None] for each in encoded]
    else:
        shape = (-1, *model.config.latent_shape[1:])
        rows = [stored(model, [each], [each.encoded and each.encoded.observed], shape) for each in episodes]
    observations = []
    for episode, latents in zip(episodes, rows, strict=True):
        pixels = None
        if model.vision.needs_frames:
            pixels = model.vision.select_frames(
                to_tensor([np.concatenate(episode.observations[len(episode.actions) :])], model.device).to(
                    model.dtype
                )
            )
        observations.append(Observation(latents, pixels))
    return observations


def encode_first_frames(model: WorldModel, batch: Batch) -> Float[Tensor, "b 1 c h w"]:
    """Encode the first observation of every episode, one frame, or take its latents.

    Raises:
        ConfigError: the latents were made by another model.
    """
    if batch.episodes[0].encoded is not None:
        blank = model.blank_observation(len(batch.episodes)).latents
        context, _ = stored_rounds(model, batch.episodes, blank)
        return context[:, 0, :1]  # of an image: the first latent of a codec has seen one frame
    return RoundEncoder.of(model).encode(next(pixels_of(model, batch)))


def encode_clips(model: WorldModel, clips: Sequence[np.ndarray]) -> list[Float[Tensor, "_ c h w"]]:
    """Encode clips of different lengths, batching clips of equal length."""
    rows: dict[int, Tensor] = {}
    for length in sorted({len(clip) for clip in clips}):
        chosen = [index for index, clip in enumerate(clips) if len(clip) == length]
        frames = to_tensor([clips[i] for i in chosen], model.device).to(model.dtype)
        rows |= dict(zip(chosen, RoundEncoder.of(model).encode(frames), strict=True))
    return [rows[index] for index in range(len(clips))]


def text_states(batches: Iterable[Batch]) -> dict[str, Float[Tensor, "_ e"]]:
    """Return the text states that episodes have, by text, on the CPU."""
    episodes = [episode for batch in batches for episode in batch.episodes]
    found = {text: state for episode in episodes for text, state in (episode.text_states or {}).items()}
    return {text: from_array(np.ascontiguousarray(state)) for text, state in found.items()}
