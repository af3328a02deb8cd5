"""The event handlers of the demo's page, called as by the pages of a visitor, against a real server."""

import asyncio
import gc
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import torch

from worldmodel.config import ActionConfig, StateConfig
from worldmodel.media.encoding import encode_png
from worldmodel.models.world_model import WorldModel
from worldmodel.serving.client import AsyncClient
from worldmodel.worlds import World

gr = pytest.importorskip("gradio", reason="gradio is not installed: openworldmodel[demo]")


@pytest.fixture(scope="module")
def address(serve: Callable[..., str]) -> str:
    return serve(requests_per_minute=60_000)


def handle(
    page: Any, tab: str, button: Any, *values: Any, data: dict[str, str] | None = None
) -> AsyncGenerator[dict[Any, Any], None]:
    """Click a button in a tab, with the data of a button in HTML; yields the updates of components."""
    event = "upload" if button is page.at.upload else "click"
    (handler,) = (each.fn for each in page.blocks.fns.values() if (button._id, event) in each.targets)
    return handler(gr.Request(session_hash=tab), gr.EventData(None, data or {}), *values)


async def click(
    page: Any, tab: str, button: Any, *values: Any, data: dict[str, str] | None = None
) -> dict[Any, Any]:
    """Click a button, and return the last updates."""
    return [updates async for updates in handle(page, tab, button, *values, data=data)][-1]


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
        ActionConfig(text=False, vector={"low": (1.0, 2.0), "high": (3.0, 4.0)}),
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


def test_the_shipped_game_starts_from_its_own_images_and_is_played_by_its_keys(
    serve: Callable[..., str],
) -> None:
    from worldmodel.demo.page import Page

    doorkey = WorldModel.from_pretrained("minigrid-doorkey")
    session = doorkey.session(seed=3)
    session.reset(doorkey.start_images[2].image)

    async def run() -> None:
        async with AsyncClient(serve(doorkey)) as client:
            page = Page(client, World())
            at, greeted = page.at, await page._greet("")
            assert greeted[at.tiles].count('class="wm-tile"') == len(doorkey.start_images) == 8
            shown = await click(page, "a", at.tiles, "", 3, data={"index": "2"})
            chips = re.findall(r'data-kind="(\w+)" data-act="(\w+)"', shown[at.palette])
            assert chips == [("key", key) for key in doorkey.config.action.keys]
            for key in ("right", "forward"):
                shown = await click(page, "a", at.palette, shown[at.worlds], data={"kind": "key", "act": key})
                (history, _) = page.histories[shown[at.worlds].split()[0]]
                expected = session.step({"keys": [key]})
                np.testing.assert_array_equal(history.branch.now.clip, expected.frames)
                assert (history.branch.now.label, history.branch.now.outcome is None) == (key, False)
            await click(page, "a", at.anew, shown[at.worlds])

    asyncio.run(run())


def test_a_visitor_picks_one_of_the_possible_futures(
    make_model: Callable[..., WorldModel], serve: Callable[..., str]
) -> None:
    state = StateConfig(width=32, num_layers=1, num_heads=2, code_groups=3, code_classes=4)
    model = make_model(state=state, num_inference_steps=1)
    assert model.state is not None
    torch.nn.init.normal_(model.state.to_latents.weight)  # zeros before training: all codes have one forecast

    async def body(page: Any, shown: dict[Any, Any]) -> None:
        at, worlds = page.at, shown[page.at.worlds]
        assert (await page._greet(""))[at.foresee].value == "Futures"
        listed = (await click(page, "a", at.foresee, worlds, "the ball wanders off"))[at.possible]
        (history, _) = page.histories[worlds.split()[0]]
        shares = [round(100 * future.probability) for future in history.possible]
        assert [int(share) for share in re.findall(r"<small>(\d+)%", listed)] == shares
        assert len(shares) > 1 and history.branch.at == 0
        chosen = history.possible[1]
        played = await click(page, "a", at.possible, worlds, data={"index": "1"})
        assert (history.branch.at, history.branch.now.code) == (1, chosen.code)
        assert (history.branch.now.label, played[at.possible]) == ("the ball wanders off", "")
        gone = await click(page, "a", at.possible, worlds, data={"index": "1"})
        assert "no longer exists" in gone[at.status] and history.branch.at == 1

    visit(serve(model, requests_per_minute=60_000), body)


def test_a_model_without_a_code_shows_several_seeds(
    make_model: Callable[..., WorldModel], serve: Callable[..., str]
) -> None:
    async def body(page: Any, shown: dict[Any, Any]) -> None:
        at, worlds = page.at, shown[page.at.worlds]
        listed = (await click(page, "a", at.foresee, worlds, "the ball wanders off"))[at.possible]
        assert re.findall(r"<small>(seed \d)</small>", listed) == ["seed 3", "seed 4", "seed 5", "seed 6"]
        assert "same frames" not in listed
        (history, _) = page.histories[worlds.split()[0]]
        frames = [future.frames for future in history.possible]
        assert not np.array_equal(frames[0], frames[1])
        live = [world.id for world in await page.client.worlds.list()]
        await click(page, "a", at.possible, worlds, data={"index": "1"})
        assert (history.branch.now.seed, history.branch.at) == (4, 1)
        np.testing.assert_array_equal(history.branch.now.clip, frames[1])
        # Seeds are of one round: without one, the world's own is drawn, also in a replay.
        await history.step("the ball wanders off")
        second = history.branch.now.clip
        history.branch.moments[1].snapshot = history.branch.moments[2].snapshot = None
        await history.go(0)
        await history.go(2)
        np.testing.assert_array_equal(await history.branch.world.frames(), second)
        assert [world.id for world in await page.client.worlds.list()] == live, "forks were closed"

    visit(serve(make_model(), requests_per_minute=60_000), body)


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
