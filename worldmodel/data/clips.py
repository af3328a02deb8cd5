"""A clip of the user's: a video file and what was done in it, cut into rounds."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from worldmodel import media
from worldmodel.config import ImageSize, WorldModelConfig
from worldmodel.errors import InputError
from worldmodel.types import DESCRIBE, Action, Camera, Episode, Pose

WITH_TEXT = ("rounds", "imagine", "describe")
"""Tasks of clips that come with text; those without have only the first."""
EXTENSIONS = ("", ".mp4", ".webm", ".mkv", ".avi", ".gif")


@dataclass(frozen=True)
class Cut:
    """What rounds look like to a model."""

    size: ImageSize
    fps: int
    chunk: int
    """Frames of a round."""

    @classmethod
    def of(cls, model: WorldModelConfig) -> "Cut":
        """Read it from a model's config."""
        return cls(model.codec.image_size, model.fps, model.chunk_frames)


@dataclass(frozen=True)
class Track:
    """Values along a clip: one for all of it, one a round from its start on, or each for its own time."""

    values: tuple[Any, ...] = ()
    per_round: bool = False
    times: tuple[tuple[float, float], ...] = ()
    """Start and end of each value, in seconds after the clip's start."""

    def during(self, place: int, start: float, end: float) -> Any:
        """Return the value in the clip's round `place`, which lasts from `start` to `end`.

        Of several values with times, it is the one that covers most of the round; None if there is none.
        """
        if self.times:
            shares = [min(end, last) - max(start, first) for first, last in self.times]
            best = max(range(len(shares)), key=shares.__getitem__)
            return self.values[best] if shares[best] > 0 else None
        if self.per_round:
            return self.values[place] if place < len(self.values) else None
        return self.values[0] if self.values else None

    def pose(self, second: float, round_s: float) -> Pose:
        """Return where the camera is at a second of the clip, of a track of its targets.

        An entry leads on a straight way from the one before it (or from where the clip begins) to its own.
        """
        times = self.times or [(place * round_s, (place + 1) * round_s) for place in range(len(self.values))]
        here = Pose()
        for (start, end), target in sorted(zip(times, self.values, strict=True), key=lambda entry: entry[0]):
            if target is None or second <= start:
                continue
            here = here.between(target.pose, min(1.0, (second - start) / max(end - start, 1e-6)))
        return here


@dataclass(frozen=True)
class Files:
    """Where a video may lie; the first that exists is it."""

    paths: tuple[str, ...]

    def read(self) -> str:
        """Return the path of the file.

        Raises:
            InputError: none of them exists.
        """
        for path in self.paths:
            for extension in EXTENSIONS:
                if os.path.isfile(path + extension):
                    return path + extension
        raise InputError(f"there is no file {' or '.join(map(repr, self.paths))}")


@dataclass(frozen=True)
class Part:
    """Bytes inside a larger file."""

    path: str
    offset: int
    size: int

    def read(self) -> bytes:
        """Return the bytes.

        Raises:
            InputError: the file is gone or has become shorter.
        """
        try:
            with open(self.path, "rb") as file:
                data = os.pread(file.fileno(), self.size, self.offset)
        except OSError as error:
            raise InputError(f"{self.path!r} cannot be read ({error.strerror})") from None
        if len(data) < self.size:
            raise InputError(f"{self.path!r} is cut off")
        return data


@dataclass(frozen=True)
class Stills:
    """A clip as encoded pictures, one a frame."""

    frames: tuple[bytes, ...]


