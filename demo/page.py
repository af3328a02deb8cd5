"""Event handlers of the page, which keeps the rollout history of each visitor; worlds are on the server."""

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import nullcontext, suppress
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import gradio as gr
from starlette.middleware import Middleware

from worldmodel.actions import AnyAction, action_kinds
from worldmodel.demo import rendering
from worldmodel.demo.access import RequireKey
from worldmodel.demo.history import WAIT, Origin, RolloutHistory
from worldmodel.demo.jobs import Job, JobQueue
from worldmodel.demo.layout import STEER, Layout
from worldmodel.demo.theme import theme
from worldmodel.episodes import StartImage
from worldmodel.errors import InputError, WorldModelError
from worldmodel.rollout.action_list import parse_action
from worldmodel.serving.client import AsyncClient
from worldmodel.serving.client.errors import ServerUnreachableError
from worldmodel.serving.errors import NotFoundError
from worldmodel.serving.protocol import ModelObject
from worldmodel.worlds import World, get_world, world_names
from worldmodel.worlds.base import Target
from worldmodel.worlds.gallery import Card, card_of, gallery

if TYPE_CHECKING:
    from worldmodel.demo.flow_reader import FlowReader
    from worldmodel.demo.local_server import LocalServer

MAX_UPLOAD = "20mb"
HISTORY_LIFETIME_S = 3600
"""Time without use after which a visitor's frames are dropped."""
STATUS_AFTER_S, STATUS_EVERY_S = 0.25, 0.5
SAVE = """
(uri) => {
  if (!uri) return;
  const link = document.createElement('a');
  link.href = uri;
  const names = {'image/gif': 'rollout.gif', 'video/mp4': 'rollout.mp4', 'application/zip': 'played.zip'};
  link.download = names[uri.slice(5, uri.indexOf(';'))];
  link.click();
}
"""
# Opens the other tab and, when its page is there, tells it behind `#` which world it goes on with.
CARRY = """
async (world) => {
  if (!world) return;
  const tabs = [...document.querySelectorAll('#wm-tabs [role=tab]')];
  tabs.find(tab => tab.innerText.trim() === 'Play live').click();
  const frame = () => document.querySelector('#wm-live iframe');
  while (!frame()) await new Promise(resolve => setTimeout(resolve, 50));
  const address = new URL(frame().src);
  const said = new URLSearchParams(address.hash.slice(1));
  said.set('world', world);
  address.hash = said;
  frame().src = address.href;
}
"""
# A tab keeps its worlds over a reload; another tab begins with none.
RECALL = "() => [sessionStorage.getItem('worldmodel.worlds') ?? '']"
REMEMBER = "(worlds) => { sessionStorage.setItem('worldmodel.worlds', worlds); }"

MAX_KEYS = 24
"""Most buttons for keys; further ones are typed."""
Updates = dict[Any, Any]
"""New values of components."""
Handler = Callable[..., Awaitable[Updates]]
"""Called with the visitor's history, the event and the values of the inputs."""


def launch(page: gr.Blocks, port: int | None, host: str = "127.0.0.1", key: str | None = None) -> str:
    """Serve the page and return its address on this machine; with a key, only those who have it get it."""
    guards = [] if key is None else [Middleware(RequireKey, key=key)]
    _, address, _ = page.queue(default_concurrency_limit=8, max_size=64).launch(
        server_name=host,
        server_port=port,
        share=False,
        quiet=True,
        prevent_thread_lock=True,
        max_file_size=MAX_UPLOAD,
        allowed_paths=[],
        show_error=False,
        footer_links=[],
        ssr_mode=False,
        app_kwargs={"middleware": guards},
        theme=theme(),
        css=files("worldmodel.demo").joinpath("style.css").read_text(encoding="utf-8"),
    )
    return address


class WorldEndedError(NotFoundError):
    """The page has changed to another model, which ended the visitor's world."""


