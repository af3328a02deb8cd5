"""Images generated from a text."""

import asyncio
import base64
import time
from dataclasses import replace

from fastapi import APIRouter, Request

from worldmodel.media.encoding import encode_png
from worldmodel.serving.context import Caller, Context
from worldmodel.serving.protocol import ImageList, ImageObject, ImageRequest
from worldmodel.serving.routes.parsing import check_size, generation_settings
from worldmodel.serving.routes.route_class import ERRORS, AuthenticatedRoute, while_connected

router = APIRouter(tags=["images"], route_class=AuthenticatedRoute, responses=ERRORS)


@router.post("/v1/images/generations")
async def generate(request: Request, context: Context, caller: Caller, body: ImageRequest) -> ImageList:
    """Generate `n` images of a described scene; image `i` has seed `seed + i`."""
    check_size(context, body.size)
    settings = generation_settings(context, body)
    seeds = [replace(settings, seed=(body.seed + index) % 2**63) for index in range(body.n)]
    images = await while_connected(request, context.worlds.generate_images(caller, body.prompt, seeds))
    pngs = [await asyncio.to_thread(encode_png, image) for image in images]
    return ImageList(
        created=int(time.time()),
        data=[ImageObject(b64_json=base64.b64encode(png).decode("ascii")) for png in pngs],
    )
