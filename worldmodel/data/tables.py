"""Tables of clips, whose rows are read by their offset in the file instead of kept in memory.

Opening a table reads some of its rows; the offsets of all are stored beside it (see index_file.py).
"""

import csv
import json
import os
import threading
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from worldmodel import media
from worldmodel.config import DataConfig, WorldModelConfig
from worldmodel.data.clips import BrokenClip, Clip, Files, RoundFormat
from worldmodel.data.columns import Row, RowReader
from worldmodel.data.files import PACKED, unpacked
from worldmodel.data.footage import ImageFolder, is_sequence
from worldmodel.data.index_file import indexed
from worldmodel.data.recording import check_specs, read_recording, renamed, vector_names
from worldmodel.errors import ConfigError, InputError, pip_install
from worldmodel.media.limits import VIDEO_SUFFIXES

MAX_ARRAY_BYTES = 2**29
"""Largest json list, which is parsed at once."""
NUM_PROBED = 100
"""Rows, spread over the table, that are checked before training starts."""
NUM_READERS = 16
"""Files that are opened at once to learn the sizes of their frames."""


class Rows(Protocol):
    """Rows by index; thread-safe."""

    def __len__(self) -> int: ...

    def row(self, number: int) -> Row:
        """Return a row.

        Raises:
            InputError: it cannot be parsed.
        """
        ...


class Table(Rows, Protocol):
    """The rows of a file, and their columns."""

    columns: Sequence[str]

    def close(self) -> None:
        """Close the file."""
        ...


class LineTable:
    """A csv or tsv file with a header, or a jsonl file; takes 8 bytes of memory per row.

    A record of a csv file may contain line breaks inside quotes, and semicolons or tabs between cells.
    """

    def __init__(self, path: Path) -> None:
        self.csv = path.suffix in (".csv", ".tsv")
        self.file = path.open("rb")
        self.delimiter = _delimiter(self.file.readline()) if self.csv else ""
        self.file.seek(0)
        self.starts = indexed(path, "rows", partial(_record_offsets, self.file, self.delimiter))
        if self.csv:
            self.columns: Sequence[str] = self._fields(0) if len(self.starts) > 1 else []
        else:
            self.columns = self._first_columns()

    def __len__(self) -> int:
        return max(0, len(self.starts) - 1 - self.csv)

    def row(self, number: int) -> Row:
        if self.csv:
            fields = self._fields(number + 1)
            if len(fields) != len(self.columns):
                raise InputError(f"it has {len(fields)} cells, and the header {len(self.columns)}")
            return dict(zip(self.columns, fields, strict=True))
        try:
            row = json.loads(self._record(number))
        except ValueError as error:
            raise InputError(f"it is not valid JSON ({error})") from None
        if not isinstance(row, dict):
            raise InputError("it is not a JSON object")
        return row

    def close(self) -> None:
        self.file.close()

    def _first_columns(self) -> list[str]:
        """Return the columns of the first rows."""
        rows, errors = [], []
        for number in range(min(NUM_PROBED, len(self))):
            try:
                rows.append(self.row(number))
            except InputError as error:
                errors.append(error)
        if errors and not rows:
            raise errors[0]
        return list(dict.fromkeys(column for row in rows for column in row))

    def _record(self, number: int) -> str:
        start, end = (int(offset) for offset in self.starts[number : number + 2])
        return os.pread(self.file.fileno(), end - start, start).decode("utf-8-sig")

    def _fields(self, number: int) -> list[str]:
        try:
            return next(csv.reader([self._record(number).strip("\r\n")], delimiter=self.delimiter))
        except (csv.Error, UnicodeDecodeError) as error:
            raise InputError(f"it is not valid csv ({error})") from None


def _delimiter(header: bytes) -> str:
    """Return what is between the cells of a header: a comma, or a tab or semicolon if it has no comma."""
    found = [mark for mark in (",", "\t", ";") if mark.encode() in header]
    return found[0] if found else ","


