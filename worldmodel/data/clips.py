"""Clips: a video with its text and actions, divided into rounds."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np

from worldmodel import media
from worldmodel.actions import Action, action_kinds
from worldmodel.actions.track import NOTHING, Track
from worldmodel.actions.words import say
from worldmodel.config import ImageSize, WorldModelConfig
from worldmodel.data.files import read_range
from worldmodel.data.latents import StoredLatents, StoredTexts
from worldmodel.episodes import DESCRIBE, WHAT_HAPPENED, EncodedObservations, Episode, Outcome
from worldmodel.errors import ConfigError, InputError
from worldmodel.media.limits import VIDEO_SUFFIXES

START_SHARE = 0.2
"""Share of episodes that begin as a session does from an image: nothing is known of the frames before it."""
_Part = tuple[int, int, np.ndarray | None, EncodedObservations | None]
"""Part of a clip: its first frame, number of rounds, frames where they are needed, and latents."""
EXTENSIONS = ("", *VIDEO_SUFFIXES)


@dataclass(frozen=True)
class RoundFormat:
    """Frame size, frame rate and length of a model's rounds."""

    size: ImageSize
    fps: int
    chunk: int
    """Frames per round."""
    actions: int = 1
    """Actions per round."""
    max_words: int = 0
    """Longest text of an action in words, each of which has a token or more; 0: any."""
    context: int = 1
    """Frames before the first round of an episode."""

    @classmethod
    def of(cls, model: WorldModelConfig) -> "RoundFormat":
        """Return the format of a model's config."""
        text = model.action.kinds.get("text")
        words = text.max_tokens if text else 0
        # Frames that a session remembers from earlier rounds; it starts with fewer.
        earlier = model.context_latents if model.context_latents > model.chunk_latents else 0
        return cls(
            model.codec.image_size,
            model.fps,
            model.chunk_frames,
            model.action.per_round,
            words,
            max(1, earlier * model.codec.temporal_factor),
        )

    @property
    def action_frames(self) -> int:
        """Frames that one action lasts."""
        return self.chunk // self.actions


@dataclass(frozen=True)
class Outcomes:
    """Rewards and ends of a recording, at its own rate: entry `i` belongs to the step after frame `i`.

    Raises:
        InputError: a reward is not finite.
    """

    rewards: tuple[float, ...]
    ended: tuple[bool, ...]
    fps: float

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, self.rewards)):
            raise InputError("it has a reward that is not a finite number")

    def during(self, start: float, end: float) -> Outcome | None:
        """Return the sum of the rewards between two times and whether it ends; None without steps."""
        first, last = round(start * self.fps), round(end * self.fps)
        if not first < last <= len(self.rewards):
            return None
        return Outcome(sum(self.rewards[first:last]), any(self.ended[first:last]))


@dataclass(frozen=True)
class Files:
    """Candidate paths of a video; the first that exists is used."""

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
    """A byte range of a larger file, or of one at an address of fsspec such as `s3://bucket/file`."""

    path: str
    offset: int
    size: int

    def read(self) -> bytes:
        """Return the bytes.

        Raises:
            InputError: the file is gone or has become shorter.
        """
        if not self.size:
            return b""  # HTTP cannot express an empty range; S3 would return the whole file
        try:
            data = read_range(self.path, self.offset, self.size)
        except OSError as error:
            raise InputError(f"{self.path!r} cannot be read ({error.strerror or error})") from None
        if len(data) < self.size:
            raise InputError(f"{self.path!r} is cut off")
        return data


@runtime_checkable
class Footage(Protocol):
    """Frames by number at the frame rate of a format."""

    def read(self, format: RoundFormat, first: int, wanted: int) -> np.ndarray:
        """Return up to `wanted` frames, beginning with number `first`.

        Raises:
            InputError: a file is missing, damaged or too short.
        """
        ...

    def length(self, format: RoundFormat) -> int:
        """Return the number of frames, up to the last one's begin."""
        ...


