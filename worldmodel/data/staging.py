"""Frames of batches in pinned memory, from which they are copied to a GPU while it computes."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from worldmodel.batch import to_device
from worldmodel.episodes import Episode


@dataclass
class StagedFrames:
    """Observations of a batch on the host, and their copies to the device once they were started."""

    clips: tuple[Tensor, ...]
    """Observations of the episodes by position, uint8 `[b, t, h, w, 3]`, pinned for a GPU."""
    device: torch.device
    stream: torch.cuda.Stream | None = None
    """The stream of the copies to a GPU."""
    _moved: tuple[Tensor, ...] | None = field(default=None, init=False)

    @property
    def started(self) -> bool:
        """Whether copies are on the device or being copied to it."""
        return self._moved is not None

    def start(self) -> None:
        """Start the copies; the host waits for nothing."""
        if not self.started:
            with torch.cuda.stream(self.stream):
                self._moved = tuple(to_device(clip, self.device) for clip in self.clips)

    def take(self) -> tuple[Tensor, ...]:
        """Return the copies, for which the current stream waits, and keep those on the host alone."""
        self.start()
        moved, self._moved = self._moved, None
        assert moved is not None
        if self.stream is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self.stream)
            for clip in moved:
                clip.record_stream(current)
        return moved


class FrameStager:
    """Stacks the observations of episodes, in pinned memory for a GPU; any thread may call it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.pinned = device, device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if self.pinned else None

    def __call__(self, episodes: list[Episode]) -> StagedFrames | None:
        """Return None without observations, and for episodes with prompts, whose lengths may differ."""
        if not episodes[0].observations or episodes[0].prompt is not None:
            return None
        columns = zip(*(episode.observations for episode in episodes), strict=True)
        clips = [torch.from_numpy(np.stack(column)) for column in columns]
        of_thread: AbstractContextManager[object] = (
            torch.cuda.device(self.device) if self.pinned else nullcontext()
        )
        with of_thread:  # otherwise a thread would use the first GPU
            staged = tuple(clip.pin_memory() if self.pinned else clip for clip in clips)
        return StagedFrames(staged, self.device, self.stream)


StageFrames = Callable[[list[Episode]], StagedFrames | None]
