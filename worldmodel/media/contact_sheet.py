"""Contact sheets: many frames on one picture, for people who would rather look than read."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from worldmodel.errors import OutputError
from worldmodel.io import atomic_file
from worldmodel.media.files import Frames

PAPER, INK = (24, 26, 32), (226, 228, 234)
GAP = 6
LINE = 18


def contact_sheet(rows: Sequence[Frames], captions: Sequence[str], scale: int = 2) -> Image.Image:
    """Draw one row of frames per clip, its caption above; long captions wrap, short clips leave room."""
    cell_h, cell_w = (side * scale for side in rows[0].shape[1:3])
    columns = max(len(row) for row in rows)
    width = GAP + columns * (cell_w + GAP)
    font = ImageFont.load_default(size=14)
    wrapped = [textwrap.wrap(caption, max(12, (width - 2 * GAP) // 8)) or [""] for caption in captions]
    heights = [len(lines) * LINE + cell_h + 2 * GAP for lines in wrapped]
    sheet = Image.new("RGB", (width, sum(heights) + GAP), PAPER)
    draw = ImageDraw.Draw(sheet)
    top = GAP
    for row, lines, height in zip(rows, wrapped, heights, strict=True):
        for index, line in enumerate(lines):
            draw.text((GAP, top + index * LINE), line, fill=INK, font=font)
        for column, frame in enumerate(row):
            picture = Image.fromarray(np.ascontiguousarray(frame)).resize(
                (cell_w, cell_h), Image.Resampling.NEAREST
            )
            sheet.paste(picture, (GAP + column * (cell_w + GAP), top + len(lines) * LINE + 2))
        top += height
    return sheet


def write_image(image: Image.Image, path: str | Path) -> None:
    """Write a picture as .png, whole or not at all.

    Raises:
        OutputError: the suffix is another one, or the place cannot be written.
    """
    if Path(path).suffix.lower() != ".png":
        raise OutputError(f"{str(path)!r} does not end in .png; name it so.")
    with atomic_file(path) as temporary:
        image.save(temporary, "PNG")
