"""Pictures of described scenes: videos of one frame."""

import asyncio
import base64
import time
from dataclasses import replace

from fastapi import APIRouter, Request

from worldmodel.serving.media import encoding
from worldmodel.serving.protocol import ImageList, ImageObject, ImageRequest
from worldmodel.serving.routes.parsing import adapter, check_size
from worldmodel.serving.routes.route_class import ERRORS, Caller, GuardedRoute, while_connected
from worldmodel.serving.worlds.service import WorldService

router = APIRouter(tags=["images"], route_class=GuardedRoute, responses=ERRORS)


@router.post("/v1/images/generations", response_model=ImageList)
async def generate(request: Request, caller: Caller, asked: ImageRequest) -> ImageList:
    """Imagine a described scene, `n` times with seeds that follow each other."""
    state = request.app.state
    service: WorldService = state.service
    check_size(service, asked.size)
    chosen = adapter(service, state.config.model_name, asked.model)
    settings = service.settings(asked.seed, asked.num_inference_steps, asked.guidance_scale, chosen)
    each = [replace(settings, seed=(asked.seed + index) % 2**63) for index in range(asked.n)]
    made = await while_connected(request, state.worlds.imagine(caller, asked.prompt, each))
    pictures = [await asyncio.to_thread(encoding.encode_png, frame) for frame in made]
    return ImageList(
        created=int(time.time()),
        data=[ImageObject(b64_json=base64.b64encode(picture).decode("ascii")) for picture in pictures],
    )
