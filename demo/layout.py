"""Layout of the page; its event handlers are in page.py."""

from typing import TYPE_CHECKING, Any

import gradio as gr

from worldmodel.demo import rendering

if TYPE_CHECKING:
    from worldmodel.demo.flow_reader import FlowReader

# Values of gr.HTML are inserted by `${value}` only: a Handlebars template would execute text of visitors.
ON_CLICK = """
element.addEventListener('click', event => {
  const button = event.target.closest('button[data-index], button[data-kind], button[data-name]');
  if (button) trigger('click', {...button.dataset});
  const video = event.target.closest('video');
  if (video) { video.currentTime = 0; video.play(); }
});
element.addEventListener('keydown', event => {
  if (event.key === 'Enter' && event.target.tagName === 'VIDEO') event.target.click();
});
"""
# What had the focus is replaced with the values: the focus would fall to the page, and Tab begin at its top.
KEEP_FOCUS = """
let last;
element.addEventListener('click', event => { last = event.target.closest('button')?.dataset.act; });
watch('value', () => {
  if (document.activeElement !== document.body || last === undefined) return;
  const same = [...element.querySelectorAll('button')].find(({dataset}) => dataset.act === last);
  same?.focus({preventScroll: true});
});
"""
# This component comes with the first value, when what began the world has gone.
TAKE_FOCUS = """
const take = () => setTimeout(() => {
  if (document.activeElement === document.body) element.querySelector('figure')?.focus({preventScroll: true});
}, 100);
take();
watch('value', take);
"""
SCROLL_TO_CURRENT = """
watch('value', () => {
  const now = element.querySelector('.now');
  const strip = element.querySelector('.wm-strip');
  if (now && strip) strip.scrollTo({left: now.offsetLeft - strip.clientWidth / 2, behavior: 'smooth'});
});
"""
# The page for live play gives the id of a world that is to be steered here.
ON_MESSAGE = """
addEventListener('message', event => {
  const frame = element.querySelector('iframe');
  if (!frame || event.source !== frame.contentWindow) return;
  trigger('click', {world: String(event.data?.world ?? '')});
});
"""
STEER = "steer"
"""Id of the tab for rounds."""
TEXT_LIMIT, QUESTION_LIMIT = 1000, 400
INTRODUCTION = """
<section class="wm-intro" aria-label="What this is">
<p>A <b>world model</b> predicts what you see next from what you see now and what is done. Nothing here is a
recording or a game engine: every frame is generated.</p>
<ol><li><b>Act</b>A round takes your action and makes the next frames.</li>
<li><b>Branch</b>Go back to any moment, fork it, or compare two futures of it.</li>
<li><b>Play live</b>The other tab streams the world while you steer it.</li></ol></section>
"""


