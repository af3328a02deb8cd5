"""Videos as background jobs, in the shape of the Videos API."""

import math
from typing import Annotated, Literal, TypeAlias

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.responses import FileResponse

from worldmodel.errors import InputError
from worldmodel.serving import protocol
from worldmodel.serving.actions import plain
from worldmodel.serving.context import Caller, Context, ServerContext
from worldmodel.serving.errors import ConflictError, NotFoundError
from worldmodel.serving.media.decoding import decode_observation
from worldmodel.serving.routes.parsing import body_schema, check_size, generation_settings, read_body
from worldmodel.serving.routes.route_class import ERRORS, AuthenticatedRoute
from worldmodel.serving.videos.jobs import (
    VideoJob,
    VideoJobs,
    VideoPlan,
    VideoRecord,
    hash_idempotency_key,
    hash_request,
    new_record,
)
from worldmodel.serving.worlds.service import WorldService
from worldmodel.types import Action

router = APIRouter(prefix="/v1/videos", tags=["videos"], route_class=AuthenticatedRoute, responses=ERRORS)

UPLOAD = "input_reference"
POLL_MS, MAX_POLL_MS = 500, 5000
SHARED_FIELDS = protocol.VideoObject.model_fields.keys() & VideoRecord.__annotations__
MEDIA_TYPES = {"video": "video/mp4", "thumbnail": "image/jpeg", "spritesheet": "image/jpeg"}


def _owned_job(context: Context, caller: Caller, video_id: Annotated[str, Path(max_length=64)]) -> VideoJob:
    return context.jobs.get(caller, video_id)


OwnedJob: TypeAlias = Annotated[VideoJob, Depends(_owned_job)]
IdempotencyKey = Annotated[str | None, Header(min_length=1, max_length=255)]


@router.post("", openapi_extra=body_schema(protocol.VideoRequest, UPLOAD))
async def create(
    request: Request,
    response: Response,
    context: Context,
    caller: Caller,
    idempotency_key: IdempotencyKey = None,
) -> protocol.VideoObject:
    """Request a video; repeating a request with the same Idempotency-Key returns the first video."""
    body, upload = await read_body(request, protocol.VideoRequest, UPLOAD)
    fps = context.model_config.fps
    settings = generation_settings(context, body)
    actions, num_frames = await _actions_of_rounds(context, body, prompt_is_action=upload is not None)
    record = new_record(
        caller,
        context.config,
        model=body.model or context.config.model_name,
        prompt=body.prompt,
        size=check_size(context, body.size),
        seconds=f"{num_frames / fps:g}",
        num_frames=num_frames,
        fps=fps,
        seed=body.seed,
        idempotency=hash_idempotency_key(caller, idempotency_key),
        fingerprint=hash_request(body.model_dump(), upload),
    )
    job = context.jobs.find_duplicate(record)
    if job is None:
        frames = await decode_observation(upload, context.model_config) if upload is not None else None
        text = body.prompt if upload is None else None
        job = await context.jobs.submit(record, VideoPlan(settings, actions, num_frames, frames, text))
    return _with_poll_header(context.jobs, job, response)


@router.get("")
async def list_videos(
    context: Context,
    caller: Caller,
    after: Annotated[str | None, Query(max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> protocol.VideoList:
    """List the videos of this key by time of creation."""
    owned = context.jobs.owned_by(caller)
    if order == "desc":
        owned.reverse()
    ids = [job.record.id for job in owned]
    if after is not None and after not in ids:
        raise NotFoundError("There is no video with the id in 'after'; list without it.")
    first = ids.index(after) + 1 if after is not None else 0
    page = owned[first : first + limit]
    return protocol.VideoList(
        data=[video_object(context.jobs, job) for job in page],
        first_id=page[0].record.id if page else None,
        last_id=page[-1].record.id if page else None,
        has_more=first + limit < len(owned),
    )


@router.get("/{video_id}")
async def retrieve(context: Context, response: Response, job: OwnedJob) -> protocol.VideoObject:
    """Return the progress of a video; `openai-poll-after-ms` says when to poll again."""
    return _with_poll_header(context.jobs, job, response)


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
        416: {"description": "The range is outside of the file."},
    },
)
async def content(context: Context, job: OwnedJob, variant: protocol.Variant = "video") -> FileResponse:
    """Return a completed video, its thumbnail, or a sprite sheet of its frames."""
    if job.record.status != "completed":
        raise ConflictError(f"The video is {job.record.status}; wait until it is completed.")
    path = context.jobs.storage.path(job.record.id, variant)
    return FileResponse(
        path,
        media_type=MEDIA_TYPES[variant],
        filename=path.name,
        headers={"cache-control": "private, no-store", "x-content-type-options": "nosniff"},
    )


@router.delete("/{video_id}")
async def delete(context: Context, job: OwnedJob) -> protocol.Deleted:
    """Delete a video; an unfinished one is cancelled within one denoising step."""
    await context.jobs.delete(job)
    return protocol.Deleted(id=job.record.id, object="video.deleted")


async def _actions_of_rounds(
    context: ServerContext, body: protocol.VideoRequest, prompt_is_action: bool
) -> tuple[tuple[Action, ...], int]:
    """Return the action of every round, and the number of frames of the video.

    Raises:
        InputError: the lengths do not fit, or the model does not accept an action.
    """
    config, max_frames = context.model_config, context.config.max_video_frames
    if body.fps not in (None, config.fps):
        raise InputError(f"fps is {body.fps}; this model generates {config.fps}: pass that, or omit fps.")
    if body.seconds is not None and body.num_frames is not None:
        raise InputError("seconds and num_frames exclude each other; send one of them.")
    given = [plain(action) for action in body.actions]
    actions = [Action.of(action) for action in ([body.prompt, *given] if prompt_is_action else given)]
    num_frames = max(1, len(actions)) * config.chunk_frames
    if body.seconds is not None:
        num_frames = round(float(body.seconds) * config.fps)
    elif body.num_frames is not None:
        num_frames = body.num_frames
    if not 1 <= num_frames <= max_frames:
        raise InputError(
            f"The video would have {num_frames} frames; request 1 to {max_frames} "
            f"({max_frames / config.fps:g} s)."
        )
    rounds = math.ceil(num_frames / config.chunk_frames)
    if len(actions) > rounds:
        raise InputError(
            f"There are {len(actions)} actions for {rounds} rounds of {config.chunk_frames} frames; "
            "request more frames, or send fewer actions."
        )
    await context.service.compute.run(_validate, context.service, (*actions, Action.of(body.prompt)))
    return (*actions, *[Action()] * (rounds - len(actions))), num_frames


def _validate(service: WorldService, actions: tuple[Action, ...]) -> None:
    for action in actions:
        service.model.action.validate(action, service.model.backbone)


def _with_poll_header(jobs: VideoJobs, job: VideoJob, response: Response) -> protocol.VideoObject:
    if not job.record.finished:
        wait_ms = POLL_MS * (1 + (jobs.position(job) or 0))
        response.headers["openai-poll-after-ms"] = str(min(MAX_POLL_MS, wait_ms))
    return video_object(jobs, job)


def video_object(jobs: VideoJobs, job: VideoJob) -> protocol.VideoObject:
    """Return the description of a video for its client."""
    record = {name: value for name, value in vars(job.record).items() if name in SHARED_FIELDS}
    return protocol.VideoObject(**record, progress=job.progress, queue_position=jobs.position(job))
