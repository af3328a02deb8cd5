"""Videos made from other videos: remixes, edits and extensions."""

import asyncio
import math
from dataclasses import dataclass, replace

import numpy as np
from fastapi import APIRouter, Request, Response

from worldmodel.actions import Action
from worldmodel.errors import InputError
from worldmodel.serving import protocol
from worldmodel.serving.actions import plain
from worldmodel.serving.context import Caller, Context, ServerContext
from worldmodel.serving.errors import ConflictError, NotFoundError
from worldmodel.serving.media.decoding import decode_video
from worldmodel.serving.models import Served
from worldmodel.serving.routes.parsing import body_schema, check_size, read_body
from worldmodel.serving.routes.route_class import BODY, ERRORS, AuthenticatedRoute, errors
from worldmodel.serving.routes.videos import (
    IdempotencyKey,
    OwnedJob,
    check_length,
    fill_rounds,
    order,
    requested_frames,
    validate,
    with_poll_header,
)
from worldmodel.serving.videos.record import VideoJob, VideoPlan, VideoRecord, hashes

router = APIRouter(prefix="/v1/videos", tags=["videos"], route_class=AuthenticatedRoute, responses=ERRORS)

UPLOAD = "video"


@dataclass(frozen=True)
class Source:
    """The video that another one is made from."""

    model: Served
    plan: VideoPlan
    num_frames: int
    frames: np.ndarray | None
    """Those that it starts from, uint8 `[t, h, w, 3]`; None if it starts from a text."""
    id: str | None = None
    """None for an upload."""


@router.post("/{video_id}/remix", responses=errors(*BODY, 404, 409))
async def remix(
    response: Response,
    context: Context,
    caller: Caller,
    job: OwnedJob,
    body: protocol.RemixRequest,
    idempotency_key: IdempotencyKey = None,
) -> protocol.VideoObject:
    """Request a video like another one: the same seed, start and further actions, with a new prompt."""
    request = {"remix": job.record.id, "prompt": body.prompt}
    keys = hashes(caller, idempotency_key, request)
    found = await context.jobs.find_duplicate(*keys)
    if found is None:
        model = _served(context, job.record)
        await context.jobs.admit(caller)
        await validate(model, [Action.of(body.prompt)])
        source = await _stored(context, model, job.record)
        source = replace(source, plan=source.plan.with_prompt(body.prompt))
        found = await _submit(context, caller, source, body.prompt, keys)
    return with_poll_header(found, response)


@router.post(
    "/edits", openapi_extra=body_schema(protocol.EditRequest, UPLOAD), responses=errors(*BODY, 404, 409)
)
async def edit(
    request: Request,
    response: Response,
    context: Context,
    caller: Caller,
    idempotency_key: IdempotencyKey = None,
) -> protocol.VideoObject:
    """Request a video with the start and length of another one, in which something else happens."""
    body, uploads = await read_body(request, protocol.EditRequest, UPLOAD)
    upload = uploads.get(UPLOAD)
    keys = hashes(caller, idempotency_key, {"edit": body.model_dump()}, upload)
    found = await context.jobs.find_duplicate(*keys)
    if found is None:
        source = await _source(context, caller, body, upload)
        if source.id is None:  # the start of an upload is its first frame, not its end
            assert source.frames is not None
            rounds = math.ceil(source.num_frames / source.model.config.chunk_frames)
            plan = replace(source.plan, actions=(Action(),) * rounds)
            source = replace(source, plan=plan, frames=source.frames[:1].copy())
        num_rounds, kept = len(source.plan.actions), source.plan.actions[1:]
        further = kept if body.actions is None else [Action.of(plain(action)) for action in body.actions]
        actions = fill_rounds(source.model, [Action.of(body.prompt), *further], num_rounds)
        await validate(source.model, actions)
        edited = replace(source, plan=replace(source.plan, actions=actions))
        found = await _submit(context, caller, edited, body.prompt, keys)
    return with_poll_header(found, response)


