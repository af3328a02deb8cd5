"""The recording of a rollout: its clips and actions, and how they are saved."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from worldmodel import media
from worldmodel.actions import Action
from worldmodel.media import contact_sheet, write_image

Clip = UInt8[np.ndarray, "t h w 3"]


@dataclass(frozen=True)
class Recording:
    """Clips and actions of a rollout; `actions[i]` leads from clip i to clip i + 1."""

    clips: tuple[Clip, ...]
    actions: tuple[Action, ...] = ()

    def extended(self, action: Action, clip: Clip) -> "Recording":
        """Return the recording with one more round."""
        return Recording((*self.clips, clip), (*self.actions, action))

    @property
    def frames(self) -> Clip:
        """All frames."""
        return np.concatenate(self.clips)

    def save(self, path: str | Path, fps: float) -> Path:
        """Write the rollout as `.mp4` or `.gif`, or as a contact sheet `.png` with one row per round.

        Raises:
            OutputError: the file cannot be written, or its suffix is not one of these.
        """
        path = Path(path)
        if path.suffix.lower() == ".png":
            titles = ["start", *(str(action) for action in self.actions)]
            write_image(contact_sheet(list(self.clips), titles), path)
        else:
            media.write_video(self.frames, path, fps=fps)
        return path
