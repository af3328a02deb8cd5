"""Event handlers of the page, which keeps the rollout history of each visitor; worlds are on the server."""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import gradio as gr

from worldmodel.demo import rendering
from worldmodel.demo.history import RolloutHistory
from worldmodel.demo.layout import Layout
from worldmodel.demo.theme import theme
from worldmodel.errors import InputError, WorldModelError
from worldmodel.serving.client import AsyncClient
from worldmodel.types import AnyAction, StartImage
from worldmodel.worlds import World

if TYPE_CHECKING:
    from worldmodel.demo.flow_reader import FlowReader

MAX_UPLOAD = "20mb"
STATE_LIFETIME_S = 3600
SAVE = """
(uri) => {
  if (!uri) return;
  const link = document.createElement('a');
  link.href = uri;
  link.download = uri.startsWith('data:image/gif') ? 'rollout.gif' : 'rollout.mp4';
  link.click();
}
"""

Handler = Callable[..., Awaitable[Any]]
Updates = dict[Any, Any]
"""New values of components."""


def launch(page: gr.Blocks, port: int | None) -> str:
    """Serve the page on the local machine and return its address."""
    _, address, _ = page.queue(default_concurrency_limit=8, max_size=64).launch(
        server_name="127.0.0.1",
        server_port=port,
        share=False,
        quiet=True,
        prevent_thread_lock=True,
        max_file_size=MAX_UPLOAD,
        allowed_paths=[],
        show_error=False,
        footer_links=[],
        ssr_mode=False,
        theme=theme(),
        css=files("worldmodel.demo").joinpath("style.css").read_text(encoding="utf-8"),
    )
    return address


def _with_warnings(handler: Handler, needs_world: bool) -> Handler:
    """Show errors of the visitor and the server as a warning, and leave the page unchanged."""

    @functools.wraps(handler)
    async def wrapped(history: RolloutHistory | None, *args: Any) -> Any:
        try:
            if needs_world and history is None:
                raise InputError("There is no world; pick a scene first.")
            return await handler(history, *args)
        except WorldModelError as error:
            gr.Warning(escape(" ".join(str(error).split())), duration=8)
            return gr.skip()

    return wrapped


