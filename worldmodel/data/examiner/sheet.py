"""A picture of frames of some episodes, with their actions."""

from dataclasses import replace

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from worldmodel.actions import Action
from worldmodel.data.examiner.opening import Examined
from worldmodel.errors import InputError
from worldmodel.media import contact_sheet

MAX_TRIED = 100
"""Episodes that are tried for some that can be read."""


def draw_sheet(examined: Examined, episodes: int = 4, frames: int = 8, side: int = 128) -> Image.Image:
    """Draw frames spread over some episodes, each with its step and the action that follows it.

    Raises:
        InputError: no episode can be read.
    """
    rows, captions = [], []
    font = ImageFont.load_default(size=12)
    for index, recipe in examined.recipes(MAX_TRIED):
        try:
            episode = examined.read(recipe, index)
        except InputError:
            continue
        pictures = []
        last = len(episode.observations) - 1
        for number in np.unique(np.linspace(0, last, frames).astype(int)).tolist():
            clip = episode.observations[number]
            label = _label(episode.actions[number]) if number < len(episode.actions) else "end"
            height, width = (length * side // max(clip.shape[1:3]) for length in clip.shape[1:3])
            canvas = Image.new("RGB", (width, height + 18), (24, 26, 32))
            canvas.paste(Image.fromarray(clip[-1]).resize((width, height), Image.Resampling.NEAREST))
            ImageDraw.Draw(canvas).text(
                (2, height + 2), f"{number}: {label}"[:20], fill=(226, 228, 234), font=font
            )
            pictures.append(np.array(canvas))
        rows.append(np.stack(pictures))
        words = next((action.text for action in episode.actions if action.text), "")
        captions.append(f"{episode.name}: {words}" if words else episode.name)
        if len(rows) == episodes:
            break
    if not rows:
        raise InputError("No episode of the source can be read; see the report.")
    return contact_sheet(rows, captions, scale=1)


def _label(action: Action) -> str:
    """Return an action for a small picture: words only if it has nothing else."""
    return str(replace(action, text=None)) if len(action.as_dict()) > 1 else str(action)
