"""The index of a LeRobot dataset: where each episode is, in the layouts of versions 2.0, 2.1 and 3.0.

A dataset may state another version than that of its files, as some do after a conversion: the files decide.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from worldmodel.errors import ConfigError
from worldmodel.media.shared_video import REMOTE, open_path


@dataclass(frozen=True)
class Footage:
    """Where the frames of an episode from one camera are: in a video, or in the rows of its data file."""

    path: str
    start: float = 0.0
    end: float = 0.0
    """Seconds of the video; 0 of rows."""
    column: str = ""
    """Column of encoded images; empty for a video."""


@dataclass(frozen=True)
class LeRobotEpisode:
    """Where an episode is."""

    index: int
    data_path: str
    first_row: int
    num_rows: int
    footage: tuple[Footage, ...]
    """Of each camera that is read."""
    broken: str = ""
    """Why it cannot be read."""


class Files:
    """The files of a dataset in a folder or on the Hub."""

    def __init__(self, root: str) -> None:
        self.root = root

    def open(self, path: str) -> Any:
        """Open a file of the dataset.

        Raises:
            OSError: there is none.
        """
        return open_path(f"{self.root}/{path}")

    def table(self, path: str, columns: list[str] | None = None) -> Any:
        """Return a parquet file, or some of its columns."""
        from pyarrow import parquet

        with self.open(path) as file:
            return parquet.read_table(file, columns=columns)

    def lines(self, path: str) -> list[dict[str, Any]]:
        """Return the objects of a jsonl file."""
        with self.open(path) as file:
            return [json.loads(line) for line in file if line.strip()]

    def matching(self, folder: str) -> list[str]:
        """Return the parquet files in the folders inside a folder, sorted."""
        if not self.root.startswith(REMOTE):
            paths = sorted(Path(self.root, folder).glob("*/*.parquet"))
            return [path.relative_to(self.root).as_posix() for path in paths]
        import fsspec

        files, _ = fsspec.core.url_to_fs(self.root)
        found = files.glob(f"{self.root.removeprefix(REMOTE)}/{folder}/*/*.parquet")
        return sorted(path[path.index(f"{folder}/") :] for path in found)


def read_episodes(files: Files, info: Mapping[str, Any], cameras: Sequence[str]) -> list[LeRobotEpisode]:
    """Return the episodes of a dataset, by their index.

    Args:
        files: its files.
        info: `meta/info.json`.
        cameras: features whose frames are wanted.

    Raises:
        OSError: an index file is missing.
        KeyError: a column of it is.
        ValueError: it names a file outside of the dataset, or an episode twice.
    """
    newer = "{file_index" in str(info["data_path"])
    rows = _rows_of_files(files, info, cameras) if newer else files.lines("meta/episodes.jsonl")
    # `info.json` is written last: rows beyond its total are of a recording that was interrupted.
    rows = sorted(rows, key=lambda row: row["episode_index"])[: int(info["total_episodes"])]
    owners = [int(row["episode_index"]) for row in rows]
    twice = next((one for one, two in pairwise(owners) if one == two), None)
    if twice is not None:
        raise ValueError(f"episode {twice} is in meta/episodes twice")
    videos, size = _videos(info, cameras), int(info.get("chunks_size") or 1000)
    first: dict[str, int] = {}
    episodes = []
    for row in rows:
        number, stated = int(row["episode_index"]), row.values() if newer else [row["length"]]
        if not all(isinstance(each, int | float) and math.isfinite(each) for each in stated):
            broken = "meta/episodes does not say where it is (NaN or null); merge or convert it again"
            episodes.append(LeRobotEpisode(number, "", 0, 0, (), broken))
            continue
        length = int(row["length"])
        if newer:  # a file holds several episodes (version 3.0)
            places = {name: row[f"data/{name}"] for name in ("chunk_index", "file_index")}
        else:
            places = {"episode_index": number, "episode_chunk": number // size}
        data = _place(info["data_path"], places)
        # Rows of an episode are counted over the dataset: the first episode of a file gives the offset.
        start = int(row["dataset_from_index"]) if newer else 0
        first_row = start - first.setdefault(data, start)
        footage = []
        for camera in cameras:
            if camera not in videos:
                footage.append(Footage(data, column=camera))
                continue
            times = 0.0, length / float(info["fps"])
            if newer:
                own = f"videos/{camera}"
                places = {name: row[f"{own}/{name}"] for name in ("chunk_index", "file_index")}
                times = row[f"{own}/from_timestamp"], row[f"{own}/to_timestamp"]
            path = _place(info["video_path"], {**places, "video_key": camera})
            footage.append(Footage(f"{files.root}/{path}", *times))
        episodes.append(LeRobotEpisode(number, data, first_row, length, tuple(footage)))
    return episodes


def _rows_of_files(files: Files, info: Mapping[str, Any], cameras: Sequence[str]) -> list[dict[str, Any]]:
    columns = ["episode_index", "length", "data/chunk_index", "data/file_index", "dataset_from_index"]
    for camera in _videos(info, cameras):
        names = ("chunk_index", "file_index", "from_timestamp", "to_timestamp")
        columns += [f"videos/{camera}/{name}" for name in names]
    paths = files.matching("meta/episodes")
    if not paths:
        raise ConfigError(
            "a LeRobot dataset of version 3 has meta/episodes/*/*.parquet, and this one has none; "
            "download it again."
        )
    return [row for path in paths for row in files.table(path, columns).to_pylist()]


def _videos(info: Mapping[str, Any], cameras: Sequence[str]) -> list[str]:
    return [camera for camera in cameras if info["features"][camera]["dtype"] == "video"]


def _place(pattern: str, places: Mapping[str, Any]) -> str:
    path = pattern.format_map(places)
    if os.path.isabs(path) or ".." in path.split("/"):
        raise ValueError(f"its path {pattern!r} leaves the folder")
    return path


def read_tasks(files: Files, name: str = "task") -> dict[int, str]:
    """Return sentences by their number: tasks, or of another name, such as subtasks.

    Raises:
        OSError: it has none.
    """
    try:
        table = files.table(f"meta/{name}s.parquet")
    except OSError:
        rows = files.lines(f"meta/{name}s.jsonl")
        return {int(row[f"{name}_index"]): str(row[name]) for row in rows}
    column = next(each for each in table.column_names if each != f"{name}_index")
    numbers = table[f"{name}_index"].to_pylist()
    return dict(zip(numbers, map(str, table[column].to_pylist()), strict=True))
