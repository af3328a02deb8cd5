"""Frames that are not in one video file: images in tables, tars and folders, and cameras side by side."""

import io
import math
import os
import re
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from worldmodel import media
from worldmodel.config import height_width
from worldmodel.data.clips import Footage, Part, RoundFormat
from worldmodel.data.files import inside
from worldmodel.errors import InputError
from worldmodel.media.limits import IMAGE_SUFFIXES
from worldmodel.media.shared_video import REMOTE, open_path

MAX_OPEN = 16
"""Row groups of images that a process keeps."""


class Images(ABC):
    """Footage of encoded images, one for each frame."""

    fps: float
    """Frames per second; 0: those of the format."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of the images."""

    @abstractmethod
    def files(self, numbers: Sequence[int]) -> Sequence[bytes | str]:
        """Return the contents, or the paths, of the images of some numbers.

        Raises:
            InputError: a file is missing or damaged, or some images are not there.
        """

    def read(self, format: RoundFormat, first: int, wanted: int) -> np.ndarray:
        count = max(min(wanted, self.length(format) - first), 1)
        step, last = (self.fps or format.fps) / format.fps, len(self) - 1
        rows = [min(int((first + index) * step + 1e-3), last) for index in range(count)]
        numbers = sorted({*rows})  # several times may fall on one image
        pictures = [media.read_image(file, format.size) for file in self.files(numbers)]
        found = dict(zip(numbers, pictures, strict=True))
        return np.stack([found[row] for row in rows])

    def length(self, format: RoundFormat) -> int:
        return int((len(self) - 1) * format.fps / (self.fps or format.fps) + 1e-3) + 1


@dataclass(frozen=True)
class Stills(Images):
    """Images in memory, at the frame rate of the format."""

    frames: tuple[bytes, ...]
    fps: float = 0.0

    def __len__(self) -> int:
        return len(self.frames)

    def files(self, numbers: Sequence[int]) -> list[bytes]:
        return [self.frames[number] for number in numbers]


@dataclass(frozen=True)
class ImageRows(Images):
    """Encoded images in a column of a parquet file, one in each row of an episode."""

    path: str
    column: str
    first_row: int
    num_frames: int
    fps: float
    root: str
    """Folder in which files lie that cells name in place of their bytes."""

    def __len__(self) -> int:
        return self.num_frames

    def files(self, numbers: Sequence[int]) -> list[bytes | str]:
        return [self._file(number) for number in numbers]

    def _file(self, row: int) -> bytes | str:
        cell = _cell(self.path, self.column, self.first_row + row)
        data, path = (cell.get("bytes"), cell.get("path")) if isinstance(cell, Mapping) else (cell, cell)
        if isinstance(data, bytes):
            return data
        if not isinstance(path, str) or self.root.startswith(REMOTE):
            raise InputError(f"its row {row + 1} has no image in {self.column}")
        return inside(os.path.abspath(self.root), path)


def _cell(path: str, column: str, row: int) -> Any:
    """Return a cell; the row groups that were read last are kept."""
    try:
        starts = _starts(path, os.getpid())
        group = int(np.searchsorted(starts, row, side="right")) - 1
        return _group(path, column, group, os.getpid())[row - int(starts[group])].as_py()
    # A missing or damaged parquet file raises many types.
    except Exception as error:
        raise InputError(f"{path!r} cannot be read ({' '.join(str(error).split())})") from None


@lru_cache(maxsize=1024)
def _starts(path: str, process: int) -> np.ndarray:
    """Return the number of each row group's first row, and that of all rows."""
    return np.cumsum([0, *row_groups(path)])


@lru_cache(maxsize=MAX_OPEN)
def _group(path: str, column: str, number: int, process: int) -> Any:
    with _open(path) as file:
        return file.read_row_group(number, columns=[column])[column]


def _open(path: str) -> Any:
    from pyarrow.parquet import ParquetFile

    return ParquetFile(open_path(path) if "://" in path else path, memory_map="://" not in path)


def row_groups(path: str) -> list[int]:
    """Return the number of rows of each row group of a parquet file."""
    with _open(path) as file:
        return [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]