def _record_offsets(file: IO[bytes], delimiter: str) -> np.ndarray:
    """Return the offset of every record that is not blank, and the size of the file.

    Args:
        file: the file.
        delimiter: what is between the cells of csv; empty for lines of another kind.
    """
    starts, end = array("q"), 0

    def lines() -> Iterator[str]:
        nonlocal end
        for line in file:
            end += len(line)
            yield line.decode("latin-1")  # any bytes; records are decoded as UTF-8 when they are read

    records = csv.reader(lines(), delimiter=delimiter) if delimiter else ([line] for line in lines())
    while True:
        start = end
        try:
            cells = next(records, None)
        except csv.Error:  # raised again when this row is read
            cells = ["invalid"]
        if cells is None:
            starts.append(start)
            return np.frombuffer(starts, dtype=np.int64)
        if len(cells) > 1 or (cells and cells[0].strip()):
            starts.append(start)


class ArrayTable:
    """A json file with a list of objects, which is kept in memory."""

    def __init__(self, path: Path) -> None:
        if path.stat().st_size > MAX_ARRAY_BYTES:
            raise InputError(f"a json list may have {MAX_ARRAY_BYTES // 2**20} MiB; write it as jsonl")
        try:
            self.rows = json.loads(path.read_text(encoding="utf-8-sig"))
        except ValueError as error:
            raise InputError(f"it is not valid JSON ({error})") from None
        if not isinstance(self.rows, list) or not all(isinstance(row, dict) for row in self.rows):
            raise InputError("it is not a list of objects")
        self.columns: Sequence[str] = list(dict.fromkeys(column for row in self.rows for column in row))

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, number: int) -> Row:
        return self.rows[number]

    def close(self) -> None:
        """Do nothing."""


class ParquetTable:
    """A parquet file, read row group by row group; only the columns in `wanted`."""

    def __init__(self, path: Path) -> None:
        try:
            from pyarrow import ArrowException
            from pyarrow.parquet import ParquetFile
        except ImportError:
            raise ConfigError(f"Reading {str(path)!r} requires pyarrow: {pip_install('data')}.") from None
        try:
            self.file = ParquetFile(path, memory_map=True)
        except (ArrowException, OSError) as error:
            raise ConfigError(
                f"{str(path)!r} is not a parquet file ({str(error).splitlines()[0]})."
            ) from None
        self.damage = ArrowException
        self.columns: Sequence[str] = self.file.schema_arrow.names
        self.wanted: list[str] = list(self.columns)
        groups = (self.file.metadata.row_group(i).num_rows for i in range(self.file.num_row_groups))
        self.starts = np.cumsum([0, *groups])
        self.lock = threading.Lock()
        self.group = lru_cache(maxsize=2)(self._group)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def row(self, number: int) -> Row:
        group = int(np.searchsorted(self.starts, number, side="right")) - 1
        try:
            with self.lock:
                table = self.group(group)
        except (self.damage, OSError) as error:
            raise InputError(f"its part of the file is damaged ({str(error).splitlines()[0]})") from None
        return table.slice(number - int(self.starts[group]), 1).to_pylist()[0]

    def close(self) -> None:
        self.file.close()

    def _group(self, number: int) -> Any:
        return self.file.read_row_group(number, columns=self.wanted)


