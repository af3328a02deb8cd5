"""The tab Data: the counts of a flow's stages, and its clips with the reasons of their verdicts."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from typing import Any, cast

import gradio as gr

from worldmodel.demo.flow_reader import FlowReader
from worldmodel.demo.rendering import data_uri
from worldmodel.errors import WorldModelError
from worldmodel.flow.catalog.clip_table import VERDICTS, ClipEntry, Verdict
from worldmodel.flow.catalog.records import BEGINNING, Place
from worldmodel.flow.log.status import FlowStatus
from worldmodel.flow.log.status import Verdict as Reasons

ANY = "any"
MAX_REASONS = 6


class DataTab:
    """Components and event handlers of the tab; the only state is the pages that a visitor has turned.

    Args:
        flow: the flow.
    """

    def __init__(self, flow: FlowReader) -> None:
        self.flow = flow
        self.counts = gr.HTML(elem_id="wm-counts")
        with gr.Row(elem_id="wm-filters", equal_height=True):
            self.verdict = gr.Dropdown(
                [ANY, *VERDICTS], value=ANY, label="Verdict", min_width=140, elem_id="wm-verdict"
            )
            self.stage = gr.Dropdown(
                [ANY, *flow.stages], value=ANY, label="Stage", min_width=140, elem_id="wm-stage-name"
            )
            self.reason = gr.Textbox(
                label="Reason contains", max_length=200, scale=2, min_width=160, elem_id="wm-reason"
            )
        self.clips = gr.HTML(elem_id="wm-clips")
        with gr.Row(elem_id="wm-pages"):
            self.back = gr.Button("Previous", size="sm", min_width=90, elem_id="wm-previous")
            self.forward = gr.Button("Next", size="sm", min_width=90, elem_id="wm-next")
        # Places behind which the pages so far begin, and the one behind which the next does.
        self.places = gr.State([BEGINNING])

    def connect(self, opened: Any) -> None:
        """Connect the components; `opened` is the event that the tab was opened."""
        outputs = [self.counts, self.clips, self.places, self.back, self.forward]
        filters = [self.verdict, self.stage, self.reason]
        turns: list[tuple[Any, Callable[[list[Place]], list[Place]]]] = [
            (self.forward.click, lambda places: places),
            (self.back.click, lambda places: places[:-2] or [BEGINNING]),
        ]
        changed = (opened, self.verdict.change, self.stage.change, self.reason.submit)
        turns += [(event, lambda _: [BEGINNING]) for event in changed]
        for event, turn in turns:
            event(
                partial(self._show, turn), [*filters, self.places], outputs, show_progress="minimal",
                show_progress_on=[self.clips], trigger_mode="always_last", api_visibility="private",
            )  # fmt: skip

    async def _show(
        self,
        turn: Callable[[list[Place]], list[Place]],
        verdict: str,
        stage: str,
        reason: str,
        places: list[Place],
    ) -> Any:
        """Return the page that begins behind the last of the places to which a visitor turns."""
        try:
            return await asyncio.to_thread(self._read, verdict, stage, reason.strip(), turn(places))
        except WorldModelError as error:
            gr.Warning(escape(" ".join(str(error).split())), duration=8)
            return gr.skip()

    def _read(self, verdict: str, stage: str, reason: str, places: list[Place]) -> Any:
        chosen, at = "" if stage == ANY else stage, places[-1]
        wanted = None if verdict == ANY else cast("Verdict", verdict)  # a choice of the list
        found, more = self.flow.page(at, wanted, chosen, reason)
        reasons = self.flow.status.verdicts(chosen) if chosen else []
        following = [*places, found[-1][0].place] if found else [*places, at]
        return (
            counts(self.flow.status.read(), reasons),
            gallery(found),
            following,
            gr.Button(interactive=len(places) > 1),
            gr.Button(interactive=more),
        )


def counts(status: FlowStatus, reasons: Sequence[Reasons]) -> str:
    """Return a table of the stages, and the most frequent reasons of one of them."""
    cells = ("done", "dropped", "dead", "waiting")
    rows = "".join(
        f"<tr><th scope='row'>{escape(stage.name)}</th>"
        + "".join(f"<td>{getattr(stage, name):,}</td>" for name in cells)
        + f"<td>{stage.rate:.1f}</td></tr>"
        for stage in status.stages
    )
    heads = "".join(f"<th scope='col'>{name}</th>" for name in ("stage", *cells, "clips/s"))
    state = f"{status.running} running" if status.running else "not running"
    more = "" if status.all_listed else " so far"
    listed = "".join(
        f"<li><b>{each.count:,} {escape(each.state)}</b> {escape(each.reason)}</li>"
        for each in reasons[:MAX_REASONS]
    )
    return (
        f"<p class='wm-quiet'>{status.listed:,} clips listed{more} · {status.packed:,} packed in "
        f"{status.segments:,} segments · {state}</p>"
        + (f"<p class='wm-failed'>{escape(status.error)}</p>" if status.error else "")
        + f"<table class='wm-counts'><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
        + (f"<ul class='wm-reasons'>{listed}</ul>" if listed else "")
    )


def gallery(found: Sequence[tuple[ClipEntry, bytes | None]]) -> str:
    """Return pictures of clips with verdict, stage and reason."""
    if not found:
        return "<p class='wm-quiet'>No clip has these properties.</p>"
    return f"<div class='wm-gallery'>{''.join(_figure(entry, picture) for entry, picture in found)}</div>"


def _figure(entry: ClipEntry, picture: bytes | None) -> str:
    shown = f"<img src='{data_uri(picture, 'image/jpeg')}' alt=''>" if picture else "<span>no picture</span>"
    span = (
        ""
        if entry.start_s is None
        else f"{entry.start_s:g}–{'' if entry.end_s is None else f'{entry.end_s:g}'} s"
    )
    name = entry.address.rstrip("/").rsplit("/", 1)[-1] or entry.id
    where = f" in {escape(entry.stage)}" if entry.stage else ""
    facts = [
        entry.address,
        f"clip {entry.id}",
        f"source {entry.source}",
        entry.licence and f"licence {entry.licence}",
    ]
    title = escape("\n".join(filter(None, facts)), quote=True)
    return (
        f"<figure class='wm-clip' data-clip='{escape(entry.id, quote=True)}' title='{title}'>"
        f"<div>{shown}</div><figcaption><b class='wm-{entry.verdict}'>{entry.verdict}{where}</b>"
        + (f"<p>{escape(entry.reason)}</p>" if entry.reason else "")
        + f"<small>{escape(' '.join(filter(None, (name, span))))}</small></figcaption></figure>"
    )
