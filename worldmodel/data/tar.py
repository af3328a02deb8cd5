"""WebDataset shards: tar files in which the parts of a sample follow each other under one name.

`kitchen-001.mp4`, `kitchen-001.json` and `kitchen-001.txt` make one clip, and so do numbered images in place
of the video: `kitchen-001.000.jpg`, `kitchen-001.001.jpg`, … The headers are read once, and the index of each
shard is stored (see index_file.py); after that a clip is a seek and a read, in any order. Shards may be at
addresses (https://, s3://), and are then read by byte ranges, while training. Members are not unpacked, and
those of other kinds (`.pyd`, `.pth`, links, …) are never read; a shard that ends in .gz or .tgz is unpacked
as a whole into the user's cache.
"""

import dataclasses
import json
import logging
import math
import os
import re
import tarfile
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import numpy as np

from worldmodel import media
from worldmodel.config import DataConfig, WorldModelConfig
from worldmodel.data.buckets import SET_SIZE
from worldmodel.data.clips import BrokenClip, Clip, Part, RoundFormat
from worldmodel.data.columns import Row, RowReader, own_columns
from worldmodel.data.files import PACKED, find_files, open_file, unpacked
from worldmodel.data.footage import TarFrames
from worldmodel.data.index_file import indexed
from worldmodel.errors import ConfigError, InputError
from worldmodel.media.limits import VIDEO_SUFFIXES

log = logging.getLogger(__name__)
VIDEO, TEXT, JSON, FRAMES = "video", "txt", "json", "frames"
KINDS = {**dict.fromkeys((suffix[1:] for suffix in VIDEO_SUFFIXES), VIDEO), "txt": TEXT, "json": JSON}
IMAGE = re.compile(r"(.*?)(\d+)\.(?:jpe?g|png|webp)")
"""What follows the first dot in the name of an image of a sequence: `000.jpg`, `frame_000.jpg`."""
MAX_TEXT_BYTES = 2**20
NUM_PROBED = 20
"""Clips whose json is read to find its fields."""


class ByteRange(NamedTuple):
    """Range of a member's content in its tar file; the size is 0 if there is none."""

    offset: int = 0
    size: int = 0
    num_images: int = 0
    """Of a sequence, whose range is from the first header to the end of the last image."""


