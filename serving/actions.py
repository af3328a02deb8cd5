"""Actions as they pass over HTTP and WebSocket, and what a server says of those that its model takes.

Sizes are bounded here; what a value means, and whether the model takes it, `worldmodel.types.Action` says.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from worldmodel.config import ActionConfig
from worldmodel.types import Action


class _Body(BaseModel):
    """No field that is not declared, no value of another type."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, frozen=True, use_attribute_docstrings=True
    )


class CameraData(_Body):
    """A pose or a motion; x is right, y up and z forward."""

    translation: Annotated[list[float], Field(min_length=3, max_length=3)] | None = None
    rotation: Annotated[list[float], Field(min_length=4, max_length=4)] | None = None
    """Unit quaternion x, y, z, w."""


class CameraBody(_Body):
    """What the camera does in one round."""

    mode: Literal["target", "velocity"] = "target"
    """target: where it is at the round's end, seen from where it was when the world began; velocity: how it
    moves in the round, seen from where it was when the round began."""
    data: CameraData


class ActionBody(_Body):
    """What is done: words, keys, mouse, vector, camera, or several of them; all empty lets time pass."""

    text: Annotated[str, Field(max_length=4000)] | None = None
    keys: Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=16)] | None = None
    mouse: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    """How far it moves right and down, as shares of the picture's width and height: -1 to 1 each."""
    vector: Annotated[list[float], Field(max_length=1024)] | None = None
    camera: CameraBody | None = None


class ActionSchema(_Body):
    """What the model takes as an action."""

    text: bool
    max_text_tokens: int
    keys: list[str]
    mouse: bool
    vector_size: int
    """Numbers in a vector action; 0 means the model takes none."""
    vector_names: list[str]
    """What each number stands for; may be empty."""
    vector_low: list[float]
    """Least value of each number; empty means any."""
    vector_high: list[float]
    camera: bool

    @classmethod
    def of(cls, takes: ActionConfig) -> "ActionSchema":
        """Return what a model's config says."""
        fields = {name: getattr(takes, name) for name in cls.model_fields}
        return cls.model_validate(
            {name: list(v) if isinstance(v, tuple) else v for name, v in fields.items()}
        )


def plain(action: ActionBody | str | None) -> str | dict[str, Any] | None:
    """Return an action as the library takes it."""
    return action.model_dump(exclude_none=True) if isinstance(action, ActionBody) else action


def body(action: Action | None) -> ActionBody | None:
    """Return an action of the library; None when time just passes."""
    return ActionBody.model_validate(action.as_dict()) if action and action != Action() else None
