"""Worlds as bytes, from which another server of the same model plays on: safetensors, with JSON in its head.

The file has all that the next round depends on: latents, the backbone's history, settings, and the seed and
the round, from which noise is drawn. Keys and values are computed again (`WorldService.resume`).
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError
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
from worldmodel.serving.actions import JsonAction
from worldmodel.serving.protocol import MAX_ACTIONS
from worldmodel.serving.worlds.identity import Identity
from worldmodel.serving.worlds.service import WorldSettings

FORMAT = "worldmodel.world.1"
MAX_HEADER_BYTES = 2**20
DAMAGED = (
    "This is not a snapshot of a world, or it is damaged; export it again with GET /v1/worlds/ID/snapshot."
)


@dataclass(frozen=True)
class Origin:
    """The observation or the text that a world starts from."""

    frames: np.ndarray | None = None
    text: str | None = None
    actions: tuple[Action, ...] = ()
    """What was done in the last rounds of the frames."""


@dataclass(frozen=True)
class SavedWorld:
    """A world between two rounds."""

    settings: WorldSettings
    state: WorldState
    origin: Origin
    last_action: Action | None = None
    """The action of the last round, which a client may send again; None if there is none to repeat."""

    def to_bytes(self, identity: Identity) -> bytes:
        """Return the world as a file; `identity` belongs to the server that played it."""
        state = self.state
        packed = torch.contiguous_format
        tensors = {name: each.detach().cpu().clone(memory_format=packed) for name, each in self._tensors()}
        header = _Header(
            settings=self.settings,
            adapter=identity.adapters.get(self.settings.adapter or ""),
            round=state.round,
            camera=state.cameras[0],
            outcome=state.outcomes[0] if state.outcomes else None,
            timesteps=None if state.trace is None else list(state.trace.timesteps),
            text=self.origin.text,
            actions=list(self.origin.actions),
            last_action=self.last_action,
        )
        metadata = {"format": FORMAT, "model": identity.model, "world": header.model_dump_json()}
        return save(tensors, {**metadata, "sha256": _digest(metadata, tensors)})

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        state = self.state
        yield from (("context", state.context), ("latents", state.latents))
        for index, part in enumerate(state.histories[0]):
            yield f"history.{index}", part
        if state.code is not None:
            yield "code", state.code
        if state.previous_latents is not None:
            yield "previous_latents", state.previous_latents
        for name, array in (
            ("frames", state.frames),
            ("previous_frames", state.previous_frames),
            ("origin", self.origin.frames),
        ):
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

    @classmethod
    def from_bytes(cls, data: bytes, model: WorldModel, identity: Identity) -> "SavedWorld":
        """Read a world of this model; every tensor is checked against the model's shapes.

        Raises:
            InputError: it is not a snapshot of a world, is damaged, or is one of another model or adapter.
        """
        try:
            metadata, tensors = _parse(data)
            _check_same("model", metadata["model"], identity.model)
            header = _Header.model_validate_json(metadata["world"])
            settings = header.settings
            adapter = identity.adapters.get(settings.adapter or "")
            if adapter is not None:  # `WorldService.settings` refuses names that the server lacks
                _check_same(f"adapter {settings.adapter!r}", header.adapter or "", adapter)
            state = _Reader(tensors, model).state(header)
            first = tensors.get("origin")
            frames = None if first is None else first.numpy()
            origin = Origin(frames, header.text, tuple(header.actions))
            return cls(settings, state, origin, header.last_action)
        except InputError:
            raise
        except (SafetensorError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError):
            raise InputError(DAMAGED) from None


class _Header(BaseModel):
    """What a file has beside tensors; it may come from anyone."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    settings: WorldSettings
    adapter: str | None
    """Digest of the adapter."""
    round: Annotated[int, Field(ge=0, lt=2**31)]
    camera: Pose
    outcome: Outcome | None
    timesteps: list[float] | None
    """Of the trace."""
    text: str | None
    actions: Annotated[list[JsonAction], Field(max_length=MAX_ACTIONS)]
    last_action: JsonAction | None


