"""Worlds as bytes: safetensors with JSON in its head, without pickle.

A file has all that the next round depends on: latents, the backbone's history, and the seed and the round,
from which noise and codes are drawn. Keys and values are computed again. Every tensor is checked against the
model's shapes, since a file may come from anyone.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from worldmodel.actions import Action, Pose
from worldmodel.config import height_width
from worldmodel.diffusion.swin import ChunkTrace
from worldmodel.episodes import Outcome
from worldmodel.errors import InputError
from worldmodel.models.conditioning import Condition
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout.state import WorldState, film_frames, observed_frames, observed_latents

MAX_HEADER_BYTES = 2**20
DAMAGED = "This is not a saved world, or it is damaged; save it again."
SAMPLED_VALUES = 256
"""Values of every weight that are read."""


@dataclass(frozen=True)
class StateHeader:
    """What the state of a world has beside tensors."""

    seed: int
    round: int
    camera: Pose
    outcome: Outcome | None
    timesteps: Sequence[float] | None
    """Of the trace."""
    negative_prompt: str = ""


def state_tensors(state: WorldState) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the state of one world, by name."""
    yield from (("context", state.context), ("latents", state.latents))
    for index, part in enumerate(state.histories[0]):
        yield f"history.{index}", part
    if state.code is not None:
        yield "code", state.code
    if state.previous_latents is not None:
        yield "previous_latents", state.previous_latents
    for name, array in (("frames", state.frames), ("previous_frames", state.previous_frames)):
        if array is not None:
            yield name, torch.from_numpy(np.ascontiguousarray(array))
    if state.trace is not None:
        yield "trace.context", state.trace.context
        for index, each in enumerate(state.trace.latents):
            yield f"trace.latents.{index}", each
        for index, condition in enumerate(state.trace.conditions):
            for field in fields(condition):
                if (tensor := getattr(condition, field.name)) is not None:
                    yield f"trace.conditions.{index}.{field.name}", tensor


class StateReader:
    """Reads the state of a world from tensors that may come from anyone.

    States of many worlds are batched: one whose shapes do not fit the model would fail the rounds of
    others.
    """

    def __init__(self, tensors: Mapping[str, Tensor], model: WorldModel) -> None:
        self._tensors, self._model = tensors, model
        config = model.config
        blank = model.blank_observation(1).latents
        self._dtype, self._cells = blank.dtype, tuple(blank.shape[2:])
        self._pixels = (*height_width(config.codec.image_size), 3)
        self._max_latents = max(config.chunk_latents, observed_latents(config))
        self._max_frames = max(config.chunk_frames, observed_frames(config))

    def state(self, header: StateHeader) -> WorldState:
        """Return the state.

        Raises:
            InputError: a tensor is missing or does not fit the model.
        """
        later = "previous_latents" in self._tensors
        if "origin" in self._tensors:
            self._frames("origin", film_frames(self._model.config))
        return WorldState(
            seeds=(header.seed,),
            context=self._latents("context", self._model.config.context_latents),
            latents=self._latents("latents", None),
            frames=self._frames("frames", self._max_frames),
            histories=(self._history(),),
            cameras=(header.camera,),
            round=header.round,
            previous_latents=self._latents("previous_latents", 1) if later else None,
            previous_frames=self._frames("previous_frames", 1) if later else None,
            outcomes=() if header.outcome is None else (header.outcome,),
            code=self._code(),
            trace=self._trace(header.timesteps, header.negative_prompt) if header.timesteps else None,
        )

    def _code(self) -> Tensor | None:
        """Return the code of the newest round, one-hot `[1, v, k]`; None if the world has none."""
        head = self._model.state
        if head is None or head.code is None:
            check("code" not in self._tensors)
            return None
        if "code" not in self._tensors:  # before the first round
            return None
        code = self._tensors["code"]
        check(tuple(code.shape) == (1, head.code.length, head.code.classes) and code.dtype == self._dtype)
        check(bool(((code == 0) | (code == 1)).all()) and bool((code.sum(dim=2) == 1).all()))
        return self._finite(code)

    def _latents(self, name: str, count: int | None) -> Tensor:
        """Return latent frames `[1, t, c, h, w]`; any number that the model makes if `count` is None."""
        tensor = self._tensors[name]
        check(tensor.ndim == 5 and tensor.shape[0] == 1 and tuple(tensor.shape[2:]) == self._cells)
        check(tensor.shape[1] == count if count else 1 <= tensor.shape[1] <= self._max_latents)
        check(tensor.dtype == self._dtype)
        return self._finite(tensor)

    def _frames(self, name: str, most: int) -> np.ndarray:
        tensor = self._tensors[name]
        *worlds, count = tensor.shape[:-3]  # an origin has no axis of worlds
        check(tensor.dtype == torch.uint8 and tuple(tensor.shape[-3:]) == self._pixels)
        check(worlds == ([] if name == "origin" else [1]) and 1 <= count <= most)
        return tensor.numpy()

    def _history(self) -> tuple[Tensor, ...]:
        names = [name for name in self._tensors if name.startswith("history.")]
        embedding = self._model.backbone.embed(torch.zeros(1, 1, dtype=torch.long, device=self._model.device))
        check(len(names) <= self._model.config.context_rounds)
        parts = [self._tensors[f"history.{index}"] for index in range(len(names))]
        action, num_queries = self._model.action, self._model.config.num_queries
        least = action.slot + num_queries
        most = self._model.vision.round_tokens + action.max_tokens + num_queries
        for part in parts:
            check(part.ndim == 2 and least <= len(part) <= most and part.shape[1] == embedding.shape[-1])
            check(part.dtype in (embedding.dtype, self._dtype))
        return tuple(map(self._finite, parts))

    def _trace(self, timesteps: Sequence[float], negative_prompt: str) -> ChunkTrace[Condition]:
        """Return the chunk that the next one overlaps; its conditions have the shapes of the model's own."""
        model, config = self._model, self._model.config
        context = self._latents("trace.context", config.context_latents)
        states = torch.zeros(1, config.num_queries, self._model.backbone.width, device=model.device)
        with torch.no_grad():
            own = (
                model.condition(
                    model.read_state(states.to(context), context, (Action(),)), context, (Action(),)
                ),
                model.null_condition(context, negative_prompt),
            )
        conditions: list[Condition] = []
        for index, expected in enumerate(own):
            prefix = f"trace.conditions.{index}."
            found = {name.removeprefix(prefix): name for name in self._tensors if name.startswith(prefix)}
            if found:
                parts = {field: self._finite(self._tensors[name]) for field, name in found.items()}
                conditions.append(_fitting(Condition(**parts), expected))
        latents = tuple(
            self._latents(f"trace.latents.{index}", config.chunk_latents) for index in range(len(timesteps))
        )
        return ChunkTrace(context, tuple(conditions), latents, tuple(timesteps))

    def _finite(self, tensor: Tensor) -> Tensor:
        check(bool(torch.isfinite(tensor).all()))
        return tensor.to(self._model.device)


