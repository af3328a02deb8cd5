"""Writing of clip tables: one mp4 per episode and camera, and a row of `clips.jsonl` for each episode.

The columns `path`, `text`, `keys`, and those of other kinds that the actions have, are columns of a
data source of kind `clips`; `rewards`, `terminated`, `truncated`, `seed` and `infos` are kept beside them.
"""

import json
import os
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from worldmodel.actions import ActionKind, action_kinds, specs_by_kind
from worldmodel.errors import InputError, OutputError
from worldmodel.io import atomic_file
from worldmodel.media import VideoWriter
from worldmodel.recording.episode import RecordedEpisode, RecordingFormat

TABLE = "clips.jsonl"
SETTINGS = "recording.json"
"""The settings of the recording and the action spec, beside the table."""


class ClipTableStore:
    """A table that is being written; a row is added when its videos are complete.

    Raises:
        OutputError: the folder has a table of other settings, or cannot be written.
    """

    def __init__(self, folder: Path, format: RecordingFormat) -> None:
        self.folder, self.format = folder, format
        self.table = folder / TABLE
        settings = {
            "fps": format.fps,
            "action_spec": [spec.as_dict() for spec in format.specs],
            "recording": format.settings,
        }
        known = folder / SETTINGS
        if known.is_file():
            before = json.loads(known.read_text(encoding="utf-8"))
            if before != json.loads(json.dumps(settings)):
                raise OutputError(
                    f"{str(folder)!r} has a recording of other settings, in {SETTINGS}; choose another "
                    "folder, or the same settings."
                )
        else:
            with atomic_file(known) as temporary:
                temporary.write_text(json.dumps(settings, indent=2), encoding="utf-8")
        self.done = self._complete_rows()

    def _complete_rows(self) -> int:
        """Count the rows, and cut off one that an earlier run did not finish."""
        if not self.table.is_file():
            return 0
        content = self.table.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(self.table, whole)
        return content[:whole].count(b"\n")

    def start(self, num_episodes: int) -> int:
        return self.done

    def write(self, episode: RecordedEpisode) -> None:
        names = {}
        for camera, frames in episode.cameras.items():
            suffix = f"-{camera}" if len(episode.cameras) > 1 else ""
            names[camera] = f"clip-{self.done:05d}{suffix}.mp4"
            with atomic_file(self.folder / names[camera]) as temporary:
                video = VideoWriter(temporary, self.format.fps, *frames.shape[1:3], recording=True)
                try:
                    for frame in frames:
                        video.write(frame)
                finally:
                    video.close()
        self._append(json.dumps(self._row(episode, names)).encode() + b"\n")
        self.done += 1

    def _row(self, episode: RecordedEpisode, names: dict[str, str]) -> dict[str, Any]:
        actions = episode.actions
        seconds = self.format.frames_per_action / self.format.fps
        first, *others = names.values()
        columns: dict[str, Any] = {"path": first}
        columns |= {f"path.{camera}": name for camera, name in list(names.items())[1:] if others}
        # Columns of texts and keys are always there, even if an episode has none.
        kinds = {"text", "keys"} | {kind.name for kind, _ in specs_by_kind(self.format.specs)}
        for kind in action_kinds():
            if kind.name in kinds:
                columns[kind.name] = list(
                    _intervals([action.part(kind.name) for action in actions], kind, seconds)
                )
        columns["text"] = columns["text"] or episode.text
        return columns | {
            "rewards": episode.rewards.tolist(),
            "terminated": episode.terminated,
            "truncated": episode.truncated,
            "seed": episode.seed,
            "infos": list(episode.infos),
        }

    def _append(self, line: bytes) -> None:
        length = self.table.stat().st_size if self.table.is_file() else 0
        try:
            with self.table.open("ab") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            if self.table.is_file():
                os.truncate(self.table, length)
            raise

    def commit(self) -> None:
        """Do nothing: every episode is complete when it is written."""

    def discard(self) -> None:
        """Do nothing: an episode that is not complete has no row."""

    def finish(self) -> None:
        """Check that there is a row.

        Raises:
            InputError: nothing was recorded.
        """
        if not self.done:
            raise InputError(f"No episode was recorded in {str(self.folder)!r}.")


def _intervals(values: list[Any], kind: ActionKind, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield equal neighbours as one interval with its time in seconds; absent values have none."""
    start = 0
    for value, group in groupby(values):
        end = start + len(list(group))
        if value is not None:
            yield {"start": start * seconds, "end": end * seconds, kind.name: kind.plain(value)}
        start = end