class Page:
    """The page and its event handlers; the only state is the history and the queue of each visitor."""

    def __init__(
        self,
        client: AsyncClient,
        catalog: World | None = None,
        flow: "FlowReader | None" = None,
        own: "LocalServer | None" = None,
    ) -> None:
        """Create the page for the client of a server, with the suggested actions of a world.

        With a flow, it has a tab that shows its clips. An `own` server is one that is started again when it
        ends, and that changes to other models; without a `catalog`, actions are those of its model's world.
        """
        self.client, self.own = client, own
        self.given_catalog, self.catalog = catalog, catalog or World()
        self.cards: dict[str, tuple[Card, bytes | None]] = {}
        """The worlds to change to with their pictures, by name."""
        self.start_images: Sequence[StartImage] = ()
        """Those of the server's model, from the first visit on."""
        self.names: list[str] = []
        """Names of the server's model and its adapters, from the first visit on."""
        self.model: ModelObject
        """That of the server, from the first visit on."""
        self.ended: set[str] = set()
        """Keys of histories whose worlds ended when the page changed to another model."""
        self.changing = asyncio.Lock()
        self.histories: dict[str, tuple[RolloutHistory, float]] = {}
        """By a key that only the visitor's browser knows, with the time of the last use."""
        self.queues: WeakValueDictionary[str | None, JobQueue] = WeakValueDictionary()
        """By open page, while it has jobs."""
        with gr.Blocks(title="worldmodel", analytics_enabled=False) as self.blocks:
            self.at = Layout(flow)
            self._connect()

    def _connect(self) -> None:
        at, on, shown = self.at, self._on, self._shown
        start = functools.partial(on, needs_world=False)
        start(at.gallery.click, self._change, [], lambda event: f"Loading {_field(event, 'name')}")
        start(at.tiles.click, self._start_scene, [at.seed], "Starting the world")
        start(at.upload.upload, self._start_upload, [at.upload, at.seed], "Reading the upload")
        for event in (at.imagine.click, at.text.submit):
            start(event, self._start_text, [at.text, at.seed], "Generating the first frame")
        for event in (at.act.click, at.action.submit):
            on(event, shown(_step_text), [at.action], _said, early={at.action: ""})
        on(at.palette.click, shown(_step_chip), [], lambda event: _field(event, "act") or WAIT)
        on(at.undo.click, shown(lambda history, _: history.undo()), [], "Undo")
        on(at.timeline.click, shown(_go), [], "Going to another moment")
        on(at.branches.click, shown(_switch), [], "Changing the branch")
        on(at.fork.click, shown(lambda history, _: history.fork()), [], "Forking")
        on(at.open_compare.click, self._open_compare, [], "Compare")
        on(at.foresee.click, self._foresee, [at.action], "Futures")
        on(at.possible.click, shown(_happen), [], "Going on")
        live = on(at.go_live.click, self._go_live, [], "Going live")
        live.then(None, at.carried, None, js=CARRY).then(lambda: "", None, at.carried, show_progress="hidden")
        start(at.live.click, self._bring, [], "Opening the world")
        on(at.both.click, self._compare, [at.first, at.second], "Two futures")
        for index, choice in enumerate(at.choices):
            on(choice.click, shown(functools.partial(_choose, index)), [], "Going on")
        on(at.neither.click, shown(lambda history, _: history.drop_futures()), [], "Going back")
        on(at.describe.click, self._describe, [], "Describing")
        on(at.explain.click, self._explain, [], "Finding the last action")
        for event in (at.ask.click, at.question.submit):
            on(event, self._ask, [at.question], _said)
        for button, save, label in (
            (at.mp4, functools.partial(self._save, "mp4"), "Encoding the clip"),
            (at.gif, functools.partial(self._save, "gif"), "Encoding the clip"),
            (at.data, self._save_dataset, "Writing the dataset"),
        ):
            saved = on(button.click, save, [], label)
            saved.then(None, at.download, None, js=SAVE).then(
                lambda: "", None, at.download, show_progress="hidden"
            )
        on(at.anew.click, self._reset, [], "Closing the world")
        for shown in (at.status, at.starting):
            shown.click(self._cancel, None, None, queue=False, api_visibility="private")
        # The iframe is loaded only when its tab is opened.
        at.live_tab.select(self._frame, None, at.live, show_progress="hidden", api_visibility="private")
        at.worlds.change(None, at.worlds, None, js=REMEMBER)
        self.blocks.load(self._greet, [at.worlds], at.all, js=RECALL, show_progress="hidden")

    # ---- the queue of a visitor --------------------------------------------------------------------------

    def _on(
        self,
        event: Callable[..., Any],
        handler: Handler,
        inputs: list[Any],
        label: str | Callable[..., str],
        *,
        needs_world: bool = True,
        early: Updates | None = None,
    ) -> Any:
        """Connect a handler that runs when its turn comes; what it waits for is shown and can be cancelled.

        `early` are updates of the moment in which the job is queued.
        """

        async def queued(
            request: gr.Request, event: gr.EventData, worlds: str, *values: Any
        ) -> AsyncIterator[Updates]:
            async def call() -> Updates:
                history = await self._find(worlds, needs_world)
                async with nullcontext() if history is None else history.lock:
                    job.world = history and history.branch.world.id
                    return await handler(history, event, *values)

            queue = self.queues.setdefault(request.session_hash, JobQueue())
            job = queue.add(label if isinstance(label, str) else label(event, *values), call)
            async for updates in self._watch(queue, job, early or {}):
                yield updates

        return event(
            queued,
            [self.at.worlds, *inputs],
            self.at.all,
            show_progress="hidden",
            trigger_mode="multiple",
            concurrency_limit=None,
            api_visibility="private",
        )

    def _shown(self, call: Callable[..., Awaitable[None]]) -> Handler:
        """Return a handler that makes a call and then shows the history as it is."""

        async def handler(history: RolloutHistory, event: gr.EventData, *values: Any) -> Updates:
            await call(history, event, *values)
            return self._show(history)

        return handler

    async def _watch(self, queue: JobQueue, job: Job, updates: Updates) -> AsyncIterator[Updates]:
        """Yield the state of the queue until a job is done, then its result."""
        assert job.task is not None
        timeout_s = STATUS_AFTER_S
        try:
            if updates or len(queue.jobs) > 1:
                yield updates | self._status(queue)
            while not (await asyncio.wait({job.task}, timeout=timeout_s))[0]:
                timeout_s = STATUS_EVERY_S
                if job is queue.jobs[0]:
                    await self._read_progress(job)
                yield self._status(queue)
            updates = job.task.result()
        except asyncio.CancelledError:
            if not job.task.cancelled():
                raise
            updates = {}
        except WorldModelError as error:
            updates = self._at_the_start() if isinstance(error, WorldEndedError) else {}
            updates |= {self.at.upload: None}  # a file that was refused does not stay there
            queue.note = self._explain_error(error)
        finally:
            job.cancel()
            queue.jobs.remove(job)
        yield updates | self._status(queue)

    def _status(self, queue: JobQueue) -> Updates:
        return dict.fromkeys((self.at.status, self.at.starting), rendering.status(queue.jobs, queue.note))

    async def _read_progress(self, job: Job) -> None:
        if job.world is not None:
            with suppress(WorldModelError):
                job.progress = (await self.client.worlds.open(job.world)).info.progress

    def _explain_error(self, error: WorldModelError) -> str:
        if isinstance(error, ServerUnreachableError) and self.own is not None:
            return "The server has ended and is being started again; repeat this in a few seconds."
        return " ".join(str(error).split())

    async def _cancel(self, request: gr.Request, event: gr.EventData) -> None:
        number = _field(event, "index")
        if (queue := self.queues.get(request.session_hash)) and number.isdecimal():
            queue.cancel(int(number))

    # ---- histories -------------------------------------------------------------------------------------

    async def _find(self, worlds: str, is_needed: bool = True) -> RolloutHistory | None:
        """Return the history of a visitor by what the browser keeps: a key, and the worlds of the branches.

        Raises:
            InputError: it is needed, and there is no world yet.
            NotFoundError: it is needed, this process does not know the key, and the server has no such world.
        """
        key, *identities = worlds.split() or [""]
        if key in self.ended and is_needed:
            raise WorldEndedError(
                f"This page has changed to {self.names[0]}, which ended your world; start one."
            )
        if key in self.histories:
            history, _ = self.histories[key]
        elif not is_needed:
            return None
        elif not identities:
            raise InputError("There is no world; pick a scene first.")
        else:
            history = await RolloutHistory.reopen(self.client, self.catalog, self.model, identities)
            history.key = key
        self._keep(history)
        return history

    def _keep(self, history: RolloutHistory) -> None:
        now = time.monotonic()
        self.histories[history.key] = history, now
        self.histories = {
            each: kept for each, kept in self.histories.items() if now - kept[1] < HISTORY_LIFETIME_S
        }

    async def _greet(self, worlds: str) -> Updates:
        """Show the model, what to start from and, after a reload, the visitor's world."""
        at = self.at
        try:
            await self._read_model()
        except WorldModelError as error:
            return {at.starting: rendering.status((), self._explain_error(error))}
        updates = self._offers() | {at.worlds: ""}
        if not worlds:
            return updates
        try:
            history = await self._find(worlds)
            assert history is not None
            async with history.lock:  # of a job that the page began before it was reloaded
                return updates | self._show(history)
        except WorldModelError as error:
            return updates | {at.starting: rendering.status((), self._explain_error(error))}

    # ---- the model -------------------------------------------------------------------------------------

    async def _read_model(self) -> None:
        """Ask the server for its model and, if it can change to others, find those."""
        self.names = await self.client.models()
        self.model = await self.client.model(self.names[0])
        self.start_images = await self.client.start_images(self.names[0])
        if self.own is not None:
            await asyncio.to_thread(self._read_gallery, self.own.model)

    def _read_gallery(self, name: str) -> None:
        found = {card.name: card for card in gallery()}
        if name not in found:
            from worldmodel.models.loading import model_folder

            card = card_of(name, model_folder.resolve(name))
            found = {name: card, **found} if card is not None else found
        known = self.cards
        self.cards = {
            each: known[each] if each in known else (card, card.picture()) for each, card in found.items()
        }
        world = found[name].world if name in found else None
        own = get_world(world) if world in world_names() else World()
        self.catalog = self.given_catalog or own

    def _offers(self) -> Updates:
        """Return what the page shows of the model."""
        at, tasks = self.at, self.model.tasks
        current = self.own.model if self.own is not None else ""
        return {
            at.head: rendering.header(" · ".join(self.names), self.model.about),
            at.gallery: rendering.gallery(self.cards.values(), current),
            at.tiles: rendering.tiles(self.start_images, self.names[0]),
            at.own_words: gr.Column(visible="imagine" in tasks),
            at.words: gr.Group(visible=bool({"describe", "ask", "inverse"} & set(tasks))),
            at.describe: gr.Button(visible="describe" in tasks),
            at.explain: gr.Button(visible="inverse" in tasks),
            at.asking: gr.Row(visible="ask" in tasks),
            at.foresee: gr.Button("Futures" if self.model.has_futures else "Seeds"),
        }

    def _at_the_start(self) -> Updates:
        """Return the updates that show the model and no world."""
        at = self.at
        shown = {at.worlds: "", at.start: gr.Column(visible=True), at.play: gr.Column(visible=False)}
        return self._offers() | shown | {at.live: ""}

    async def _change(self, history: RolloutHistory | None, event: gr.EventData) -> Updates:
        """Change to another model, which ends the worlds of all visitors."""
        name = _field(event, "name")
        if self.own is None or name not in self.cards:
            raise InputError("There is no such world any more; reload the page.")
        # Who cancels while the process of one model takes the place of another does not stop it halfway.
        await asyncio.shield(asyncio.create_task(self._change_to(self.own, name)))
        return self._at_the_start()

    async def _change_to(self, own: "LocalServer", name: str) -> None:
        async with self.changing:
            if name == own.model:
                return
            # Of earlier changes, only servers know that their worlds have ended.
            self.ended, self.histories = set(self.histories), {}
            try:
                await asyncio.to_thread(own.switch, name)
            finally:
                await self._read_model()

    def _frame(self, request: gr.Request) -> str:
        """Return the page for live play, of the address by which the visitor reached this one."""
        address = self.client.base_url
        if self.own is not None and self.own.key is not None:
            host = urlsplit(f"//{request.headers.get('host', '')}").hostname or "127.0.0.1"
            host = f"[{host}]" if ":" in host else host
            return _frame(f"http://{host}:{self.own.port}", f"&key={self.own.key}")
        return _frame(address)

    # ---- start -----------------------------------------------------------------------------------------

    async def _start_scene(
        self, history: RolloutHistory | None, event: gr.EventData, seed: float | None
    ) -> Updates:
        if _field(event, "model") not in ("", self.names[0]):
            raise WorldEndedError(f"This page has changed to {self.names[0]}; pick one of its scenes.")
        image = self.start_images[_index(event, len(self.start_images))].image
        return await self._start(history, Origin(_seed(seed), image), self.catalog.targets_in(image))

    async def _start_upload(
        self, history: RolloutHistory | None, event: gr.EventData, data: bytes | None, seed: float | None
    ) -> Updates:
        if not data:
            raise InputError("The file is empty; use a PNG, JPEG, WebP or MP4.")
        return {**await self._start(history, Origin(_seed(seed), data)), self.at.upload: None}

    async def _start_text(
        self, history: RolloutHistory | None, event: gr.EventData, text: str, seed: float | None
    ) -> Updates:
        text = text.strip()
        if not text:
            raise InputError("Describe the scene, or pick one of the examples.")
        return await self._start(history, Origin(_seed(seed), text=text), self.catalog.targets_named(text))

    async def _start(
        self, previous: RolloutHistory | None, origin: Origin, targets: tuple[Target, ...] = ()
    ) -> Updates:
        started = await RolloutHistory.start(self.client, self.catalog, self.model, origin, targets)
        if previous is not None:
            await self._drop(previous)
        self._keep(started)
        return self._show(started)

    async def _drop(self, history: RolloutHistory) -> None:
        self.histories.pop(history.key, None)
        await history.close()

    async def _reset(self, history: RolloutHistory, event: gr.EventData) -> Updates:
        await self._drop(history)
        return self._at_the_start()

    # ---- the other tab ---------------------------------------------------------------------------------

    async def _go_live(self, history: RolloutHistory, event: gr.EventData) -> Updates:
        return {self.at.carried: (await history.synchronised()).id}

    async def _bring(self, history: RolloutHistory | None, event: gr.EventData) -> Updates:
        """Go on with a world of the other tab, as a branch of what is played here."""
        identity = _field(event, "world")
        if history is None:
            history = await RolloutHistory.reopen(self.client, self.catalog, self.model, [identity])
            self._keep(history)
        else:
            await history.adopt(identity)
        return self._show(history) | {self.at.tabs: gr.Tabs(selected=STEER)}

    # ---- futures --------------------------------------------------------------------------------------

    async def _open_compare(self, history: RolloutHistory, event: gr.EventData) -> Updates:
        suggested = [
            action for row in self.catalog.target_actions(history.branch.now.targets) for action in row
        ]
        first, second = (suggested[1].text, suggested[4].text) if len(suggested) > 4 else ("", "")
        return {self.at.compare: gr.Column(visible=True), self.at.first: first, self.at.second: second}

    async def _compare(
        self, history: RolloutHistory, event: gr.EventData, first: str, second: str
    ) -> Updates:
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

    async def _foresee(self, history: RolloutHistory, event: gr.EventData, text: str) -> Updates:
        await history.foresee(_typed(history, text) if text.strip() else None)
        words = text.strip() or WAIT
        fps = history.branch.world.info.fps
        return {self.at.possible: rendering.possible(history.possible, words, fps)}

    # ---- questions and saving --------------------------------------------------------------------------

    async def _describe(self, history: RolloutHistory, event: gr.EventData) -> Updates:
        return {self.at.answer: rendering.answer("Description", await history.describe(None))}

    async def _explain(self, history: RolloutHistory, event: gr.EventData) -> Updates:
        return {self.at.answer: rendering.answer("Last action", await history.explain())}

    async def _ask(self, history: RolloutHistory, event: gr.EventData, question: str) -> Updates:
        if not question.strip():
            raise InputError("Ask a question about the image, such as: how many things are there.")
        return {self.at.answer: rendering.answer(question, await history.describe(question.strip()))}

    async def _save(self, suffix: str, history: RolloutHistory, event: gr.EventData) -> Updates:
        fps = history.branch.world.info.fps
        uri = await asyncio.to_thread(
            rendering.video_uri, history.frames(), fps, rendering.SAVED_SIDE, suffix
        )
        return {self.at.download: uri}

    async def _save_dataset(self, history: RolloutHistory, event: gr.EventData) -> Updates:
        packed = await asyncio.to_thread(history.dataset)
        return {self.at.download: rendering.data_uri(packed, "application/zip")}

    def _show(self, history: RolloutHistory) -> Updates:
        """Return the values of all components for a rollout history."""
        at, branch = self.at, history.branch
        info = branch.world.info
        before = branch.moments[branch.at - 1] if branch.at else None
        widgets = info.action_schema.widgets
        keys = () if _of_type(widgets, "text") else _keys(widgets)[1][:MAX_KEYS]
        waits = self.model.pace == "realtime"
        heading = f"Round {branch.first_round + branch.at}"
        return {
            at.worlds: history.address,
            at.start: gr.Column(visible=False),
            at.play: gr.Column(visible=True),
            at.main: gr.Row(visible=True),
            at.futures: gr.Column(visible=False),
            at.compare: gr.Column(visible=False),
            at.undo: gr.Button(interactive=branch.at > 0),
            at.stage: rendering.stage(branch.now, before, info.fps, heading),
            at.timeline: rendering.timeline(branch),
            at.branches: rendering.branches(history),
            at.palette: rendering.palette(self.catalog, branch.now.targets, branch.at, keys, waits),
            at.action: gr.Textbox(placeholder=_hint(history)),
            at.answer: "",
            at.possible: "",
            **dict.fromkeys(at.stages, ""),
        }