class FolderTable:
    """A folder without a table: a row for each video below it, and for each folder of numbered images.

    Their text is in a file beside them, `walk.txt` for `walk.mp4` or the folder `walk`.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.videos = path, sorted(_videos_below(path))
        texts = any(self._text_file(video).is_file() for video in self.videos)
        self.columns: Sequence[str] = ["video", "text"] if texts else ["video"]

    def __len__(self) -> int:
        return len(self.videos)

    def row(self, number: int) -> Row:
        video = self.videos[number]
        try:
            text = self._text_file(video).read_text(encoding="utf-8-sig").strip()
        except OSError:
            text = ""
        except UnicodeDecodeError as error:
            raise InputError(f"its text {self._text_file(video).name!r} is not UTF-8 ({error})") from None
        return {"video": video, **({"text": text} if text else {})}

    def close(self) -> None:
        """Do nothing."""

    def _text_file(self, video: str) -> Path:
        path = self.path / video
        return path.with_name(path.name + ".txt") if path.is_dir() else path.with_suffix(".txt")


def _videos_below(folder: Path) -> Iterator[str]:
    """Yield the paths of videos and of folders of numbered images, relative to a folder."""
    for inner, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        here = os.path.relpath(inner, folder)
        if is_sequence(files):
            yield here
        for name in files:
            if name.lower().endswith(VIDEO_SUFFIXES) and not name.startswith("."):
                yield os.path.normpath(os.path.join(here, name))


KINDS = {
    ".csv": LineTable,
    ".tsv": LineTable,
    ".jsonl": LineTable,
    ".json": ArrayTable,
    ".parquet": ParquetTable,
}


def is_table(path: str | Path) -> bool:
    """Return whether a path ends as that of a table does."""
    path = Path(path)
    return (Path(path.stem) if path.suffix in PACKED else path).suffix in KINDS


def open_table(path: str | Path) -> Table:
    """Open a table by its suffix, or the videos in a folder; one in .gz is unpacked into the user's cache.

    Raises:
        ConfigError: the file does not exist, has another suffix, or cannot be read.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        videos = FolderTable(path)
        if not len(videos):
            raise ConfigError(
                f"The folder {str(path)!r} has no videos and no numbered images; check the path."
            )
        return videos
    if not path.is_file():
        raise ConfigError(f"There is no table {str(path)!r}; check the path.")
    if not is_table(path):
        raise ConfigError(
            f"The table {str(path)!r} does not end in one of {', '.join(KINDS)}, or that and .gz."
        )
    try:
        opened = Path(unpacked(str(path)))
        kind = KINDS[opened.suffix]
        if kind is ArrayTable and not _is_list(opened):  # lines of objects, as c4 has
            kind = LineTable
        table = kind(opened)
    except (OSError, EOFError, InputError) as error:
        raise ConfigError(f"The table {str(path)!r} cannot be read: {error}.") from None
    if not len(table):
        raise ConfigError(f"The table {str(path)!r} has no rows.")
    return table


def first_rows(table: Rows, count: int) -> Iterator[Row]:
    """Yield the rows among the first ones that can be read."""
    for number in range(min(count, len(table))):
        with suppress(InputError):
            yield table.row(number)


