"""Pieces of the page: clips, the film strip and suggestions as HTML that needs no file on the server.

Pictures travel inside the page (`data:`), so that no path of the server ever reaches a browser. Whatever a
visitor or a model wrote is escaped.
"""

import base64
import io
import tempfile
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import numpy as np
from PIL import Image

from worldmodel.demo.journey import Branch, Journey, Moment
from worldmodel.media import Frame, Frames, write_video
from worldmodel.worlds.base import StartImage, SuggestedAction, Target, World

STAGE_SIDE = 512
"""Clips are enlarged at least to this side: a browser would blur what it enlarges itself."""
FILM_SIDE = 384
MAX_TARGETS = 5
"""Rows of suggestions; more would push the row of moments off the screen."""


def data_uri(data: bytes, kind: str) -> str:
    """Return bytes as an address that holds them."""
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"


def picture(frame: Frame) -> str:
    """Return a frame as a PNG's address; the style sheet enlarges it pixel by pixel."""
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(frame)).save(buffer, "PNG")
    return data_uri(buffer.getvalue(), "image/png")


def film(frames: Frames, fps: float, side: int, suffix: str = "mp4") -> str:
    """Return a clip as the address of an .mp4 or .gif whose pixels are enlarged to at least `side`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"film.{suffix}"
        write_video(frames, path, fps, scale=max(1, -(-side // min(frames.shape[1:3]))))
        return data_uri(path.read_bytes(), "video/mp4" if suffix == "mp4" else "image/gif")


def stage(moment: Moment, before: Moment | None, fps: float, heading: str, said: str | None = None) -> str:
    """Return a figure that plays a moment once; a click plays it again."""
    if len(moment.clip) == 1:
        shown = f'<img src="{picture(moment.clip[0])}" alt="The first frame">'
    else:
        # The frame before lies under the clip until its first one is decoded, so that nothing flashes.
        under = picture((before or moment).clip[-1])
        shown = (
            f'<video src="{film(moment.clip, fps, STAGE_SIDE)}" autoplay muted playsinline tabindex="0" '
            f'aria-label="Clip; press to play again" style="background-image:url({under})"></video>'
        )
    words = escape(said if said is not None else moment.label)
    height, width = moment.clip.shape[1:3]
    return (
        f'<figure class="wm-stage"><div class="wm-frame" style="aspect-ratio:{width}/{height}">{shown}</div>'
        f'<figcaption aria-live="polite"><b>{escape(heading)}</b><span>{words}</span></figcaption></figure>'
    )


def strip(branch: Branch) -> str:
    """Return the film strip: a button for every moment, the present one marked, dropped ones to come pale."""
    cells = []
    for index, moment in enumerate(branch.moments):
        kind = "now" if index == branch.at else "later" if index > branch.at else "earlier"
        current = ' aria-current="step"' if index == branch.at else ""
        label = escape(moment.label)
        cells.append(
            f'<li><button type="button" class="wm-cell {kind}" data-index="{index}" title="{label}"{current}>'
            f'<img src="{picture(moment.clip[-1])}" alt=""><small><i>{index}</i>{label}</small></button></li>'
        )
    return f'<ol class="wm-strip" aria-label="Film strip: press a moment to go there">{"".join(cells)}</ol>'


def branches(journey: Journey) -> str:
    """Return a switch between branches; nothing where there is one."""
    if len(journey.branches) < 2:
        return ""
    buttons = [
        f'<button type="button" data-index="{index}" aria-pressed="{str(index == journey.current).lower()}">'
        f"{escape(branch.name)}<i>{branch.at}</i></button>"
        for index, branch in enumerate(journey.branches)
    ]
    return f'<div class="wm-branches" role="group" aria-label="Branches">{"".join(buttons)}</div>'


def palette(catalog: World, targets: Sequence[Target], turn: int, keys: Sequence[str] = ()) -> str:
    """Return suggested actions: a row for each target, and one of actions without a target."""
    targets = targets[:MAX_TARGETS]
    rows = [
        _row(_swatch(target.colour) + escape(target.name), map(_chip, actions))
        for target, actions in zip(targets, catalog.target_actions(targets), strict=True)
    ]
    others = [_chip(SuggestedAction(key, key), "key") for key in keys]
    others.append(_chip(SuggestedAction("time passes", ""), "wait"))
    others += map(_chip, catalog.other_actions(targets, turn))
    rows.append(_row("anything", others))
    return f'<div class="wm-palette" aria-label="Suggested actions">{"".join(rows)}</div>'


def _row(name: str, chips: Iterable[str]) -> str:
    return f'<div class="wm-thing"><span class="wm-name">{name}</span><span>{"".join(chips)}</span></div>'


def _chip(action: SuggestedAction, kind: str = "text") -> str:
    title, text = escape(action.text or action.label, quote=True), escape(action.text, quote=True)
    return (
        f'<button type="button" class="wm-chip" data-kind="{kind}" data-act="{text}" '
        f'title="{title}" aria-label="{title}">{escape(action.label)}{_swatch(action.colour)}</button>'
    )


def _swatch(colour: tuple[int, int, int] | None) -> str:
    return f'<i style="background:rgb{colour}"></i>' if colour else ""


def tiles(start_images: Iterable[StartImage]) -> str:
    """Return the images to start from."""
    cells = [
        f'<button type="button" class="wm-tile" data-index="{index}">'
        f'<img src="{picture(start.image)}" alt=""><small>{escape(start.title)}</small></button>'
        for index, start in enumerate(start_images)
    ]
    return f'<div class="wm-tiles">{"".join(cells)}</div>'


def answer(question: str, said: str) -> str:
    """Return what the model said."""
    words = escape(said) or "…"
    return f'<div class="wm-answer" aria-live="polite"><b>{escape(question)}</b><p>{words}</p></div>'


def header(told: str) -> str:
    """Return the head of the page."""
    return (
        f'<header class="wm-head"><div><span class="wm-mark" aria-hidden="true">{"<i></i>" * 4}</span>'
        f"<h1>worldmodel</h1></div><p>{escape(told)}</p></header>"
    )
