"""Live worlds: start, step, go back, fork, ask."""

import asyncio
from typing import Annotated, TypeAlias

from fastapi import APIRouter, Depends, Path, Request, Response

from worldmodel.errors import InputError
from worldmodel.serving.actions import ActionSchema, plain
from worldmodel.serving.media import encoding
from worldmodel.serving.protocol import (
    Deleted,
    DescribeRequest,
    ResetRequest,
    RestoreRequest,
    SnapshotObject,
    StepRequest,
    TextObject,
    WorldList,
    WorldObject,
    WorldRequest,
)
from worldmodel.serving.routes.frames import FRAMES, answer_frames, chosen_format
from worldmodel.serving.routes.parsing import adapter, decode, described, frame_size, read_body
from worldmodel.serving.routes.route_class import ERRORS, Caller, GuardedRoute, while_connected
from worldmodel.serving.worlds.registry import HeldWorld, HeldWorlds, Origin
from worldmodel.serving.worlds.service import WorldService

router = APIRouter(prefix="/v1/worlds", tags=["worlds"], route_class=GuardedRoute, responses=ERRORS)

UPLOAD = "observation"


def _mine(request: Request, caller: Caller, world_id: Annotated[str, Path(max_length=64)]) -> HeldWorld:
    return _worlds(request).get(caller, world_id)


Mine: TypeAlias = Annotated[HeldWorld, Depends(_mine)]


def _worlds(request: Request) -> HeldWorlds:
    return request.app.state.worlds


@router.post("", response_model=WorldObject, openapi_extra=described(WorldRequest, UPLOAD))
async def start(request: Request, caller: Caller) -> WorldObject:
    """Start a world from a description, or from an uploaded picture or film."""
    asked, upload = await read_body(request, WorldRequest, UPLOAD)
    state, service = request.app.state, request.app.state.service
    if asked.text is not None and asked.prompt is not None:
        raise InputError("text and prompt are the same field; send one of them.")
    chosen = adapter(service, state.config.model_name, asked.model)
    settings = service.settings(asked.seed, asked.num_inference_steps, asked.guidance_scale, chosen)
    origin = await _origin(service, asked.text or asked.prompt, upload)
    held = await while_connected(request, _worlds(request).start(caller, origin or Origin(), settings))
    return shown(request, held)


@router.get("", response_model=WorldList)
async def find_all(request: Request, caller: Caller) -> WorldList:
    """List the live worlds of this key."""
    return WorldList(data=[shown(request, held) for held in _worlds(request).owned(caller)])


@router.get("/{world_id}", response_model=WorldObject)
async def find(request: Request, held: Mine) -> WorldObject:
    """Return a world's state."""
    return shown(request, held)


@router.delete("/{world_id}", response_model=Deleted)
async def delete(request: Request, held: Mine) -> Deleted:
    """End a world; a step that is under way stops."""
    _worlds(request).close(held)
    return Deleted(id=held.world.id, object="world.deleted")


@router.post("/{world_id}/step", response_class=Response, responses=FRAMES)
async def step(request: Request, held: Mine, asked: StepRequest) -> Response:
    """Play one round and return its frames; the same step may be sent again and is not played twice."""
    kind, worlds = chosen_format(request), _worlds(request)
    frames = await while_connected(request, worlds.step(held, asked.step_id, plain(asked.action)))
    return await answer_frames(kind, frames, _fps(request), asked.step_id)


@router.get("/{world_id}/frames", response_class=Response, responses=FRAMES)
async def newest(request: Request, held: Mine) -> Response:
    """Return the newest observation."""
    kind = chosen_format(request)
    return await answer_frames(kind, held.world.last_frames, _fps(request), held.world.round)


@router.get(
    "/{world_id}/frame.png",
    response_class=Response,
    responses={200: {"description": "A PNG.", "content": {"image/png": {}}}},
)
async def picture(held: Mine) -> Response:
    """Return the newest frame as a PNG."""
    data = await asyncio.to_thread(encoding.encode_png, held.world.last_frames[-1])
    return Response(data, media_type="image/png", headers={"cache-control": "no-store"})


@router.post(
    "/{world_id}/reset",
    response_class=Response,
    responses=FRAMES,
    openapi_extra=described(ResetRequest, UPLOAD, required=False),
)
async def reset(request: Request, held: Mine) -> Response:
    """Start anew, with nothing given from the same beginning; returns the first observation."""
    kind = chosen_format(request)
    asked, upload = await read_body(request, ResetRequest, UPLOAD)
    origin = await _origin(request.app.state.service, asked.text, upload)
    frames = await while_connected(request, _worlds(request).reset(held, origin))
    return await answer_frames(kind, frames, _fps(request), 0)


@router.post("/{world_id}/fork", response_model=WorldObject)
async def fork(request: Request, held: Mine) -> WorldObject:
    """Return a second world that goes its own way from here."""
    return shown(request, await _worlds(request).fork(held))


@router.post("/{world_id}/snapshot", response_model=SnapshotObject)
async def snapshot(request: Request, held: Mine) -> SnapshotObject:
    """Keep this moment; above the limit the oldest one is forgotten."""
    name, number = await _worlds(request).snapshot(held)
    return SnapshotObject(snapshot=name, round=number)


@router.post("/{world_id}/restore", response_model=WorldObject)
async def restore(request: Request, held: Mine, asked: RestoreRequest) -> WorldObject:
    """Go back to a kept moment."""
    await _worlds(request).restore(held, asked.snapshot)
    return shown(request, held)


@router.post("/{world_id}/describe", response_model=TextObject)
async def describe(request: Request, held: Mine, asked: DescribeRequest | None = None) -> TextObject:
    """Say what is seen now, or answer a question about it."""
    question = asked.question if asked is not None else None
    text, number = await while_connected(request, _worlds(request).describe(held, question))
    return TextObject(text=text, round=number)


@router.post("/{world_id}/infer_action", response_model=TextObject)
async def infer_action(request: Request, held: Mine) -> TextObject:
    """Say in words which action led to what is seen now."""
    text, number = await while_connected(request, _worlds(request).infer_action(held))
    return TextObject(text=text, round=number)


def shown(request: Request, held: HeldWorld) -> WorldObject:
    """Return what a client learns of a world."""
    state, world = request.app.state, held.world
    service: WorldService = state.service
    config = service.model.config
    return WorldObject(
        id=world.id,
        created_at=held.created_at,
        model=world.settings.adapter or state.config.model_name,
        engine=service.engine.name,
        round=world.round,
        max_rounds=service.max_rounds,
        fps=config.fps,
        size=frame_size(service),
        chunk_frames=config.chunk_frames,
        action_schema=ActionSchema.of(config.action),
        seed=world.settings.seed,
        num_inference_steps=world.settings.num_inference_steps,
        guidance_scale=world.settings.guidance_scale,
        snapshots=list(world.snapshots),
        idle_timeout_s=state.config.idle_timeout_s,
    )


async def _origin(service: WorldService, text: str | None, upload: bytes | None) -> Origin | None:
    if text is not None and upload is not None:
        raise InputError("A world starts from one thing: send a text or an upload, not both.")
    if upload is not None:
        return Origin(frames=await decode(service, upload))
    return Origin(text=text) if text is not None else None


def _fps(request: Request) -> int:
    return request.app.state.service.model.config.fps
