"""Videos as jobs, in the shape of the Videos API."""

import math
from typing import Annotated, Literal, TypeAlias

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.responses import FileResponse

from worldmodel.errors import InputError
from worldmodel.serving.actions import plain
from worldmodel.serving.errors import Conflict, NotFound
from worldmodel.serving.protocol import (
    Deleted,
    Variant,
    VideoError,
    VideoList,
    VideoObject,
    VideoRequest,
)
from worldmodel.serving.routes.parsing import adapter, check_size, decode, described, read_body
from worldmodel.serving.routes.route_class import ERRORS, Caller, GuardedRoute
from worldmodel.serving.videos.jobs import Job, Jobs, Order, Record, fingerprint, idempotency, new_record
from worldmodel.serving.worlds.service import WorldService
from worldmodel.types import Action

router = APIRouter(prefix="/v1/videos", tags=["videos"], route_class=GuardedRoute, responses=ERRORS)

UPLOAD = "input_reference"
POLL_MS, LONGEST_POLL_MS = 500, 5000
MEDIA_TYPES = {"video": "video/mp4", "thumbnail": "image/jpeg", "spritesheet": "image/jpeg"}


def _mine(request: Request, caller: Caller, video_id: Annotated[str, Path(max_length=64)]) -> Job:
    return _jobs(request).get(caller, video_id)


Mine: TypeAlias = Annotated[Job, Depends(_mine)]
IdempotencyKey = Annotated[str | None, Header(min_length=1, max_length=255)]


def _jobs(request: Request) -> Jobs:
    return request.app.state.jobs


@router.post("", response_model=VideoObject, openapi_extra=described(VideoRequest, UPLOAD))
async def create(
    request: Request, response: Response, caller: Caller, idempotency_key: IdempotencyKey = None
) -> VideoObject:
    """Ask for a video; with an Idempotency-Key the same request asks for the same one again."""
    asked, upload = await read_body(request, VideoRequest, UPLOAD)
    service: WorldService = request.app.state.service
    config, jobs = service.model.config, _jobs(request)
    chosen = adapter(service, request.app.state.config.model_name, asked.model)
    settings = service.settings(asked.seed, asked.num_inference_steps, asked.guidance_scale, chosen)
    actions, num_frames = await _plan(request, asked, begins_with_prompt=upload is not None)
    record = new_record(
        caller,
        request.app.state.config,
        model=asked.model or request.app.state.config.model_name,
        prompt=asked.prompt,
        size=check_size(service, asked.size),
        seconds=f"{num_frames / config.fps:g}",
        num_frames=num_frames,
        fps=config.fps,
        seed=asked.seed,
        idempotency=idempotency(caller, idempotency_key),
        fingerprint=fingerprint(asked.model_dump(), upload),
    )
    job = jobs.earlier(record)
    if job is None:
        frames = await decode(service, upload) if upload is not None else None
        text = asked.prompt if upload is None else None
        job = await jobs.submit(record, Order(settings, actions, num_frames, frames, text))
    return _answer(jobs, job, response)


