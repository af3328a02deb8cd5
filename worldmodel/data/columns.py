"""Reading of clips from the rows of a table.

Columns that a source may name (`data.sources.NAME.columns`), all but `video` optional:

video   path of the file relative to `root`, with or without its extension, or of a folder of numbered images;
        or a URL, whose file is looked up under `root` by the row's name and by the last part of the URL.
        Nothing is downloaded.
text    one sentence for the whole clip, or a list with one per action; of captions `{"idx": i, "content": …}`
        of key frames (ShareGPT4Video) the one of the whole clip, whose `idx` is -1.
question, answer   what may be asked about the frames, and the answer, both in the forms of `text`.
keys    keys held: `left+up`, or a list of names, for the whole clip; a list of such lists has one per action.
vector, mouse   a list of numbers for the whole clip; a list of lists has one per action.
camera  `{"mode": "velocity", "data": {"translation": [x, y, z], "rotation": [x, y, z, w]}}`, the motion in
        every action (`worldmodel.actions.Camera`), or a list with one per action. With the mode `target` a
        list has the pose of the camera at the end of every entry, relative to that at the start of the clip.
        Or the path of an npz or npy file with the pose at every frame of the clip (see poses.py).
fps     frames per second of the images of a folder, and of poses in a file; by default those of the model.
rewards, terminated   a list with the reward of every action (or of every step of a recording, see
        recording.json), and whether an episode ended with the last of them.
start, end   the part of the file that is the clip, in seconds or as h:mm:ss; later ends are the file's end.
name    name of the clip in messages.

Lists are JSON where a cell can only hold text. Instead of one value per action, a list may give the interval
of each value, in seconds after the start of the clip: `[{"start": 0, "end": 1.5, "text": "she waves"}, ...]`,
with the column's own field in place of `text`; the frame at `start` is the last before the action is visible.
Actions without a value are the null action. A round has one action, or `model.action.per_round` of them. A
list with one per action has one for each of the clip's rounds; one for the frames after them is left out.
"""

import ast
import json
import math
import os
import re
import reprlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote, urlsplit

from worldmodel.actions import action_kinds, control_kinds
from worldmodel.actions.kind import ActionKind
from worldmodel.actions.text import TextKind
from worldmodel.actions.track import Track
from worldmodel.config import ActionConfig, SourceConfig
from worldmodel.data.clips import Clip, Files, Outcomes, RoundFormat
from worldmodel.data.files import inside
from worldmodel.data.footage import ImageFolder
from worldmodel.data.poses import SUFFIXES, read_poses
from worldmodel.data.recording import vector_names
from worldmodel.errors import ConfigError, InputError, did_you_mean

ASKED = ("question", "answer")
CAPTIONED = {"idx", "content"}
"""Fields of a caption of a key frame."""
OUTCOME = ("rewards", "terminated")
Row = Mapping[str, Any]


def source_fields() -> tuple[str, ...]:
    """Return the fields of a source for which a column can be named, but rewards and ends of episodes."""
    return ("video", *(kind.name for kind in action_kinds()), *ASKED, "start", "end", "fps", "name")


def own_columns(offered: Collection[str], takes: ActionConfig) -> dict[str, str]:
    """Return the columns of a table that have the names of fields, but actions that a model does not take.

    A question without its answer, or an answer without its question, is left out.
    """
    untaken = {name for name, taken in takes.takes.items() if not taken}
    left_out = untaken if {*ASKED} <= {*offered} else untaken | {*ASKED}
    return {field: field for field in source_fields() if field in offered and field not in left_out}


@dataclass(frozen=True)
class Preset:
    """The columns of a published table."""

    columns: dict[str, str]
    files: tuple[str, ...]
    """Candidate paths of a row's file under the root, without extension."""
    segments: str = ""
    """Column with start and end of several clips per row, or of one; the text column has a text for each."""
    numbered: bool = False
    """Whether the names of rows end in a number that those of their files lack: `NAME_12` of `NAME.mp4`."""
    address: str = ""
    """Column of the addresses from which files are fetched (`worldmodel flow`)."""
    marks: tuple[str, ...] = ()
    """Further columns by which the table is recognised."""
    ends: tuple[str, str] | None = None
    """Columns of the names of the first and the last image of a clip, whose video is a folder."""
    fps: float = 0.0
    """Frames per second of images, if the table has no column of them."""

    @property
    def needed(self) -> set[str]:
        """Columns by which the table is recognised."""
        return {
            *self.columns.values(),
            self.address,
            *self.marks,
            *(self.ends or ()),
            *filter(None, [self.segments]),
        } - {""}