@dataclass(frozen=True)
class TarFrames(Images):
    """Numbered images of one sample in a tar file, of which the range has the first and the last."""

    part: Part
    pattern: re.Pattern[str]
    """Matches what follows the first dot in the name of an image: what is before its number, and that."""
    num_frames: int
    fps: float

    def __len__(self) -> int:
        return self.num_frames

    def files(self, numbers: Sequence[int]) -> list[bytes]:
        images = self.images()
        return [images[min(number, len(images) - 1)] for number in numbers]

    def images(self) -> list[bytes]:
        """Return the files of the images, by their numbers.

        Raises:
            InputError: the file is gone or damaged, or a number is missing among those of the images.
        """
        if self.part.size > (most := media.MediaLimits().max_video_bytes):
            raise InputError(f"its images have more than {most // 2**20} MiB together; divide the clip")
        data, found, key = self.part.read(), dict[int, bytes](), None
        try:
            with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
                for member in tar:
                    path, _, rest = member.name.rpartition("/")[2].partition(".")
                    image = self.pattern.fullmatch(rest.lower()) if member.isreg() else None
                    same = (member.name.rpartition("/")[0], path, image[1]) if image else None
                    key = key or same
                    if image and same == key and int(image[2]) not in found:
                        found[int(image[2])] = data[member.offset_data :][: member.size]
        except tarfile.TarError as error:
            if len(found) < self.num_frames:
                raise InputError(f"its images cannot be read ({error})") from None
        numbers = sorted(found)
        if len({*np.diff(numbers).tolist()}) > 1:
            raise InputError(
                f"it has {len(numbers)} images with numbers from {numbers[0]} to {numbers[-1]}, and some "
                "between them are missing"
            )
        return [found[number] for number in numbers]


@dataclass(frozen=True)
class ImageFolder(Images):
    """Numbered images in a folder."""

    path: str
    fps: float
    start: float = 0.0
    """Seconds before its first frame."""
    end: float | None = None
    """Seconds before the frame after its last."""
    ends: tuple[str, str] | None = None
    """Instead of these, the names of its first and last image."""

    def __len__(self) -> int:
        return len(self.images())

    def files(self, numbers: Sequence[int]) -> list[str]:
        images = self.images()
        return [f"{self.path}/{images[number]}" for number in numbers]

    def images(self) -> list[str]:
        """Return the names of its images, by their numbers.

        Raises:
            InputError: there are none, or a number is missing among them.
        """
        try:
            whole = _numbered(self.path, os.stat(self.path).st_mtime_ns, os.getpid())
        except OSError as error:
            raise InputError(f"{self.path!r} cannot be read ({error.strerror or error})") from None
        if self.ends:
            first, last = (_number(name) for name in self.ends)
            chosen = [each for each in whole if first <= each[0] <= last]
        else:
            end = None if self.end is None else round(self.end * self.fps)
            chosen = list(whole[round(self.start * self.fps) : end])
        if not chosen:
            raise InputError(f"{self.path!r} has no numbered images, or none in this part")
        numbers = [number for number, _ in chosen]
        if len({*np.diff(numbers).tolist()}) > 1:
            raise InputError(
                f"{self.path!r} has {len(numbers)} images with numbers from {numbers[0]} to {numbers[-1]}, "
                "and some between them are missing"
            )
        return [name for _, name in chosen]


@lru_cache(maxsize=256)
def _numbered(path: str, changed_ns: int, process: int) -> tuple[tuple[int, str], ...]:
    """Return the numbers and names of the images in a folder."""
    names = (name for name in os.listdir(path) if Path(name).suffix.lower() in IMAGE_SUFFIXES)
    return tuple(sorted((_number(name), name) for name in names if re.search(r"\d", name)))


def is_sequence(names: Iterable[str]) -> bool:
    """Return whether files in a folder are the frames of a clip: at least two images with numbers."""
    numbered = (Path(name).suffix.lower() in IMAGE_SUFFIXES and re.search(r"\d", name) for name in names)
    return sum(map(bool, numbered)) > 1


def _number(name: str) -> int:
    """Return the last number in a name."""
    numbers = re.findall(r"\d+", Path(name).stem)
    if not numbers:
        raise InputError(f"the image {name!r} has no number in its name")
    return int(numbers[-1])


@dataclass(frozen=True)
class Tiles:
    """Several cameras of one episode in one picture, row by row."""

    parts: tuple[Footage, ...]

    def read(self, format: RoundFormat, first: int, wanted: int) -> np.ndarray:
        # Each frame is scaled to its tile; a place without a camera is black.
        rows, columns = grid(len(self.parts))
        height, width = height_width(format.size)
        tops = np.linspace(0, height, rows + 1).astype(int)
        lefts = np.linspace(0, width, columns + 1).astype(int)
        whole: np.ndarray | None = None
        for number, part in enumerate(self.parts):
            row, column = divmod(number, columns)
            size = int(tops[row + 1] - tops[row]), int(lefts[column + 1] - lefts[column])
            found = part.read(replace(format, size=size), first, wanted)
            if whole is None:
                whole = np.zeros((len(found), height, width, 3), np.uint8)
            count = min(len(whole), len(found))
            whole = whole[:count]
            whole[:, tops[row] : tops[row + 1], lefts[column] : lefts[column + 1]] = found[:count]
        assert whole is not None
        return whole

    def length(self, format: RoundFormat) -> int:
        return min(part.length(format) for part in self.parts)


def grid(count: int) -> tuple[int, int]:
    """Return rows and columns of tiles: two side by side, four in a square."""
    columns = math.ceil(math.sqrt(count))
    return math.ceil(count / columns), columns