class TarSource:
    """Clips in tar files.

    `data.sources.NAME.columns` maps a clip's fields to fields of the json parts (see columns.py). Fields with
    the same name (`text`, `keys`, `start`, …) need no mapping, and the txt part is the text where the json
    has none. Images are on screen at the frame rate in the field `fps` of the json part, or at the model's.

    Raises:
        ConfigError: no tar file matches, one is damaged, or they hold no video.
    """

    streams = 0

    def __init__(self, name: str, data: DataConfig, model: WorldModelConfig) -> None:
        key, config = f"data.sources.{name}", data.sources[name]
        self.shards = find_shards(config.path)
        if not self.shards:
            raise ConfigError(
                f"{key}.path is {config.path!r}, which matches no file; set it to a tar file, or "
                "to several as data/*.tar or https://host/{000..127}.tar."
            )
        if packed := [path for path in self.shards if path.endswith(PACKED)]:
            log.warning("%s: %d packed shards are unpacked into the cache.", key, len(packed))
        try:
            self.shards = list(map(unpacked, self.shards))
        except (OSError, EOFError, InputError) as error:
            raise ConfigError(f"{key}: a shard of {config.path!r} cannot be unpacked: {error}.") from None
        tables = clip_ranges(self.shards)
        numbers = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        self.ranges = np.column_stack([numbers, np.concatenate(tables)])
        self.size = len(self.ranges)
        if not self.size:
            raise ConfigError(
                f"{key}: no sample of {config.path!r} has a video ({', '.join(KINDS)}) or numbered images."
            )
        self.format = RoundFormat.of(model)
        some = np.unique(np.linspace(0, self.size - 1, NUM_PROBED).astype(int))
        fields: set[str] = set()
        for number in some:
            with suppress(InputError):
                fields.update(self.row(number))
        own = own_columns(fields, model.action)
        if TEXT in fields and model.action.text:
            own = {"text": TEXT, **own}
        columns = {**own, **config.columns}
        self.reader = RowReader(
            name, dataclasses.replace(config, columns=columns), sorted(fields), self.format, model.action
        )
        self.tasks = self.reader.tasks

    def at(self, index: int) -> Clip | BrokenClip:
        number = index % self.size
        video, count = self._part(number), int(self.ranges[number][-1])
        name = f"{os.path.basename(video.path)}/{self._name(video, count > 0)}"
        try:
            row = self.row(number)
            frames = TarFrames(video, IMAGE, count, _rate(row)) if count else video
            return self.reader.clip(row, name, video=frames)
        except InputError as error:
            return BrokenClip(name, str(error))

    def _part(self, number: int) -> Part:
        """Return the range of a clip's video or images."""
        shard, offset, size = (int(x) for x in self.ranges[number][:3])
        return Part(self.shards[shard], offset, size)

    def frame_sizes(self) -> np.ndarray:
        """Return height and width of the frames of every clip, `[n, 2]`; 0 where it cannot be read.

        Every clip is read, once: sizes are stored beside the shards.

        Raises:
            ConfigError: they are at addresses, where reading all clips beforehand would take a whole pass.
        """
        if far := next((path for path in self.shards if "://" in path), None):
            raise ConfigError(
                f"{far!r} is not on this machine, so the sizes of its clips are not known before they are "
                f"read; for data.buckets, {SET_SIZE}."
            )
        return np.concatenate(
            [
                indexed(path, "sizes", partial(self._frame_sizes, shard))
                for shard, path in enumerate(self.shards)
            ]
        )

    def _frame_sizes(self, shard: int) -> np.ndarray:
        return np.array(
            [self._frame_size(row) for row in np.flatnonzero(self.ranges[:, 0] == shard).tolist()],
            dtype=np.int64,
        ).reshape(-1, 2)

    def _frame_size(self, index: int) -> tuple[int, int]:
        clip = self.at(index)
        with suppress(InputError):
            if isinstance(clip, Clip):
                video = clip.video
                file = video.files([0])[0] if isinstance(video, TarFrames) else self._part(index).read()
                found = media.probe(file, decode=False)
                return found.height, found.width
        return 0, 0

    def cost(self, index: int, rounds: int) -> float:
        """Return a constant: the index does not contain the lengths of clips."""
        return rounds

    def close(self) -> None:
        """Do nothing: files are only open while they are read."""

    def __len__(self) -> int:
        return len(self.ranges)

    def row(self, number: int) -> Row:
        """Return the content of a clip's json and txt parts.

        Raises:
            InputError: they cannot be read.
        """
        shard, _, _, *offsets, _ = (int(x) for x in self.ranges[number])
        text, record = (Part(self.shards[shard], *part) for part in (offsets[:2], offsets[2:]))
        if max(text.size, record.size) > MAX_TEXT_BYTES:
            raise InputError(f"its json or txt is larger than {MAX_TEXT_BYTES // 2**20} MiB")
        row = {}
        try:
            if record.size:
                row = json.loads(record.read())
            if text.size:
                row[TEXT] = text.read().decode().strip()
        except ValueError as error:
            raise InputError(f"its json or txt cannot be read ({error})") from None
        if not isinstance(row, dict):
            raise InputError("its json is not an object")
        return row

    def _name(self, part: Part, begins: bool) -> str:
        """Return the name in the header before a part, or with which it begins: its first 100 bytes."""
        header = Part(part.path, part.offset - tarfile.BLOCKSIZE * (not begins), 100)
        try:
            return header.read().split(b"\0")[0].decode(errors="replace")
        except InputError:
            return str(part.offset)


def clip_ranges(shards: Sequence[str]) -> list[np.ndarray]:
    """Return for each shard the offsets and sizes of the video, text and json of its clips, `[n, 7]`.

    The last number is that of the images in place of a video, 0 for a video.

    The processes of a run begin at different shards and find the indexes that others have stored, so that a
    header is read by one of them.

    Raises:
        ConfigError: a shard is not a tar file, or is compressed or cut off.
    """
    rank, size = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    first = len(shards) * rank // max(size, 1)
    order = [(first + index) % len(shards) for index in range(len(shards))]
    passed: Counter[str] = Counter()
    found = {
        number: indexed(shards[number], "clips", partial(_ranges, shards[number], passed)) for number in order
    }
    if passed:  # by those that read the headers: an index does not know
        kinds = ", ".join(f"{count} {what}" for what, count in passed.most_common(5))
        log.warning("In %s%s, what no clip is made of: %s.", shards[0], " …" if shards[1:] else "", kinds)
    return [found[number] for number in range(len(shards))]


