"""Twin futures of a recording: pairs of episodes that are equal up to a moment, then random actions.

They are a recording of their own, in a folder inside of the other, with some steps before the moment.
Episodes 2k and 2k + 1 are a pair. Those of held-out episodes, in `twins`, tell whether a model obeys, and
nothing is trained on them. Those of the other episodes, in `branches`, are training data: a policy seldom
does what a user will try.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from worldmodel.config import SourceConfig

Inside = Literal["twins", "branches"]
FOLDER: Inside = "twins"
BRANCHES: Inside = "branches"
HISTORY: Mapping[Inside, int] = {FOLDER: 16, BRANCHES: 4}
"""Most steps before the moment that are kept."""
STEPS = 12
"""Steps after the moment, unless another number is chosen: whole rounds of two, three or four actions."""


def twins_of(source: SourceConfig, inside: Inside = FOLDER) -> SourceConfig | None:
    """Return the source of the twins, or branches, that were recorded beside a source; None without any."""
    folder = recording_folder(source)
    if folder is None:
        return None
    folder = folder / inside
    if source.kind == "lerobot":
        found = replace(source, path=str(folder), split="all", weight=0.0)
        return found if (folder / "meta" / "info.json").is_file() else None
    table = folder / "clips.jsonl"
    return replace(source, path=str(table), root=str(folder), weight=0.0) if table.is_file() else None


def recording_folder(source: SourceConfig) -> Path | None:
    """Return the folder of a recording on this machine; None for other sources."""
    if source.kind not in ("lerobot", "clips"):
        return None
    path = source.video_root if source.kind == "clips" else Path(source.path).expanduser()
    return path if path.is_dir() else None
