"""Settings of recordings and conversions."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from worldmodel.config import ImageSize


@dataclass(frozen=True)
class Settings:
    """What all settings have in common."""

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as plain values."""
        return json.loads(json.dumps(asdict(self)))


@dataclass(frozen=True)
class EnvironmentSettings(Settings):
    """Settings of a recording of an environment; episodes depend on nothing else."""

    env_id: str
    policy: str = "random"
    seed: int = 0
    max_steps: int = 1000
    """Longest episode, in recorded steps."""
    size: ImageSize | None = None
    """Size of the frames; None keeps the environment's."""
    frame_skip: int = 1
    """Steps of the environment per recorded step; the action is repeated and the rewards are added."""
    fps: int = 0
    """Recorded steps per second; 0: `render_fps` of the environment divided by `frame_skip`."""
    cameras: tuple[str, ...] = ()
    """`render`, `observation`, or the path of an image in the observation such as `observation.top`; empty:
    what is rendered, or the observation if nothing is."""
    epsilon: float = 0.0
    """Share of actions that are random instead of the policy's."""
    action_details: tuple[Mapping[str, Any], ...] = ()
    """Name, unit, scale and frame of every number of an action."""
    env_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `gymnasium.make`."""


@dataclass(frozen=True)
class ConversionSettings(Settings):
    """Settings of the conversion of a dataset in another format."""

    path: str
    size: ImageSize | None = None
    """Size of the frames; None keeps it."""
    fps: int = 0
    """Actions per second; 0 keeps the rate of the dataset or environment."""
    cameras: tuple[str, ...] = ()
    env_id: str = ""
    """Minari: environment in which episodes are played again, for what it renders."""
    env_args: Mapping[str, Any] = field(default_factory=dict)
    max_steps: int = 1000
    """VPT: longest episode, in actions."""
