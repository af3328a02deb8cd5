"""Streamed datasets of the Hugging Face Hub or of a local folder: nothing is stored on disk.

The rows of a dataset are read in streams (`data.sources.NAME.streams`), each of which reads all files in
order, again and again, from a place of its own. These places are equally far apart, so that every row is read
as often as every other: in rows where their number is known (parquet files here, or few of them; other files
that are here and small), else in files. Row `i` of the source is row `i // streams` of stream `i % streams`,
so in each pass a data-parallel rank reads only its share of the files. A thread reads each stream ahead by
one window, so a window is shuffled while the next one arrives: three windows of encoded clips are in memory
(`data.window`, divided by the streams; 256 suits clips of 1 MB).

Checkpoints store a bookmark of every stream, from which a resumed run reads on. Without one, for example
after `streams` was changed, rows are read over.
"""

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np

from worldmodel import media
from worldmodel.actions import Action
from worldmodel.config import DataConfig, WorldModelConfig
from worldmodel.data.clips import BrokenClip, Clip, Files, Part, RoundFormat
from worldmodel.data.columns import RowReader
from worldmodel.data.files import inside, unread_format
from worldmodel.data.footage import Stills, row_groups
from worldmodel.data.sources import Recipe
from worldmodel.episodes import DESCRIBE, Episode
from worldmodel.errors import ConfigError, InputError, pip_install

VIDEO_NAMES = ("video", "mp4", "webm", "clip", "image", "images", "frames", "png", "jpg", "jpeg", "webp")
TEXT_NAMES = ("text", "caption", "txt", "prompt", "description")
IMAGE_NAMES = {"image", "png", "jpg", "jpeg", "webp"}
MAX_PARTS = 1024
"""Groups into which the files of a dataset are put, one file each if there are fewer."""
MAX_COUNTED, MAX_COUNTED_BYTES = 64, 2**28
"""Parquet files elsewhere whose rows are counted by their footers, and bytes of other files here that are
read to count their rows."""
MAX_MARKS = 256
"""Bookmarks that a stream keeps: a run is that many windows behind what was read ahead, at most."""

Bookmark = tuple[int, dict[str, Any]]
"""A window, and the state of the dataset at its first row."""
Bookmarks = dict[str, Bookmark]
"""Bookmarks by stream; a name contains the number of streams and the window, which must be the same."""


