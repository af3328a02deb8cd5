"""The page: what happens when something is pressed. Worlds live on the server; journeys know the way back."""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from html import escape
from importlib.resources import files
from typing import Any

import gradio as gr

from worldmodel.demo import pictures
from worldmodel.demo.journey import Journey
from worldmodel.demo.layout import Layout
from worldmodel.demo.theme import theme
from worldmodel.errors import InputError, WorldModelError
from worldmodel.serving.client import AsyncClient
from worldmodel.serving.client.transport import AnyAction
from worldmodel.worlds import World

MAX_UPLOAD = "20mb"
STATE_LIFETIME_S = 3600
SAVE = """
(film) => {
  if (!film) return;
  const link = document.createElement('a');
  link.href = film;
  link.download = film.startsWith('data:image/gif') ? 'rollout.gif' : 'rollout.mp4';
  link.click();
}
"""

Handler = Callable[..., Awaitable[Any]]
Shown = dict[Any, Any]
"""Components and what they show now."""


def launch(page: gr.Blocks, port: int | None, *, block: bool = True) -> str:
    """Show the page on this machine and return its address."""
    _, address, _ = page.queue(default_concurrency_limit=8, max_size=64).launch(
        server_name="127.0.0.1",
        server_port=port,
        share=False,
        quiet=True,
        prevent_thread_lock=not block,
        max_file_size=MAX_UPLOAD,
        allowed_paths=[],
        show_error=False,
        footer_links=[],
        ssr_mode=False,
        theme=theme(),
        css=files("worldmodel.demo").joinpath("style.css").read_text(encoding="utf-8"),
    )
    return address


def _told(handler: Handler) -> Handler:
    """Show a visitor's mistakes, and the server's, as a note in one sentence; the page stays as it is."""

    @functools.wraps(handler)
    async def told(*args: Any, **kwargs: Any) -> Any:
        try:
            return await handler(*args, **kwargs)
        except WorldModelError as error:
            gr.Warning(escape(" ".join(str(error).split())), duration=8)
            return gr.skip()

    return told