async def _step_text(history: RolloutHistory, event: gr.EventData, text: str) -> None:
    if not text.strip():
        raise InputError("Describe the action, or pick one of the suggestions.")
    await history.step(_typed(history, text))


async def _step_chip(history: RolloutHistory, event: gr.EventData) -> None:
    kind, act = _field(event, "kind"), _field(event, "act")
    await history.step({"keys": [act]} if kind == "key" else None if kind == "wait" else act)


async def _go(history: RolloutHistory, event: gr.EventData) -> None:
    await history.go(_index(event, len(history.branch.moments)))


async def _switch(history: RolloutHistory, event: gr.EventData) -> None:
    history.current = _index(event, len(history.branches))


async def _happen(history: RolloutHistory, event: gr.EventData) -> None:
    await history.happen(_index(event, len(history.possible)))


async def _choose(index: int, history: RolloutHistory, event: gr.EventData) -> None:
    await history.choose(index)


def _said(event: gr.EventData, text: str) -> str:
    """Return what was typed as the label of a job."""
    return text.strip() or "no words"


def _seed(value: float | None) -> int:
    return int(value or 0)


def _hint(history: RolloutHistory) -> str:
    """Return what can be typed as an action."""
    schema = history.branch.world.info.action_schema
    if _of_type(schema.widgets, "text"):
        return "What happens next?"
    _, keys = _keys(schema.widgets)
    if keys:
        return f"Keys, such as {' '.join(keys[:2])}"
    for kind in action_kinds():
        if kind.name in schema.kinds:
            return f"Numbers, such as {kind.argument(kind.configure(schema.kinds[kind.name]))}"
    return ""