class HuggingFaceSource:
    """Clips of a streamed dataset; see the module.

    The video column is the one of type Video or Image, or one with a usual name, and the text column one with
    a usual name; `data.sources.NAME.columns` overrides both. A row holds a video, its bytes, a list of images
    (a clip at the model's frame rate), or one image, which offers the tasks `imagine` and `describe`.

    Raises:
        ConfigError: `datasets` is not installed, or there is no such dataset, split or column.
    """

    size = None

    def __init__(self, name: str, config: DataConfig, model: WorldModelConfig) -> None:
        self.key, source = f"data.sources.{name}", config.sources[name]
        self.path, self.format = source.path, RoundFormat.of(model)
        dataset, types = self._open(source.split)
        columns = dict(source.columns)
        self.video = columns.pop("video", "") or _first(types, ("Video", "Image"), VIDEO_NAMES)
        if self.video not in types:
            raise ConfigError(
                f"{self.key} has no known video column; set columns.video to one of {', '.join(types)}."
            )
        text = _first({n: t for n, t in types.items() if n != self.video}, (), TEXT_NAMES)
        if text and model.action.text:
            columns.setdefault("text", text)
        self.offered, self.whole = list(types), dataset  # with all columns, also those that are not read
        others = [column for column in types if column != self.video]
        self.reader = RowReader(name, replace(source, columns=columns), others, self.format, model.action)
        self.still = types[self.video] == "Image" or (types[self.video] == "" and self.video in IMAGE_NAMES)
        self.tasks = self.reader.still_tasks if self.still else self.reader.tasks
        if not self.tasks:
            raise ConfigError(
                f"{self.key} has images without text, which no task can use; set columns.text, or "
                "columns.question and columns.answer."
            )
        self._divide(dataset, sorted({self.video, *self.reader.needed}), config, source.streams)

    def _divide(self, dataset: Any, columns: list[str], config: DataConfig, streams: int) -> None:
        """Divide a dataset into streams, of which only some columns are read."""
        if dataset.num_shards < streams:
            dataset = dataset.reshard()  # parquet: by row group
        self.streams = num_streams(dataset.num_shards, streams)
        self.dataset = dataset.select_columns(columns)
        self.parts = min(dataset.num_shards, MAX_PARTS)
        """Groups of files, or of row groups, that are opened one after another."""
        self.starts = starts(count_rows(self.path, self.split, dataset, self.parts), self.parts, self.streams)
        self.window, self.timeout_s = -(-config.window // self.streams), config.timeout_s
        self.opened: dict[int, ReadAhead] = {}
        self.bookmarks: Bookmarks = {}
        self.one_opens = threading.Lock()

    def _open(self, split: str) -> tuple[Any, dict[str, str]]:
        """Return the stream, and the type of each of its columns."""
        folder = os.path.expanduser(self.path)
        # A relative path such as `text` would be a builder of that name, which reads the current folder.
        self.path = os.path.abspath(folder) if os.path.exists(folder) else self.path
        self.split = split
        dataset, features = open_stream(self.key, self.path, split)
        return dataset, {column: _type(feature) for column, feature in features.items()}

    def at(self, index: int) -> Recipe:
        row = self._stream(index % self.streams).row(index // self.streams)
        return self._recipe(row, f"{self.path} row {index + 1}")

    def sample(self) -> Iterator[Recipe]:
        shards = [
            self.dataset.shard(self.streams, number, contiguous=False) for number in range(self.streams)
        ]
        columns = zip_longest(*map(iter, shards))
        rows = (row for column in columns for row in column if row is not None)
        yield from (self._recipe(row, f"{self.path} row {number + 1}") for number, row in enumerate(rows))

    def _recipe(self, row: Mapping[str, Any], name: str) -> Recipe:
        try:
            video = self._video(row[self.video])
            clip = self.reader.clip(row, name, video=Stills((b"",)) if self.still else video)
        except InputError as error:
            return BrokenClip(name, str(error))
        if not self.still:
            return clip
        assert isinstance(video, bytes | Files)
        return Still.of(clip, video)

    def cost(self, index: int, rounds: int) -> float:
        """Return a constant: the row may not have been read yet."""
        return rounds

    def resume(self, bookmarks: Bookmarks) -> None:
        """Begin at bookmarks of an earlier run; bookmarks for another number of streams are ignored."""
        self.bookmarks = {
            key: mark for key, mark in bookmarks.items() if key.endswith(f"/{self.streams}/{self.window}")
        }

    def marks(self, window: int) -> Bookmarks:
        """Return a bookmark of each stream that this process reads, at or before a window."""
        marks = {number: stream.mark(window) for number, stream in self.opened.items()}
        return {self._mark_name(number): mark for number, mark in marks.items() if mark}

    def close(self) -> None:
        for stream in self.opened.values():
            stream.close()

    def _stream(self, number: int) -> "ReadAhead":
        """Return a stream, which is opened when its first row is needed."""
        with self.one_opens:
            if number not in self.opened:
                # Each call makes another object, because an iteration changes its own.
                open_part = partial(self.dataset.shard, self.parts, contiguous=True)
                cycle = Cycle(open_part, self.parts, *self.starts[number])
                mark = self.bookmarks.get(self._mark_name(number))
                self.opened[number] = ReadAhead(cycle, self.window, self.timeout_s, self.key, mark)
            return self.opened[number]

    def _mark_name(self, number: int) -> str:
        return f"{number}/{self.streams}/{self.window}"

    def _video(self, value: Any) -> Files | Stills | bytes:
        """Return the frames of a cell, or their location."""
        if isinstance(value, list):
            frames = [data for data in map(self._video, value) if isinstance(data, bytes)]
            if not frames or len(frames) < len(value):
                raise InputError(f"of its {len(value)} images, {len(frames)} have their bytes in the row")
            return Stills(tuple(frames))
        data, path = (value.get("bytes"), value.get("path")) if isinstance(value, Mapping) else (value, value)
        if isinstance(data, bytes):
            return data
        if not isinstance(path, str):
            raise InputError("it has no video")
        if "://" not in path:  # the rows of a local folder name files
            return Files((inside(os.path.abspath(os.path.expanduser(self.path)), path),))
        return _remote(path, self.path)


def open_stream(key: str, path: str, split: str) -> tuple[Any, Mapping[str, Any]]:
    """Return a split of a dataset as a stream, and the feature of each column; None where it is not known.

    Raises:
        ConfigError: `datasets` is not installed, or there is no such dataset or split.
    """
    if reason := unread_format(path):
        raise ConfigError(f"{key}: {path!r} cannot be opened: {reason}.")
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"{key} requires datasets: {pip_install('data')}.") from None
    try:
        dataset = datasets.load_dataset(path, split=split, streaming=True)
        if dataset.features is None:  # columns of text have none to decode
            return dataset, dict.fromkeys(next(iter(dataset)))
        return dataset.decode(False), dataset.features  # only worldmodel.media decodes bytes
    except Exception as error:  # missing, private, offline and damaged datasets raise many types
        reason = " ".join(str(error).split()) or "it has no rows"
        raise ConfigError(f"{key}: {path!r} cannot be opened: {reason}") from None


def _remote(path: str, dataset: str) -> bytes:
    """Read a file of the dataset's own repository, possibly inside an archive there."""
    import fsspec

    repository = f"hf://datasets/{dataset}"
    *inner, outer = path.split("::")
    # An inner link that is not an archive would open a local file, whatever the outer link is.
    archived = all(link.startswith("zip://") for link in inner)
    if not archived or not outer.startswith((f"{repository}@", f"{repository}/")):
        raise InputError(f"its video {path!r} is not in the dataset's own repository")
    try:
        with fsspec.open(path, "rb") as file:
            return file.read(media.MediaLimits.max_video_bytes + 1)  # type: ignore[union-attr]
    except OSError as error:
        raise InputError(f"its video {path!r} cannot be read ({error})") from None


def _type(feature: Any) -> str:
    """Return the name of a column's type: Video, Image, or '' for all others."""
    kind = type(feature).__name__
    return kind if kind in ("Video", "Image") else ""


def _first(types: Mapping[str, str], kinds: tuple[str, ...], names: tuple[str, ...]) -> str:
    """Return the first column of one of the types, else of one of the names, else ''."""
    typed = [column for column, kind in types.items() if kind in kinds]
    named = [column for column in names if column in types]
    return next(iter([*typed, *named]), "")


@dataclass(frozen=True)
class Still:
    """Recipe of the episodes of one image with a text, or with a question and its answer."""

    name: str
    image: Files | Part | bytes = field(repr=False)
    format: RoundFormat
    text: str | None
    question: str | None = None
    answer: str | None = None

    @classmethod
    def of(cls, clip: Clip, image: Files | Part | bytes) -> "Still":
        """Return the recipe of an image with the texts of a clip."""
        texts = (track.during(0, 0, 1) for track in (clip.text, clip.question, clip.answer))
        return cls(clip.name, image, clip.format, *texts)

    @property
    def texts(self) -> tuple[str, ...]:
        """Its text, question and answer."""
        return tuple(filter(None, (self.text, self.question, self.answer)))

    def episode(self, task: str, seed: int, index: int, rounds: int) -> Episode:
        """Return the episode.

        Raises:
            InputError: the image is missing or damaged, or has no text.
        """
        try:
            if task == "ask" and not (self.question and self.answer):
                raise InputError("it has no question with an answer")
            if task != "ask" and not self.text:
                raise InputError("it has no text")
            image = self.image if isinstance(self.image, bytes) else self.image.read()
            clip = media.read_image(image, self.format.size)[None]
        except InputError as error:
            raise InputError(f"{self.name}: {error}") from None
        if task == "ask":
            return Episode(self.name, (clip,), prompt=self.question, answer=self.answer)
        if task == "describe":
            return Episode(self.name, (clip,), prompt=DESCRIBE, answer=self.text)
        return Episode(self.name, (clip[:0], clip.repeat(self.format.chunk, axis=0)), (Action(self.text),))


class ReadAhead:
    """Random access to nearby rows of an endless stream: a thread keeps the windows around them in memory.

    Args:
        cycle: the rows of the stream.
        window: number of rows that are read together.
        timeout_s: how long a window may take.
        key: config key of the source, for messages.
        mark: where an earlier process was in the stream.
    """

    def __init__(
        self,
        cycle: "Cycle",
        window: int,
        timeout_s: float,
        key: str,
        mark: Bookmark | None = None,
    ) -> None:
        self.cycle, self.window = cycle, window
        self.timeout_s, self.key = timeout_s, key
        self.marks: dict[int, dict[str, Any]] = {mark[0]: mark[1]} if mark else {}
        """State of the dataset at the beginning of windows."""
        self.windows: dict[int, list[Mapping[str, Any]]] = {}
        self.wanted = self.reading = 0
        """The window that was requested last, and the one that is being read."""
        self.error: Exception | None = None
        self.closed = False
        self.thread: threading.Thread | None = None
        self.one_caller = threading.Lock()
        self.changed = threading.Condition()

    def row(self, number: int) -> Mapping[str, Any]:
        """Wait for a row and return it.

        Raises:
            ConfigError: it does not arrive in time, or the stream fails.
        """
        window, offset = divmod(number, self.window)
        with self.one_caller, self.changed:
            # The thread will get there by itself; anything else, further ahead or behind, starts it anew.
            near = self.thread is not None and self.reading <= window <= self.reading + 1
            if window not in self.windows and not near and not self.closed:
                self._start(window)
            self.wanted = window
            self.changed.notify_all()
            if not self.changed.wait_for(
                lambda: window in self.windows or self.error or self.closed, self.timeout_s
            ):
                raise ConfigError(
                    f"{self.key} did not send {self.window} rows within {self.timeout_s:g} s; check the "
                    "connection, lower data.window, or raise data.timeout_s."
                )
            if window not in self.windows:
                reason = " ".join(str(self.error or "it was closed").split())
                raise ConfigError(f"{self.key} cannot be read further: {reason}") from self.error
            return self.windows[window][offset]

    def close(self) -> None:
        """End the thread and drop the rows."""
        with self.changed:
            self.closed, self.thread = True, None
            self.windows.clear()
            self.changed.notify_all()

    def mark(self, window: int) -> Bookmark | None:
        """Return the newest bookmark at or before a window."""
        with self.changed:
            known = max((number for number in self.marks if number <= window), default=None)
            return None if known is None else (known, self.marks[known])

    def _start(self, window: int) -> None:
        """Start reading at `window`; an earlier thread ends."""
        self.windows.clear()
        self.reading, self.error = window, None
        self.thread = threading.Thread(target=self._read, args=(window * self.window,), daemon=True)
        self.thread.start()

    def _read(self, first: int) -> None:
        """Read windows, up to one ahead of the requested one."""
        thread = threading.current_thread()
        try:
            mark = self.mark(first // self.window)
            rows = EndlessRows(self.cycle, mark and mark[1])
            rows.skip(first - (mark[0] * self.window if mark else 0))
            while True:
                state = rows.state()
                filled = [rows.next() for _ in range(self.window)]
                with self.changed:
                    if self.thread is not thread:
                        return
                    self.windows[self.reading] = filled
                    if state is not None:
                        self.marks[self.reading] = state
                    for old in sorted(self.marks)[:-MAX_MARKS]:
                        del self.marks[old]
                    self.reading += 1
                    for old in [number for number in self.windows if number < self.wanted - 1]:
                        del self.windows[old]
                    self.changed.notify_all()
                    self.changed.wait_for(
                        lambda: self.thread is not thread or self.reading <= self.wanted + 1
                    )
                    if self.thread is not thread:
                        return
        except Exception as error:  # raised in `row`
            with self.changed:
                if self.thread is thread:
                    self.error = error
                    self.changed.notify_all()


@dataclass(frozen=True)
class Cycle:
    """The parts of a dataset, one after another and again, from a row on."""

    open_part: Callable[[int], Any]
    """Returns a new `datasets.IterableDataset` of a part."""
    parts: int = 1
    first: int = 0
    """Part with which it begins."""
    skipped: int = 0
    """Rows of that part before the first one."""


class EndlessRows:
    """The rows of a cycle.

    Args:
        cycle: where they begin.
        state: what `state` returned at the row to begin with; None: the first.
    """

    def __init__(self, cycle: Cycle, state: dict[str, Any] | None = None) -> None:
        self.cycle, self.read, self.total = cycle, 0, 0
        self.from_start = state is None
        """Whether all rows since the cycle's first were read: a repetition tells how many there are."""
        self._open(cycle.first if state is None else state["part"], state and state["rows"])
        if state is None:
            for _ in range(cycle.skipped):
                if self._next() is None:
                    break

    def next(self) -> Mapping[str, Any]:
        """Return the next row.

        Raises:
            InputError: there are none.
        """
        for _ in range(self.cycle.parts + 1):
            row = self._next()
            if row is not None:
                self.read += 1
                return row
            self._open((self.part + 1) % self.cycle.parts)
            if self.part == self.cycle.first and self.from_start and not self.total:
                self.total = self.read + self.cycle.skipped
        raise InputError("the dataset is empty")

    def skip(self, number: int) -> None:
        """Read over rows, each at most twice."""
        while number:
            self.next()
            number -= 1
            if self.total and number >= self.total:  # whole repetitions need not be read
                number %= self.total

    def state(self) -> dict[str, Any] | None:
        """Return a state to begin with again; None where the format of the dataset has none."""
        state = getattr(self.current, "state_dict", lambda: None)()
        try:
            return None if state is None else {"part": self.part, "rows": json.loads(json.dumps(state))}
        except TypeError:
            return None

    def _open(self, part: int, state: dict[str, Any] | None = None) -> None:
        self.part, self.current = part, self.cycle.open_part(part)
        if state is not None:
            self.current.load_state_dict(state)
        self.rows = iter(self.current)

    def _next(self) -> Mapping[str, Any] | None:
        return next(self.rows, None)


def starts(counts: Sequence[int] | None, parts: int, streams: int) -> list[tuple[int, int]]:
    """Return for each stream the part with which it begins, and the rows of it before its first one.

    Args:
        counts: rows of each part, if they are known.
        parts: number of the parts.
        streams: number of the streams.
    """
    if counts is None or not sum(counts):
        return [(number * parts // streams, 0) for number in range(streams)]
    ends = np.cumsum(counts)
    rows = [number * int(ends[-1]) // streams for number in range(streams)]
    found = [int(np.searchsorted(ends, row, side="right")) for row in rows]
    return [(part, row - int(ends[part] - counts[part])) for part, row in zip(found, rows, strict=True)]


def count_rows(path: str, split: str, dataset: Any, parts: int) -> list[int] | None:
    """Return the rows of each part of a dataset; None if counting them would take long.

    Args:
        path: of the dataset.
        split: the split.
        dataset: the dataset as a stream.
        parts: number of the parts into which its files are divided.
    """
    import datasets

    files = datasets.load_dataset_builder(path).config.data_files
    paths = [str(each) for each in (files or {}).get(split, ())]
    here = os.path.exists(path)
    if paths and all(each.endswith(".parquet") for each in paths) and (here or len(paths) <= MAX_COUNTED):
        groups = [row_groups(each) for each in paths]
        counts = [sum(group) for group in groups]
        if dataset.num_shards != len(counts):  # divided by row groups
            counts = [count for group in groups for count in group]
        if dataset.num_shards == len(counts):
            return [sum(each.tolist()) for each in np.array_split(counts, parts)]
    if here and sum(os.path.getsize(each) for each in paths if os.path.isfile(each)) <= MAX_COUNTED_BYTES:
        return [sum(1 for _ in dataset.shard(parts, part, contiguous=True)) for part in range(parts)]
    return None


def num_streams(num_files: int, wanted: int) -> int:
    """Return how many streams so many files are divided into: `wanted`, halved until each has a file."""
    while wanted > max(num_files, 1):
        wanted //= 2
    return wanted
