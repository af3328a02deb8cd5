"""JSON schema of actions, and of the actions that a model accepts.

Sizes are limited here; `worldmodel.types.Action` defines and validates the values.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from worldmodel.config import ActionConfig
from worldmodel.types import Action

MAX_CHUNK = 256


class StrictModel(BaseModel):
    """Base class: strict types, no undeclared fields."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, frozen=True, use_attribute_docstrings=True
    )


class CameraData(StrictModel):
    """A pose or a motion; x is right, y is up and z is forward."""

    translation: Annotated[list[float], Field(min_length=3, max_length=3)] | None = None
    rotation: Annotated[list[float], Field(min_length=4, max_length=4)] | None = None
    """Unit quaternion x, y, z, w."""


class CameraBody(StrictModel):
    """Camera motion of one round."""

    mode: Literal["target", "velocity"] = "target"
    """target: pose at the end of the round, relative to the start of the world; velocity: motion during the
    round, relative to the start of the round."""
    data: CameraData


class SingleAction(StrictModel):
    """Text, keys, mouse, vector and camera, in any combination; without any of them, the empty action."""

    text: Annotated[str, Field(max_length=4000)] | None = None
    keys: Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=16)] | None = None
    mouse: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    """Motion to the right and down, as fractions of the image's width and height: -1 to 1 each."""
    vector: Annotated[list[float], Field(max_length=1024)] | None = None
    camera: CameraBody | None = None


class ActionBody(SingleAction):
    """The action of a round: one that holds for all of it, or a chunk."""

    chunk: Annotated[list[SingleAction], Field(min_length=1, max_length=MAX_CHUNK)] | None = None
    """Instead of the other fields: the actions of the round in order, as many as `per_round`."""


class InferredAction(StrictModel):
    """The action that led to the newest observation, as the model infers it."""

    object: Literal["world.action"] = "world.action"
    action: ActionBody | None
    """As a step takes it; null if nothing happened."""
    text: str
    """The same in words."""
    round: int


class ActionSchema(StrictModel):
    """The actions that a model accepts."""

    per_round: int
    """Actions in a round: 1, or how many a `chunk` has."""

    text: bool
    max_text_tokens: int
    keys: list[str]
    mouse: bool
    vector_size: int
    """Length of a vector action; 0 if the model accepts none."""
    vector_names: list[str]
    """Name of each element; may be empty."""
    vector_low: list[float]
    """Minimum of each element; empty for no minimum."""
    vector_high: list[float]
    """Maximum of each element; empty for no maximum."""
    camera: bool

    @classmethod
    def of(cls, config: ActionConfig) -> "ActionSchema":
        """Return the schema for a model's config."""
        fields = {name: getattr(config, name) for name in cls.model_fields}
        return cls.model_validate(
            {name: list(v) if isinstance(v, tuple) else v for name, v in fields.items()}
        )


def plain(action: ActionBody | str | None) -> str | dict[str, Any] | None:
    """Return an action in a form that `Action.of` accepts."""
    return action.model_dump(exclude_none=True) if isinstance(action, ActionBody) else action


def action_body(action: Action | None) -> ActionBody | None:
    """Return an action as JSON model; None for the empty action."""
    return ActionBody.model_validate(action.as_dict()) if action and action != Action() else None
