"""Episodes of Minari datasets (offline reinforcement learning, HDF5 or Arrow).

Frames are the images in the observations. Where observations are not images, the episodes are played again in
the environment, which must observe what was recorded. It is named by the user: the dataset's own description
of it could call any function that is installed.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from worldmodel.actions import Action
from worldmodel.errors import InputError, pip_install
from worldmodel.recording.cameras import OBSERVATION, Cameras, images_in
from worldmodel.recording.episode import RecordedEpisode, RecordingFormat
from worldmodel.recording.settings import ConversionSettings, EnvironmentSettings
from worldmodel.recording.spaces import ActionMapping


class MinariEpisodes:
    """The episodes of a dataset.

    Raises:
        InputError: there is no such dataset, its observations have no image and no environment is named, its
            rate is unknown, or its action space has no mapping.
    """

    def __init__(self, settings: ConversionSettings) -> None:
        self.settings, self.dataset = settings, _open(settings.path)
        spec = self.dataset.env_spec
        self.played: Any = None
        if settings.env_id:
            from worldmodel.recording.environment import EnvironmentEpisodes

            self.played = EnvironmentEpisodes(
                EnvironmentSettings(
                    settings.env_id,
                    size=settings.size,
                    fps=settings.fps,
                    cameras=settings.cameras,
                    env_args=settings.env_args,
                )
            )
            if self.played.env.action_space != self.dataset.action_space:
                raise InputError(
                    f"{settings.env_id} has the action space {self.played.env.action_space}, and the dataset "
                    f"{self.dataset.action_space}; name the environment of the recording."
                )
            plain = self.played.format
            self.format = RecordingFormat(plain.fps, plain.specs, settings.as_dict())
            return
        if not list(images_in(OBSERVATION, self.dataset.observation_space.sample())):
            raise InputError(
                f"{settings.path!r} has observations of {self.dataset.observation_space}, not images; pass "
                f"--env, by which its episodes are played again{f' ({spec.id})' if spec else ''}."
            )
        if not settings.fps:
            raise InputError(f"{settings.path!r} has no frame rate; pass --fps, the actions in a second.")
        self.mapping = ActionMapping(self.dataset.action_space, settings.fps)
        self.cameras = Cameras(settings.path, settings.cameras or (OBSERVATION,), settings.size)
        self.format = RecordingFormat(settings.fps, self.mapping.specs, settings.as_dict())

    def __len__(self) -> int:
        return int(self.dataset.total_episodes)

    def episode(self, index: int) -> RecordedEpisode:
        found = self.dataset[index]
        # Some have as many observations as actions: what the last action did is not known.
        steps = min(len(found), _length(found.observations) - 1)
        if steps < 1:
            raise InputError(
                f"{self.settings.path!r} has fewer than two observations in episode {index}; write the "
                "dataset anew without it (MinariDataset.filter_episodes)."
            )
        actions = [_at(found.actions, step) for step in range(steps)]
        observations = [_at(found.observations, step) for step in range(steps + 1)]
        rewards, ended = np.asarray(found.rewards, np.float32)[:steps], bool(found.terminations[steps - 1])
        if not np.isfinite(rewards).all():
            raise InputError(f"{self.settings.path!r} has a reward in episode {index} that is not a number.")
        if self.played is not None:
            return self.played.replay(self._seed(index), actions, observations)
        frames = [self.cameras.frames(each, _no_render(self.settings.path)) for each in observations]
        numbers = np.stack([self.mapping.numbers(action) for action in actions])
        text = observations[0].get("mission", "") if isinstance(observations[0], Mapping) else ""
        return RecordedEpisode(
            {name: np.stack([frame[name] for frame in frames]) for name in frames[0]},
            tuple(Action.of_numbers(self.mapping.specs, row) for row in numbers),
            numbers,
            rewards,
            ended,
            not ended,
            text=str(text),
            infos=({},) * (steps + 1),
        )

    def _seed(self, index: int) -> int:
        (metadata,) = self.dataset.storage.get_episode_metadata([self.dataset.episode_indices[index]])
        seed = metadata.get("seed")
        if seed is None or np.asarray(seed).shape != ():
            raise InputError(
                f"{self.settings.path!r} does not have the seed of episode {index}, so it cannot be played "
                "again; use a dataset with seeds, or with images."
            )
        return int(seed)


def _open(path: str) -> Any:
    try:
        from minari import MinariDataset
        from minari.dataset.minari_storage import MinariStorage
        from minari.storage.datasets_root_dir import get_dataset_path
    except ImportError:
        raise InputError(f"Minari datasets require minari: {pip_install('minari')}.") from None
    folder = Path(path).expanduser()
    try:
        # Only what is on this machine: `minari download` fetches.
        data = (folder if folder.is_dir() else get_dataset_path(path)) / "data"
        spaces = {"observation_space", "action_space"}
        if missing := sorted(spaces - MinariStorage.read_raw_metadata(data).keys()):
            # Minari would make the environment that the dataset describes.
            raise ValueError(f"it does not state its {missing[0]}")
        return MinariDataset(data)
    # A damaged file raises many types.
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise InputError(
            f"{path!r} cannot be read as a Minari dataset ({reason}); pass a folder, or the name of one that "
            "`minari download` fetched."
        ) from None


def _length(values: Any) -> int:
    """Return the number of entries; of spaces of several parts, of the shortest."""
    if isinstance(values, Mapping):
        return min(map(_length, values.values()))
    return min(map(_length, values)) if isinstance(values, tuple) else len(values)


def _at(values: Any, step: int) -> Any:
    """Return the entry of a step; spaces of several parts are stored part by part."""
    if isinstance(values, Mapping):
        return {name: _at(part, step) for name, part in values.items()}
    if isinstance(values, tuple):
        return tuple(_at(part, step) for part in values)
    return values[step]


def _no_render(path: str) -> Callable[[], Any]:
    def render() -> Any:
        raise InputError(f"{path!r} cannot render; pass --env, by which its episodes are played again.")

    return render