class Layout:
    """All components of the page, created in the order of the page."""

    def __init__(self, flow: "FlowReader | None") -> None:
        """Create the components in the current `gr.Blocks`, with a tab for a flow if there is one."""
        # The visitor's worlds, which the browser keeps; the style sheet hides this component.
        self.worlds = gr.Textbox(show_label=False, container=False, elem_id="wm-worlds")
        self.head = gr.HTML(rendering.header("Steer a world by text."), elem_id="wm-head")
        with gr.Tabs(elem_id="wm-tabs") as self.tabs:
            with gr.Tab("Steer", id=STEER):
                with gr.Column(elem_id="wm-start") as self.start:
                    self._lay_out_start()
                with gr.Column(visible=False, elem_id="wm-play") as self.play:
                    with gr.Row(elem_id="wm-main", equal_height=False) as self.main:
                        self._lay_out_main()
                    with gr.Column(visible=False, elem_id="wm-futures") as self.futures:
                        self._lay_out_futures()
            with gr.Tab("Play live", id="live") as self.live_tab:
                self.live = gr.HTML(js_on_load=ON_MESSAGE, elem_id="wm-live")
            if flow is not None:
                from worldmodel.demo.data_tab import DataTab  # needs the packages of the extra `flow`

                with gr.Tab("Data") as data_tab:
                    DataTab(flow).connect(data_tab.select)

    @property
    def all(self) -> list[Any]:
        """Everything that the handlers change."""
        return [
            *(self.head, self.gallery, self.tiles, self.live, self.tabs, self.carried),
            *(self.worlds, self.starting, self.status, self.start, self.play, self.main, self.futures),
            *(self.compare, self.undo, self.stage, self.timeline, self.branches, self.palette, self.words),
            *(self.action, self.answer, self.first, self.second, self.upload, self.download),
            *(self.own_words, self.describe, self.explain, self.asking, *self.stages),
            *(self.foresee, self.possible),
        ]

    def _lay_out_start(self) -> None:
        self.gallery = gr.HTML(js_on_load=ON_CLICK, elem_id="wm-gallery")
        gr.HTML('<h2>Pick a scene</h2><p class="wm-quiet">Then choose what is done, round after round.</p>')
        self.starting = gr.HTML(js_on_load=ON_CLICK, elem_classes="wm-progress")
        self.tiles = gr.HTML(js_on_load=ON_CLICK, elem_id="wm-tiles")
        with gr.Row(equal_height=False, elem_id="wm-own"):
            with gr.Column(min_width=280):
                gr.HTML("<h3>or upload your own</h3>")
                self.upload = gr.File(
                    label="Image (PNG, JPEG, WebP) or video (MP4)",
                    file_types=[".png", ".jpg", ".jpeg", ".webp", ".mp4"],
                    type="binary",
                    height=104,
                    elem_id="wm-upload",
                )
            with gr.Column(min_width=280, elem_id="wm-describe-own") as self.own_words:
                gr.HTML("<h3>or describe one</h3>")
                self.text = _line("night background, a small red ball at the left", "wm-text", lines=2)
                self.imagine = gr.Button("Generate", variant="primary", elem_id="wm-imagine", min_width=120)
        self.seed = gr.Number(0, label="Seed", precision=0, minimum=0, min_width=90, elem_id="wm-seed")
        gr.HTML(INTRODUCTION)

    def _lay_out_main(self) -> None:
        with gr.Column(min_width=300, scale=5, elem_id="wm-left"):
            with gr.Column(elem_id="wm-view"):
                self.stage = gr.HTML(js_on_load=ON_CLICK + TAKE_FOCUS, elem_id="wm-stage")
                self.status = gr.HTML(js_on_load=ON_CLICK, elem_id="wm-status", elem_classes="wm-progress")
            self.branches = gr.HTML(js_on_load=ON_CLICK, elem_id="wm-branches")
            self.timeline = gr.HTML(js_on_load=ON_CLICK + SCROLL_TO_CURRENT, elem_id="wm-strip")
        with gr.Column(min_width=300, scale=6):
            with gr.Row(elem_id="wm-say", equal_height=True):
                self.action = _line("What happens next?", "wm-action", scale=5)
                self.act = gr.Button("Go", variant="primary", scale=1, min_width=64, elem_id="wm-act")
            self.palette = gr.HTML(js_on_load=ON_CLICK + KEEP_FOCUS, elem_id="wm-palette")
            with gr.Row(elem_id="wm-tools"):
                self.undo = _button("Undo", "wm-undo")
                self.fork = _button("Fork", "wm-fork")
                self.open_compare = _button("Compare", "wm-compare")
                self.foresee = _button("Futures", "wm-foresee")
                self.go_live = _button("Play live", "wm-go-live")
            self.possible = gr.HTML(js_on_load=ON_CLICK, elem_id="wm-possible")
            with gr.Column(visible=False, elem_id="wm-versus") as self.compare:
                gr.HTML('<p class="wm-quiet">Two actions from this moment, side by side.</p>')
                self.first = gr.Textbox(label="First action", max_length=TEXT_LIMIT, elem_id="wm-first")
                self.second = gr.Textbox(label="Second action", max_length=TEXT_LIMIT, elem_id="wm-second")
                self.both = gr.Button("Run both", variant="primary", size="sm", elem_id="wm-both")
            self._lay_out_words()
            with gr.Row(elem_id="wm-ends"):
                self.mp4 = _button("Save MP4", "wm-mp4")
                self.gif = _button("Save GIF", "wm-gif")
                self.data = _button("Save dataset", "wm-data")
                self.anew = _button("New world", "wm-new")
            # The saved clip is passed to the browser as a data URI; the style sheet hides this component.
            self.download = gr.Textbox(show_label=False, container=False, elem_id="wm-download")
            # The id of a world on its way to the other tab; hidden as well.
            self.carried = gr.Textbox(show_label=False, container=False, elem_id="wm-carried")

    def _lay_out_words(self) -> None:
        with gr.Group(elem_id="wm-ask") as self.words:
            with gr.Row(equal_height=True):
                self.describe = _button("Describe", "wm-describe")
                self.explain = _button("What happened?", "wm-explain")
            with gr.Row(equal_height=True) as self.asking:
                self.question = _line(
                    "Ask: how many things are there", "wm-question", scale=4, max_length=QUESTION_LIMIT
                )
                self.ask = gr.Button("Ask", size="sm", scale=1, min_width=64, elem_id="wm-ask-button")
        self.answer = gr.HTML(elem_id="wm-said")

    def _lay_out_futures(self) -> None:
        gr.HTML('<h2>Two futures of one moment</h2><p class="wm-quiet">Click a clip to replay it.</p>')
        self.stages: list[gr.HTML] = []
        self.choices: list[gr.Button] = []
        with gr.Row(equal_height=True, elem_id="wm-pair"):
            for name in ("a", "b"):
                with gr.Column(min_width=140, elem_classes="wm-future"):
                    self.stages.append(gr.HTML(js_on_load=ON_CLICK, elem_id=f"wm-future-{name}"))
                    choice = gr.Button(
                        "Continue from here", variant="primary", size="sm", elem_id=f"wm-choose-{name}"
                    )
                    self.choices.append(choice)
        self.neither = _button("Keep neither", "wm-neither")


def _button(label: str, name: str) -> gr.Button:
    return gr.Button(label, size="sm", min_width=80, elem_id=name)


def _line(
    placeholder: str, name: str, *, lines: int = 1, scale: int | None = None, max_length: int = TEXT_LIMIT
) -> gr.Textbox:
    return gr.Textbox(
        placeholder=placeholder,
        show_label=False,
        container=False,
        lines=lines,
        max_lines=4 if lines > 1 else 1,
        scale=scale,
        min_width=160,
        max_length=max_length,
        elem_id=name,
    )
