"""The tiles of Crafter: those of the game's own map, and those that a frame shows.

The game draws every tile by itself, so one is read from pixels as the drawing that it resembles most, in the
light of the moment: nights are darker and bluer, with noise that grows towards the edges, and the picture of
a player who sleeps is grey.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product
from typing import Any

import numpy as np
from crafter import engine

from worldmodel.games.crafter import RULES, TILES, Game
from worldmodel.media import Frame

SIDE = 8
"""Pixels along each side of a tile."""
ROWS = 7
"""Rows of a frame that show the map; the others show the bag."""
OUTSIDE = "outside"
"""Name of a tile beyond the edge of the world."""
GROUNDS = ("grass", "sand", "path")
"""What creatures stand on."""
NOISE = (32, 127)
"""Range of the grey levels that nights mix in."""
DARK = 0.5
"""Daylight below which they do."""
ERROR = 10.0
"""Grey levels by which a pixel may be wrong: a model's are not exact."""

Names = np.ndarray
"""Names of tiles, strings `[7, 9]`."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What the game knows of a frame.

    Attributes:
        tiles: The names of the drawings in view, `[7, 9]`: a material, or what is on it.
        bag: Amount of every thing, in the order of the frame, `[16]`.
        place: Column and row of the player in the world.
        daylight: 1 by day, 0 in the middle of the night.
        asleep: Whether the picture is that of a sleeping player.
        unlocked: How often every achievement was made.
    """

    tiles: Names
    bag: np.ndarray
    place: tuple[int, int]
    daylight: float
    asleep: bool
    unlocked: tuple[int, ...]

    @property
    def cells(self) -> np.ndarray:
        """Column and row in the world of every tile in view, `[7, 9, 2]`."""
        rows, columns = np.indices((ROWS, TILES))
        return np.stack([columns + self.place[0] - TILES // 2, rows + self.place[1] - ROWS // 2], axis=-1)


def moment(game: Any) -> Moment:
    """Return what a game shows now."""
    world, player = game._world, game._player
    place = int(player.pos[0]), int(player.pos[1])
    tiles = np.full((ROWS, TILES), OUTSIDE, dtype="<U16")
    for row, column in np.ndindex(ROWS, TILES):
        material, thing = world[place[0] + column - TILES // 2, place[1] + row - ROWS // 2]
        if material is not None:
            tiles[row, column] = thing.texture if thing else material
    return Moment(
        tiles,
        np.array(list(player.inventory.values())),
        place,
        float(world.daylight),
        bool(player.sleeping),
        tuple(player.achievements.values()),
    )


def tile_names() -> list[str]:
    """Return the names of all tiles."""
    return sorted({str(name) for name in _drawings()[0]})


def read_tiles(frame: Frame, *lights: Moment) -> Names:
    """Return the names of the tiles that a frame of 72 x 72 pixels shows.

    Args:
        frame: The frame, uint8 `[72, 72, 3]`.
        lights: Moments, of whose lights the one counts that explains the frame best: a model that has the
            tiles of one in the light of another is judged by the tiles.
    """
    names, _ = _drawings()
    pixels = frame[: ROWS * SIDE].reshape(ROWS, SIDE, TILES, SIDE, 3).swapaxes(1, 2)
    pixels = pixels.reshape(ROWS * TILES, -1).astype(np.float32)
    found: list[tuple[float, np.ndarray]] = []
    for daylight, asleep in {(round(each.daylight, 3), each.asleep) for each in lights}:
        lit, weight = _light(daylight, asleep)
        # Twice the log-likelihood: w (p - d)^2 for each pixel, of which w p^2 is the same for all drawings.
        fit = np.einsum("np,nkp->nk", 2 * weight * pixels, lit) - np.einsum("np,nkp->nk", weight, lit**2)
        whole = fit.max(axis=1).sum() - (weight * pixels**2).sum() + np.log(weight).sum()
        found.append((float(whole), fit.argmax(axis=1)))
    return names[max(found, key=lambda each: each[0])[1]].reshape(ROWS, TILES)


def read_bag(frame: Frame) -> np.ndarray:
    """Return the amounts of things, `[16]`, that the last two rows of a frame show."""
    slots = _slots(frame)[: len(RULES.items)]
    return np.square(_amounts() - slots[None].astype(np.float32)).sum(axis=2).argmin(axis=0)


def _slots(frame: Frame) -> np.ndarray:
    rows = frame[ROWS * SIDE :].reshape(TILES - ROWS, SIDE, TILES, SIDE, 3).swapaxes(1, 2)
    return rows.reshape((TILES - ROWS) * TILES, -1)


@cache
def _textures() -> Any:
    return engine.Textures(RULES.root / "assets")


@cache
def _amounts() -> np.ndarray:
    """Return the drawings of all things in the amounts 0 to 9, `[amounts, things, pixels]`."""
    view = engine.ItemView(_textures(), [TILES, TILES - ROWS])
    drawn = [view(dict.fromkeys(RULES.items, amount), (SIDE, SIDE)) for amount in range(10)]
    above = np.zeros((ROWS * SIDE, TILES * SIDE, 3), np.uint8)
    frames = [np.concatenate([above, each.transpose(1, 0, 2)]) for each in drawn]
    return np.stack([_slots(frame)[: len(RULES.items)] for frame in frames]).astype(np.float32)


@cache
def _drawings() -> tuple[np.ndarray, np.ndarray]:
    """Return the names of all tiles, and how they are drawn by day: float32 `[names, 8, 8, 3]`."""
    on = {
        "cow": GROUNDS,
        "zombie": GROUNDS,
        "skeleton": GROUNDS,
        "plant": ("grass",),
        "plant-ripe": ("grass",),
    }
    for way in ("left", "right", "up", "down"):
        on |= {f"arrow-{way}": (*GROUNDS, "water", "lava"), f"player-{way}": (*GROUNDS, "lava")}
    on["player-sleep"] = GROUNDS
    names, drawn = [OUTSIDE], [np.full((SIDE, SIDE, 3), 127.0)]
    for material in RULES.materials:
        names.append(material)
        drawn.append(_texture(material)[..., :3])
    for name, grounds in on.items():
        for ground in grounds:
            texture = _texture(name)
            share = texture[..., 3:] / 255
            names.append(name)
            drawn.append(share * texture[..., :3] + (1 - share) * _texture(ground)[..., :3])
    return np.array(names), np.stack(drawn).astype(np.float32)


def _texture(name: str) -> np.ndarray:
    """Return a texture in rows and columns; the game has columns first."""
    return _textures().get(name, (SIDE, SIDE)).transpose(1, 0, 2).astype(np.float32)


@lru_cache(maxsize=64)
def _light(daylight: float, asleep: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the drawings in the light of a moment on every tile, and how much each pixel tells.

    The first is float32 `[tiles, names, pixels]`. The second, `[tiles, pixels]`, is the inverse variance of a
    pixel by the noise of the night and the errors of models. The noise itself counts as its mean.
    """
    _, drawings = _drawings()
    columns, rows = np.meshgrid(np.linspace(-1, 1, TILES * SIDE), np.linspace(-1, 1, ROWS * SIDE))
    noisy = 2 * max(0.0, DARK - daylight) * (1 - np.exp(-0.5 * (columns**2 + rows**2) / 0.5**2))
    noisy = noisy.reshape(ROWS, SIDE, TILES, SIDE).swapaxes(1, 2).reshape(-1, 1, SIDE, SIDE, 1)
    noisy = noisy.astype(np.float32)
    night = (1 - noisy) * drawings + noisy * (sum(NOISE) / 2)
    night = 0.5 * (0.4 * night + 0.6 * _grey(night)) + 0.5 * np.array([0, 16, 64], np.float32)
    lit = daylight * drawings + (1 - daylight) * night
    deviation = 0.5 * (1 - daylight) * noisy * ((NOISE[1] - NOISE[0]) / 12**0.5)
    if asleep:
        lit = 0.5 * _grey(lit) + 0.5 * np.array([0, 0, 16], np.float32)
        deviation = 0.5 * deviation
    weight = np.broadcast_to(1 / (ERROR**2 + deviation**2), (len(noisy), 1, SIDE, SIDE, 3))
    return (
        lit.reshape(len(noisy), len(drawings), -1).astype(np.float32),
        weight.reshape(len(noisy), -1).astype(np.float32),
    )


def _grey(x: np.ndarray) -> np.ndarray:
    """Return the luma of ITU-R BT.601, by which Pillow takes the colour out of a picture."""
    return (x @ np.array([0.299, 0.587, 0.114], np.float32))[..., None] * np.ones(3, np.float32)


@cache
def materials_beside(worlds: int = 6) -> Mapping[tuple[str, str], float]:
    """Return how often a material of generated worlds has another one beside it, as a share of the first."""
    counts: dict[tuple[str, str], int] = {}
    for seed, flip in product(range(worlds), (False, True)):
        game = Game(seed=10**6 + seed)
        game.reset()
        names = np.array([OUTSIDE, *RULES.materials])[game._world._mat_map]
        names = names.T if flip else names
        for pair in zip(names[:-1].ravel().tolist(), names[1:].ravel().tolist(), strict=True):
            for each in (pair, pair[::-1]):
                counts[each] = counts.get(each, 0) + 1
    totals: dict[str, int] = {}
    for (first, _), count in counts.items():
        totals[first] = totals.get(first, 0) + count
    return {pair: count / totals[pair[0]] for pair, count in counts.items()}