class Page:
    """The page and its event handlers; the only state is the history of each visitor."""

    def __init__(self, client: AsyncClient, catalog: World, flow: "FlowReader | None" = None) -> None:
        """Create the page for the client of a server, with the suggested actions of a world.

        With a flow, it has a tab that shows its clips.
        """
        self.client, self.catalog = client, catalog
        self.start_images: Sequence[StartImage] = ()
        """Those of the server's model, from the first visit on."""
        with gr.Blocks(title="worldmodel", analytics_enabled=False) as self.blocks:
            state = gr.State(None, time_to_live=STATE_LIFETIME_S, delete_callback=_close_callback())
            self.at = Layout(state, flow)
            self._connect()

    def _connect(self) -> None:
        at = self.at
        shown = [
            *(at.history, at.start, at.play, at.main, at.futures, at.compare, at.undo),
            *(at.stage, at.timeline, at.branches, at.palette, at.words, at.action, at.answer, *at.stages),
        ]
        on = self._on
        start = functools.partial(on, busy=[at.tiles], needs_world=False)
        start(at.tiles.click, self._start_scene, [at.seed], shown)
        start(at.upload.upload, self._start_upload, [at.upload, at.seed], [*shown, at.upload])
        for event in (at.imagine.click, at.text.submit):
            start(event, self._start_text, [at.text, at.seed], shown)
        for event in (at.act.click, at.action.submit):
            on(event, self._step_text, [at.action], shown)
        on(at.palette.click, self._step_chip, [], shown)
        on(at.undo.click, self._undo, [], shown)
        on(at.timeline.click, self._go, [], shown)
        on(at.branches.click, self._switch, [], shown)
        on(at.fork.click, self._fork, [], shown)
        on(at.open_compare.click, self._open_compare, [], [at.compare, at.first, at.second])
        on(at.both.click, self._compare, [at.first, at.second], [at.main, at.futures, *at.stages])
        for index, choice in enumerate(at.choices):
            on(choice.click, functools.partial(self._choose, index), [], shown, busy=at.stages)
        on(at.neither.click, self._forget, [], shown, busy=at.stages)
        on(at.describe.click, self._describe, [], [at.answer])
        on(at.explain.click, self._explain, [], [at.answer])
        for event in (at.ask.click, at.question.submit):
            on(event, self._ask, [at.question], [at.answer])
        for button, suffix in ((at.mp4, "mp4"), (at.gif, "gif")):
            saved = on(button.click, functools.partial(self._save, suffix), [], [at.download])
            saved.then(None, at.download, None, js=SAVE).then(
                lambda: "", None, at.download, show_progress="hidden"
            )
        on(at.anew.click, self._reset, [], [at.history, at.start, at.play], needs_world=False)
        # The iframe is loaded only when its tab is opened.
        at.live_tab.select(lambda: _frame(self.client.base_url), None, at.live, show_progress="hidden")
        self.blocks.load(self._greet, None, [at.head, at.tiles], show_progress="hidden")

    def _on(
        self,
        event: Callable[..., Any],
        handler: Handler,
        inputs: list[Any],
        outputs: list[Any],
        busy: list[Any] | None = None,
        needs_world: bool = True,
    ) -> Any:
        return event(
            _with_warnings(handler, needs_world),
            [self.at.history, *inputs],
            outputs,
            show_progress="minimal",
            show_progress_on=busy or [self.at.stage],
            trigger_mode="once",
            api_visibility="private",
        )

    # ---- start -----------------------------------------------------------------------------------------

    async def _greet(self) -> Any:
        try:
            names = await self.client.models()
            self.start_images = await self.client.start_images(names[0])
            return rendering.header(" · ".join(names)), rendering.tiles(self.start_images)
        except WorldModelError as error:
            gr.Warning(escape(str(error)), duration=None)
            return gr.skip()

    async def _start_scene(self, history: RolloutHistory | None, seed: float, event: gr.EventData) -> Updates:
        image = self.start_images[_index(event, len(self.start_images))].image
        return await self._start(history, seed, image, targets=self.catalog.targets_in(image))

    async def _start_upload(self, history: RolloutHistory | None, data: bytes | None, seed: float) -> Updates:
        if not data:
            raise InputError("The file is empty; use a PNG, JPEG, WebP or MP4.")
        return {**await self._start(history, seed, data), self.at.upload: None}

    async def _start_text(self, history: RolloutHistory | None, text: str, seed: float) -> Updates:
        if not text.strip():
            raise InputError("Describe the scene, or pick one of the examples.")
        text = text.strip()
        return await self._start(history, seed, text=text, targets=self.catalog.targets_named(text))

    async def _start(
        self, previous: RolloutHistory | None, seed: float | None, *origin: Any, **more: Any
    ) -> Updates:
        started = await RolloutHistory.start(self.client, self.catalog, int(seed or 0), *origin, **more)
        if previous is not None:
            await previous.close()
        return self._show(started)

    async def _reset(self, history: RolloutHistory | None) -> Updates:
        if history is not None:
            await history.close()
        at = self.at
        return {at.history: None, at.start: gr.Column(visible=True), at.play: gr.Column(visible=False)}

    # ---- steps -----------------------------------------------------------------------------------------

    async def _step_text(self, history: RolloutHistory, text: str) -> Updates:
        if not text.strip():
            raise InputError("Describe the action, or pick one of the suggestions.")
        shown = await self._step(history, _typed(history, text))
        return {**shown, self.at.action: gr.Textbox("", placeholder=_hint(history))}

    async def _step_chip(self, history: RolloutHistory, event: gr.EventData) -> Updates:
        kind, act = (str(event._data.get(name, "")) for name in ("kind", "act"))
        return await self._step(
            history, {"keys": [act]} if kind == "key" else None if kind == "wait" else act
        )

    async def _step(self, history: RolloutHistory, action: AnyAction) -> Updates:
        await history.step(action)
        return self._show(history)

    async def _undo(self, history: RolloutHistory) -> Updates:
        if history.branch.at == 0:
            raise InputError("There is nothing to undo.")
        await history.go(history.branch.at - 1)
        return self._show(history)

    async def _go(self, history: RolloutHistory, event: gr.EventData) -> Updates:
        await history.go(_index(event, len(history.branch.moments)))
        return self._show(history)

    # ---- branches and futures --------------------------------------------------------------------------

    async def _switch(self, history: RolloutHistory, event: gr.EventData) -> Updates:
        history.current = _index(event, len(history.branches))
        return self._show(history)

    async def _fork(self, history: RolloutHistory) -> Updates:
        await history.fork()
        gr.Info(f"Switched to {history.branch.name}; the previous branch is unchanged.", duration=5)
        return self._show(history)

    async def _open_compare(self, history: RolloutHistory) -> Updates:
        suggested = [
            action for row in self.catalog.target_actions(history.branch.now.targets) for action in row
        ]
        first, second = (suggested[1].text, suggested[4].text) if len(suggested) > 4 else ("", "")
        return {self.at.compare: gr.Column(visible=True), self.at.first: first, self.at.second: second}

    async def _compare(self, history: RolloutHistory, first: str, second: str) -> Updates:
        at = self.at
        if not first.strip() or not second.strip():
            raise InputError("Describe two actions, one in each field.")
        await history.compare(_typed(history, first), _typed(history, second))
        rendered = [
            rendering.stage(moment, history.branch.now, world.info.fps, name)
            for name, (world, moment) in zip(("First", "Second"), history.futures, strict=True)
        ]
        stages = dict(zip(at.stages, rendered, strict=True))
        return {at.main: gr.Row(visible=False), at.futures: gr.Column(visible=True), **stages}

    async def _choose(self, index: int, history: RolloutHistory) -> Updates:
        await history.choose(index)
        return self._show(history)

    async def _forget(self, history: RolloutHistory) -> Updates:
        await history.forget_futures()
        return self._show(history)

    # ---- questions and saving --------------------------------------------------------------------------

    async def _describe(self, history: RolloutHistory) -> str:
        return rendering.answer("Description", await history.describe(None))

    async def _explain(self, history: RolloutHistory) -> str:
        return rendering.answer("Last action", await history.explain())

    async def _ask(self, history: RolloutHistory, question: str) -> str:
        if not question.strip():
            raise InputError("Ask a question about the image, such as: how many things are there.")
        return rendering.answer(question, await history.describe(question.strip()))

    async def _save(self, suffix: str, history: RolloutHistory) -> str:
        fps = history.branch.world.info.fps
        return await asyncio.to_thread(
            rendering.video_uri, history.frames(), fps, rendering.SAVED_SIDE, suffix
        )

    def _show(self, history: RolloutHistory) -> Updates:
        """Return the values of all components for a rollout history."""
        at, branch = self.at, history.branch
        info = branch.world.info
        before = branch.moments[branch.at - 1] if branch.at else None
        keys = () if info.action_schema["text"] else info.action_schema["keys"][:12]
        return {
            at.history: history,
            at.start: gr.Column(visible=False),
            at.play: gr.Column(visible=True),
            at.main: gr.Row(visible=True),
            at.futures: gr.Column(visible=False),
            at.compare: gr.Column(visible=False),
            at.undo: gr.Button(interactive=branch.at > 0),
            at.stage: rendering.stage(branch.now, before, info.fps, f"Round {branch.at}"),
            at.timeline: rendering.timeline(branch),
            at.branches: rendering.branches(history),
            at.palette: rendering.palette(self.catalog, branch.now.targets, branch.at, keys),
            at.words: gr.Group(visible=info.action_schema["text"]),
            at.action: gr.Textbox(placeholder=_hint(history)),
            at.answer: "",
            **dict.fromkeys(at.stages, ""),
        }


