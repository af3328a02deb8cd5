"""The event handlers of the demo's page, called as by the pages of a visitor, against a real server."""

import asyncio
import gc
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from worldmodel.config import ActionConfig
from worldmodel.media.encoding import encode_png
from worldmodel.models.world_model import WorldModel
from worldmodel.serving.client import AsyncClient
from worldmodel.worlds import World

gr = pytest.importorskip("gradio", reason="gradio is not installed: worldmodel[demo]")


@pytest.fixture(scope="module")
def address(serve: Callable[..., str]) -> str:
    return serve(requests_per_minute=60_000)


def handle(page: Any, tab: str, button: Any, *values: Any) -> AsyncGenerator[dict[Any, Any], None]:
    """Click a button in a tab; yields the updates of components."""
    event = "upload" if button is page.at.upload else "click"
    (handler,) = (each.fn for each in page.blocks.fns.values() if (button._id, event) in each.targets)
    return handler(gr.Request(session_hash=tab), gr.EventData(None, {}), *values)


async def click(page: Any, tab: str, button: Any, *values: Any) -> dict[Any, Any]:
    """Click a button, and return the last updates."""
    return [updates async for updates in handle(page, tab, button, *values)][-1]


def visit(
    address: str, body: Callable[[Any, dict[Any, Any]], Awaitable[None]], upload: bytes | None = None
) -> None:
    """Start a world, from words or an upload, and call `body` with the page and what it shows."""
    from worldmodel.demo.page import Page

    async def run() -> None:
        async with AsyncClient(address) as client:
            page = Page(client, World())
            await page._greet("")
            start, origin = (page.at.upload, upload) if upload else (page.at.imagine, "a red ball")
            shown = await click(page, "a", start, "", origin, 3)
            await body(page, shown)
            await click(page, "a", page.at.anew, shown[page.at.worlds])

    asyncio.run(run())


@pytest.mark.parametrize(
    "action",
    [
        ActionConfig(text=False, keys=("left", "right")),
        ActionConfig(text=False, vector_size=2, vector_low=(1.0, 2.0), vector_high=(3.0, 4.0)),
        ActionConfig(text=False, mouse=True),
        ActionConfig(text=False, camera=True),
    ],
    ids=["keys", "vector", "mouse", "camera"],
)
def test_what_the_page_suggests_to_type_is_taken(
    action: ActionConfig,
    make_model: Callable[..., WorldModel],
    serve: Callable[..., str],
    image: np.ndarray,
) -> None:
    async def body(page: Any, shown: dict[Any, Any]) -> None:
        _, _, example = shown[page.at.action].placeholder.partition("such as ")
        played = await click(page, "a", page.at.act, shown[page.at.worlds], example)
        assert page.at.worlds in played, played[page.at.status]

    visit(serve(make_model(action=action)), body, encode_png(image))


def test_two_pages_of_a_visitor_play_one_after_the_other(address: str) -> None:
    async def body(page: Any, shown: dict[Any, Any]) -> None:
        worlds = shown[page.at.worlds]
        await asyncio.gather(
            *(click(page, tab, page.at.act, worlds, f"the ball moves {tab}") for tab in ("left", "right"))
        )
        (history, _) = page.histories[worlds.split()[0]]
        assert [moment.label for moment in history.branch.moments][1:] == [
            "the ball moves left",
            "the ball moves right",
        ]
        assert (await history.branch.world.refresh()).round == history.branch.at == 2

    visit(address, body)


def test_a_page_that_is_closed_leaves_nothing_behind(address: str) -> None:
    async def body(page: Any, shown: dict[Any, Any]) -> None:
        worlds = shown[page.at.worlds]
        updates = handle(page, "a", page.at.act, worlds, "the ball moves left")
        await anext(updates)
        await updates.aclose()
        del updates
        again = await page._greet(worlds)
        assert again[page.at.worlds] == worlds
        gc.collect()
        assert not page.queues
        (history, _) = page.histories[worlds.split()[0]]
        assert history.branch.at == 0

    visit(address, body)
