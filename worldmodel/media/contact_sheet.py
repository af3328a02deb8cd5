"""Contact sheets: the frames of several clips side by side in one image."""

import textwrap
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from worldmodel.media.video import Frames

BACKGROUND, TEXT = (24, 26, 32), (226, 228, 234)
GAP = 6
LINE_HEIGHT = 18
LEAST_SIDE, LEAST_WIDTH = 128, 300
"""Smallest side of a frame, and width of a sheet, in pixels."""


def contact_sheet(rows: Sequence[Frames], captions: Sequence[str], scale: int = 0) -> Image.Image:
    """Draw one row of frames per clip below its caption.

    Every pixel becomes `scale` x `scale` pixels; 0 enlarges small frames until their sides are `LEAST_SIDE`.
    """
    scale = scale or -(-LEAST_SIDE // min(LEAST_SIDE, *rows[0].shape[1:3]))
    cell_h, cell_w = (side * scale for side in rows[0].shape[1:3])
    columns = max(len(row) for row in rows)
    width = max(LEAST_WIDTH, GAP + columns * (cell_w + GAP))
    font = ImageFont.load_default(size=14)
    wrapped = [textwrap.wrap(caption, max(12, (width - 2 * GAP) // 8)) or [""] for caption in captions]
    heights = [len(lines) * LINE_HEIGHT + cell_h + 2 * GAP for lines in wrapped]
    sheet = Image.new("RGB", (width, sum(heights) + GAP), BACKGROUND)
    draw = ImageDraw.Draw(sheet)
    top = GAP
    for row, lines, height in zip(rows, wrapped, heights, strict=True):
        for index, line in enumerate(lines):
            draw.text((GAP, top + index * LINE_HEIGHT), line, fill=TEXT, font=font)
        for column, frame in enumerate(row):
            image = Image.fromarray(np.ascontiguousarray(frame)).resize(
                (cell_w, cell_h), Image.Resampling.NEAREST
            )
            sheet.paste(image, (GAP + column * (cell_w + GAP), top + len(lines) * LINE_HEIGHT + 2))
        top += height
    return sheet
