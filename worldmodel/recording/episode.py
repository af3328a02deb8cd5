"""A recorded episode, and what all episodes of a recording have in common."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from worldmodel.actions import Action
from worldmodel.config import ActionSpec


@dataclass(frozen=True)
class RecordedEpisode:
    """An episode of an environment or world: T actions and the T + 1 frames around them."""

    cameras: Mapping[str, np.ndarray]
    """Frames of every camera, uint8 `[t + 1, h, w, 3]`."""
    actions: tuple[Action, ...]
    numbers: np.ndarray
    """The actions as numbers of the specs, `[t, numbers]`."""
    rewards: np.ndarray
    terminated: bool = False
    truncated: bool = False
    seed: int = 0
    text: str = ""
    """Task of the episode in words."""
    infos: tuple[Mapping[str, Any], ...] = ()
    """JSON values that the environment reported with each frame: after `reset`, then after every step."""
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Rows of further columns, `[t + 1]` or `[t + 1, numbers]`."""


class Recordable(Protocol):
    """A source of recordings: episode `index` is a pure function of the settings and the index."""

    @property
    def format(self) -> "RecordingFormat":
        """Settings that all episodes share."""
        ...

    def episode(self, index: int) -> RecordedEpisode:
        """Return an episode.

        Raises:
            InputError: it cannot be recorded.
        """
        ...


@dataclass(frozen=True)
class RecordingFormat:
    """Settings that all episodes of a recording share."""

    fps: float
    specs: tuple[ActionSpec, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings of the recording as plain values; a folder goes on only with equal ones."""
    frames_per_action: int = 1
    """Frames that follow one action."""
    has_rewards: bool = True
    """Whether rewards and ends are known."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Further columns by name, as features of a LeRobot dataset: `dtype`, `shape` and `names`."""
