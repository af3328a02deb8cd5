"""HTML of clips, the timeline and suggested actions.

Images and videos are embedded as data URIs, so the page refers to no files of the server. Text of visitors
and models is escaped.
"""

import base64
from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

from worldmodel.demo.history import Branch, Moment, RolloutHistory, SeededFuture
from worldmodel.demo.jobs import Job
from worldmodel.episodes import StartImage
from worldmodel.media import Frame, Frames
from worldmodel.media.encoding import encode_png, encode_video
from worldmodel.serving.client import RemoteFuture
from worldmodel.worlds.base import SuggestedAction, Target, World
from worldmodel.worlds.gallery import Card

STAGE_SIDE = 512
"""Least side of clips in pixels: browsers blur videos that they enlarge."""
SAVED_SIDE = 384
TILE_SIDE = 128
SIGNS = {"left": "←", "right": "→", "up": "↑", "forward": "↑", "down": "↓", "backward": "↓"}
MISUNDERSTOOD = "The model may not have understood these words."
UNKNOWN = "This world does not know that picture, and will make something else of it."
MAX_TARGETS = 5
"""Rows of suggestions; more would push the timeline off the screen."""


def data_uri(data: bytes, media_type: str) -> str:
    """Encode bytes as a data URI."""
    return f"data:{media_type};base64,{base64.b64encode(data).decode('ascii')}"


def image_uri(frame: Frame) -> str:
    """Encode a frame as a PNG data URI; the style sheet enlarges it without smoothing."""
    return data_uri(encode_png(frame), "image/png")


