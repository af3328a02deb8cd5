"""Parsing of request bodies: JSON or multipart forms, uploads, model names and sizes."""

import asyncio
import base64
import binascii
import json
import logging
import re
from collections.abc import Sequence
from typing import Any, TypeVar, get_args

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser

from worldmodel.errors import InputError
from worldmodel.serving.errors import UnavailableError, UnsupportedFormatError
from worldmodel.serving.models import Served
from worldmodel.serving.protocol import Generation
from worldmodel.serving.settings import MIB
from worldmodel.serving.worlds.service import WorldSettings

LOG = logging.getLogger(__name__)

Model = TypeVar("Model", bound=BaseModel)

REF_TEMPLATE = "#/components/schemas/{model}"
MAX_FORM_FIELDS = 32
PART_CHARACTERS = MIB
"""Characters of base64 that are decoded at once, a multiple of 4; about 10 ms."""
_NESTED_FIELD = re.compile(r"(\w{1,64})\[(\w{1,64})\]")
_EXTENDED_NAME = re.compile(rb";\s*filename\*\s*=", re.IGNORECASE)
_DATA_URL = re.compile(r"data:[a-z]{1,16}/[a-z0-9.+-]{1,64};base64,", re.IGNORECASE)


class UploadParser(MultiPartParser):
    """Parser of forms that also takes a part with the file name `filename*` alone (RFC 5987) for a file."""

    def on_headers_finished(self) -> None:
        """Read the head of a part."""
        part = self._current_part
        _, options = parse_options_header(part.content_disposition)
        given = part.content_disposition or b""
        if b"filename" not in options and _EXTENDED_NAME.search(given):
            part.content_disposition = given + b'; filename="upload"'
        super().on_headers_finished()


async def read_body(request: Request, model: type[Model], *uploads: str) -> tuple[Model, dict[str, bytes]]:
    """Parse a body of JSON, or of a form with an optional file in one of the fields `uploads`.

    The file name and content type that the client gives are ignored.

    Raises:
        InputError: the body is neither JSON nor a form, or a field is invalid.
        UnsupportedFormatError: the content type is not supported.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type == "multipart/form-data":
        _, parameters = parse_options_header(request.headers["content-type"])
        # Some of Python's other codecs take quadratic time.
        if parameters.get(b"charset", b"utf-8").lower() not in (b"utf-8", b"utf8"):
            raise UnsupportedFormatError("Send the form in UTF-8, without another charset.")
        parser = UploadParser(
            *(request.headers, request.stream()),
            max_files=1,
            max_fields=MAX_FORM_FIELDS,
            max_part_size=MIB // 4,
        )
        try:
            form = await parser.parse()
        except MultiPartException as error:
            raise HTTPException(400, error.message) from None
        except OSError as error:  # large parts are temporary files
            LOG.exception("An upload cannot be kept.")
            raise UnavailableError(
                "The server cannot keep uploads at the moment; try again later."
            ) from error
        try:
            return _validate(model, _text_fields(form, uploads)), await _uploaded_bytes(form)
        finally:
            await form.close()
    raw = await request.body()
    if content_type != "application/json" and (content_type or raw):
        raise UnsupportedFormatError("Send the body as application/json or multipart/form-data.")
    try:
        values = json.loads(raw) if raw else {}
    except (ValueError, RecursionError):
        raise InputError("The body is not JSON; send one JSON object.") from None
    return _validate(model, values), {}


def _validate(model: type[Model], values: Any) -> Model:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise RequestValidationError(
            [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)]
        ) from None


def _text_fields(form: FormData, uploads: Sequence[str]) -> dict[str, Any]:
    """Return the text fields of a form: `name[]` as items of a list, `name[key]` as an item of an object."""
    fields: dict[str, Any] = {}
    for name, value in form.multi_items():
        if isinstance(value, UploadFile):
            if name not in uploads:
                raise InputError(
                    f"The form has an upload that is not named {' or '.join(map(repr, uploads))}; rename it."
                )
        elif name in uploads:
            raise InputError(f"{name!r} is not an upload; send the content of the file.")
        elif name.endswith("[]"):
            _container(fields, name.removesuffix("[]"), list).append(value)
        else:
            nested = _NESTED_FIELD.fullmatch(name)
            within = fields if nested is None else _container(fields, nested[1], dict)
            key = name if nested is None else nested[2]
            if key in within:
                raise _repeated()
            within[key] = value
    return fields


def _container(fields: dict[str, Any], name: str, kind: type[Any]) -> Any:
    """Return the list or object of a field, which may be empty yet."""
    found = fields.setdefault(name, kind())
    if not isinstance(found, kind):
        raise _repeated()
    return found


def _repeated() -> InputError:
    return InputError("The form has a repeated field; send each field once, lists as JSON.")


async def _uploaded_bytes(form: FormData) -> dict[str, bytes]:
    """Return the content of the form's files, of which there is one at most."""
    return {name: await each.read() for name, each in form.items() if isinstance(each, UploadFile)}


