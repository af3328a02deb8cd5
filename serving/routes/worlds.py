"""Live worlds: start, step, snapshot, restore, fork, describe."""

import asyncio
import base64
from typing import Annotated, TypeAlias

from fastapi import APIRouter, Depends, Path, Query, Request, Response

from worldmodel.actions import Action
from worldmodel.actions.words import say
from worldmodel.config import WorldModelConfig
from worldmodel.errors import InputError
from worldmodel.media.encoding import encode_png
from worldmodel.serving import protocol
from worldmodel.serving.actions import ActionSchema, InferredAction, action_body, plain
from worldmodel.serving.context import Caller, Context
from worldmodel.serving.media.decoding import decode_observation
from worldmodel.serving.routes.frames import (
    FRAME_RESPONSES,
    MEDIA_TYPES,
    Format,
    encode_frames,
    frames_response,
)
from worldmodel.serving.routes.parsing import body_schema, generation_settings, read_body
from worldmodel.serving.routes.route_class import (
    BODY,
    ERRORS,
    OBJECT,
    AuthenticatedRoute,
    errors,
    while_connected,
)
from worldmodel.serving.worlds.owned import OwnedWorld
from worldmodel.serving.worlds.saved import Origin
from worldmodel.serving.worlds.service import World

WORLD = (*OBJECT, 409)
"""Statuses of routes of one world, which another replica may play."""

router = APIRouter(prefix="/v1/worlds", tags=["worlds"], route_class=AuthenticatedRoute, responses=ERRORS)

UPLOAD, SNAPSHOT = "observation", "snapshot"
SNAPSHOT_TYPE = "application/octet-stream"


async def _owned_world(
    context: Context, caller: Caller, world_id: Annotated[str, Path(max_length=64, pattern=r"^[\w-]+$")]
) -> OwnedWorld:
    return await context.worlds.get(caller, world_id)


Owned: TypeAlias = Annotated[OwnedWorld, Depends(_owned_world)]


@router.post(
    "",
    openapi_extra=body_schema(protocol.WorldRequest, UPLOAD, SNAPSHOT),
    responses=errors(*BODY, 404, 504),
)
async def start(request: Request, context: Context, caller: Caller) -> protocol.WorldObject:
    """Start a world from a text, from an uploaded image or video, or from an exported snapshot."""
    body, uploads = await read_body(request, protocol.WorldRequest, UPLOAD, SNAPSHOT)
    if SNAPSHOT in uploads:
        if uploads.keys() | body.model_fields_set != {SNAPSHOT}:
            raise InputError("A world from a snapshot keeps its settings; send the file alone.")
        loading = context.worlds.load(caller, uploads[SNAPSHOT])
        return world_object(context, await while_connected(request, loading))
    upload = uploads.get(UPLOAD)
    if body.text is not None and body.prompt is not None:
        raise InputError("text and prompt are the same field; send one of them.")
    model = context.models.find(body.model)
    settings = generation_settings(model, body)
    actions = tuple(Action.of(plain(action)) for action in body.actions)
    origin = await _origin(model.config, body.text or body.prompt, upload, actions)
    started = context.worlds.start(
        caller, model.service, origin or Origin(), settings, body.max_observation_score
    )
    world = await while_connected(request, started)
    return world_object(context, world)


@router.get("")
async def list_worlds(context: Context, caller: Caller) -> protocol.ListObject[protocol.WorldObject]:
    """List the live worlds of this key on this server."""
    return protocol.ListObject(
        data=[world_object(context, world) for world in context.worlds.owned_by(caller)]
    )


@router.get("/{world_id}", responses=errors(*WORLD))
async def retrieve(context: Context, world: Owned) -> protocol.WorldObject:
    """Return the state of a world."""
    return world_object(context, world)


@router.delete("/{world_id}", responses=errors(*WORLD))
async def delete(context: Context, world: Owned) -> protocol.Deleted:
    """Delete a world; a step in progress is cancelled."""
    await context.worlds.close(world)
    return protocol.Deleted(id=world.world.id, object="world.deleted")


@router.post(
    "/{world_id}/step",
    response_class=Response,
    responses=FRAME_RESPONSES | errors(*BODY, 404, 409, 504),
)
async def step(
    request: Request,
    context: Context,
    world: Owned,
    body: protocol.StepRequest,
    format: Format = "mp4",
    confidence: Annotated[bool, Query(description="Whether to return `x-confidence` for a text.")] = False,
) -> Response:
    """Play one round and return its frames; repeating the last step returns the same frames."""
    action, service = Action.of(plain(body.action)), world.world.service
    if confidence:
        service.check_confidence()
    frames = await while_connected(
        request, context.worlds.step(world, body.step_id, plain(body.action), body.code, body.seed)
    )
    outcome, fit = world.world.outcome, None
    if confidence and action.text is not None:
        fit = await while_connected(request, context.worlds.confidence(world, body.step_id, action.text))
    return await frames_response(format, frames, service.model.config.fps, body.step_id, outcome, fit)


@router.post("/{world_id}/futures", responses=errors(*BODY, 404, 409, 504))
async def futures(
    request: Request,
    context: Context,
    world: Owned,
    body: protocol.FuturesRequest,
    format: Format = "mp4",
) -> protocol.FutureList:
    """List the distinct futures after an action with their probabilities; the world does not change."""
    action = Action.of(plain(body.action))
    asked = context.worlds.ask(world, lambda played: played.futures(action, body.num_draws, body.max_futures))
    made, round_number = await while_connected(request, asked)
    data = []
    for each in made:
        encoded = await encode_frames(format, each.frames, world.world.service.model.config.fps)
        data.append(
            protocol.FutureObject(
                probability=each.probability,
                state=protocol.StateObject.of(each.state),
                outcome=each.outcome,
                b64_json=base64.b64encode(encoded).decode("ascii"),
            )
        )
    return protocol.FutureList(round=round_number + 1, content_type=MEDIA_TYPES[format], data=data)