class Page:
    """Handlers of the page; a visitor's journey is the only state, and every visitor has their own."""

    def __init__(self, client: AsyncClient, catalog: World) -> None:
        """Lay out the page over a server's client, with the start images and actions of a world."""
        self.client, self.catalog = client, catalog
        self.start_images = catalog.start_images()
        with gr.Blocks(title="worldmodel", analytics_enabled=False) as self.blocks:
            state = gr.State(None, time_to_live=STATE_LIFETIME_S, delete_callback=_end())
            self.at = Layout(state, self.start_images)
            self._connect()

    def _connect(self) -> None:
        at = self.at
        shown = [
            *(at.journey, at.start, at.play, at.main, at.futures, at.compare, at.undo),
            *(at.stage, at.strip, at.branches, at.palette, at.said, *at.stages),
        ]
        on = self._on
        on(at.tiles.click, self._start_scene, [at.seed], shown, busy=[at.tiles])
        on(at.upload.upload, self._start_upload, [at.upload, at.seed], [*shown, at.upload], busy=[at.tiles])
        for event in (at.imagine.click, at.text.submit):
            on(event, self._start_text, [at.text, at.seed], shown, busy=[at.tiles])
        for event in (at.act.click, at.action.submit):
            on(event, self._step_text, [at.action], [*shown, at.action])
        on(at.palette.click, self._step_chip, [], shown)
        on(at.undo.click, self._undo, [], shown)
        on(at.strip.click, self._go, [], shown)
        on(at.branches.click, self._switch, [], shown)
        on(at.fork.click, self._fork, [], shown)
        on(at.open_compare.click, self._open_compare, [], [at.compare, at.first, at.second])
        on(at.both.click, self._compare, [at.first, at.second], [at.main, at.futures, *at.stages])
        for index, choice in enumerate(at.choices):
            on(choice.click, functools.partial(self._choose, index), [], shown, busy=at.stages)
        on(at.neither.click, self._forget, [], shown, busy=at.stages)
        on(at.describe.click, self._describe, [], [at.said])
        on(at.explain.click, self._explain, [], [at.said])
        for event in (at.ask.click, at.question.submit):
            on(event, self._ask, [at.question], [at.said])
        for button, suffix in ((at.mp4, "mp4"), (at.gif, "gif")):
            made = on(button.click, functools.partial(self._save, suffix), [], [at.film])
            made.then(None, at.film, None, js=SAVE).then(lambda: "", None, at.film, show_progress="hidden")
        on(at.anew.click, self._begin_anew, [], [at.journey, at.start, at.play])
        # The page to play on is asked for only when somebody looks at it.
        at.live_tab.select(lambda: _frame(self.client.base_url), None, at.live, show_progress="hidden")
        self.blocks.load(self._greet, None, at.head, show_progress="hidden")

    def _on(
        self,
        event: Callable[..., Any],
        handler: Handler,
        inputs: list[Any],
        outputs: list[Any],
        busy: list[Any] | None = None,
    ) -> Any:
        return event(
            _told(handler),
            [self.at.journey, *inputs],
            outputs,
            show_progress="minimal",
            show_progress_on=busy or [self.at.stage],
            trigger_mode="once",
            api_visibility="private",
        )

    # ---- beginning -------------------------------------------------------------------------------------

    async def _greet(self) -> Any:
        try:
            return pictures.header(" · ".join(await self.client.models()))
        except WorldModelError as error:
            gr.Warning(escape(str(error)), duration=None)
            return gr.skip()

    async def _start_scene(self, journey: Journey | None, seed: float, event: gr.EventData) -> Shown:
        start = self.start_images[_index(event, len(self.start_images))]
        begun = await Journey.from_image(self.client, self.catalog, start, _seed(seed))
        return await self._start(journey, begun)

    async def _start_upload(self, journey: Journey | None, data: bytes | None, seed: float) -> Shown:
        if not data:
            raise InputError("The file is empty; use a PNG, JPEG, WebP or MP4.")
        begun = await Journey.from_upload(self.client, self.catalog, data, _seed(seed))
        return {**await self._start(journey, begun), self.at.upload: None}

    async def _start_text(self, journey: Journey | None, text: str, seed: float) -> Shown:
        if not text.strip():
            raise InputError("Say what the scene should show, or pick one of the pictures.")
        begun = await Journey.from_text(self.client, self.catalog, text.strip(), _seed(seed))
        return await self._start(journey, begun)

    async def _start(self, before: Journey | None, begun: Journey) -> Shown:
        if before is not None:
            await before.close()
        return self._show(begun)

    async def _begin_anew(self, journey: Journey | None) -> Shown:
        if journey is not None:
            await journey.close()
        at = self.at
        return {at.journey: None, at.start: gr.Column(visible=True), at.play: gr.Column(visible=False)}

    # ---- steps, back and forth -------------------------------------------------------------------------

    async def _step_text(self, journey: Journey | None, text: str) -> Shown:
        if not text.strip():
            raise InputError("Say what happens next, or press one of the suggestions.")
        return {**await self._step(journey, text), self.at.action: ""}

    async def _step_chip(self, journey: Journey | None, event: gr.EventData) -> Shown:
        kind, act = (str(event._data.get(name, "")) for name in ("kind", "act"))
        return await self._step(
            journey, {"keys": [act]} if kind == "key" else None if kind == "wait" else act
        )

    async def _step(self, journey: Journey | None, action: AnyAction) -> Shown:
        begun = _begun(journey)
        await begun.step(action)
        return self._show(begun)

    async def _undo(self, journey: Journey | None) -> Shown:
        begun = _begun(journey)
        if begun.branch.at == 0:
            raise InputError("This is the beginning; there is nothing to undo.")
        await begun.go(begun.branch.at - 1)
        return self._show(begun)

    async def _go(self, journey: Journey | None, event: gr.EventData) -> Shown:
        begun = _begun(journey)
        await begun.go(_index(event, len(begun.branch.moments)))
        return self._show(begun)

    # ---- branches and futures --------------------------------------------------------------------------

    async def _switch(self, journey: Journey | None, event: gr.EventData) -> Shown:
        begun = _begun(journey)
        begun.current = _index(event, len(begun.branches))
        return self._show(begun)

    async def _fork(self, journey: Journey | None) -> Shown:
        begun = _begun(journey)
        await begun.fork()
        gr.Info(f"You are on {begun.branch.name}; the branch before waits as it was.", duration=5)
        return self._show(begun)

    async def _open_compare(self, journey: Journey | None) -> Shown:
        suggested = [
            act for row in self.catalog.target_actions(_begun(journey).branch.now.targets) for act in row
        ]
        first, second = (suggested[1].text, suggested[4].text) if len(suggested) > 4 else ("", "")
        return {self.at.compare: gr.Column(visible=True), self.at.first: first, self.at.second: second}

    async def _compare(self, journey: Journey | None, first: str, second: str) -> Shown:
        begun, at = _begun(journey), self.at
        if not first.strip() or not second.strip():
            raise InputError("Say two things that could happen next, one in each field.")
        await begun.compare(first, second)
        made = [
            pictures.stage(moment, begun.branch.now, world.info.fps, name)
            for name, (world, moment) in zip(("Either", "Or"), begun.futures, strict=True)
        ]
        stages = dict(zip(at.stages, made, strict=True))
        return {at.main: gr.Row(visible=False), at.futures: gr.Column(visible=True), **stages}

    async def _choose(self, index: int, journey: Journey | None) -> Shown:
        begun = _begun(journey)
        await begun.choose(index)
        return self._show(begun)

    async def _forget(self, journey: Journey | None) -> Shown:
        begun = _begun(journey)
        await begun.forget_futures()
        return self._show(begun)

    # ---- words and films -------------------------------------------------------------------------------

    async def _describe(self, journey: Journey | None) -> str:
        return pictures.answer("What is seen", await _begun(journey).say(None))

    async def _explain(self, journey: Journey | None) -> str:
        return pictures.answer("What happened last", await _begun(journey).explain())

    async def _ask(self, journey: Journey | None, question: str) -> str:
        if not question.strip():
            raise InputError("Ask something about the picture, such as: how many things are there.")
        return pictures.answer(question, await _begun(journey).say(question.strip()))

    async def _save(self, suffix: str, journey: Journey | None) -> str:
        begun = _begun(journey)
        fps = begun.branch.world.info.fps
        return await asyncio.to_thread(pictures.film, begun.film(), fps, pictures.FILM_SIDE, suffix)

    def _show(self, journey: Journey) -> Shown:
        """Return the page as a journey has it."""
        at, branch = self.at, journey.branch
        info = branch.world.info
        before = branch.moments[branch.at - 1] if branch.at else None
        keys = () if info.action_schema["text"] else info.action_schema["keys"][:12]
        return {
            at.journey: journey,
            at.start: gr.Column(visible=False),
            at.play: gr.Column(visible=True),
            at.main: gr.Row(visible=True),
            at.futures: gr.Column(visible=False),
            at.compare: gr.Column(visible=False),
            at.undo: gr.Button(interactive=branch.at > 0),
            at.stage: pictures.stage(branch.now, before, info.fps, f"Round {branch.at}"),
            at.strip: pictures.strip(branch),
            at.branches: pictures.branches(journey),
            at.palette: pictures.palette(self.catalog, branch.now.targets, branch.at, keys),
            at.said: "",
            **dict.fromkeys(at.stages, ""),
        }


def _begun(journey: Journey | None) -> Journey:
    if journey is None:
        raise InputError("There is no world yet; pick a scene first.")
    return journey


def _seed(number: float | None) -> int:
    return int(number or 0)


def _index(event: gr.EventData, count: int) -> int:
    """Read which button was pressed; it comes from the browser."""
    told = str(event._data.get("index", "")) if isinstance(event._data, dict) else ""
    if not told.isdecimal() or int(told) >= count:
        raise InputError("This is no longer there; reload the page.")
    return int(told)


def _frame(base_url: str) -> str:
    return (
        f'<iframe src="{escape(base_url, quote=True)}/play" title="Play live" referrerpolicy="no-referrer" '
        'sandbox="allow-scripts allow-same-origin allow-forms"></iframe>'
    )


def _end() -> Callable[[Journey | None], None]:
    """Return what ends the worlds of a visitor who has left."""
    running: set[asyncio.Task[None]] = set()

    def end(journey: Journey | None) -> None:
        if journey is not None:
            task = asyncio.get_running_loop().create_task(journey.close())
            running.add(task)
            task.add_done_callback(running.discard)

    return end
