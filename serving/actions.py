"""JSON schema of actions, and of the actions that a model accepts.

The fields of an action, and their limits of size, are those of the registered kinds (`ActionKind.schema`);
`worldmodel.actions.Action` validates the values.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    PlainSerializer,
    PlainValidator,
    create_model,
)

from worldmodel.actions import Action, action_kinds
from worldmodel.config import ActionConfig

MAX_CHUNK = 256


class StrictModel(BaseModel):
    """Base class: strict types, no undeclared fields."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, frozen=True, use_attribute_docstrings=True
    )


TYPES: Mapping[str, Any] = {"string": str, "number": float, "integer": int, "boolean": bool}
LIMITS = {
    "minItems": "min_length",
    "maxItems": "max_length",
    "minLength": "min_length",
    "maxLength": "max_length",
    "minimum": "ge",
    "maximum": "le",
}
"""Arguments of `Field` by keyword of JSON schema."""


def type_of_schema(schema: Mapping[str, Any], name: str) -> Any:
    """Return the type that checks a JSON schema, as far as kinds of actions use it (`ActionKind.schema`).

    Args:
        schema: the schema.
        name: name of the class of an object without a title.
    """
    if "enum" in schema:
        return Literal[tuple(schema["enum"])]
    if schema["type"] == "object":
        properties: dict[str, Any] = {}
        for field, own in schema["properties"].items():
            type_ = type_of_schema(own, f"{name}{field.title()}")
            properties[field] = _field(own, type_, field in schema.get("required", ()))
        return create_model(
            schema.get("title", name), __base__=StrictModel, __doc__=schema.get("description"), **properties
        )
    kind: Any = TYPES.get(schema["type"])
    if schema["type"] == "array":
        kind = list[type_of_schema(schema["items"], f"{name}Item")]  # type: ignore[misc]
    limits = {argument: schema[key] for key, argument in LIMITS.items() if key in schema}
    return Annotated[kind, Field(**limits)] if limits else kind


def _field(schema: Mapping[str, Any], type_: Any, required: bool) -> Any:
    """Return the type and the default of a field, or its type and `...`."""
    description = schema.get("description")
    if required:
        return type_, ...
    if "default" in schema:
        return type_, Field(schema["default"], description=description)
    is_object = schema.get("type") == "object"
    return type_ | None, Field(None, description=None if is_object else description)


KIND_TYPES: Mapping[str, Any] = {
    kind.name: type_of_schema(kind.schema, f"{kind.name.title()}Body") for kind in action_kinds()
}
"""Types of the fields of an action."""
NAMES = ", ".join(KIND_TYPES)
SingleAction: Any = create_model(
    "SingleAction",
    __base__=StrictModel,
    __doc__=f"Any of {NAMES} together; without any of them, the empty action.",
    **{kind.name: _field(kind.schema, KIND_TYPES[kind.name], False) for kind in action_kinds()},
)


class ActionBody(SingleAction):
    """The action of a round: one that holds for all of it, or a chunk."""

    # Made while the program runs, of every kind of action, so type checkers do not know it.
    chunk: Annotated[list[SingleAction], Field(min_length=1, max_length=MAX_CHUNK)] | None = None  # pyright: ignore[reportInvalidTypeForm]
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
    kinds: dict[str, JsonValue]
    """Settings of the kinds that the model takes, by the name of their field, as in the model's config:
    `"keys": ["left", "right"]`, `"vector": {"size": 2}`, `"text": true`."""
    widgets: dict[str, dict[str, JsonValue]]
    """For pages: the control for each kind (`type`: text, keys, sliders, drag, buttons or none), what that
    needs, and how values that are held at once are combined (`merge`: newest, union or sum)."""

    @classmethod
    def of(cls, config: ActionConfig) -> "ActionSchema":
        """Return the schema for a model's config."""
        return cls(per_round=config.per_round, kinds=config.settings, widgets=config.widgets)


JsonAction = Annotated[Action, PlainValidator(Action.of), PlainSerializer(Action.as_dict)]
"""An action in JSON that this server writes and reads."""


def plain(action: ActionBody | str | None) -> str | dict[str, Any] | None:
    """Return an action in a form that `Action.of` accepts."""
    return action.model_dump(exclude_none=True) if isinstance(action, ActionBody) else action


def action_body(action: Action | None) -> ActionBody | None:
    """Return an action as JSON model; None for the empty action."""
    return ActionBody.model_validate(action.as_dict()) if action and action != Action() else None