@router.get("/{world_id}/frames", response_class=Response, responses=FRAME_RESPONSES | errors(*WORLD))
async def newest_frames(world: Owned, format: Format = "mp4") -> Response:
    """Return the newest observation."""
    frames, fps = world.world.last_frames, world.world.service.model.config.fps
    return await frames_response(format, frames, fps, world.world.round, world.world.outcome)


@router.get(
    "/{world_id}/frame.png",
    response_class=Response,
    responses={200: {"description": "A PNG.", "content": {"image/png": {}}}} | errors(*WORLD),
)
async def newest_frame(world: Owned) -> Response:
    """Return the newest frame as a PNG."""
    data = await asyncio.to_thread(encode_png, world.world.last_frames[-1])
    return Response(data, media_type="image/png", headers={"cache-control": "no-store"})


@router.post(
    "/{world_id}/reset",
    response_class=Response,
    responses=FRAME_RESPONSES | errors(*BODY, 404, 409, 504),
    openapi_extra=body_schema(protocol.ResetRequest, UPLOAD, required=False),
)
async def reset(request: Request, context: Context, world: Owned, format: Format = "mp4") -> Response:
    """Restart a world, by default from its origin, and return the first observation."""
    body, uploads = await read_body(request, protocol.ResetRequest, UPLOAD)
    config = world.world.service.model.config
    origin = await _origin(config, body.text, uploads.get(UPLOAD))
    frames = await while_connected(request, context.worlds.reset(world, origin))
    return await frames_response(format, frames, config.fps, 0)


@router.post("/{world_id}/fork", responses=errors(*WORLD))
async def fork(context: Context, world: Owned) -> protocol.WorldObject:
    """Return an independent copy of a world."""
    return world_object(context, await context.worlds.fork(world))


@router.post("/{world_id}/snapshot", responses=errors(*WORLD))
async def snapshot(context: Context, world: Owned) -> protocol.SnapshotObject:
    """Save the current state; above the limit the oldest snapshot is deleted."""
    snapshot_id, round_number = await context.worlds.snapshot(world)
    return protocol.SnapshotObject(snapshot=snapshot_id, round=round_number)


@router.get(
    "/{world_id}/snapshot",
    response_class=Response,
    responses={
        200: {
            "description": "A safetensors file, from which POST /v1/worlds starts a world.",
            "content": {SNAPSHOT_TYPE: {"schema": {"type": "string", "format": "binary"}}},
        }
    }
    | errors(*WORLD),
)
async def export(
    context: Context, world: Owned, name: Annotated[str | None, Query(max_length=64)] = None
) -> Response:
    """Download the current state of a world, or the snapshot `name`: another server can play on from it."""
    data = await context.worlds.export(world, name)
    headers = {
        "cache-control": "no-store",
        "content-disposition": f'attachment; filename="{world.world.id}.safetensors"',
    }
    return Response(data, media_type=SNAPSHOT_TYPE, headers=headers)


@router.post("/{world_id}/restore", responses=errors(*BODY, 404, 409))
async def restore(context: Context, world: Owned, body: protocol.RestoreRequest) -> protocol.WorldObject:
    """Return to a snapshot."""
    await context.worlds.restore(world, body.snapshot)
    return world_object(context, world)


@router.post("/{world_id}/describe", responses=errors(*BODY, 404, 409, 504))
async def describe(
    request: Request, context: Context, world: Owned, body: protocol.DescribeRequest | None = None
) -> protocol.TextObject:
    """Describe the newest observation, or answer a question about it."""
    question = body.question if body is not None else None
    asked = context.worlds.ask(world, lambda played: played.describe(question), "chat")
    text, round_number = await while_connected(request, asked)
    return protocol.TextObject(text=text, round=round_number)


@router.post("/{world_id}/infer_action", responses=errors(*WORLD, 504))
async def infer_action(request: Request, context: Context, world: Owned) -> InferredAction:
    """Return the action that led to the newest observation."""
    asked = context.worlds.ask(world, World.infer_action, "chat")
    action, round_number = await while_connected(request, asked)
    return InferredAction(action=action_body(action), text=say(action), round=round_number)


def world_object(context: Context, entry: OwnedWorld) -> protocol.WorldObject:
    """Return the description of a world for its client."""
    world, service = entry.world, entry.world.service
    config = service.model.config
    return protocol.WorldObject(
        id=world.id,
        created_at=entry.created_at,
        model=world.settings.adapter or service.name,
        engine=service.engine.name,
        round=world.round,
        max_rounds=service.max_rounds,
        fps=config.fps,
        size=service.frame_size,
        chunk_frames=config.chunk_frames,
        action_schema=ActionSchema.of(config.action),
        seed=world.settings.seed,
        num_inference_steps=world.settings.num_inference_steps,
        guidance_scale=world.settings.guidance_scale,
        progress=None if entry.progress is None else round(100 * entry.progress),
        snapshots=list(world.snapshots),
        outcome=world.outcome,
        state=world.predicted and protocol.StateObject.of(world.predicted),
        observation_score=world.observation_score,
        idle_timeout_s=context.config.idle_timeout_s,
    )


async def _origin(
    config: WorldModelConfig, text: str | None, upload: bytes | None, actions: tuple[Action, ...] = ()
) -> Origin | None:
    if text is not None and upload is not None:
        raise InputError("A world starts from a text or from an upload; send one of them.")
    if upload is not None:
        return Origin(frames=await decode_observation(upload, config), actions=actions)
    return Origin(text=text, actions=actions) if text is not None else None
