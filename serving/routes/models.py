"""The server's models and their adapters, which an administrator adds and removes, and their first images."""

import asyncio
import base64
from pathlib import Path as FolderPath
from typing import Annotated

from fastapi import APIRouter, Path

from worldmodel.errors import InputError
from worldmodel.media.encoding import encode_png
from worldmodel.serving import protocol
from worldmodel.serving.actions import ActionSchema
from worldmodel.serving.context import Caller, Context, ServerContext
from worldmodel.serving.errors import NotFoundError, PermissionDeniedError
from worldmodel.serving.models import Served
from worldmodel.serving.routes.route_class import BODY, ERRORS, OBJECT, AuthenticatedRoute, errors
from worldmodel.worlds import start_images

router = APIRouter(tags=["models"], route_class=AuthenticatedRoute, responses=ERRORS)


@router.get("/v1/models")
async def list_models(context: Context, caller: Caller) -> protocol.ListObject[protocol.ModelObject]:
    """List the server's models and their adapters."""
    models = map(context.models.find, context.models.names)
    return protocol.ListObject(data=[_model_object(context, model) for model in models])


@router.get("/v1/models/{model}", responses=errors(*OBJECT))
async def retrieve_model(
    context: Context, caller: Caller, model: Annotated[str, Path(max_length=128)]
) -> protocol.ModelObject:
    """Return one of the server's models or adapters."""
    return _model_object(context, context.models.find(model))


@router.get("/v1/models/{model}/start_images", responses=errors(*OBJECT))
async def list_start_images(
    context: Context, caller: Caller, model: Annotated[str, Path(max_length=128)]
) -> protocol.ListObject[protocol.StartImageObject]:
    """List images from which worlds of a model can start: its own, or those of its world."""
    found = await asyncio.to_thread(start_images, context.models.find(model).service.model)
    pngs = await asyncio.to_thread(lambda: [encode_png(start.image) for start in found])
    return protocol.ListObject(
        data=[
            protocol.StartImageObject(title=start.title, b64_json=base64.b64encode(png).decode("ascii"))
            for start, png in zip(found, pngs, strict=True)
        ]
    )


@router.post("/v1/load_lora_adapter", responses=errors(*BODY, 404, 409))
async def load_adapter(
    context: Context, caller: Caller, body: protocol.LoadAdapterRequest
) -> protocol.ModelObject:
    """Add an adapter of `--adapters-dir` to a model; needs a key with the option admin, or the only key.

    No calls to models run meanwhile.
    """
    root = _folder(context, caller, "--adapters-dir", context.config.adapters_dir)
    folder = await _below(root, body.lora_path)
    adapter = await context.models.add_adapter(body.lora_name, folder, body.base_model_name)
    return _model_object(context, adapter)


@router.post("/v1/unload_lora_adapter", responses=errors(*BODY, 404))
async def unload_adapter(
    context: Context, caller: Caller, body: protocol.UnloadAdapterRequest
) -> protocol.Deleted:
    """Remove an adapter; its worlds and sessions end, and its videos fail."""
    _folder(context, caller, "--adapters-dir", context.config.adapters_dir)
    model = context.models.get(body.lora_name)
    if model is None or model.adapter is None:
        raise NotFoundError(
            "The server has no adapter with this name; GET /v1/models lists its models.", "model_not_found"
        )
    await context.unload_adapter(model)
    return protocol.Deleted(id=body.lora_name, object="model.deleted")


@router.post("/v1/load_model", responses=errors(*BODY, 409))
async def load_model(
    context: Context, caller: Caller, body: protocol.LoadModelRequest
) -> protocol.ModelObject:
    """Add a model of `--models-dir`; needs a key with the option admin, or the only key.

    Other models go on meanwhile. It is there when it has played a round.
    """
    root = _folder(context, caller, "--models-dir", context.config.models_dir)
    model = await context.models.add(body.model_name, await _below(root, body.model_path))
    return _model_object(context, model)


@router.post("/v1/unload_model", responses=errors(*BODY, 404, 409))
async def unload_model(
    context: Context, caller: Caller, body: protocol.UnloadModelRequest
) -> protocol.Deleted:
    """Remove a model that was added; its worlds and sessions end, its videos fail, its memory is free."""
    _folder(context, caller, "--models-dir", context.config.models_dir)
    await context.unload_model(body.model_name)
    return protocol.Deleted(id=body.model_name, object="model.deleted")


def _folder(context: ServerContext, caller: str, option: str, folder: FolderPath | None) -> FolderPath:
    """Return the folder of an option for an administrator."""
    context.require_admin(caller, alone=True)
    if folder is None:
        what = option.removeprefix("--").removesuffix("-dir")
        raise PermissionDeniedError(f"This server adds and removes no {what}; start it with {option}.")
    return folder


async def _below(root: FolderPath, name: str) -> FolderPath:
    """Return the folder of a name in another one; raise `InputError` if there is none."""
    if not await asyncio.to_thread((root / name).is_dir):
        raise InputError(f"There is no folder {name!r} in {root.name!r}; name one that is there.")
    return root / name


def _model_object(context: ServerContext, model: Served) -> protocol.ModelObject:
    config, service = model.config, model.service
    return protocol.ModelObject(
        id=model.name,
        created=context.started_at,
        owned_by="worldmodel",
        parent=service.name if model.adapter else None,
        tasks=list(service.tasks),
        about=config.about,
        pace=config.pace,
        confidence_threshold=service.confidence_threshold,
        has_futures=config.has_code,
        size=service.frame_size,
        fps=config.fps,
        chunk_frames=config.chunk_frames,
        max_seconds=context.config.max_video_frames / config.fps,
        action_schema=ActionSchema.of(config.action),
    )
