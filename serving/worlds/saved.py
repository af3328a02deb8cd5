"""Worlds as bytes, from which another server of the same model plays on: safetensors, with JSON in its head.

The file has all that the next round depends on: latents, the backbone's history, settings, and the seed and
the round, from which noise is drawn. Keys and values are computed again (`WorldService.resume`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError
from torch import Tensor

from worldmodel.actions import Action, Pose
from worldmodel.episodes import Outcome
from worldmodel.errors import InputError
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout.saved import (
    DAMAGED,
    StateHeader,
    StateReader,
    check_same,
    pack,
    state_tensors,
    unpack,
)
from worldmodel.rollout.state import WorldState
from worldmodel.serving.actions import JsonAction
from worldmodel.serving.protocol import MAX_ACTIONS, MAX_CODE
from worldmodel.serving.worlds.identity import Identity
from worldmodel.serving.worlds.service import WorldSettings

FORMAT = "worldmodel.world.2"


@dataclass(frozen=True)
class Origin:
    """The observation or the text that a world starts from."""

    frames: np.ndarray | None = None
    text: str | None = None
    actions: tuple[Action, ...] = ()
    """What was done in the last rounds of the frames."""


@dataclass(frozen=True)
class PlayedStep:
    """What the last step of a world asked for, which a client may send again."""

    action: JsonAction
    code: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=MAX_CODE)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None


@dataclass(frozen=True)
class SavedWorld:
    """A world between two rounds."""

    settings: WorldSettings
    state: WorldState
    origin: Origin
    last_step: PlayedStep | None = None
    """None if there is none to repeat."""

    def to_bytes(self, identity: Identity) -> bytes:
        """Return the world as a file; `identity` belongs to the server that played it."""
        state = self.state
        tensors = dict(self._tensors())
        header = _Header(
            settings=self.settings,
            adapter=identity.adapters.get(self.settings.adapter or ""),
            round=state.round,
            camera=state.cameras[0],
            outcome=state.outcomes[0] if state.outcomes else None,
            timesteps=None if state.trace is None else list(state.trace.timesteps),
            text=self.origin.text,
            actions=list(self.origin.actions),
            last_step=self.last_step,
        )
        metadata = {"format": FORMAT, "model": identity.model, "world": header.model_dump_json()}
        return pack(metadata, tensors)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from state_tensors(self.state)
        if self.origin.frames is not None:
            yield "origin", torch.from_numpy(np.ascontiguousarray(self.origin.frames))

    @classmethod
    def from_bytes(cls, data: bytes, model: WorldModel, identity: Identity) -> "SavedWorld":
        """Read a world of this model; every tensor is checked against the model's shapes.

        Raises:
            InputError: it is not a snapshot of a world, is damaged, or is one of another model or adapter.
        """
        try:
            metadata, tensors = unpack(data, FORMAT)
            check_same("model", metadata["model"], identity.model)
            header = _Header.model_validate_json(metadata["world"])
            settings = header.settings
            adapter = identity.adapters.get(settings.adapter or "")
            if adapter is not None:  # `WorldService.settings` refuses names that the server lacks
                check_same(f"adapter {settings.adapter!r}", header.adapter or "", adapter)
            told = (settings.seed, header.round, header.camera, header.outcome, header.timesteps)
            state = StateReader(tensors, model).state(StateHeader(*told, settings.negative_prompt))
            first = tensors.get("origin")
            frames = None if first is None else first.numpy()
            origin = Origin(frames, header.text, tuple(header.actions))
            return cls(settings, state, origin, header.last_step)
        except InputError:
            raise
        except (SafetensorError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError):
            raise InputError(DAMAGED) from None


def made_by(data: bytes) -> str:
    """Return the digest of the model of a saved world.

    Raises:
        InputError: it is not a snapshot of a world, or is damaged.
    """
    try:
        return unpack(data, FORMAT)[0]["model"]
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
    last_step: PlayedStep | None