def _is_list(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(1024).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


class TableSource:
    """Clips in the rows of a table; every row is one clip, or several with some presets.

    Raises:
        ConfigError: the table, a column or a row's action is wrong, the model does not take the actions of
            the recording, or none of the checked rows has its video.
    """

    streams = 0

    def __init__(self, name: str, data: DataConfig, model: WorldModelConfig) -> None:
        config = data.sources[name]
        self.key, self.format = f"data.sources.{name}", RoundFormat.of(model)
        self.table = open_table(config.path)
        self.path = path = Path(config.path).expanduser()
        self.label = path.name
        root = config.video_root
        if not root.is_dir():
            raise ConfigError(f"{self.key}.root is {str(root)!r}, which is not a folder.")
        root = os.path.abspath(root)
        specs, _ = read_recording(root) or ((), 0)
        rate = max((spec.rate for spec in specs), default=0.0)
        named = replace(config, numbers=vector_names(self.key, specs, config.numbers, model.action))
        self.reader = RowReader(name, named, self.table.columns, self.format, model.action, root, rate)
        stated = renamed(specs, config.numbers)
        check_specs(self.key, [spec for spec in stated if spec.field in self.reader.columns], model)
        if isinstance(self.table, ParquetTable):
            self.table.wanted = self.reader.needed
        self.tasks = self.reader.tasks
        self.starts: np.ndarray | None = None  # index of every row's first clip, where rows have several
        if self.reader.preset and self.reader.preset.segments:
            self.starts = indexed(path, f"clips-{self.reader.preset.segments}", self._first_clips)
        self.size = int(self.starts[-1]) if self.starts is not None else len(self.table)
        self._probe()

    def at(self, index: int) -> Clip | BrokenClip:
        number, part = index % self.size, 0
        if self.starts is not None:
            row = int(np.searchsorted(self.starts, number, side="right")) - 1
            number, part = row, number - int(self.starts[row])
        name = f"{self.label} row {number + 1}"
        try:
            return self.reader.clip(self.table.row(number), name, part)
        except InputError as error:
            return BrokenClip(name, str(error))

    def cost(self, index: int, rounds: int) -> float:
        """Return the number of rounds of an episode, where the table has the end of its clip."""
        if self.starts is None and "end" not in self.reader.columns:
            return rounds
        clip = self.at(index)
        if isinstance(clip, BrokenClip) or clip.end is None:
            return rounds
        frames = int((clip.end - clip.start) * self.format.fps + 1e-3)
        return max(1, min(rounds, (frames - 1) // self.format.chunk))

    def frame_sizes(self) -> np.ndarray:
        """Return height and width of the frames of every clip, `[n, 2]`; 0 where its file cannot be read.

        The first frame of every file is decoded; those of a large table are remembered with its index.
        """
        return indexed(self.path, "sizes", self._frame_sizes)

    def _frame_sizes(self) -> np.ndarray:
        with ThreadPoolExecutor(NUM_READERS) as pool:
            return np.array(list(pool.map(self._frame_size, range(self.size))), dtype=np.int64)

    def _frame_size(self, index: int) -> tuple[int, int]:
        clip = self.at(index)
        with suppress(InputError):
            if isinstance(clip, Clip) and isinstance(clip.video, Files):
                return media.frame_size(clip.video.read())
            if isinstance(clip, Clip) and isinstance(clip.video, ImageFolder):
                image = media.probe(clip.video.files([0])[0], decode=False)
                return image.height, image.width
        return 0, 0

    def _first_clips(self) -> np.ndarray:
        """Return the index of every row's first clip, and the number of clips."""
        counts = np.fromiter(map(self._clips_in, range(len(self.table))), np.int64, len(self.table))
        return np.concatenate([[0], np.cumsum(counts)])

    def _clips_in(self, row: int) -> int:
        """Count the clips of a row; one that cannot be read is one bad clip."""
        try:
            return max(1, self.reader.clips_in(self.table.row(row)))
        except InputError:
            return 1

    def close(self) -> None:
        self.table.close()

    def _probe(self) -> None:
        """Check some of the rows, spread over the table: an error in the actions of one is in many.

        The other rows are checked when they are read; one that is wrong is a bad clip.
        """
        for number in _spread(len(self.table)) if self.reader.has_actions else ():
            try:
                self.reader.tracks(self.table.row(number))
            except InputError as error:
                raise ConfigError(f"{self.key}: {self.label} row {number + 1}: {error}.") from None
        problems, indices = [], _spread(self.size)
        for index in indices:
            clip = self.at(index)
            try:
                if isinstance(clip, BrokenClip):
                    raise InputError(clip.reason)
                if isinstance(clip.video, Files):
                    clip.video.read()
                elif isinstance(clip.video, ImageFolder):
                    clip.video.images()
            except InputError as error:
                problems.append(f"{clip.name}: {error}")
        if len(problems) == len(indices):
            raise ConfigError(f"{self.key}: of {len(indices)} checked rows, none can be used; {problems[0]}.")


def _spread(size: int) -> list[int]:
    """Return `NUM_PROBED` indices, spread over a range."""
    return np.unique(np.linspace(0, size - 1, NUM_PROBED).astype(int)).tolist()
