"""A dataset of the Hugging Face Hub, or a local folder of one, read as a stream: nothing is stored on disk.

A stream is read front to back, again and again. A thread reads ahead by one window, so that a window is
shuffled while the next one arrives: three windows of encoded clips are in memory (`data.window`; for clips
of 1 MB, 256 is a good one). Every data-parallel rank reads the whole stream and decodes its own part only.
To resume, rows are skipped: at once where the format allows it, else by reading over them; datasets that are
trained on for long are better downloaded as tar files or a table.
"""

import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from worldmodel import media
from worldmodel.config import DataConfig, WorldModelConfig
from worldmodel.data.clips import WITH_TEXT, Broken, Cut, Files, Stills
from worldmodel.data.columns import RowReader, inside
from worldmodel.data.sources import Recipe
from worldmodel.errors import ConfigError, InputError
from worldmodel.types import DESCRIBE, Action, Episode

VIDEO_NAMES = ("video", "mp4", "webm", "clip", "image", "images", "frames", "png", "jpg", "jpeg", "webp")
TEXT_NAMES = ("text", "caption", "txt", "prompt", "description")
PICTURES = {"image", "png", "jpg", "jpeg", "webp"}


class HuggingFaceSource:
    """Clips of a streamed dataset; see the module.

    The column of the clips is the one of type Video or Image, or goes by a usual name, and so is that of the
    text; `data.sources.NAME.columns` says otherwise. A row may hold a video, its bytes, a list of pictures
    (a clip at the model's frame rate), or one picture: those offer `imagine` and `describe`.

    Raises:
        ConfigError: `datasets` is not installed, or there is no such dataset, split or column.
    """

    seekable = False
    size = None

    def __init__(self, name: str, config: DataConfig, model: WorldModelConfig) -> None:
        self.place, source = f"data.sources.{name}", config.sources[name]
        self.path, self.cut = source.path, Cut.of(model)
        dataset, types = self._open(source.split)
        columns = dict(source.columns)
        self.video = columns.pop("video", "") or _first(types, ("Video", "Image"), VIDEO_NAMES)
        if self.video not in types:
            raise ConfigError(
                f"{self.place}: which column is the video? Set columns.video to one of {', '.join(types)}."
            )
        text = _first({n: t for n, t in types.items() if n != self.video}, (), TEXT_NAMES)
        if text and model.action.text:
            columns.setdefault("text", text)
        offered = [column for column in types if column != self.video]
        self.reader = RowReader(name, replace(source, columns=columns), offered, self.cut, model.action)
        self.still = types[self.video] == "Image" or (types[self.video] == "" and self.video in PICTURES)
        self.tasks = (WITH_TEXT if "text" in columns else WITH_TEXT[:1])[self.still :]
        if not self.tasks:
            raise ConfigError(f"{self.place} has pictures without text, of which no task can be made.")
        keep = {self.video, *self.reader.needed}
        self.stream = ReadAhead(
            dataset.select_columns(sorted(keep)), config.window, config.timeout_s, self.place
        )

    def _open(self, split: str) -> tuple[Any, dict[str, str]]:
        """Return the stream and its columns with the name of their type."""
        try:
            import datasets
        except ImportError:
            raise ConfigError(f"{self.place} takes datasets: pip install 'worldmodel[data]'.") from None
        try:
            dataset = datasets.load_dataset(self.path, split=split, streaming=True)
            dataset = dataset.decode(False)  # bytes are decoded by media.py only
            features = dataset.features or dict.fromkeys(next(iter(dataset)), None)
        # A dataset that is not there, private, offline or damaged each has exceptions of its own.
        except Exception as error:
            reason = " ".join(str(error).split()) or "it has no rows"
            raise ConfigError(f"{self.place}: {self.path!r} cannot be opened: {reason}") from None
        return dataset, {column: _type(feature) for column, feature in features.items()}

    def at(self, index: int) -> Recipe:
        """Return row `index` of the endless stream."""
        name = f"{self.path} row {index + 1}"
        row = self.stream.row(index)
        try:
            video = self._video(row[self.video])
            clip = self.reader.clip(row, name, video=Stills((b"",)) if self.still else video)
        except InputError as error:
            return Broken(name, str(error))
        if not self.still:
            return clip
        assert isinstance(video, bytes | Files)
        return Picture(clip.name, video, self.cut, clip.text.during(0, 0, 1))

    def cost(self, index: int, rounds: int) -> float:
        """Return the same for all: the row has not arrived yet."""
        return rounds

    def close(self) -> None:
        """Stop reading."""
        self.stream.close()

    def _video(self, value: Any) -> Files | Stills | bytes:
        """Return where the frames are."""
        if isinstance(value, list):
            return Stills(tuple(data for data in map(self._video, value) if isinstance(data, bytes)))
        data, path = (value.get("bytes"), value.get("path")) if isinstance(value, Mapping) else (value, value)
        if isinstance(data, bytes):
            return data
        if not isinstance(path, str):
            raise InputError("it has no video")
        if "://" not in path:  # the rows of a local folder name files
            return Files((inside(os.path.abspath(os.path.expanduser(self.path)), path),))
        return _remote(path, self.path)