def video_uri(frames: Frames, fps: float, side: int, suffix: str = "mp4") -> str:
    """Encode a clip as the data URI of an MP4 or GIF whose sides are at least `side` pixels."""
    scale = max(1, -(-side // min(frames.shape[1:3])))
    data = encode_video(frames, fps, scale, f".{suffix}")
    return data_uri(data, "video/mp4" if suffix == "mp4" else "image/gif")


def stage(moment: Moment, before: Moment | None, fps: float, heading: str) -> str:
    """Return a figure that plays the clip of a moment once, and again after a click."""
    if len(moment.clip) == 1:
        shown = f'<img src="{image_uri(moment.clip[0])}" alt="The first frame">'
    else:
        # The last frame is the background until the clip is decoded, so that the page does not flash.
        background = image_uri((before or moment).clip[-1])
        shown = (
            f'<video src="{video_uri(moment.clip, fps, STAGE_SIDE)}" autoplay muted playsinline tabindex="0" '
            f'aria-label="Clip; press to play again" style="background-image:url({background})"></video>'
        )
    words, outcome = escape(moment.label), ""
    doubt = ""
    if moment.doubtful or moment.unlike:
        doubt = f'<p class="wm-doubt">{MISUNDERSTOOD if moment.doubtful else UNKNOWN}</p>'
    if moment.outcome is not None:
        ended = " · the episode ends here" if moment.outcome.ended else ""
        outcome = f'<span class="wm-outcome">reward {moment.outcome.reward:.2f}{ended}</span>'
    height, width = moment.clip.shape[1:3]
    return (
        f'<figure class="wm-stage" tabindex="-1">'
        f'<div class="wm-frame" style="aspect-ratio:{width}/{height}">{shown}</div>'
        f'<figcaption aria-live="polite"><b>{escape(heading)}</b><span>{words}</span>{outcome}'
        f"</figcaption>{doubt}</figure>"
    )


def timeline(branch: Branch) -> str:
    """Return the timeline: a button for every moment, with marks for the current and the undone ones."""
    cells = []
    for index, moment in enumerate(branch.moments):
        state = "now" if index == branch.at else "later" if index > branch.at else "earlier"
        current = ' aria-current="step"' if index == branch.at else ""
        label = escape(moment.label)
        cells.append(
            f'<li><button type="button" class="wm-cell {state}" data-index="{index}" '
            f'title="{label}"{current}>'
            f'<img src="{image_uri(moment.clip[-1])}" alt="">'
            f"<small><i>{index}</i>{label}</small></button></li>"
        )
    return (
        f'<ol class="wm-strip" aria-label="Timeline: select a moment to return to it">{"".join(cells)}</ol>'
    )


def branches(history: RolloutHistory) -> str:
    """Return a switch between branches; empty if there is only one."""
    if len(history.branches) < 2:
        return ""
    buttons = [
        f'<button type="button" data-index="{index}" aria-pressed="{str(index == history.current).lower()}">'
        f"{escape(branch.name)}<i>{branch.at}</i></button>"
        for index, branch in enumerate(history.branches)
    ]
    return f'<div class="wm-branches" role="group" aria-label="Branches">{"".join(buttons)}</div>'


def palette(
    catalog: World, targets: Sequence[Target], turn: int, keys: Sequence[str] = (), waits: bool = True
) -> str:
    """Return suggested actions: a row for each target, and one of actions without a target.

    `waits`: whether the world can be left alone for a round.
    """
    targets = targets[:MAX_TARGETS]
    rows = [
        _row(_swatch(target.colour) + escape(target.name), map(_chip, actions))
        for target, actions in zip(targets, catalog.target_actions(targets), strict=True)
    ]
    others = [_chip(SuggestedAction(SIGNS.get(key, key), key), "key") for key in keys]
    if waits:
        others.append(_chip(SuggestedAction("Wait", ""), "wait"))
    others += map(_chip, catalog.other_actions(targets, turn))
    if others:
        rows.append(_row("keys" if keys else "anything", others))
    return f'<div class="wm-palette" aria-label="Suggested actions">{"".join(rows)}</div>'


def _row(name: str, chips: Iterable[str]) -> str:
    return f'<div class="wm-target"><span class="wm-name">{name}</span><span>{"".join(chips)}</span></div>'


def _chip(action: SuggestedAction, kind: str = "text") -> str:
    title, text = escape(action.text or action.label, quote=True), escape(action.text, quote=True)
    return (
        f'<button type="button" class="wm-chip" data-kind="{kind}" data-act="{text}" '
        f'title="{title}" aria-label="{title}">{escape(action.label)}{_swatch(action.colour)}</button>'
    )


def _swatch(colour: tuple[int, int, int] | None) -> str:
    return f'<i style="background:rgb{colour}"></i>' if colour else ""


def possible(futures: Sequence[RemoteFuture | SeededFuture], action: str, fps: float) -> str:
    """Return what may follow from a moment: for each future a button with its clip and its share or seed."""
    cells = []
    for index, future in enumerate(futures):
        seeded = isinstance(future, SeededFuture)
        name = f"seed {future.seed}" if seeded else f"{future.probability:.0%}"
        said = f"with {name}" if seeded else f"which has a share of {name}"
        clip = video_uri(future.frames, fps, TILE_SIDE, "gif")
        cells.append(
            f'<button type="button" class="wm-tile" data-index="{index}" '
            f'aria-label="Let future {index + 1} happen, {said}">'
            f'<img src="{clip}" alt=""><small>{name}</small></button>'
        )
    words = f"What may follow after “{escape(action)}”, and how often."
    if futures and isinstance(futures[0], SeededFuture):
        words = f"“{escape(action)}” with several seeds. This model cannot say how probable each is."
        if all(np.array_equal(future.frames, futures[0].frames) for future in futures):
            words = f"“{escape(action)}” gives the same frames with every seed: chance plays no part here."
    return (
        f'<p class="wm-quiet">{words} Select one to let it happen.</p>'
        f'<div class="wm-tiles">{"".join(cells)}</div>'
    )


def gallery(cards: Iterable[tuple[Card, bytes | None]], current: str) -> str:
    """Return the worlds to change to, with a picture, a sentence and what each takes; empty for only one."""
    cells = []
    for card, picture in cards:
        image = f'<img src="{data_uri(picture, "image/png")}" alt="">' if picture else "<i></i>"
        height, width = card.size
        facts = escape(f"{width} x {height} · takes {', '.join(card.takes)}")
        shown = str(card.name == current).lower()
        cells.append(
            f'<button type="button" class="wm-card" data-name="{escape(card.name, quote=True)}" '
            f'aria-pressed="{shown}">{image}<span><b>{escape(card.name)}</b>'
            f"<small>{escape(card.about)}</small><small>{facts}</small></span></button>"
        )
    if len(cells) < 2:
        return ""
    return (
        '<section aria-label="Worlds"><h2>Worlds</h2><p class="wm-quiet">Another one takes the place of the '
        f'one that is loaded, and ends what is played in it.</p><div class="wm-cards">{"".join(cells)}</div>'
        "</section>"
    )


def tiles(start_images: Iterable[StartImage], model: str = "") -> str:
    """Return the images to start from, or what else to start from; `model` is the one they belong to."""
    own = escape(model, quote=True)
    cells = [
        f'<button type="button" class="wm-tile" data-index="{index}" data-model="{own}">'
        f'<img src="{image_uri(start.image)}" alt=""><small>{escape(start.title)}</small></button>'
        for index, start in enumerate(start_images)
    ]
    if not cells:
        return '<p class="wm-none">This model brings no images to start from; upload one of yours.</p>'
    return f'<div class="wm-tiles">{"".join(cells)}</div>'


def status(jobs: Sequence[Job], note: str = "") -> str:
    """Return what runs and what waits, each with a button that gives it up, and what went wrong last."""
    parts = []
    for job in jobs[:1]:
        facts = " · ".join(
            [f"{job.elapsed_s:.0f} s"] + ([] if job.progress is None else [f"{job.progress} %"])
        )
        value = "" if job.progress is None else f' value="{job.progress}"'
        parts.append(
            f'<div class="wm-running"><span>{escape(job.label)}</span><i>{facts}</i>{_cancel(job, "Cancel")}'
            f'<progress max="100"{value}></progress></div>'
        )
    if waiting := "".join(
        f"<li><span>{escape(job.label)}</span>{_cancel(job, '×')}</li>" for job in jobs[1:]
    ):
        parts.append(f'<div class="wm-waiting">Next: <ol>{waiting}</ol></div>')
    if note:
        parts.append(f'<p class="wm-note" role="alert">{escape(note)}</p>')
    return f'<div role="status">{"".join(parts)}</div>' if parts else ""


def _cancel(job: Job, words: str) -> str:
    name = escape(f"Cancel: {job.label}", quote=True)
    return f'<button type="button" data-index="{job.number}" aria-label="{name}">{words}</button>'


def answer(question: str, text: str) -> str:
    """Return the answer of the model to a question."""
    words = escape(text) or "…"
    return f'<div class="wm-answer" aria-live="polite"><b>{escape(question)}</b><p>{words}</p></div>'


def header(subtitle: str, about: str = "") -> str:
    """Return the header of the page; `about` says what the world is and what one wants in it."""
    said = f'<p class="wm-about">{escape(about)}</p>' if about else ""
    return (
        f'<header class="wm-head"><div><span class="wm-mark" aria-hidden="true">{"<i></i>" * 4}</span>'
        f"<h1>worldmodel</h1></div><p>{escape(subtitle)}</p></header>{said}"
    )