@dataclass(frozen=True)
class Clip:
    """How to make episodes of a clip.

    `rounds` is one observation and up to the asked number of rounds, from a random place of the clip on;
    `imagine` leads from nothing to a part of the clip, from the first frame that its text is about, and
    `describe` from what is seen in a round to its text.
    """

    name: str
    video: Files | Part | Stills | bytes = field(repr=False)
    cut: Cut
    text: Track = Track()
    keys: Track = Track()
    mouse: Track = Track()
    vector: Track = Track()
    camera: Track = Track()
    start: float = 0.0
    end: float | None = None
    """Seconds in the file between which the clip lies; None: up to the file's end."""

    def episode(self, task: str, seed: int, index: int, rounds: int) -> Episode:
        """Return one episode; `index` draws where in the clip it lies.

        Raises:
            InputError: the video is missing or damaged or shorter than a round, or there is no text to say.
        """
        chunk = self.cut.chunk
        try:
            first, frames = self._frames(
                np.random.default_rng((seed, index)), rounds if task == "rounds" else 1
            )
            if len(frames) <= chunk:
                raise InputError(
                    f"it has {len(frames)} frames at {self.cut.fps} a second, and a round takes 1 + {chunk}"
                )
            actions = [self._action(first, place) for place in range((len(frames) - 1) // chunk)]
            if task != "rounds" and not actions[0].text:
                raise InputError(f"it has no text, which the task {task!r} takes")
        except InputError as error:
            raise InputError(f"{self.name}: {error}") from None
        clips = [frames[1 + place * chunk :][:chunk] for place in range(len(actions))]
        if task == "describe":
            return Episode(self.name, (clips[0],), prompt=DESCRIBE, answer=actions[0].text)
        if task == "imagine":
            return Episode(self.name, (frames[:0], frames[:chunk]), (Action(actions[0].text),))
        return Episode(self.name, (frames[:1], *clips), tuple(actions))

    def _frames(self, rng: np.random.Generator, rounds: int) -> tuple[int, np.ndarray]:
        """Return frames for up to `rounds` rounds, and the place in the clip of the first of them."""
        cut, wanted, source = self.cut, 1 + rounds * self.cut.chunk, self.video

        def first_of(length: int) -> int:
            starts = self._starts(max(0, length - wanted))
            return starts[int(rng.integers(len(starts)))]

        if isinstance(source, Stills):
            first = first_of(len(source.frames))
            chosen = source.frames[first : first + wanted]
            return first, np.stack([media.read_image(frame, cut.size) for frame in chosen])
        with media.open_video(source if isinstance(source, bytes) else source.read()) as video:
            length = int(((video.duration_s if self.end is None else self.end) - self.start) * cut.fps + 1e-3)
            first = first_of(length)
            if self.end is not None:
                wanted = max(1, min(wanted, length - first))
            return first, video.read(cut.size, cut.fps, wanted, self.start + first / cut.fps)

    def _starts(self, last: int) -> Sequence[int]:
        """Return the frames up to `last` at which rounds may begin: where what is said does, or anywhere."""
        if any(track.per_round for track in (self.text, self.keys, self.mouse, self.vector, self.camera)):
            return range(0, last + 1, self.cut.chunk)
        if self.text.times:
            starts = sorted(round(start * self.cut.fps) for start, _ in self.text.times)
            return [start for start in starts if start <= last] or starts[:1]
        return range(last + 1)

    def _action(self, first: int, place: int) -> Action:
        """Return the action of the round `place` after the observation at frame `first` of the clip."""
        chunk, fps = self.cut.chunk, self.cut.fps
        start = first + place * chunk
        when = (start // chunk, start / fps, (start + chunk) / fps)
        camera: Camera | None = self.camera.during(*when)
        if camera is not None and camera.mode == "target":
            before, after = (self.camera.pose(second, chunk / fps) for second in when[1:])
            camera = Camera("velocity", before.motion_to(after))
        return Action(
            self.text.during(*when),
            self.keys.during(*when) or (),
            self.vector.during(*when),
            self.mouse.during(*when),
            camera,
        )


@dataclass(frozen=True)
class Broken:
    """A clip whose row cannot be read."""

    name: str
    reason: str

    def episode(self, task: str, seed: int, index: int, rounds: int) -> Episode:
        """Refuse.

        Raises:
            InputError: always; it says what is wrong with the row.
        """
        raise InputError(f"{self.name}: {self.reason}")
