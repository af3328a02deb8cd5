"""Sessions as files: the state of the world, the settings of the sampler, and what was recorded so far."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from worldmodel.actions import Action, Pose
from worldmodel.config import height_width
from worldmodel.episodes import Outcome
from worldmodel.errors import InputError
from worldmodel.io import atomic_file
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout.recording import Recording
from worldmodel.rollout.round import SamplingParams
from worldmodel.rollout.saved import (
    DAMAGED,
    StateHeader,
    StateReader,
    check,
    check_same,
    identify,
    pack,
    state_tensors,
    unpack,
)
from worldmodel.rollout.state import WorldState

FORMAT = "worldmodel.session.1"
SUFFIXES = (".safetensors", ".pt")
"""Of session files. Both hold safetensors: no file of this package is a pickle."""


class SavedSession(NamedTuple):
    """What a session has beside its model."""

    seed: int
    params: SamplingParams
    state: WorldState
    recording: Recording


def write(session: SavedSession, model: WorldModel, path: Path) -> None:
    """Write a session.

    Raises:
        OutputError: the file cannot be written.
    """
    state, recording = session.state, session.recording
    told = {
        "seed": session.seed,
        "params": asdict(session.params),
        "round": state.round,
        "camera": asdict(state.cameras[0]),
        "outcome": asdict(state.outcomes[0]) if state.outcomes else None,
        "timesteps": None if state.trace is None else list(state.trace.timesteps),
        "actions": [action.as_dict() for action in recording.actions],
    }
    metadata = {"format": FORMAT, "model": identify(model), "session": json.dumps(told)}
    data = pack(metadata, dict(_tensors(state, recording)))
    with atomic_file(path) as file:
        file.write_bytes(data)


def read(path: str | Path, model: WorldModel) -> SavedSession:
    """Read a session that was written.

    Raises:
        InputError: there is no such file, it is damaged, or it is of another model.
    """
    if not Path(path).is_file():
        raise InputError(f"There is no file {str(path)!r}; check the path.")
    try:
        metadata, tensors = unpack(Path(path).read_bytes(), FORMAT)
        check_same("model", metadata["model"], identify(model))
        told = json.loads(metadata["session"])
        params = SamplingParams(**told["params"])
        numbers = (params.guidance_scale, params.temperature)
        check(type(params.num_inference_steps) is int and type(params.top_k) is int)
        check(isinstance(params.negative_prompt, str) and all(type(x) in (int, float) for x in numbers))
        pose = Pose(**{name: tuple(map(float, value)) for name, value in told["camera"].items()})
        outcome = None if told["outcome"] is None else Outcome(**told["outcome"])
        seed, number = told["seed"], told["round"]
        check(type(seed) is int and type(number) is int and number >= 0)
        header = StateHeader(seed, number, pose, outcome, told["timesteps"], params.negative_prompt)
        state = StateReader(tensors, model).state(header)
        return SavedSession(seed, params, state, _recording(tensors, told["actions"], model))
    except InputError:
        raise
    except (SafetensorError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError):
        raise InputError(DAMAGED) from None


def _tensors(state: WorldState, recording: Recording) -> Iterator[tuple[str, Tensor]]:
    yield from state_tensors(state)
    for index, clip in enumerate(recording.clips):
        yield f"clip.{index}", torch.from_numpy(np.ascontiguousarray(clip))


def _recording(tensors: Mapping[str, Tensor], actions: list[Any], model: WorldModel) -> Recording:
    pixels = (*height_width(model.config.codec.image_size), 3)
    clips = []
    while (clip := tensors.get(f"clip.{len(clips)}")) is not None:
        check(clip.dtype == torch.uint8 and clip.ndim == 4 and tuple(clip.shape[1:]) == pixels)
        clips.append(clip.numpy())
    # A session that forgot its recording has the newest clip alone.
    check(len(clips) == len(actions) + 1)
    return Recording(tuple(clips), tuple(map(Action.of, actions)))