@router.post(
    "/extensions",
    openapi_extra=body_schema(protocol.ExtendRequest, UPLOAD),
    responses=errors(*BODY, 404, 409),
)
async def extend(
    request: Request,
    response: Response,
    context: Context,
    caller: Caller,
    idempotency_key: IdempotencyKey = None,
) -> protocol.VideoObject:
    """Request a video that begins with another one and goes on.

    A video of this server is generated again from its start, so that its world continues with all that it
    remembers; an upload is continued from its end, and its last rounds are remembered.
    """
    body, uploads = await read_body(request, protocol.ExtendRequest, UPLOAD)
    upload = uploads.get(UPLOAD)
    keys = hashes(caller, idempotency_key, {"extend": body.model_dump()}, upload)
    found = await context.jobs.find_duplicate(*keys)
    if found is None:
        source = await _source(context, caller, body, upload)
        new = [Action.of(action) for action in (body.prompt, *map(plain, body.actions))]
        plan, added = source.plan, requested_frames(source.model, body, len(new))
        if source.id is None:
            plan = replace(plan, start_frames=source.num_frames)
        num_frames = source.num_frames + added
        check_length(context, source.model, num_frames)
        # A round that the source ends in is played to its end; the new actions begin with the next one.
        generated = num_frames - plan.start_frames
        num_new = math.ceil(generated / source.model.config.chunk_frames) - len(plan.actions)
        actions = fill_rounds(source.model, new, num_new)
        await validate(source.model, actions)
        plan = replace(plan, actions=(*plan.actions, *actions))
        extended = replace(source, plan=plan, num_frames=num_frames)
        found = await _submit(context, caller, extended, body.prompt, keys)
    return with_poll_header(found, response)


async def _source(
    context: ServerContext, caller: str, body: protocol.DerivedRequest, upload: bytes | None
) -> Source:
    """Return the source of a new video, whose owner may order one more.

    Raises:
        InputError: there is neither a reference nor an upload, or both, the model generates other frames, or
            one is named beside a reference.
        NotFoundError: there is no such video or model, or another key owns the video.
        ConflictError: the video is not completed.
        RateLimitError: the queue is full, or the owner has the maximum number of videos.
    """
    video = body.video
    if (video is None) == (upload is None):
        raise InputError("Send either the id of a video as video[id], or an MP4 as the upload 'video'.")
    if video is not None:
        if body.model is not None:
            raise InputError("A video is made again by its own model; send model beside an upload only.")
        record = (await context.jobs.get(caller, video.id)).record
        if record.status != "completed":
            raise ConflictError(f"The video is {record.status}; wait until it is completed.")
        model = _served(context, record)
        await context.jobs.admit(caller)
        return await _stored(context, model, record)
    assert upload is not None
    model = context.models.find(body.model)
    await context.jobs.admit(caller)  # a refusal does not wait for a decoder
    frames = await decode_video(upload, model.config)
    plan = VideoPlan(model.service.settings(adapter=model.adapter), actions=())
    return Source(model, plan, len(frames), frames)


def _served(context: ServerContext, record: VideoRecord) -> Served:
    """Return the model of a video; it may be another one of the same name than when the video was made.

    Raises:
        NotFoundError: the server does not have the model of the video.
        InputError: its model generates frames of another size or rate.
    """
    model = context.models.find(record.model)
    check_size(model, record.size)
    if record.fps != model.config.fps:
        raise InputError(f"The video has {record.fps} fps; this model generates {model.config.fps}.")
    return model


async def _stored(context: ServerContext, model: Served, record: VideoRecord) -> Source:
    frames = await asyncio.to_thread(context.jobs.storage.read_input, record.id)
    if frames is None and record.plan.text is None:
        raise NotFoundError("The frames that this video starts from are gone; create it again.")
    return Source(model, record.plan, record.num_frames, frames, record.id)


async def _submit(
    context: ServerContext, caller: str, source: Source, prompt: str, keys: tuple[str | None, str]
) -> VideoJob:
    """Order a video with the plan and length of `source`, whose `id` is where it comes from."""
    record = order(context, caller, keys, source.model, prompt, source.plan, source.num_frames, source.id)
    return await context.jobs.submit(record, source.frames)