@router.get("", response_model=VideoList)
async def find_all(
    request: Request,
    caller: Caller,
    after: Annotated[str | None, Query(max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> VideoList:
    """List this key's videos, by the time at which they were asked for."""
    jobs = _jobs(request)
    owned = jobs.owned(caller)
    if order == "desc":
        owned.reverse()
    names = [job.record.id for job in owned]
    if after is not None and after not in names:
        raise NotFound("There is no video of the name in 'after'; begin the list without it.")
    first = names.index(after) + 1 if after is not None else 0
    page = owned[first : first + limit]
    return VideoList(
        data=[shown(jobs, job) for job in page],
        first_id=page[0].record.id if page else None,
        last_id=page[-1].record.id if page else None,
        has_more=first + limit < len(owned),
    )


@router.get("/{video_id}", response_model=VideoObject)
async def find(request: Request, response: Response, job: Mine) -> VideoObject:
    """Return how far a video is; `openai-poll-after-ms` says when to ask again."""
    return _answer(_jobs(request), job, response)


@router.get(
    "/{video_id}/content",
    response_class=FileResponse,
    responses={
        200: {
            "description": "The file; a Range is answered 206.",
            "content": {
                kind: {"schema": {"type": "string", "format": "binary"}} for kind in set(MEDIA_TYPES.values())
            },
        },
        206: {"description": "The part of the file that Range asks for."},
        416: {"description": "The Range lies outside of the file."},
    },
)
async def content(request: Request, job: Mine, variant: Variant = "video") -> FileResponse:
    """Return a finished video, its first frame, or a sheet of its frames."""
    if job.record.status != "completed":
        why = "failed" if job.record.status == "failed" else "is not finished"
        raise Conflict(f"The video {why}; ask for its status first.")
    path = _jobs(request).storage.path(job.record.id, variant)
    return FileResponse(
        path,
        media_type=MEDIA_TYPES[variant],
        filename=path.name,
        headers={"cache-control": "private, no-store", "x-content-type-options": "nosniff"},
    )


@router.delete("/{video_id}", response_model=Deleted)
async def delete(request: Request, job: Mine) -> Deleted:
    """Remove a video; one that is not finished is stopped within a denoising step."""
    await _jobs(request).delete(job)
    return Deleted(id=job.record.id, object="video.deleted")


async def _plan(
    request: Request, asked: VideoRequest, begins_with_prompt: bool
) -> tuple[tuple[Action, ...], int]:
    """Return an action for every round, and how many frames are kept.

    Raises:
        InputError: lengths do not fit each other, or the model does not take an action.
    """
    service: WorldService = request.app.state.service
    config, most = service.model.config, request.app.state.config.max_video_frames
    if asked.fps not in (None, config.fps):
        raise InputError(f"fps is {asked.fps}; this model makes {config.fps}: pass that, or leave fps out.")
    if asked.seconds is not None and asked.num_frames is not None:
        raise InputError("seconds and num_frames say the same thing; send one of them.")
    given = [plain(action) for action in asked.actions]
    actions = [Action.of(action) for action in ([asked.prompt, *given] if begins_with_prompt else given)]
    num_frames = max(1, len(actions)) * config.chunk_frames
    if asked.seconds is not None:
        num_frames = round(float(asked.seconds) * config.fps)
    elif asked.num_frames is not None:
        num_frames = asked.num_frames
    if not 1 <= num_frames <= most:
        raise InputError(
            f"The video would have {num_frames} frames; ask for 1 to {most} ({most / config.fps:g} s)."
        )
    rounds = math.ceil(num_frames / config.chunk_frames)
    if len(actions) > rounds:
        raise InputError(
            f"There are {len(actions)} actions for {rounds} rounds of {config.chunk_frames} frames; "
            "ask for more frames, or send fewer actions."
        )
    await service.compute.run(_validate, service, (*actions, Action.of(asked.prompt)))
    return (*actions, *[Action()] * (rounds - len(actions))), num_frames


def _validate(service: WorldService, actions: tuple[Action, ...]) -> None:
    for action in actions:
        service.model.action.validate(action, service.model.backbone)


def _answer(jobs: Jobs, job: Job, response: Response) -> VideoObject:
    if not job.record.finished:
        wait_ms = POLL_MS * (1 + (jobs.position(job) or 0))
        response.headers["openai-poll-after-ms"] = str(min(LONGEST_POLL_MS, wait_ms))
    return shown(jobs, job)


def shown(jobs: Jobs, job: Job) -> VideoObject:
    """Return what a client learns of a video."""
    record: Record = job.record
    return VideoObject(
        id=record.id,
        model=record.model,
        status=record.status,
        progress=job.progress,
        queue_position=jobs.position(job),
        created_at=record.created_at,
        completed_at=record.completed_at,
        expires_at=record.expires_at,
        prompt=record.prompt,
        seconds=record.seconds,
        size=record.size,
        num_frames=record.num_frames,
        fps=record.fps,
        seed=record.seed,
        inference_time_s=record.inference_time_s,
        error=VideoError(**record.error) if record.error is not None else None,
    )
