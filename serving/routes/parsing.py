"""Bodies that come as JSON or, with an upload, as a form; and what uploads become."""

import base64
import binascii
import json
import re
from typing import Any, TypeVar

import numpy as np
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.datastructures import FormData, UploadFile

from worldmodel.config import height_width
from worldmodel.errors import InputError
from worldmodel.rollout.state import observed_frames
from worldmodel.serving.errors import NotFound, UnsupportedFormat
from worldmodel.serving.media import decoding
from worldmodel.serving.media.limits import UploadLimits
from worldmodel.serving.settings import MIB
from worldmodel.serving.worlds.service import WorldService

Model = TypeVar("Model", bound=BaseModel)

REFERENCE = "#/components/schemas/{model}"
MAX_FIELDS = 32
_DATA_URL = re.compile(r"data:[a-z]{1,16}/[a-z0-9.+-]{1,64};base64,", re.IGNORECASE)


class UnknownModel(NotFound):
    """The request names a model that the server does not have."""

    code = "model_not_found"


async def read_body(request: Request, model: type[Model], upload: str) -> tuple[Model, bytes | None]:
    """Read a request as JSON, or as a form that may hold one upload of the given name.

    The upload's own name and type are never looked at.

    Raises:
        InputError: the body is neither JSON nor a form, or a field is wrong.
        UnsupportedFormat: it says that it is of another kind.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        async with request.form(max_files=1, max_fields=MAX_FIELDS, max_part_size=MIB // 4) as form:
            return _checked(model, _fields(form, upload)), await _uploaded(form, upload)
    raw = await request.body()
    if kind != "application/json" and (kind or raw):
        raise UnsupportedFormat("Send the body as application/json or, with an upload, multipart/form-data.")
    try:
        values = json.loads(raw) if raw else {}
    except (ValueError, RecursionError):
        raise InputError("The body is not JSON; send one JSON object.") from None
    return _checked(model, values), None


def _checked(model: type[Model], values: Any) -> Model:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise RequestValidationError(
            [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)]
        ) from None


def _fields(form: FormData, upload: str) -> dict[str, Any]:
    """Return a form's text fields; `name[]` adds to the list `name`, as some clients write lists."""
    fields: dict[str, Any] = {}
    for name, value in form.multi_items():
        if isinstance(value, UploadFile):
            if name != upload:
                raise InputError(f"There is an upload in the form that is not called {upload!r}; rename it.")
        elif name == upload:
            raise InputError(f"{upload!r} is not an upload; send the file itself, not its name or address.")
        elif name.endswith("[]"):
            fields.setdefault(name.removesuffix("[]"), []).append(value)
        elif name in fields:
            raise InputError("The form has a field twice; send each once, lists as JSON.")
        else:
            fields[name] = value
    return fields


async def _uploaded(form: FormData, upload: str) -> bytes | None:
    value = form.get(upload)
    return await value.read() if isinstance(value, UploadFile) else None


def described(model: type[BaseModel], upload: str, required: bool = True) -> dict[str, Any]:
    """Return what OpenAPI says of a body that `read_body` reads."""
    schema = model.model_json_schema(ref_template=REFERENCE)
    schema.pop("$defs", None)
    form = {
        "type": "object",
        "additionalProperties": False,
        "required": schema.get("required", []),
        "properties": {
            name: {"type": "string", "contentMediaType": "application/json"} if name == "actions" else each
            for name, each in schema["properties"].items()
        }
        | {upload: {"type": "string", "format": "binary", "description": "PNG, JPEG, WebP or MP4 (H.264)"}},
    }
    content = {"application/json": {"schema": schema}, "multipart/form-data": {"schema": form}}
    return {"requestBody": {"required": required, "content": content}}


def schemas(*models: type[BaseModel]) -> dict[str, Any]:
    """Return what the schemas of `described` refer to."""
    found: dict[str, Any] = {}
    for model in models:
        found |= model.model_json_schema(ref_template=REFERENCE).get("$defs", {})
    return found


async def decode(service: WorldService, data: bytes) -> np.ndarray:
    """Decode an upload to the frames that a world can begin with, uint8 `[t, h, w, 3]`.

    Raises:
        InputError: it cannot be used.
    """
    config = service.model.config
    limits = UploadLimits()
    frames = await decoding.decode_upload(
        data,
        size=config.codec.image_size,
        fps=config.fps,
        max_frames=min(limits.max_frames, int(limits.media.max_video_s * config.fps)),
        limits=limits,
    )
    # A world goes on from a film's end; a copy lets the rest of it go.
    return frames[-observed_frames(config) :].copy()


def from_data_url(url: str) -> bytes:
    """Return the bytes that a `data:` URL holds; no other address is looked at.

    Raises:
        InputError: it is not a base64 `data:` URL.
    """
    head = _DATA_URL.match(url[:128])
    if head is None:
        raise InputError("A url must be data:<type>;base64,<content>: addresses are not followed.")
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise InputError("The base64 of a data: URL is damaged; encode the file again.") from None


def adapter(service: WorldService, model_name: str, asked: str | None) -> str | None:
    """Return the adapter that a request's `model` names, None for the model itself.

    Raises:
        UnknownModel: the server has no such model.
    """
    if asked is None or asked == model_name:
        return None
    if asked not in service.engine.adapters:
        raise UnknownModel("The server has no model of this name; GET /v1/models lists what it has.")
    return asked


def frame_size(service: WorldService) -> str:
    """Return the model's frame size as `WIDTHxHEIGHT`."""
    height, width = height_width(service.model.config.codec.image_size)
    return f"{width}x{height}"


def check_size(service: WorldService, size: str | None) -> str:
    """Return the model's frame size as `WIDTHxHEIGHT`.

    Raises:
        InputError: another one is asked for.
    """
    own = frame_size(service)
    if size not in (None, own):
        raise InputError(f"size is {size}; this model makes {own}: pass that, or leave size out.")
    return own
