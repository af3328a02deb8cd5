"""A judge of MiniGrid's boards, which reads every cell of a frame from its pixels.

MiniGrid (Chevalier-Boisvert et al., 2023, https://minigrid.farama.org) draws each cell by itself, so a cell
is recognised as the drawing that it resembles most.
"""

from collections.abc import Iterator
from functools import cached_property
from itertools import product

import numpy as np

from worldmodel.errors import InputError
from worldmodel.eval.judge import Verdict
from worldmodel.media import Frame, crop_and_resize

DIRECTIONS = ("right", "down", "left", "up")
"""Names of MiniGrid's directions of the agent."""


class MiniGridJudge:
    """Compares the cells of a frame with the recorded frame; `worldmodel eval MODEL --data … --judge`.

    A cell is right if it shows the same object, colour, door state, agent direction and highlight.

    Attributes:
        cell: Side of a cell in pixels; subclasses can change it. A board of n x n cells that was recorded
            with `--size` 8 n has cells of 8.
    """

    cell = 8

    def __call__(self, frame: Frame, truth: Frame, /) -> Verdict:
        """Return the verdict on a frame: `named` is right if every cell with the agent in the truth is.

        Raises:
            InputError: the frame does not consist of whole cells, or MiniGrid is not installed.
        """
        made, true = self.read(frame), self.read(truth)
        agent = np.vectorize(lambda name: "agent" in name)(true)
        wrong = made != true
        notes = [
            f"{made[place]} instead of {true[place]} at {place[1]},{place[0]}"
            for place in zip(*np.nonzero(wrong), strict=True)
        ]
        return Verdict(
            named=not wrong[agent].any(),
            others=not wrong[~agent].any(),
            strict=not wrong.any(),
            note="; ".join(notes[:3]) + (f"; {len(notes) - 3} more" if len(notes) > 3 else ""),
        )

    def read(self, frame: Frame) -> np.ndarray:
        """Return the names of the cells of a frame `[h, w, 3]`, `[rows, columns]`."""
        height, width = frame.shape[:2]
        if height % self.cell or width % self.cell:
            raise InputError(
                f"A frame of {width} x {height} pixels does not consist of cells of {self.cell} pixels; "
                "record with a size of 8 pixels per cell, or pass a subclass of MiniGridJudge."
            )
        rows, columns = height // self.cell, width // self.cell
        tiles = frame.reshape(rows, self.cell, columns, self.cell, 3).swapaxes(1, 2)
        tiles = tiles.reshape(rows * columns, -1).astype(np.float32)
        names, drawings = self.drawings
        # The nearest drawing: |t - d|^2 = |t|^2 - 2 (t d - |d|^2 / 2), as one matrix product.
        nearness = tiles @ drawings.T - np.square(drawings).sum(axis=1) / 2
        return names[nearness.argmax(axis=1)].reshape(rows, columns)

    @cached_property
    def drawings(self) -> tuple[np.ndarray, np.ndarray]:
        """Names of all cells, and how they are drawn: float32 `[names, pixels]`."""
        found = dict(self._draw())
        return np.array(list(found)), np.stack([x.astype(np.float32).ravel() for x in found.values()])

    def _draw(self) -> Iterator[tuple[str, np.ndarray]]:
        try:
            from minigrid.core import world_object as objects
            from minigrid.core.constants import COLOR_NAMES
            from minigrid.core.grid import Grid
        except ImportError:
            raise InputError("The judge of MiniGrid draws its cells; run pip install minigrid.") from None
        from PIL import Image

        fixed = {"floor": None, "wall": objects.Wall(), "goal": objects.Goal(), "lava": objects.Lava()}
        coloured: dict[str, objects.WorldObj] = {}
        entered: dict[str, objects.WorldObj | None] = {"": None, "on the goal": objects.Goal()}
        for colour in COLOR_NAMES:
            door = objects.Door(colour, is_open=True)
            entered[f"in the {colour} door"] = door
            coloured |= {
                f"open {colour} door": door,
                f"closed {colour} door": objects.Door(colour),
                f"locked {colour} door": objects.Door(colour, is_locked=True),
                f"{colour} key": objects.Key(colour),
                f"{colour} ball": objects.Ball(colour),
                f"{colour} box": objects.Box(colour),
            }
        shown = [(name, thing, None) for name, thing in (fixed | coloured).items()]
        shown += [
            (f"agent facing {DIRECTIONS[direction]} {where}".strip(), thing, direction)
            for (where, thing), direction in product(entered.items(), range(4))
        ]
        for (name, thing, direction), highlight in product(shown, (False, True)):
            drawn = np.clip(Grid.render_tile(thing, direction, highlight), 0, 255).astype(np.uint8)
            yield (
                f"{name}{' in view' * highlight}",
                crop_and_resize(Image.fromarray(drawn), (self.cell, self.cell)),
            )