PRESETS = {
    "webvid": Preset(
        {"text": "name", "name": "videoid"}, ("{page_dir}/{videoid}", "{videoid}"), address="contentUrl"
    ),
    "panda70m": Preset(
        {"text": "caption", "name": "videoID"}, ("{videoID}",), segments="timestamp", address="url"
    ),
    "koala36m": Preset(
        {"text": "caption", "name": "videoID"},
        ("{videoID}",),
        segments="timestamp",
        numbered=True,
        address="url",
    ),
    "openvid": Preset(
        {"text": "caption", "name": "video"},
        ("{video}",),
        address="video",
        marks=("aesthetic score", "motion score"),
    ),
    "opendv": Preset({"video": "folder", "text": "blip"}, (), ends=("first_frame", "last_frame"), fps=10.0),
}


class RowReader:
    """Reads clips from the rows of a table.

    Args:
        source: name of the source, for messages.
        offered: columns of the table.
        root: folder of the videos; None where rows contain their videos.
        rate: rewards per second; 0: one for each action of the model.

    Raises:
        ConfigError: a column or a preset does not exist, or the model does not take such actions.
    """

    def __init__(
        self,
        source: str,
        config: SourceConfig,
        offered: Sequence[str],
        format: RoundFormat,
        action: ActionConfig,
        root: str | None = None,
        rate: float = 0.0,
    ) -> None:
        key = f"data.sources.{source}"
        if config.preset and config.preset not in PRESETS:
            raise ConfigError(f"{key}.preset is {config.preset!r}; use {', '.join(PRESETS)}.")
        self.preset = PRESETS[config.preset] if config.preset else None
        self.columns = {**(self.preset.columns if self.preset else {}), **config.columns}
        for field, column in self.columns.items():
            if field not in (known := (*source_fields(), *OUTCOME)):
                raise ConfigError(f"{key}.columns has {field!r}; the fields are {', '.join(known)}.")
            check_column(f"{key}.columns.{field}", column, offered)
        for pair in (ASKED, OUTCOME):
            if len(set(pair) & set(self.columns)) == 1:
                raise ConfigError(
                    f"{key}.columns names only one of {' and '.join(pair)}; name both or neither."
                )
        for field, taken in action.takes.items():
            if field in self.columns and not taken:
                raise ConfigError(
                    f"{key}.columns names {field}, but the model takes no {field} (model.action); "
                    "remove it, or enable it in the model."
                )
        if root is not None and "video" not in self.columns and self.preset is None:
            raise ConfigError(
                f"{key}.columns must name the column of the video: one of {', '.join(offered)}."
            )
        self.format, self.action, self.root = format, action, root
        self.names = vector_names(key, (), config.numbers, action)
        self.rate = rate or format.fps / format.action_frames
        self.has_actions = any(kind.name in self.columns for kind in control_kinds())

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that clips of the table can have, `rounds` first."""
        texts = ("imagine", "describe") if "text" in self.columns else ()
        acted = ("inverse",) if self.has_actions or "text" in self.columns else ()
        return ("rounds", *texts, *acted, *(("ask",) if ASKED[0] in self.columns else ()))

    @property
    def still_tasks(self) -> tuple[str, ...]:
        """The tasks that rows with one image in place of a video can have."""
        return tuple(task for task in self.tasks if task not in ("rounds", "inverse"))

    @property
    def needed(self) -> list[str]:
        """The columns that are read."""
        files = {column for column in (self.preset.files if self.preset else ()) for column in _names(column)}
        others = {self.preset.segments, *(self.preset.ends or ())} - {""} if self.preset else set()
        return sorted({*self.columns.values(), *files, *others})

    def clips_in(self, row: Row) -> int:
        """Count the clips of a row."""
        if self.preset is None or not self.preset.segments:
            return 1
        return count_segments(row, self.preset.segments)

    def clip(self, row: Row, name: str, part: int = 0, video: Any = None) -> Clip:
        """Return one clip of a row.

        Args:
            row: the table's row.
            name: name of the row, for messages.
            part: index among the clips of the row.
            video: its frames, if they are not in a file that the row names.

        Raises:
            InputError: a cell cannot be read, or the model does not take its action.
        """
        label = self._cell(row, "name") or self._cell(row, "video")
        name = f"{name} ({label})" if isinstance(label, str | int) else name
        start, end = parse_seconds(self._cell(row, "start")), parse_seconds(self._cell(row, "end"))
        tracks: dict[str, Any] = {**self.tracks(row)}
        if self.preset and self.preset.segments:
            (start, end), text = parse_segment(row[self.preset.segments], self._cell(row, "text"), part)
            name, tracks["text"] = f"{name}, clip {part + 1}", Track((text,))
        start = start or 0.0
        if end is not None and not start < end:
            raise InputError(f"it ends at {end:g} s, which is not after its start at {start:g} s")
        files, outcomes = video or self._files(row), self._outcomes(row)
        if isinstance(files, Files) and self.root and os.path.isdir(files.paths[0]):
            named = self.preset.ends if self.preset else None
            ends = (str(row[named[0]]), str(row[named[1]])) if named else None
            files = ImageFolder(files.paths[0], self._fps(row), start, end, ends)
            start, end = 0.0, None
        shared = {field: tracks.pop(field) for field in ("text", *ASKED)}
        return Clip(
            name, files, self.format, **shared, controls=tracks, outcomes=outcomes, start=start, end=end
        )

    def tracks(self, row: Row) -> dict[str, Track]:
        """Return the text, actions, questions and answers of a row.

        Raises:
            InputError: as `clip`.
        """
        tracks = {}
        for kind in action_kinds():
            cell = self._cell(row, kind.name)
            if kind.name == "camera" and isinstance(cell, str) and cell.endswith(SUFFIXES):
                if self.root is None:
                    raise InputError(f"its camera {cell!r} is a file, which only tables of clips can name")
                cell = read_poses(inside(self.root, cell), self._fps(row))
            track = cell if isinstance(cell, Track) else track_of(cell, kind)
            try:
                tracks[kind.name] = track = self._taken(track, kind)
            except InputError as error:
                raise InputError(_clause(error)) from None
            kind.check_track(track)
        asked = {field: track_of(self._cell(row, field), QUESTION, field) for field in ASKED}
        return tracks | asked

    def _taken(self, track: Track, kind: ActionKind) -> Track:
        """Return values as the model takes them, each of which is checked once."""
        settings, checked = self.action.kinds.get(kind.name), dict[Any, Any]()
        for value in track.values:
            if value in checked:
                continue
            checked[value] = value
            if not kind.is_absent(value):
                checked[value] = kind.arranged(value, self.names, settings) if self.names else value
                kind.check(checked[value], settings)
        return replace(track, values=tuple(checked[value] for value in track.values))

    def _fps(self, row: Row) -> float:
        """Return the frames per second of a row's images and poses."""
        stated = self._cell(row, "fps")
        if stated is None:
            return (self.preset.fps if self.preset else 0.0) or float(self.format.fps)
        try:
            fps = float(stated)
        except (TypeError, ValueError):
            fps = math.nan
        if not 0 < fps < math.inf:
            raise InputError(f"its fps is {stated!r}, which is not a positive number")
        return fps

    def _outcomes(self, row: Row) -> Outcomes | None:
        """Return the rewards of a row, and whether its episode ended with the last, if it has both."""
        rewards, ended = (self._cell(row, field) for field in OUTCOME)
        if rewards is None or ended is None:
            return None
        try:  # csv: both are text
            known = tuple(map(float, json.loads(rewards) if isinstance(rewards, str) else rewards))
            last = json.loads(ended.lower()) if isinstance(ended, str) else ended
        except (TypeError, ValueError):
            raise InputError(
                f"its rewards {reprlib.repr(rewards)} are not a list of numbers, or its terminated {ended!r} "
                "is neither true nor false"
            ) from None
        ends = (*(False for _ in known[1:]), bool(last)) if known else ()
        return Outcomes(known, ends, self.rate)

    def _cell(self, row: Row, field: str) -> Any:
        value = row.get(self.columns.get(field, ""))
        return None if value == "" else value

    def _files(self, row: Row) -> Files:
        assert self.root is not None
        if "video" not in self.columns and self.preset:
            found = [pattern.format_map(row) for pattern in self.preset.files]
            if self.preset.numbered:
                found = [re.sub(r"_\d+$", "", each) for each in found]
        else:
            video = str(self._cell(row, "video") or "")
            if not video:
                raise InputError("it names no video")
            found = [video]
            if "://" in video:
                name = self._cell(row, "name")
                last = os.path.basename(unquote(urlsplit(video).path))
                found = [last] if name is None else [str(name), last]
        return Files(tuple(inside(self.root, path) for path in found))


