"""Videos as background jobs, in the shape of the Videos API."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Literal, TypeAlias

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.responses import FileResponse, StreamingResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.staticfiles import NotModifiedResponse, StaticFiles
from starlette.types import Message, Receive, Scope, Send

from worldmodel.actions import Action
from worldmodel.errors import InputError
from worldmodel.serving import protocol
from worldmodel.serving.actions import plain
from worldmodel.serving.context import Caller, Context, ServerContext
from worldmodel.serving.errors import ConflictError, NotFoundError, RateLimitError, UnavailableError
from worldmodel.serving.media.decoding import decode_observation
from worldmodel.serving.models import Served
from worldmodel.serving.routes.parsing import (
    body_schema,
    check_size,
    decode_data_url,
    generation_settings,
    read_body,
)
from worldmodel.serving.routes.route_class import BODY, ERRORS, OBJECT, VideoRoute, errors
from worldmodel.serving.videos.record import (
    VideoJob,
    VideoPlan,
    VideoRecord,
    hashes,
    new_record,
    video_object,
)

router = APIRouter(prefix="/v1/videos", tags=["videos"], route_class=VideoRoute, responses=ERRORS)

UPLOAD = "input_reference"
EVENT_S = 0.5
POLL_MS, MAX_POLL_MS = 500, 5000
MEDIA_TYPES = {"video": "video/mp4", "thumbnail": "image/jpeg", "spritesheet": "image/jpeg"}


class VideoFile(FileResponse):
    """A file of a video; Starlette answers an invalid Range in plain text, this one as all errors."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the file.

        Raises:
            HTTPException: the Range header is invalid, or outside of the file.
        """

        async def checked(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] in (400, 416):
                size = Headers(raw=message["headers"]).get("content-range")
                detail = "The Range header is invalid, or outside of the file; send bytes=FIRST-LAST."
                headers = None if size is None else {"content-range": size}
                raise HTTPException(message["status"], detail, headers)
            await send(message)

        await super().__call__(scope, receive, checked)


async def _owned_job(
    context: Context, caller: Caller, video_id: Annotated[str, Path(max_length=64, pattern=r"^[\w-]+$")]
) -> VideoJob:
    return await context.jobs.get(caller, video_id)


OwnedJob: TypeAlias = Annotated[VideoJob, Depends(_owned_job)]
IdempotencyKey = Annotated[str | None, Header(min_length=1, max_length=255)]


@router.post("", openapi_extra=body_schema(protocol.VideoRequest, UPLOAD), responses=errors(*BODY, 404, 409))
async def create(
    request: Request,
    response: Response,
    context: Context,
    caller: Caller,
    idempotency_key: IdempotencyKey = None,
) -> protocol.VideoObject:
    """Request a video; repeating a request with the same Idempotency-Key returns the first video."""
    body, uploads = await read_body(request, protocol.VideoRequest, UPLOAD)
    upload = uploads.get(UPLOAD)
    if body.input_reference is not None:
        upload = await decode_data_url(body.input_reference.image_url)
    keys = hashes(caller, idempotency_key, body.model_dump(), upload)
    model = context.models.find(body.model)
    check_size(model, body.size)
    actions, num_frames = _actions_of_rounds(context, model, body, prompt_is_action=upload is not None)
    text = body.prompt if upload is None else None
    plan = VideoPlan(generation_settings(model, body), actions, text)
    record = order(context, caller, keys, model, body.prompt, plan, num_frames)
    job = await context.jobs.find_duplicate(*keys)
    if job is None:
        await context.jobs.admit(caller)  # a refusal does not wait for the model or a decoder
        await validate(model, (*actions, Action.of(body.prompt)))
        frames = await decode_observation(upload, model.config) if upload is not None else None
        job = await context.jobs.submit(record, frames)
    return with_poll_header(job, response)


@router.get("", responses=errors(*OBJECT))
async def list_videos(
    context: Context,
    caller: Caller,
    after: Annotated[str | None, Query(max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> protocol.VideoList:
    """List the videos of this key by time of creation."""
    owned = await context.jobs.owned_by(caller)
    if order == "desc":
        owned.reverse()
    ids = [job.record.id for job in owned]
    if after is not None and after not in ids:
        raise NotFoundError("There is no video with the id in 'after'; list without it.")
    first = ids.index(after) + 1 if after is not None else 0
    page = owned[first : first + limit]
    return protocol.VideoList(
        data=[video_object(job) for job in page],
        first_id=page[0].record.id if page else None,
        last_id=page[-1].record.id if page else None,
        has_more=first + limit < len(owned),
    )


@router.get("/{video_id}", responses=errors(*OBJECT))
async def retrieve(context: Context, response: Response, job: OwnedJob) -> protocol.VideoObject:
    """Return the progress of a video; `openai-poll-after-ms` says when to poll again."""
    return with_poll_header(job, response)


@router.get(
    "/{video_id}/content",
    response_class=FileResponse,
    responses={
        200: {
            "description": "The file; a Range request is answered with 206.",
            "content": {
                kind: {"schema": {"type": "string", "format": "binary"}} for kind in set(MEDIA_TYPES.values())
            },
        },
        206: {"description": "The requested range of the file."},
        304: {"description": "The client has the file already: its ETag is that of If-None-Match."},
        416: {"description": "The range is outside of the file."},
    }
    | errors(*OBJECT, 409),
)
async def content(
    request: Request, context: Context, job: OwnedJob, variant: protocol.Variant = "video"
) -> Response:
    """Return a completed video, its thumbnail, or a sprite sheet of its frames."""
    if job.record.status != "completed":
        raise ConflictError(f"The video is {job.record.status}; wait until it is completed.")
    path = context.jobs.storage.path(job.record.id, variant)
    file = VideoFile(
        path,
        media_type=MEDIA_TYPES[variant],
        filename=path.name,
        headers={"cache-control": "private, no-store", "x-content-type-options": "nosniff"},
        stat_result=await asyncio.to_thread(path.stat),
    )
    if StaticFiles(check_dir=False).is_not_modified(file.headers, request.headers):
        return NotModifiedResponse(file.headers)
    return file


@router.get(
    "/{video_id}/events",
    response_class=Response,
    responses={
        200: {
            "description": "Server-sent events: the video whenever it has changed, until it has finished.",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        }
    }
    | errors(*OBJECT),
)
async def events(context: Context, job: OwnedJob) -> StreamingResponse:
    """Follow a video: the same object as of GET, at once and after every change."""
    owner = job.record.owner
    if context.num_sockets[owner] >= context.config.of_key("max_sockets_per_key", owner):
        raise RateLimitError("This key has its maximum of open sockets and streams; close one first.", 5)
    return StreamingResponse(_changes(context, job), media_type="text/event-stream")


async def _changes(context: ServerContext, job: VideoJob) -> AsyncIterator[str]:
    sent, owner = None, job.record.owner
    context.num_sockets[owner] += 1
    try:
        while True:
            text = video_object(job).model_dump_json()
            # A comment in between, without which a proxy would end a connection that says nothing.
            yield f"data: {text}\n\n" if text != sent else ":\n\n"
            sent = text
            if job.record.finished or context.jobs.draining:
                return
            await asyncio.sleep(EVENT_S)
            job = await context.jobs.get(owner, job.record.id)
    except (NotFoundError, UnavailableError):  # it was deleted, or the database does not answer
        return
    finally:
        context.num_sockets[owner] -= 1


@router.delete("/{video_id}", responses=errors(*OBJECT))
async def delete(context: Context, job: OwnedJob) -> protocol.Deleted:
    """Delete a video; an unfinished one is cancelled within one denoising step."""
    await context.jobs.delete(job)
    return protocol.Deleted(id=job.record.id, object="video.deleted")


def order(
    context: ServerContext,
    caller: str,
    keys: tuple[str | None, str],
    model: Served,
    prompt: str,
    plan: VideoPlan,
    num_frames: int,
    source: str | None = None,
) -> VideoRecord:
    """Return the record of a new video; `keys` are the hashes of the Idempotency-Key and of the request."""
    fps = model.config.fps
    return new_record(
        caller,
        context.config,
        model=model.name,
        prompt=prompt,
        size=model.service.frame_size,
        seconds=f"{num_frames / fps:g}",
        num_frames=num_frames,
        fps=fps,
        seed=plan.settings.seed,
        plan=plan,
        idempotency=keys[0],
        fingerprint=keys[1],
        remixed_from_video_id=source,
    )


def _actions_of_rounds(
    context: ServerContext, model: Served, body: protocol.VideoRequest, prompt_is_action: bool
) -> tuple[tuple[Action, ...], int]:
    """Return the action of every round, and the number of frames of the video.

    Raises:
        InputError: the lengths do not fit.
    """
    config = model.config
    if body.fps not in (None, config.fps):
        raise InputError(f"fps is {body.fps}; this model generates {config.fps}: pass that, or omit fps.")
    given = [Action.of(plain(action)) for action in body.actions]
    actions = [Action.of(body.prompt), *given] if prompt_is_action else given
    num_frames = requested_frames(model, body, max(1, len(actions)))
    check_length(context, model, num_frames)
    return fill_rounds(model, actions, math.ceil(num_frames / config.chunk_frames)), num_frames


def requested_frames(model: Served, body: protocol.VideoRequest | protocol.ExtendRequest, rounds: int) -> int:
    """Return the number of frames that a request asks for, by default as many as `rounds` have."""
    if body.seconds is not None and body.num_frames is not None:
        raise InputError("seconds and num_frames exclude each other; send one of them.")
    if body.seconds is not None:
        return round(float(body.seconds) * model.config.fps)
    return rounds * model.config.chunk_frames if body.num_frames is None else body.num_frames


def check_length(context: ServerContext, model: Served, num_frames: int) -> None:
    """Raise `InputError` for a video without frames, or with too many."""
    fps, max_frames = model.config.fps, context.config.max_video_frames
    if not 1 <= num_frames <= max_frames:
        raise InputError(
            f"The video would have {num_frames} frames; request 1 to {max_frames} ({max_frames / fps:g} s)."
        )


def fill_rounds(model: Served, actions: Sequence[Action], rounds: int) -> tuple[Action, ...]:
    """Return the action of every round: those given, which must fit, and then the empty action."""
    if len(actions) > rounds:
        raise InputError(
            f"There are {len(actions)} actions for {rounds} rounds of {model.config.chunk_frames} "
            "frames; request more frames, or send fewer actions."
        )
    return (*actions, *[Action()] * (rounds - len(actions)))


async def validate(model: Served, actions: Sequence[Action]) -> None:
    """Raise `InputError` if the model does not take an action; it is asked in its own thread."""
    takes = model.service.model.action.validate

    def check() -> None:
        for action in actions:
            takes(action, model.service.model.backbone)

    await model.service.run(None, check)


def with_poll_header(job: VideoJob, response: Response) -> protocol.VideoObject:
    """Describe a video, and say in a header when to ask again."""
    if not job.record.finished:
        wait_ms = POLL_MS * (1 + (job.position or 0))
        response.headers["openai-poll-after-ms"] = str(min(MAX_POLL_MS, wait_ms))
    return video_object(job)
