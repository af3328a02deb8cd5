"""Words about pictures in the shape of chat, and the models that a request may name."""

import secrets
import time

from fastapi import APIRouter, Request

from worldmodel.errors import InputError
from worldmodel.serving.protocol import (
    ChatMessage,
    ChatObject,
    ChatRequest,
    Choice,
    ModelList,
    ModelObject,
    TextPart,
    VideoPart,
)
from worldmodel.serving.routes.parsing import adapter, decode, from_data_url
from worldmodel.serving.routes.route_class import (
    ERRORS,
    Caller,
    GuardedRoute,
    MediaInJsonRoute,
    while_connected,
)
from worldmodel.serving.worlds.service import WorldSettings

router = APIRouter(tags=["text"], route_class=MediaInJsonRoute, responses=ERRORS)
models = APIRouter(tags=["models"], route_class=GuardedRoute, responses=ERRORS)


@router.post("/v1/chat/completions", response_model=ChatObject)
async def complete(request: Request, caller: Caller, asked: ChatRequest) -> ChatObject:
    """Answer a question about a picture or film, or describe it."""
    state = request.app.state
    parts = asked.messages[0].content
    words = [part.text for part in parts if isinstance(part, TextPart)]
    shown = [part for part in parts if not isinstance(part, TextPart)]
    if len(shown) != 1 or len(words) > 1:
        raise InputError("A message shows one picture or film and asks one question at most.")
    part = shown[0]
    url = part.video_url.url if isinstance(part, VideoPart) else part.image_url.url
    settings: WorldSettings = state.service.settings(
        adapter=adapter(state.service, state.config.model_name, asked.model)
    )
    frames = await decode(state.service, from_data_url(url))
    text = await while_connected(request, state.worlds.answer(caller, frames, settings, *words))
    return ChatObject(
        id=f"chatcmpl-{secrets.token_urlsafe(16)}",
        created=int(time.time()),
        model=asked.model or state.config.model_name,
        choices=[Choice(message=ChatMessage(content=text))],
    )


@models.get("/v1/models", response_model=ModelList)
async def find_models(request: Request, caller: Caller) -> ModelList:
    """List the server's model and its adapters."""
    state = request.app.state
    names = (state.config.model_name, *state.service.engine.adapters)
    return ModelList(
        data=[ModelObject(id=name, created=state.started_at, owned_by="worldmodel") for name in names]
    )