def _remote(path: str, dataset: str) -> bytes:
    """Read a file of the dataset's own repository, possibly inside an archive there."""
    import fsspec

    home = f"hf://datasets/{dataset}"
    *inner, outer = path.split("::")
    # A link before the last that is no archive would open a file of this machine, whatever the last says.
    archived = all(link.startswith("zip://") for link in inner)
    if not archived or not outer.startswith((f"{home}@", f"{home}/")):
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
class Picture:
    """How to make episodes of one picture and its text: it is imagined, or described."""

    name: str
    image: Files | bytes = field(repr=False)
    cut: Cut
    text: str | None

    def episode(self, task: str, seed: int, index: int, rounds: int) -> Episode:
        """Return the episode.

        Raises:
            InputError: the picture is missing or damaged, or has no text.
        """
        try:
            if not self.text:
                raise InputError("it has no text")
            image = self.image.read() if isinstance(self.image, Files) else self.image
            clip = media.read_image(image, self.cut.size)[None]
        except InputError as error:
            raise InputError(f"{self.name}: {error}") from None
        if task == "describe":
            return Episode(self.name, (clip,), prompt=DESCRIBE, answer=self.text)
        return Episode(self.name, (clip[:0], clip.repeat(self.cut.chunk, axis=0)), (Action(self.text),))


class ReadAhead:
    """Rows of an endless stream by number, near each other: a thread keeps the windows around them.

    Args:
        dataset: a `datasets.IterableDataset`.
        window: rows that are read together.
        timeout_s: how long a window may take.
        place: how messages name the source.
    """

    def __init__(self, dataset: Any, window: int, timeout_s: float, place: str) -> None:
        self.dataset, self.window, self.timeout_s, self.place = dataset, window, timeout_s, place
        self.windows: dict[int, list[Mapping[str, Any]]] = {}
        self.wanted = self.reading = 0
        """The window that was asked for last, and the one that is being read."""
        self.error: Exception | None = None
        self.closed = False
        self.thread: threading.Thread | None = None
        self.one_caller = threading.Lock()
        self.changed = threading.Condition()

    def row(self, number: int) -> Mapping[str, Any]:
        """Return a row; waits until it has arrived.

        Raises:
            ConfigError: it does not arrive in time, or the stream fails.
        """
        window, place = divmod(number, self.window)
        with self.one_caller, self.changed:
            near = self.thread is not None and self.reading <= window <= self.reading + 1
            if window not in self.windows and not near and not self.closed:
                self._start(window)
            self.wanted = window
            self.changed.notify_all()
            if not self.changed.wait_for(
                lambda: window in self.windows or self.error or self.closed, self.timeout_s
            ):
                raise ConfigError(
                    f"{self.place} did not send {self.window} rows in {self.timeout_s:g} s; check the "
                    "connection, lower data.window, or raise data.timeout_s."
                )
            if window not in self.windows:
                reason = " ".join(str(self.error or "it was closed").split())
                raise ConfigError(f"{self.place} cannot be read on: {reason}") from self.error
            return self.windows[window][place]

    def close(self) -> None:
        """End the thread and forget the rows."""
        with self.changed:
            self.closed, self.thread = True, None
            self.windows.clear()
            self.changed.notify_all()

    def _start(self, window: int) -> None:
        """Read from `window` on; a thread that reads elsewhere ends."""
        self.windows.clear()
        self.reading, self.error = window, None
        self.thread = threading.Thread(target=self._read, args=(window * self.window,), daemon=True)
        self.thread.start()

    def _read(self, first: int) -> None:
        """Fill windows, up to one ahead of what is wanted."""
        me = threading.current_thread()
        try:
            rows = endless(self.dataset, first)
            while True:
                filled = [next(rows) for _ in range(self.window)]
                with self.changed:
                    if self.thread is not me:
                        return
                    self.windows[self.reading] = filled
                    self.reading += 1
                    for old in [number for number in self.windows if number < self.wanted - 1]:
                        del self.windows[old]
                    self.changed.notify_all()
                    self.changed.wait_for(lambda: self.thread is not me or self.reading <= self.wanted + 1)
                    if self.thread is not me:
                        return
        except Exception as error:  # told to whoever waits
            with self.changed:
                if self.thread is me:
                    self.error = error
                    self.changed.notify_all()


def endless(dataset: Any, first: int) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a dataset, from row `first` of its endless repetition on."""
    splits, name = getattr(dataset.info, "splits", None), getattr(dataset, "split", None)
    size = splits[str(name)].num_examples if splits and str(name) in splits else None
    rows = iter(dataset.skip(first % size if size else first))
    row = next(rows, None)
    if row is None:  # it is shorter: count its rows
        size = sum(1 for _ in dataset)
        if not size:
            raise InputError("the dataset is empty")
        rows = iter(dataset.skip(first % size))
        row = next(rows)
    while True:
        if row is None:
            rows = iter(dataset)
            row = next(rows)
        yield row
        row = next(rows, None)
