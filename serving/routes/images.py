"""Images generated from a text, or from an image and an action."""

import asyncio
import base64
import time
from dataclasses import replace

import numpy as np
from fastapi import APIRouter, Request

from worldmodel.errors import InputError
from worldmodel.media.encoding import encode_png
from worldmodel.serving.context import Caller, Context, ServerContext
from worldmodel.serving.media.decoding import decode_observation
from worldmodel.serving.protocol import ImageList, ImageObject, ImageRequest
from worldmodel.serving.routes.parsing import body_schema, check_size, generation_settings, read_body
from worldmodel.serving.routes.route_class import BODY, ERRORS, ImageRoute, errors, while_connected

router = APIRouter(tags=["images"], route_class=ImageRoute, responses=ERRORS)
UPLOAD = "image"


@router.post("/v1/images/generations", responses=errors(*BODY, 404, 504))
async def generate(request: Request, context: Context, caller: Caller, body: ImageRequest) -> ImageList:
    """Generate `n` images of a described scene; image `i` has seed `seed + i`."""
    return await _generate(request, context, caller, body)


@router.post(
    "/v1/images/edits",
    openapi_extra=body_schema(ImageRequest, UPLOAD),
    responses=errors(*BODY, 404, 504),
)
async def edit(request: Request, context: Context, caller: Caller) -> ImageList:
    """Play one round from an image, with the prompt as its action, and return the last frame, `n` times."""
    body, uploads = await read_body(request, ImageRequest, UPLOAD)
    upload = uploads.get(UPLOAD)
    if upload is None:
        raise InputError("There is no image to edit; upload one as the form field 'image'.")
    frames = await decode_observation(upload, context.models.find(body.model).config)
    return await _generate(request, context, caller, body, frames)


async def _generate(
    request: Request,
    context: ServerContext,
    caller: str,
    body: ImageRequest,
    frames: np.ndarray | None = None,
) -> ImageList:
    model = context.models.find(body.model)
    check_size(model, body.size)
    settings = generation_settings(model, body)
    seeds = [replace(settings, seed=(body.seed + index) % 2**63) for index in range(body.n)]
    images = await while_connected(
        request, context.worlds.generate_images(caller, model.service, body.prompt, seeds, frames)
    )
    pngs = [await asyncio.to_thread(encode_png, image) for image in images]
    return ImageList(
        created=int(time.time()),
        data=[ImageObject(b64_json=base64.b64encode(png).decode("ascii")) for png in pngs],
    )
