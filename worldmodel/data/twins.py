"""Twin futures of a recording: pairs of episodes that are equal up to a moment, then other actions.

They are a recording of their own, in the folder `twins` inside of the other, with up to `HISTORY` steps
before the moment. Episodes 2k and 2k + 1 are a pair, which goes on from a held-out episode of the other. No
source reads that folder unless it is named, so nothing is trained on them.
"""

from dataclasses import replace
from pathlib import Path

from worldmodel.config import SourceConfig

FOLDER = "twins"
HISTORY = 16
"""Most steps before the moment that are kept."""
STEPS = 10
"""Steps after the moment, unless another number is chosen."""


def twins_of(source: SourceConfig) -> SourceConfig | None:
    """Return the source of the twins that were recorded beside a source; None if there are none."""
    folder = recording_folder(source)
    if folder is None:
        return None
    folder = folder / FOLDER
    if source.kind == "lerobot":
        found = replace(source, path=str(folder), split="all", weight=0.0)
        return found if (folder / "meta" / "info.json").is_file() else None
    table = folder / "clips.jsonl"
    return replace(source, path=str(table), root=str(folder), weight=0.0) if table.is_file() else None


def recording_folder(source: SourceConfig) -> Path | None:
    """Return the folder of a recording on this machine; None for other sources."""
    if source.kind not in ("lerobot", "clips"):
        return None
    path = Path(source.path).expanduser()
    if source.kind == "clips":
        path = Path(source.root).expanduser() if source.root else path.parent
    return path if path.is_dir() else None