def _hint(history: RolloutHistory) -> str:
    """Return what can be typed as an action."""
    schema = history.branch.world.info.action_schema
    return "What happens next?" if schema["text"] else f"Keys, such as {' '.join(schema['keys'][:2])}"


def _typed(history: RolloutHistory, text: str) -> AnyAction:
    """Return a typed action: words or, for a model that takes none, keys."""
    return (
        text if history.branch.world.info.action_schema["text"] else {"keys": text.replace(",", " ").split()}
    )


def _index(event: gr.EventData, count: int) -> int:
    """Return the index of the clicked button; it comes from the browser and is not trusted."""
    index = str(event._data.get("index", "")) if isinstance(event._data, dict) else ""
    if not index.isdecimal() or int(index) >= count:
        raise InputError("This entry no longer exists; reload the page.")
    return int(index)


def _frame(base_url: str) -> str:
    return (
        f'<iframe src="{escape(base_url, quote=True)}/play" title="Play live" referrerpolicy="no-referrer" '
        'sandbox="allow-scripts allow-same-origin allow-forms"></iframe>'
    )


def _close_callback() -> Callable[[RolloutHistory | None], None]:
    """Return a callback that closes the worlds of a visitor who has left."""
    running: set[asyncio.Task[None]] = set()

    def close(history: RolloutHistory | None) -> None:
        if history is not None:
            task = asyncio.get_running_loop().create_task(history.close())
            running.add(task)
            task.add_done_callback(running.discard)

    return close