def _typed(history: RolloutHistory, text: str) -> AnyAction:
    """Return a typed action: words or, for a model that takes none, keys, or numbers as in `rollout`."""
    widgets = history.branch.world.info.action_schema.widgets
    if _of_type(widgets, "text"):
        return text
    kind, keys = _keys(widgets)
    if keys and ":" not in text:
        return {kind: text.replace(",", " ").split()}
    return parse_action(text)


def _of_type(widgets: dict[str, Any], type_: str) -> list[str]:
    """Return the kinds of action that have a type of widget."""
    return [kind for kind, widget in widgets.items() if widget["type"] == type_]


def _keys(widgets: dict[str, Any]) -> tuple[str, Sequence[str]]:
    """Return the kind of action that has keys, and their names; none if there is no such kind."""
    kinds = _of_type(widgets, "keys")
    return (kinds[0], widgets[kinds[0]]["names"]) if kinds else ("", ())


def _field(event: gr.EventData, name: str) -> str:
    """Return a field of the clicked button; it comes from the browser and is not trusted."""
    return str(event._data.get(name, "")) if isinstance(event._data, dict) else ""


def _index(event: gr.EventData, count: int) -> int:
    """Return the index of the clicked button."""
    index = _field(event, "index")
    if not index.isdecimal() or int(index) >= count:
        raise InputError("This entry no longer exists; reload the page.")
    return int(index)


def _frame(base_url: str, told: str = "") -> str:
    address = escape(f"{base_url}/play#steer={told}", quote=True)
    return (
        f'<iframe src="{address}" title="Play live" referrerpolicy="no-referrer" '
        'sandbox="allow-scripts allow-same-origin allow-forms"></iframe>'
    )