def _fitting(condition: Condition, own: Condition) -> Condition:
    """Check that a condition can be batched with the model's conditions."""
    for field in fields(Condition):
        tensor, expected = getattr(condition, field.name), getattr(own, field.name)
        check((tensor is None) == (expected is None))
        if tensor is not None:
            check(tensor.shape == expected.shape and tensor.dtype == expected.dtype)
    return condition


def pack(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> bytes:
    """Return a file of tensors, with a checksum of them and of the metadata."""
    packed = torch.contiguous_format
    kept = {name: each.detach().cpu().clone(memory_format=packed) for name, each in tensors.items()}
    return save(kept, {**metadata, "sha256": _digest(metadata, kept)})


def unpack(data: bytes, format: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the metadata and the tensors of a file, whose checksum is right.

    Raises:
        InputError: the file is damaged, or of another version of the format.
        SafetensorError, ValueError, LookupError, TypeError: the same; callers say what the file should be.
    """
    length = int.from_bytes(data[:8], "little")
    check(len(data) > 8 and length <= min(MAX_HEADER_BYTES, len(data)))
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    made, kind = metadata["format"], format.rpartition(".")[0]
    if made != format and made.rpartition(".")[0] == kind and made.rpartition(".")[2].isdecimal():
        raise InputError(
            f"The file has the format {made[:64]}, and this version reads {format}; play on with the version "
            "that wrote it, or start anew."
        )
    check(made == format)
    tensors = load(data)
    claimed = {name: value for name, value in metadata.items() if name != "sha256"}
    check(metadata["sha256"] == _digest(claimed, tensors))
    return metadata, tensors


def check_same(what: str, made: str, here: str) -> None:
    """Check that a file is of the same model or adapter.

    Raises:
        InputError: it is not.
    """
    if made != here:
        raise InputError(
            f"The snapshot is of another {what} (identity {made[:12]!r}, that of this one is {here[:12]!r}); "
            "use the one that made it."
        )


def check(valid: bool) -> None:
    """Check something about a file.

    Raises:
        InputError: it is not so.
    """
    if not valid:
        raise InputError(DAMAGED)


def identify(model: WorldModel) -> str:
    """Return a digest of a model's config and weights, equal on every machine.

    It reads 256 values of each weight, spread evenly: training changes nearly all of them. LoRA adapters of
    a server do not count, see `Adapters.digests`.
    """
    digest = hashlib.sha256(json.dumps(asdict(model.config), sort_keys=True, default=str).encode())
    for name, tensor in sorted(
        (name.replace(".base_layer", ""), tensor)
        for name, tensor in model.state_dict().items()
        if ".lora_" not in name
    ):
        values = tensor.detach().flatten()
        chosen = torch.linspace(0, len(values) - 1, min(SAMPLED_VALUES, len(values)), dtype=torch.float64)
        taken = values[chosen.round().long().to(values.device)].cpu().view(torch.uint8)
        digest.update(f"\0{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode() + taken.numpy().tobytes())
    return digest.hexdigest()


def _digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(dict(sorted(metadata.items()))).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\0{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
