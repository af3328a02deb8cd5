"""Recordings of Minecraft in the format of Video PreTraining: NAME.mp4, and NAME.jsonl with a line per frame.

A line has the keys, buttons and mouse motion that follow its frame. Recordings of several minutes are divided
into episodes of `max_steps` actions; two in a row share a frame.

Source: Baker et al., 2022 (arXiv:2206.11795); github.com/openai/Video-Pre-Training.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from worldmodel.actions import Action
from worldmodel.config import ActionSpec
from worldmodel.errors import InputError
from worldmodel.media import shared_video
from worldmodel.recording.episode import RecordedEpisode, RecordingFormat
from worldmodel.recording.settings import ConversionSettings

FPS = 20
KEYS = {
    "w": "forward",
    "s": "back",
    "a": "left",
    "d": "right",
    "space": "jump",
    "left.shift": "sneak",
    "left.control": "sprint",
    "e": "inventory",
    "q": "drop",
    "f": "swap_hands",
    "escape": "escape",
}
BUTTONS = ("attack", "use", "pick_item")
NUM_SLOTS = 9
SLOTS = tuple(f"hotbar_{number}" for number in range(1, NUM_SLOTS + 1))
NAMES = (*KEYS.values(), *BUTTONS, *SLOTS)
DEGREES_PER_COUNT = 360 / 2400
"""Degrees that the camera turns for one count of the mouse, at the sensitivity of the recordings."""
MAX_DEGREES = 10.0
"""Turn of one frame that is 1; larger ones are clipped, as Video PreTraining does."""
MAX_LINE_BYTES = 2**20


@dataclass(frozen=True)
class Part:
    """A part of a recording that is one episode."""

    name: str
    first: int
    num_actions: int


class VptEpisodes:
    """The episodes of a folder of recordings.

    Raises:
        InputError: there is no recording, or a file cannot be read.
    """

    def __init__(self, settings: ConversionSettings) -> None:
        self.settings, self.folder = settings, Path(settings.path).expanduser()
        if settings.size is None:
            raise InputError("Recordings of Minecraft are large; pass --size, such as 128 or 72x128.")
        if settings.env_id or settings.cameras or settings.fps not in (0, FPS):
            raise InputError(f"Recordings of Minecraft have one camera and {FPS} fps; leave these out.")
        names = sorted(
            path.stem for path in self.folder.glob("*.jsonl") if path.with_suffix(".mp4").is_file()
        )
        if not names:
            raise InputError(f"{settings.path!r} has no NAME.mp4 with a NAME.jsonl; name their folder.")
        self.parts = [part for name in names for part in self._parts(name)]
        self.specs = (
            *(ActionSpec(name, "key", low=0.0, high=1.0, rate=FPS) for name in NAMES),
            *(
                ActionSpec(name, "mouse", "deg", MAX_DEGREES, low=-1.0, high=1.0, rate=FPS, frame="camera")
                for name in ("right", "down")
            ),
        )
        self.format = RecordingFormat(FPS, self.specs, settings.as_dict(), has_rewards=False)
        self._numbers = lru_cache(maxsize=2)(self._read)

    def __len__(self) -> int:
        return len(self.parts)

    def episode(self, index: int) -> RecordedEpisode:
        part = self.parts[index]
        numbers = self._numbers(part.name)[part.first : part.first + part.num_actions]
        times = [(part.first + frame) / FPS for frame in range(part.num_actions + 1)]
        assert self.settings.size is not None
        frames = shared_video(str(self.folder / f"{part.name}.mp4")).read(self.settings.size, times)
        return RecordedEpisode(
            {"pov": frames},
            tuple(Action.of_numbers(self.specs, row) for row in numbers),
            numbers,
            np.zeros(len(numbers), np.float32),
            truncated=True,
            infos=({},) * len(frames),
        )

    def _parts(self, name: str) -> Iterator[Part]:
        with (self.folder / f"{name}.jsonl").open("rb") as file:
            last = sum(1 for line in file if line.strip()) - 1  # no frame follows the last action
        for first in range(0, last, self.settings.max_steps):
            yield Part(name, first, min(self.settings.max_steps, last - first))

    def _read(self, name: str) -> np.ndarray:
        """Return the actions of a recording, `[lines, numbers]`."""
        rows, slot, stuck = [], 0, False
        path = self.folder / f"{name}.jsonl"
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    if len(line) > MAX_LINE_BYTES:
                        raise ValueError("it is too long")
                    tick = json.loads(line)
                    pressed = tick["mouse"]["newButtons"]
                    # Some recordings begin with an attack that lasts until the button is really pressed.
                    stuck = pressed == [0] if not rows else stuck and 0 not in pressed
                    held, slot = _held(tick, slot, stuck)
                    rows.append([*(float(key in held) for key in NAMES), *_turn(tick["mouse"])])
                except (KeyError, TypeError, ValueError) as error:
                    raise InputError(f"Line {number} of {str(path)!r} cannot be read ({error!r}).") from None
        return np.array(rows, np.float32)


def _held(tick: Mapping[str, Any], slot: int, stuck: bool) -> tuple[set[str], int]:
    """Return the names of what is held, and the slot that is chosen now.

    A slot that was chosen with the wheel of the mouse counts as its key: the wheel is not in the recordings.
    """
    keys = {str(key).removeprefix("key.keyboard.") for key in tick["keyboard"]["keys"]}
    held = {KEYS[key] for key in keys & KEYS.keys()} | {
        name for number, name in enumerate(SLOTS, 1) if str(number) in keys
    }
    buttons = [int(button) for button in tick["mouse"]["buttons"] if not (stuck and button == 0)]
    held |= {BUTTONS[button] for button in buttons if 0 <= button < len(BUTTONS)}
    now = int(tick["hotbar"])
    if now != slot and 0 <= now < NUM_SLOTS:
        held.add(SLOTS[now])
    return held, now


def _turn(mouse: Mapping[str, Any]) -> list[float]:
    counts = np.array([mouse["dx"], mouse["dy"]], np.float64)
    if not np.isfinite(counts).all():
        raise ValueError("the motion of the mouse is not a number")
    return (counts * DEGREES_PER_COUNT / MAX_DEGREES).clip(-1, 1).tolist()