def find_shards(pattern: str) -> list[str]:
    """Return the tar files that a path, an address or a pattern names.

    Raises:
        ConfigError: a store cannot be listed.
    """
    try:
        return find_files(pattern)
    except OSError as error:
        raise ConfigError(f"{pattern!r} cannot be listed ({error}).") from None


def _ranges(shard: str, passed: Counter[str]) -> np.ndarray:
    found = array("q")
    for sample in samples(shard, passed):
        frames = sample.get(FRAMES, ByteRange())
        if VIDEO in sample and frames.num_images:
            passed["images beside a video"] += frames.num_images
        elif VIDEO not in sample and not frames.num_images:
            passed["samples without a video"] += 1
            continue
        video = sample.get(VIDEO, frames)
        for part in (video, sample.get(TEXT, ByteRange()), sample.get(JSON, ByteRange())):
            found.extend(part[:2])
        found.append(video.num_images)
    return np.array(found, dtype=np.int64).reshape(-1, 7)


def _rate(row: Row) -> float:
    """Return the frame rate that a json part states; 0 if it states none."""
    fps = row.get("fps", 0.0)
    if not isinstance(fps, int | float) or not 0 <= fps < math.inf:
        raise InputError(f"its fps is {fps!r}, which is not a number of 0 or more")
    return float(fps)


def samples(path: str, passed: Counter[str] | None = None) -> Iterator[dict[str, ByteRange]]:
    """Yield the byte ranges of every sample of a tar file, by kind; of one at an address, headers are read.

    The parts of a sample have its name, and need not follow each other. A second part of a kind, or a second
    image of a number, begins another sample of that name.

    Args:
        path: the file.
        passed: gets the number of members of other kinds.

    Raises:
        ConfigError: it is not a tar file, or is compressed or cut off.
    """
    found: list[dict[str, ByteRange]] = []
    named: dict[tuple[str, str], dict[str, ByteRange]] = {}
    images: dict[tuple[str, str], tuple[str, set[int]]] = {}  # what is before their numbers, and those
    passed = Counter() if passed is None else passed
    try:
        with open_file(path) as (file, whole), tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                tar.members = []  # type: ignore[attr-defined] # otherwise it keeps all of them
                if not member.isreg():
                    passed["links and devices"] += not member.isdir()
                    continue
                if member.offset_data + member.size > whole:
                    raise ConfigError(
                        f"The tar file {path!r} is cut off in {member.name!r}; download it again."
                    )
                folder, file = os.path.split(member.name)
                stem, _, extension = file.partition(".")
                if not stem:  # a hidden file, such as the one that macOS adds for each
                    continue
                image = IMAGE.fullmatch(extension.lower())
                kind = FRAMES if image else KINDS.get(extension.lower())
                if kind is None:
                    passed[f"members .{extension}" if extension else "members without extension"] += 1
                    continue
                key = folder, stem
                before, numbers = images.get(key, ("", set[int]()))
                parts = named.get(key)
                known = image is not None and image[1] == before and int(image[2]) in numbers
                if parts is None or known or (kind in parts and not image):
                    parts, numbers = {}, set()
                    named[key] = parts
                    found.append(parts)
                    images.pop(key, None)
                if not image:
                    parts[kind] = ByteRange(member.offset_data, member.size)
                elif numbers and image[1] != before:
                    passed["images of another sequence"] += 1
                else:
                    first = parts.get(FRAMES, ByteRange(member.offset))
                    end = member.offset_data + member.size
                    parts[FRAMES] = ByteRange(first.offset, end - first.offset, first.num_images + 1)
                    numbers.add(int(image[2]))
                    images[key] = image[1], numbers
    except (tarfile.TarError, OSError) as error:
        raise ConfigError(
            f"{path!r} cannot be read as a tar file ({error}); a packed one must end in .tar.gz."
        ) from None
    yield from found