@dataclass(frozen=True)
class Span:
    """Frames of a video file that holds several clips; a process opens it once for all of them."""

    path: str
    start: float
    """Seconds before its first frame."""
    num_frames: int
    fps: float
    """Frames per second that it is taken to have: 30 for 29.97."""
    file_fps: float
    """Frames per second of the file."""

    def read(self, format: RoundFormat, first: int, wanted: int) -> np.ndarray:
        count = min(wanted, self.length(format) - first)
        # The middle of the span that a frame is on screen: times of containers are rounded.
        middle, slower = 0.25 / max(self.fps, format.fps), self.fps / self.file_fps
        times = (middle + (first + index) / format.fps for index in range(max(count, 1)))
        return media.shared_video(self.path).read(format.size, [self.start + slower * time for time in times])

    def length(self, format: RoundFormat) -> int:
        return int((self.num_frames - 1) / self.fps * format.fps + 1e-3) + 1


@dataclass(frozen=True)
class Clip:
    """Recipe of a clip's episodes.

    The task `rounds` has one observation and up to the requested number of rounds, from a random offset in
    the clip; `imagine` leads from no observation to a round of the clip, starting where its text does,
    `describe` leads from a round to its text, `ask` from a round with its question to the answer, and
    `inverse` from a round and the frame before it to its action in words (`action_words`).

    With `latents`, episodes begin at a whole number of rounds after the clip's start, and the video is only
    read if the model's vision encoder reads pixels.
    """

    name: str
    video: Files | Part | Footage | bytes = field(repr=False)
    format: RoundFormat
    text: Track = NOTHING
    question: Track = NOTHING
    answer: Track = NOTHING
    controls: Mapping[str, Track] = field(default_factory=dict)
    """Values of the kinds of action other than text, by name."""
    outcomes: Outcomes | None = None
    start: float = 0.0
    end: float | None = None
    """Seconds in the file between which the clip lies; None: up to the file's end."""
    latents: StoredLatents | None = None
    text_states: StoredTexts | None = None
    exact: bool = True
    """Whether lists must have an entry for every action; a stage of a flow may label or cut off a part."""

    @property
    def has_actions(self) -> bool:
        """Whether the clip says what is done in it, and when; one text for all of it is a caption."""
        return not self.text.is_caption or any(track.values for track in self.controls.values())

    @property
    def tracks(self) -> dict[str, Track]:
        """All values along the clip, by name."""
        return {"text": self.text, **self.controls, "question": self.question, "answer": self.answer}

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts, questions and answers of the whole clip."""
        return tuple(filter(None, (*self.text.values, *self.question.values, *self.answer.values)))

    def episode(self, task: str, seed: int, index: int, rounds: int) -> Episode:
        """Return one episode; `index` seeds its offset in the clip.

        Raises:
            InputError: the video is missing, damaged or shorter than a round, or has no text for the task.
            ConfigError: the latents were made by another model.
        """
        rng, count = np.random.default_rng((seed, index)), rounds if task == "rounds" else 1
        try:
            first, found, frames, encoded = (self._decoded if self.latents is None else self._stored)(
                rng, task, count
            )
            actions = [self._action(first, index) for index in range(found)]
            if task in ("rounds", "imagine"):
                self._check_words(actions)
            states = None if self.text_states is None else self._states(actions)
            when = self._when(first)
            question, answer = self.question.during(*when), self.answer.during(*when)
            text = self.text.during(*when)
            if task == "ask" and not (question and answer):
                raise InputError("it has no question with an answer, which the task 'ask' needs")
            if task in ("imagine", "describe") and not text:
                raise InputError(f"it has no text, which the task {task!r} needs")
            if task == "inverse" and not self.has_actions:
                raise InputError("it has no actions, which the task 'inverse' needs")
        except (InputError, ConfigError) as error:
            raise type(error)(f"{self.name}: {error}") from None
        seen, led_to = _observations(
            frames, found, self.format.chunk, task, encoded is not None, self._context(task)
        )
        if task == "ask":
            return Episode(self.name, led_to, prompt=question, answer=answer, encoded=encoded)
        if task == "inverse":
            acted = replace(self, text=Track()) if self.text.is_caption else self
            answer = say(acted._action(first, 0))
            return Episode(self.name, (*seen, *led_to), prompt=WHAT_HAPPENED, answer=answer, encoded=encoded)
        if task == "describe":
            return Episode(self.name, led_to, prompt=DESCRIBE, answer=text, encoded=encoded)
        if task == "imagine":
            actions = [Action(text)]
        outcomes = [self._outcome(first, index) for index in range(found)] if task == "rounds" else []
        return Episode(
            self.name,
            (*seen, *led_to),
            tuple(actions),
            encoded=encoded,
            text_states=states,
            outcomes=tuple(each for each in outcomes if each) if all(outcomes) else (),
        )

    def read_rounds(self, most: int) -> np.ndarray:
        """Return the frames of up to `most` rounds from the clip's start: 1 + n rounds of frames.

        Raises:
            InputError: the video is missing, damaged or shorter than a round.
        """
        chunk = self.format.chunk
        _, frames = self._frames(lambda length: 0, 1 + most * chunk)
        self._check_length(len(frames))
        return frames[: 1 + (len(frames) - 1) // chunk * chunk]

    def actions(self, rounds: int) -> list[Action]:
        """Return the actions of the first rounds of an episode that begins with the clip."""
        return [self._action(0, index) for index in range(rounds)]

    def _check_length(self, num_frames: int) -> None:
        chunk, fps = self.format.chunk, self.format.fps
        if num_frames <= chunk:
            raise InputError(f"it has {num_frames} frames at {fps} fps, and a round needs 1 + {chunk}")

    def _check_words(self, actions: Sequence[Action]) -> None:
        """Check that the texts of actions are short enough; a text that is to be written may be longer."""
        most = self.format.max_words
        for action in actions:
            for text in filter(None, (each.text for each in (action, *action.chunk))):
                if most and len(text) > most and len(text.split()) > most:
                    raise InputError(
                        f"its text has {len(text.split())} words, and the model reads {most} tokens; shorten "
                        "it, or raise max_tokens of model.action.text"
                    )

    def _check_lists(self, num_frames: int) -> None:
        """Check that lists have an entry for each action of the clip's rounds.

        They may have one for the rest of its frames, too, and one that begins at its last frame.
        """
        lists: dict[str, tuple[int, float]] = {
            name: (len(track.values), self.format.action_frames)
            for name, track in self.tracks.items()
            if track.per_action
        }
        if self.outcomes:
            lists["rewards"] = len(self.outcomes.rewards), self.format.fps / self.outcomes.fps
        rounds = (num_frames - 1) // self.format.chunk * self.format.chunk
        for name, (count, length) in lists.items() if self.exact else ():
            least, most = math.floor(rounds / length + 1e-6), math.ceil(num_frames / length - 1e-6)
            if not least <= count <= most:
                raise InputError(
                    f"its list of {name} has {count} entries, and its {num_frames} frames at "
                    f"{self.format.fps} fps have {least} actions; give one for each"
                )

    def _decoded(self, rng: np.random.Generator, task: str, rounds: int) -> _Part:
        """Read up to `rounds` rounds from where a sentence begins, if sentences have times."""
        chunk = self.format.chunk

        def draw_first(length: int) -> int:
            self._check_lists(length)
            starts = self._starts(max(0, length - 1 - rounds * chunk), self._sentences(task))
            return starts[int(rng.integers(len(starts)))]

        earlier = self._context(task) - 1
        wanted = 0 if not earlier or rng.random() < START_SHARE else earlier
        first, frames = self._frames(draw_first, 1 + rounds * chunk, wanted)
        found = min(wanted, first)
        self._check_length(len(frames) - found)
        # What is not known has not moved, as where a session starts from an image.
        repeated = np.repeat(frames[:1], earlier - found, axis=0)
        return first, (len(frames) - 1 - found) // chunk, np.concatenate([repeated, frames]), None

    def _context(self, task: str) -> int:
        """Return how many frames there are before the first round."""
        return self.format.context if task == "rounds" and self.latents is None else 1

    def _stored(self, rng: np.random.Generator, task: str, rounds: int) -> _Part:
        """Read the latents of up to `rounds` rounds, and their frames only where they are needed."""
        assert self.latents is not None
        latents, chunk = self.latents.read(), self.format.chunk
        if not latents.num_chunks:
            raise InputError(f"it has no latents of a round of {chunk} frames at {self.format.fps} fps")
        starts = self._starts(max(0, latents.num_chunks - rounds) * chunk, self._sentences(task))
        index = min(round(starts[int(rng.integers(len(starts)))] / chunk), latents.num_chunks - 1)
        count, first = min(rounds, latents.num_chunks - index), index * chunk
        frames = None
        if latents.format.needs_frames:
            _, frames = self._frames(lambda length: first, 1 + count * chunk)
            if len(frames) != 1 + count * chunk:
                raise InputError(
                    f"its video is shorter than its latents, {latents.num_chunks} rounds of {chunk} frames"
                )
        return first, count, frames, latents.observations(task, index, count)

    def _sentences(self, task: str) -> Track:
        return self.question if task == "ask" else self.text

    def _states(self, actions: Sequence[Action]) -> dict[str, np.ndarray]:
        """Return the stored text states of actions, and of the empty text."""
        assert self.text_states is not None
        states = self.text_states.read()
        texts = {"", *(action.text or "" for action in actions)}
        return {text: state for text, state in states.items() if text in texts}

    def _frames(
        self, draw_first: Callable[[int], int], wanted: int, before: int = 0
    ) -> tuple[int, np.ndarray]:
        """Return the index in the clip of the first frame, chosen by the clip's length, and the frames.

        They begin with up to `before` frames before that one, as many as the clip has.
        """
        source = self.video
        if isinstance(source, Footage):
            first = draw_first(source.length(self.format))
            earlier = min(before, first)
            return first, source.read(self.format, first - earlier, wanted + earlier)
        with media.open_video(source if isinstance(source, bytes) else source.read()) as video:
            end = video.duration_s if self.end is None else min(self.end, video.duration_s)
            length = int((end - self.start) * self.format.fps + 1e-3)
            first = draw_first(length)
            if self.end is not None:
                wanted = max(1, min(wanted, length - first))
            begin = max(0, first - before)
            return first, video.read(
                self.format.size,
                self.format.fps,
                wanted + first - begin,
                self.start + begin / self.format.fps,
            )

    def _starts(self, last: int, sentences: Track) -> Sequence[int]:
        """Return the frames up to `last` at which an episode may begin: where a sentence begins, or all.

        With latents, where a round begins.
        """
        per_action = any(track.per_action for track in self.tracks.values())
        if per_action or (self.latents is not None and not sentences.times):
            step = self.format.action_frames if self.latents is None else self.format.chunk
            return range(0, last + 1, step)
        if sentences.times:
            starts = sorted(round(start * self.format.fps) for start, _ in sentences.times)
            return [start for start in starts if start <= last] or starts[:1]
        # A round has the rewards of whole steps.
        step = round(self.format.fps / self.outcomes.fps) if self.outcomes else 1
        return range(0, last + 1, max(1, step))

    def _when(self, start: int) -> tuple[int, float, float]:
        """Return the index of the action after frame `start` of the clip, and when it starts and ends."""
        length, fps = self.format.action_frames, self.format.fps
        return start // length, start / fps, (start + length) / fps

    def _parts(self, first: int, index: int) -> list[int]:
        """Return the frames after which the actions of round `index` begin, in an episode from `first` on."""
        start = first + index * self.format.chunk
        return list(range(start, start + self.format.chunk, self.format.action_frames))

    def _outcome(self, first: int, index: int) -> Outcome | None:
        """Return the sum of the rewards of a round and whether the episode ends in it, if it is known."""
        start, chunk, fps = first + index * self.format.chunk, self.format.chunk, self.format.fps
        return self.outcomes and self.outcomes.during(start / fps, (start + chunk) / fps)

    def _action(self, first: int, index: int) -> Action:
        """Return the action of round `index` after the observation at frame `first` of the clip."""
        return Action(chunk=tuple(map(self._part, self._parts(first, index)))).of_round(self.format.actions)

    def _part(self, start: int) -> Action:
        """Return the action after frame `start`."""
        when = self._when(start)
        action_s = self.format.action_frames / self.format.fps
        tracks = {"text": self.text, **self.controls}
        found = {}
        for kind in action_kinds():
            if kind.name in tracks:
                found[kind.name] = kind.during(tracks[kind.name], *when, action_s)
        return Action(**found)


def _observations(
    frames: np.ndarray | None, rounds: int, chunk: int, task: str, encoded: bool, context: int
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Return the observation before the first round, and the clip of every round."""
    if frames is None:
        return (), ()
    clips = tuple(frames[context + index * chunk :][:chunk] for index in range(rounds))
    if task == "imagine":  # its frames are those that the latents are of
        return (frames[:0],), clips if encoded else (frames[:chunk],)
    return (frames[:context],), clips


@dataclass(frozen=True)
class BrokenClip:
    """Recipe of a clip whose row cannot be read."""

    name: str
    reason: str
    texts: tuple[str, ...] = ()

    def episode(self, task: str, seed: int, index: int, rounds: int) -> Episode:
        """Raise the error of the row.

        Raises:
            InputError: always.
        """
        raise InputError(f"{self.name}: {self.reason}")
