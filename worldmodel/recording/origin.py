"""Recordings of environments that were made on this machine, and their settings.

Settings name environments and policies, so code that is imported: what others recorded must not choose it.
"""

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from worldmodel.errors import OutputError
from worldmodel.io import atomic_file, user_cache
from worldmodel.recording.settings import EnvironmentSettings


@dataclass(frozen=True)
class Origin:
    """What a recording was made with."""

    format: Literal["lerobot", "clips"]
    num_episodes: int
    settings: EnvironmentSettings


def remember(folder: Path, settings: EnvironmentSettings) -> None:
    """Note that a recording was made here, where the cache of the user can be written."""
    mark = _mark(folder, settings.as_dict())
    with suppress(OSError, OutputError), atomic_file(mark) as temporary:
        temporary.write_text(str(folder.resolve()), encoding="utf-8")


def origin_of(folder: Path) -> Origin | None:
    """Return the origin of a recording; None of other data, and of recordings of another machine."""
    info, table = folder / "meta" / "info.json", folder / "recording.json"
    lerobot = info.is_file()
    try:
        stored = json.loads((info if lerobot else table).read_text(encoding="utf-8"))
        settings = (stored["worldmodel"] if lerobot else stored)["recording"]
        if not _mark(folder, settings).is_file():
            return None
        size = settings["size"]
        known = EnvironmentSettings(
            **{
                **settings,
                "size": tuple(size) if isinstance(size, list) else size,
                "cameras": tuple(settings["cameras"]),
                "action_details": tuple(settings["action_details"]),
            }
        )
        if lerobot:
            return Origin("lerobot", int(stored["total_episodes"]), known)
        return Origin("clips", (folder / "clips.jsonl").read_bytes().count(b"\n"), known)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _mark(folder: Path, settings: Any) -> Path:
    text = json.dumps([str(folder.resolve()), settings], sort_keys=True)
    return user_cache() / "recordings" / hashlib.sha256(text.encode()).hexdigest()[:32]