def check_column(key: str, column: str, offered: Sequence[str]) -> None:
    """Check that a table has a column.

    Raises:
        ConfigError: it has not; the message names the setting `key` and the nearest name.
    """
    if column not in offered:
        raise ConfigError(
            f"{key} is {column!r}, which is not a column of the table{did_you_mean(column, offered)}; it has "
            f"{', '.join(offered)}."
        )


QUESTION = TextKind()
"""The form of questions and answers, which are texts and no actions."""


def track_of(value: Any, kind: ActionKind, field: str = "") -> Track:
    """Read a cell of a column of actions, questions or answers; see the module for its forms.

    Args:
        value: the cell.
        kind: the kind of its values.
        field: name of the field; by default that of the kind.

    Raises:
        InputError: it has none of these forms.
    """
    field = field or kind.name
    if isinstance(value, str) and value.lstrip().startswith(("[", "{") if kind.is_object else "["):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            if not kind.is_language:  # a sentence may begin with a bracket
                raise InputError(f"its {field} {value!r} are not valid JSON") from None
    if value is None or value == []:
        return Track()
    if not isinstance(value, list | tuple):
        return Track((_value(value, kind),))
    if kind.is_language and all(isinstance(entry, Mapping) and {*entry} == CAPTIONED for entry in value):
        whole = [entry["content"] for entry in value if str(entry["idx"]) == "-1"]
        if len(whole) != 1:
            raise InputError(f"its {field} have {len(whole)} entries with idx -1, which is the whole clip")
        return Track((_value(whole[0], kind),))
    # An object without the fields that a value must have is an interval with a value in it.
    needed = set(kind.schema.get("required", ())) if kind.is_object else set()
    if all(isinstance(entry, Mapping) and not needed & set(entry) for entry in value):
        try:
            times = tuple((float(entry["start"]), float(entry["end"])) for entry in value)
        except (KeyError, TypeError, ValueError):
            raise InputError(f"its {field} have an entry without start and end in seconds") from None
        if not all(start <= end < math.inf for start, end in times):  # also if one is not a number
            raise InputError(f"its {field} have an entry that ends before it starts or does not end")
        return Track(tuple(_value(entry.get(field), kind) for entry in value), times=times)
    if not kind.is_list or any(isinstance(entry, list | tuple) for entry in value):
        return Track(tuple(_value(entry, kind) for entry in value), per_action=True)
    return Track((_value(value, kind),))