def body_schema(
    model: type[BaseModel], upload: str, snapshot: str | None = None, required: bool = True
) -> dict[str, Any]:
    """Return the OpenAPI description of a body that `read_body` parses."""
    schema = model.model_json_schema(ref_template=REF_TEMPLATE)
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
    if snapshot is not None:
        description = "A file of GET /v1/worlds/{world_id}/snapshot, sent without other fields"
        form["properties"][snapshot] = {"type": "string", "format": "binary", "description": description}
    if upload in schema["properties"]:  # the field is a reference to an object, or the upload itself
        reference = next(
            each for each in get_args(model.model_fields[upload].annotation) if each is not type(None)
        )
        form["properties"] |= {f"{upload}[{name}]": {"type": "string"} for name in reference.model_fields}
    content = {"application/json": {"schema": schema}, "multipart/form-data": {"schema": form}}
    return {"requestBody": {"required": required, "content": content}}


def referenced_schemas(*models: type[BaseModel]) -> dict[str, Any]:
    """Return the schemas that `body_schema` refers to."""
    found: dict[str, Any] = {}
    for model in models:
        found |= model.model_json_schema(ref_template=REF_TEMPLATE).get("$defs", {})
    return found


async def decode_data_url(url: str) -> bytes:
    """Decode a `data:` URL; other URLs are never fetched.

    A large one is decoded in parts, between which other requests are answered.

    Raises:
        InputError: it is not a base64 `data:` URL.
    """
    head = _DATA_URL.match(url[:128])
    if head is None:
        raise InputError("A url must be data:<type>;base64,<content>; other URLs are not fetched.")
    parts: list[bytes] = []
    try:
        for first in range(head.end(), len(url), PART_CHARACTERS):
            parts.append(base64.b64decode(url[first : first + PART_CHARACTERS], validate=True))
            await asyncio.sleep(0)
        if any(len(part) * 4 != PART_CHARACTERS * 3 for part in parts[:-1]):
            raise ValueError("padding before the end")
        return b"".join(parts)
    except (binascii.Error, ValueError):
        raise InputError("The base64 of the data: URL is invalid; encode the file again.") from None


def generation_settings(model: Served, body: Generation, adapter: str | None = None) -> WorldSettings:
    """Return the settings of a request, completed by the defaults of its model.

    Raises:
        InputError: a setting is out of the model's range.
    """
    given = {name: getattr(body, name) for name in Generation.model_fields if name != "model"}
    return model.service.settings(**given, adapter=adapter or model.adapter)


def check_size(model: Served, size: str | None) -> None:
    """Raise `InputError` for a frame size that is not the model's."""
    own = model.service.frame_size
    if size not in (None, "auto", own):
        raise InputError(f"size is {size}; this model generates {own}: pass that, or omit size.")
