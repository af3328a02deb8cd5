"""What was played in a world as a LeRobot dataset, with the actions and what the model predicted."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from worldmodel.actions import Action, action_kind
from worldmodel.config import ActionConfig, ActionSpec
from worldmodel.episodes import Outcome
from worldmodel.errors import InputError
from worldmodel.media import Frame, Frames
from worldmodel.recording.episode import RecordedEpisode, RecordingFormat

CAMERA = "render"


@dataclass(frozen=True)
class PlayedRound:
    """A round: its action, the frames that it made, uint8 `[t, h, w, 3]`, and reward and end if predicted."""

    action: Action
    frames: Frames
    outcome: Outcome | None = None


@dataclass(frozen=True)
class PlayedEpisode:
    """The frame at which a rollout starts, uint8 `[h, w, 3]`, and its rounds."""

    start: Frame
    rounds: Sequence[PlayedRound]
    seed: int = 0


def write_played(folder: Path, episodes: Sequence[PlayedEpisode], fps: int, takes: ActionConfig) -> None:
    """Write rollouts as a new LeRobot dataset, from which `worldmodel train` and `data check` read.

    Args:
        folder: Folder of the dataset.
        episodes: Rollouts of one model; those without a round are left out.
        fps: Frames per second of the model.
        takes: Its actions.

    Raises:
        InputError: nothing was played, or the actions have no numbers to store.
        OutputError: pyarrow is not installed, or the folder cannot be written.
    """
    from worldmodel.recording.lerobot import LeRobotStore

    played = [episode for episode in episodes if episode.rounds]
    if not played:
        raise InputError("Nothing was played yet; act once, then save the dataset.")
    per_action = len(played[0].rounds[0].frames) // takes.per_round
    specs = tuple(_specs(takes, fps / per_action))
    judged = all(each.outcome is not None for episode in played for each in episode.rounds)
    settings = {"played": True, "fps": fps, "frames_per_action": per_action}
    store = LeRobotStore(folder, RecordingFormat(fps, specs, settings, per_action, judged))
    for episode in played:
        store.write(_recorded(episode, specs, takes.per_round))
    store.finish()


def _recorded(episode: PlayedEpisode, specs: Sequence[ActionSpec], per_round: int) -> RecordedEpisode:
    actions: list[Action] = []
    rewards: list[float] = []
    for each in episode.rounds:
        actions += each.action.of_round(per_round).chunk or [each.action]
        # Of the round; the store divides what an action has among its frames.
        rewards += [(each.outcome.reward if each.outcome else 0.0) / per_round] * per_round
    last = episode.rounds[-1].outcome
    ended = last is not None and last.ended
    frames = np.concatenate([episode.start[None], *(each.frames for each in episode.rounds)])
    numbers = np.array([action.numbers(specs) for action in actions], np.float32)
    return RecordedEpisode(
        {CAMERA: frames},
        tuple(actions),
        numbers.reshape(len(actions), len(specs)),
        np.array(rewards, np.float32),
        terminated=ended,
        truncated=not ended,
        seed=episode.seed,
    )


def _specs(takes: ActionConfig, rate: float) -> Iterator[ActionSpec]:
    """Yield the numbers of the actions that a model takes; words have none and are the task of a row."""
    for name, settings in takes.kinds.items():
        kind = action_kind(name)
        if kind.is_language:
            continue
        if name == "keys":
            yield from (ActionSpec(key, "key", low=0, high=1, rate=rate) for key in settings)
        elif name == "vector":
            bounds = zip(settings.low, settings.high, strict=True) if settings.low else ()
            limits = list(bounds) or [(None, None)] * settings.size
            for index, (low, high) in enumerate(limits):
                own = settings.names[index] if settings.names else f"vector_{index}"
                yield ActionSpec(own, "vector", low=low, high=high, rate=rate)
        elif name == "mouse":
            yield from (ActionSpec(f"mouse_{axis}", "mouse", rate=rate) for axis in "xy")
        else:
            raise InputError(f"Actions of kind {name} have no numbers to store; save a clip instead.")