def _value(value: Any, kind: ActionKind) -> Any:
    """Read one value."""
    try:
        return kind.parse_cell(value)
    except InputError as error:
        raise InputError(_clause(error)) from None


def _clause(error: InputError) -> str:
    """Return the text of an error as the end of a message about a row."""
    text = str(error).rstrip(".?")
    return text[:1].lower() + text[1:]


def parse_seconds(value: Any) -> float | None:
    """Read a time: seconds, or h:mm:ss.

    Raises:
        InputError: it is neither.
    """
    if value is None:
        return None
    seconds = 0.0
    try:
        for part in str(value).split(":"):
            seconds = seconds * 60 + float(part)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise InputError(f"the time {value!r} is not a number of seconds")
    return seconds


def count_segments(row: Row, column: str) -> int:
    """Count the clips of a row: `[['0:00:08.342', '0:00:20.187'], ...]` as text, or a list; a pair is one.

    Raises:
        InputError: it is neither.
    """
    value = row.get(column)
    if not isinstance(value, str | Sequence):
        raise InputError(f"its {column} is not a list")
    if isinstance(value, str):
        return value.count("[") - 1 or int("," in value)
    return 1 if value and isinstance(value[0], str | float | int) else len(value)


def parse_segment(times: Any, texts: Any, part: int) -> tuple[tuple[float | None, float | None], str]:
    """Return start, end and text of one clip of a row that lists several.

    Raises:
        InputError: the lists cannot be read, or have no such entry.
    """
    try:
        times = ast.literal_eval(times) if isinstance(times, str) else times
        if times and isinstance(times[0], str | float | int):  # one clip, whose text is not a list
            times, texts = [times], [texts]
        texts = ast.literal_eval(texts) if isinstance(texts, str) else texts
        start, end = times[part]
        return (parse_seconds(start), parse_seconds(end)), str(texts[part])
    except (ValueError, SyntaxError, TypeError, IndexError, MemoryError, RecursionError):
        raise InputError("its lists of times and texts cannot be read") from None


def _names(pattern: str) -> list[str]:
    """Return the columns in a pattern such as `{page_dir}/{videoid}`."""
    return [part.split("}")[0] for part in pattern.split("{")[1:]]
