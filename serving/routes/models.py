"""The server's model, its adapters and the images it starts from."""

import asyncio
import base64
from typing import Annotated

from fastapi import APIRouter, Path

from worldmodel.media.encoding import encode_png
from worldmodel.serving import protocol
from worldmodel.serving.context import Caller, Context, ServerContext
from worldmodel.serving.routes.parsing import adapter_name
from worldmodel.serving.routes.route_class import ERRORS, OBJECT, AuthenticatedRoute, errors
from worldmodel.worlds import start_images

router = APIRouter(tags=["models"], route_class=AuthenticatedRoute, responses=ERRORS)


@router.get("/v1/models")
async def list_models(context: Context, caller: Caller) -> protocol.ListObject[protocol.ModelObject]:
    """List the server's model and its adapters."""
    names = (context.config.model_name, *context.service.engine.adapters)
    return protocol.ListObject(data=[_model_object(context, name) for name in names])


@router.get("/v1/models/{model}", responses=errors(*OBJECT))
async def retrieve_model(
    context: Context, caller: Caller, model: Annotated[str, Path(max_length=128)]
) -> protocol.ModelObject:
    """Return the server's model, or one of its adapters."""
    adapter_name(context, model)
    return _model_object(context, model)


@router.get("/v1/models/{model}/start_images", responses=errors(*OBJECT))
async def list_start_images(
    context: Context, caller: Caller, model: Annotated[str, Path(max_length=128)]
) -> protocol.ListObject[protocol.StartImageObject]:
    """List images from which worlds of a model can start: its own, or those of its world."""
    adapter_name(context, model)
    found = await asyncio.to_thread(start_images, context.service.model)
    pngs = await asyncio.to_thread(lambda: [encode_png(start.image) for start in found])
    return protocol.ListObject(
        data=[
            protocol.StartImageObject(title=start.title, b64_json=base64.b64encode(png).decode("ascii"))
            for start, png in zip(found, pngs, strict=True)
        ]
    )


def _model_object(context: ServerContext, name: str) -> protocol.ModelObject:
    config = context.model_config
    return protocol.ModelObject(
        id=name,
        created=context.started_at,
        owned_by="worldmodel",
        tasks=list(context.service.tasks),
        about=config.about,
        pace=config.pace,
        confidence_threshold=context.service.confidence_threshold,
        has_futures=config.has_code,
    )
