"""Text that an engine makes token by token."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Literal

from worldmodel.models.text import MAX_TOKENS


@dataclass(frozen=True)
class TextParams:
    """Settings of text decoding."""

    max_tokens: int = MAX_TOKENS
    temperature: float = 0.0
    """0 takes the most likely token; logits are divided by other values before a token is sampled."""
    stop: tuple[str, ...] = ()
    """Texts before the first of which the text ends; see `until`."""
    seed: int = 0
    """Seed of the sampling; equal seeds give equal texts on one engine."""


@dataclass(frozen=True)
class Completion:
    """The text so far, and its length in tokens."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    finish_reason: Literal["stop", "length"] | None = None
    """Why it ended: at the end token, or at `max_tokens`; None while it goes on."""


async def merge(
    texts: Sequence[AsyncGenerator[Completion, None]],
) -> AsyncGenerator[tuple[int, Completion], None]:
    """Run generators of texts together; yields what each of them yields, with its index."""
    waiting = {asyncio.ensure_future(anext(text, None)): index for index, text in enumerate(texts)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for each in sorted(done, key=lambda done: waiting[done]):
                index = waiting.pop(each)
                if (completion := each.result()) is not None:
                    waiting[asyncio.ensure_future(anext(texts[index], None))] = index
                    yield index, completion
    finally:
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for text in texts:
            await text.aclose()


async def until(
    completions: AsyncGenerator[Completion, None], stops: Sequence[str]
) -> AsyncGenerator[Completion, None]:
    """End a text before the first of `stops`; what may be the begin of one is held back until it is not."""
    async with aclosing(completions):
        async for completion in completions:
            found = [at for stop in stops if (at := completion.text.find(stop)) >= 0]
            if found:
                yield replace(completion, text=completion.text[: min(found)], finish_reason="stop")
                return
            text = completion.text
            begun = (size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size]))
            held = 0 if completion.finish_reason else max(begun, default=0)
            yield replace(completion, text=text[: len(text) - held])


async def last(completions: AsyncIterator[Completion]) -> Completion:
    """Return the whole text."""
    return [completion async for completion in completions][-1]
