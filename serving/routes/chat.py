"""Questions about images and videos as chat completions."""

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import aclosing
from typing import TypeAlias

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse

from worldmodel.errors import InputError, WorldModelError
from worldmodel.models.text import MAX_TOKENS
from worldmodel.serving import protocol
from worldmodel.serving.context import Caller, Context
from worldmodel.serving.engine.completion import Completion, TextParams
from worldmodel.serving.errors import ApiError
from worldmodel.serving.media.decoding import decode_observation
from worldmodel.serving.routes.parsing import decode_data_url
from worldmodel.serving.routes.route_class import BODY, ERRORS, ChatRoute, errors, while_connected

router = APIRouter(tags=["text"], route_class=ChatRoute, responses=ERRORS)
STREAM = "text/event-stream"
Grown: TypeAlias = tuple[int, Completion]
"""One of several texts as it grows: its index, and the text so far."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Replacement character, to which the bytes of an incomplete character decode."""


@router.post(
    "/v1/chat/completions",
    response_model=protocol.ChatObject,
    responses={200: {"content": {STREAM: {"schema": {"type": "string"}}}}} | errors(*BODY, 404, 504),
)
async def complete(
    request: Request, context: Context, caller: Caller, body: protocol.ChatRequest
) -> protocol.ChatObject | StreamingResponse:
    """Describe an image or video, or answer a question about it."""
    url, question = _newest_turn(body.messages)
    model = context.models.find(body.model)
    settings = model.service.settings(adapter=model.adapter)
    max_tokens = body.max_completion_tokens or body.max_tokens or MAX_TOKENS
    seed = secrets.randbelow(2**63) if body.seed is None else body.seed
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    params = [
        TextParams(max_tokens, body.temperature, stop, (seed + index) % 2**63) for index in range(body.n)
    ]
    frames = await decode_observation(await decode_data_url(url), model.config)
    completions = context.worlds.complete_frames(caller, model.service, frames, settings, question, params)
    name, created = model.name, int(time.time())
    answer = protocol.ChatChunk(
        id=f"chatcmpl-{secrets.token_urlsafe(16)}", created=created, model=name, choices=[]
    )
    if body.stream:
        first = await while_connected(request, anext(completions))  # its errors have an HTTP status
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        return StreamingResponse(_events(answer, first, completions, with_usage), media_type=STREAM)
    whole = await while_connected(request, _whole(completions))
    return protocol.ChatObject(
        id=answer.id,
        created=created,
        model=name,
        choices=[
            protocol.Choice(
                index=index,
                message=protocol.ChatMessage(content=whole[index].text),
                finish_reason=whole[index].finish_reason or "stop",  # the last completion has the reason
            )
            for index in range(body.n)
        ],
        usage=_usage(whole.values()),
    )


def _newest_turn(messages: list[protocol.Message]) -> tuple[str, str | None]:
    """Return the newest image or video of a conversation, and the question of its last message.

    The text of system messages is put before the question.

    Raises:
        InputError: the last message is not the user's, or a message has several questions or observations.
    """
    if messages[-1].role != "user":
        raise InputError(f"The last message is of the role {messages[-1].role}; end with one of the user.")
    url, question, instructions = None, None, []
    for message in messages:
        content, question = message.content, None
        parts = [protocol.TextPart(type="text", text=content)] if isinstance(content, str) else content
        texts = [part.text for part in parts if isinstance(part, protocol.TextPart)]
        media = [part for part in parts if not isinstance(part, protocol.TextPart)]
        if len(media) > 1 or len(texts) > 1:
            raise InputError("A message has at most one image or video, and at most one question.")
        if message.role in ("system", "developer"):
            if media:
                raise InputError("A system message has an image or video; send it in a message of the user.")
            instructions += texts
        elif media:
            part = media[0]
            url = part.video_url.url if isinstance(part, protocol.VideoPart) else part.image_url.url
        question = texts[0] if texts else None
    if url is None:
        raise InputError("There is no image or video; send one as image_url or video_url in a message.")
    return url, "\n".join([*instructions, *([question] if question else [])]) or None


async def _whole(completions: AsyncIterator[Grown]) -> dict[int, Completion]:
    """Return the newest completion of every index: the whole texts."""
    return {index: completion async for index, completion in completions}


async def _events(
    answer: protocol.ChatChunk, first: Grown, others: AsyncGenerator[Grown, None], with_usage: bool
) -> AsyncIterator[str]:
    """Yield the server-sent events of a streamed answer; an error after the first token is one of them."""
    newest: dict[int, Completion] = {}
    sent: dict[int, str] = {}
    grown: Grown | None = first
    try:
        async with aclosing(others):
            while grown is not None:
                index, completion = grown
                newest[index] = completion
                if index not in sent:
                    sent[index] = ""
                    yield _event(answer, index, protocol.Delta(role="assistant", content=""))
                ended, text = completion.finish_reason is not None, completion.text
                if len(text) > len(sent[index]) and (ended or not text.endswith(UNFINISHED)):
                    yield _event(answer, index, protocol.Delta(content=text[len(sent[index]) :]))
                    sent[index] = text
                if ended:
                    yield _event(answer, index, protocol.Delta(), completion.finish_reason)
                grown = await anext(others, None)
    except WorldModelError as error:
        kind, code = getattr(error, "type", ApiError.type), getattr(error, "code", "invalid_input")
        body = protocol.ErrorObject(error=protocol.ErrorBody(type=kind, code=code, message=str(error)))
        yield f"data: {body.model_dump_json()}\n\n"
        return
    if with_usage:
        usage = _usage(newest.values())
        yield f"data: {answer.model_copy(update={'usage': usage}).model_dump_json()}\n\n"
    yield "data: [DONE]\n\n"


def _event(
    answer: protocol.ChatChunk, index: int, delta: protocol.Delta, reason: protocol.FinishReason | None = None
) -> str:
    choice = protocol.ChunkChoice(index=index, delta=delta, finish_reason=reason)
    chunk = answer.model_copy(update={"choices": [choice]})
    return f"data: {chunk.model_dump_json(exclude_none=True)}\n\n"


def _usage(texts: Collection[Completion]) -> protocol.Usage:
    """Count the tokens of the question once, and the tokens of all answers."""
    asked = max(text.prompt_tokens for text in texts)
    answered = sum(text.completion_tokens for text in texts)
    return protocol.Usage(prompt_tokens=asked, completion_tokens=answered, total_tokens=asked + answered)
