"""The server's model and its adapters, which an administrator adds and removes, and their first images."""

import asyncio
import base64
from pathlib import Path as FolderPath
from typing import Annotated

from fastapi import APIRouter, Path

from worldmodel.errors import InputError, ModelError
from worldmodel.media.encoding import encode_png
from worldmodel.serving import protocol
from worldmodel.serving.context import Caller, Context, ServerContext
from worldmodel.serving.errors import ConflictError, NotFoundError, PermissionDeniedError
from worldmodel.serving.routes.parsing import adapter_name
from worldmodel.serving.routes.route_class import BODY, ERRORS, OBJECT, AuthenticatedRoute, errors
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


@router.post("/v1/load_lora_adapter", responses=errors(*BODY, 409))
async def load_adapter(
    context: Context, caller: Caller, body: protocol.LoadAdapterRequest
) -> protocol.ModelObject:
    """Add an adapter of `--adapters-dir`; needs a key with the option admin, or the only key.

    No calls to the model run meanwhile.
    """
    folder, name = _adapters_dir(context, caller) / body.lora_path, body.lora_name
    adapters = context.service.adapters
    if name in (context.config.model_name, *adapters.names):
        raise ConflictError(f"There is a model {name!r}; unload it first, or choose another name.")
    if not await asyncio.to_thread(folder.is_dir):
        raise InputError(f"There is no folder {body.lora_path!r} in the folder of adapters; name one of it.")
    try:
        await context.service.compute.run(adapters.add, name, folder)
    except ModelError as error:
        raise InputError(str(error)) from None
    return _model_object(context, name)


@router.post("/v1/unload_lora_adapter", responses=errors(*BODY, 404))
async def unload_adapter(
    context: Context, caller: Caller, body: protocol.UnloadAdapterRequest
) -> protocol.Deleted:
    """Remove an adapter; its worlds and sessions end, and its videos fail."""
    _adapters_dir(context, caller)
    if body.lora_name not in context.service.adapters.names:
        raise NotFoundError(
            "The server has no adapter with this name; GET /v1/models lists its models.", "model_not_found"
        )
    await context.unload_adapter(body.lora_name)
    return protocol.Deleted(id=body.lora_name, object="model.deleted")


def _adapters_dir(context: ServerContext, caller: str) -> FolderPath:
    """Return the folder of adapters for an administrator."""
    context.require_admin(caller, alone=True)
    folder = context.config.adapters_dir
    if folder is None:
        raise PermissionDeniedError("This server adds and removes no adapters; start it with --adapters-dir.")
    return folder


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