class _Reader:
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

    def state(self, header: _Header) -> WorldState:
        """Return the state."""
        settings = header.settings
        later = "previous_latents" in self._tensors
        if "origin" in self._tensors:
            self._frames("origin", film_frames(self._model.config))
        return WorldState(
            seeds=(settings.seed,),
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
            trace=self._trace(header.timesteps, settings.negative_prompt) if header.timesteps else None,
        )

    def _code(self) -> Tensor | None:
        """Return the code of the newest round, one-hot `[1, v, k]`; None if the world has none."""
        head = self._model.state
        if head is None or head.code is None:
            _check("code" not in self._tensors)
            return None
        if "code" not in self._tensors:  # before the first round
            return None
        code = self._tensors["code"]
        _check(tuple(code.shape) == (1, head.code.length, head.code.classes) and code.dtype == self._dtype)
        _check(bool(((code == 0) | (code == 1)).all()) and bool((code.sum(dim=2) == 1).all()))
        return self._finite(code)

    def _latents(self, name: str, count: int | None) -> Tensor:
        """Return latent frames `[1, t, c, h, w]`; any number that the model makes if `count` is None."""
        tensor = self._tensors[name]
        _check(tensor.ndim == 5 and tensor.shape[0] == 1 and tuple(tensor.shape[2:]) == self._cells)
        _check(tensor.shape[1] == count if count else 1 <= tensor.shape[1] <= self._max_latents)
        _check(tensor.dtype == self._dtype)
        return self._finite(tensor)

    def _frames(self, name: str, most: int) -> np.ndarray:
        tensor = self._tensors[name]
        *worlds, count = tensor.shape[:-3]  # an origin has no axis of worlds
        _check(tensor.dtype == torch.uint8 and tuple(tensor.shape[-3:]) == self._pixels)
        _check(worlds == ([] if name == "origin" else [1]) and 1 <= count <= most)
        return tensor.numpy()

    def _history(self) -> tuple[Tensor, ...]:
        names = [name for name in self._tensors if name.startswith("history.")]
        embedding = self._model.backbone.embed(torch.zeros(1, 1, dtype=torch.long, device=self._model.device))
        _check(len(names) <= self._model.config.context_rounds)
        parts = [self._tensors[f"history.{index}"] for index in range(len(names))]
        action, num_queries = self._model.action, self._model.config.num_queries
        least = action.slot + num_queries
        most = self._model.vision.round_tokens + action.max_tokens + num_queries
        for part in parts:
            _check(part.ndim == 2 and least <= len(part) <= most and part.shape[1] == embedding.shape[-1])
            _check(part.dtype in (embedding.dtype, self._dtype))
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
        _check(bool(torch.isfinite(tensor).all()))
        return tensor.to(self._model.device)


def _fitting(condition: Condition, own: Condition) -> Condition:
    """Check that a condition can be batched with the model's conditions."""
    for field in fields(Condition):
        tensor, expected = getattr(condition, field.name), getattr(own, field.name)
        _check((tensor is None) == (expected is None))
        if tensor is not None:
            _check(tensor.shape == expected.shape and tensor.dtype == expected.dtype)
    return condition


def _parse(data: bytes) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the metadata and the tensors of a file, whose digest is checked."""
    length = int.from_bytes(data[:8], "little")
    _check(len(data) > 8 and length <= min(MAX_HEADER_BYTES, len(data)))
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    _check(metadata["format"] == FORMAT)
    tensors = load(data)
    claimed = {name: metadata[name] for name in ("format", "model", "world")}
    _check(metadata["sha256"] == _digest(claimed, tensors))
    return metadata, tensors


def _check_same(what: str, made: str, here: str) -> None:
    if made != here:
        raise InputError(
            f"The snapshot is of another {what} (identity {made[:12]!r}, that of this server is "
            f"{here[:12]!r}); send it to a server with the one that made it."
        )


def _check(valid: bool) -> None:
    if not valid:
        raise InputError(DAMAGED)


def _digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(dict(sorted(metadata.items()))).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\0{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
