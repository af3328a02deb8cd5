"""Questions about images and videos as chat completions, and the list of models."""

import secrets
import time

from fastapi import APIRouter, Request

from worldmodel.errors import InputError
from worldmodel.serving import protocol
from worldmodel.serving.context import Caller, Context
from worldmodel.serving.media.decoding import decode_observation
from worldmodel.serving.routes.parsing import adapter_name, decode_data_url
from worldmodel.serving.routes.route_class import (
    ERRORS,
    AuthenticatedRoute,
    MediaInJsonRoute,
    while_connected,
)

router = APIRouter(tags=["text"], route_class=MediaInJsonRoute, responses=ERRORS)
models_router = APIRouter(tags=["models"], route_class=AuthenticatedRoute, responses=ERRORS)


@router.post("/v1/chat/completions")
async def complete(
    request: Request, context: Context, caller: Caller, body: protocol.ChatRequest
) -> protocol.ChatObject:
    """Describe an image or video, or answer a question about it."""
    parts = body.messages[0].content
    texts = [part.text for part in parts if isinstance(part, protocol.TextPart)]
    media = [part for part in parts if not isinstance(part, protocol.TextPart)]
    if len(media) != 1 or len(texts) > 1:
        raise InputError("A message has one image or video, and at most one question.")
    part = media[0]
    url = part.video_url.url if isinstance(part, protocol.VideoPart) else part.image_url.url
    settings = context.service.settings(adapter=adapter_name(context, body.model))
    frames = await decode_observation(await decode_data_url(url), context.model_config)
    text = await while_connected(request, context.worlds.describe_frames(caller, frames, settings, *texts))
    return protocol.ChatObject(
        id=f"chatcmpl-{secrets.token_urlsafe(16)}",
        created=int(time.time()),
        model=body.model or context.config.model_name,
        choices=[protocol.Choice(message=protocol.ChatMessage(content=text))],
    )


@models_router.get("/v1/models")
async def list_models(context: Context, caller: Caller) -> protocol.ModelList:
    """List the server's model and its adapters."""
    names = (context.config.model_name, *context.service.engine.adapters)
    return protocol.ModelList(
        data=[
            protocol.ModelObject(id=name, created=context.started_at, owned_by="worldmodel") for name in names
        ]
    )
