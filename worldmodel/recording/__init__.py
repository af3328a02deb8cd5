"""Training data from environments and worlds (`worldmodel record`) and other formats (`worldmodel convert`).

Episode `index` is a pure function of the settings and the index, whichever process plays it. So a recording
that was interrupted goes on at the first episode that is not on disk, and gets the rows and frames of one
that was not; the encoder may write the same frames in other bytes. There are two formats: LeRobot v3.0
(lerobot.py) and a table of clips (clip_table.py).
"""

import errno
import multiprocessing
import shutil
import signal
import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from tqdm import tqdm

from worldmodel import signals
from worldmodel.config.imports import import_object
from worldmodel.data.facts import hold_out
from worldmodel.data.twins import BRANCHES, FOLDER, HISTORY, STEPS, Inside
from worldmodel.errors import InputError, OutputError, pip_install
from worldmodel.io import TEMPORARY_PREFIX
from worldmodel.recording.episode import Recordable, RecordedEpisode, RecordingFormat
from worldmodel.recording.origin import Origin, origin_of, remember

if TYPE_CHECKING:
    from worldmodel.recording.environment import EnvironmentEpisodes
    from worldmodel.recording.settings import ConversionSettings, EnvironmentSettings
    from worldmodel.recording.twins import TwinEpisodes

Format = Literal["lerobot", "clips"]
FORMATS = {
    "minari": "worldmodel.recording.minari:MinariEpisodes",
    "vpt": "worldmodel.recording.vpt:VptEpisodes",
}
"""Formats that can be converted: `module:Class` of their episodes."""
MIN_TWINS = 10
"""Fewest pairs of twin futures that are recorded within a time."""
LOOKED_AT = 5
"""Episodes after which an environment from which nothing can be learned is refused."""


class Store(Protocol):
    """A recording on disk."""

    def start(self, num_episodes: int) -> int:
        """Return the first episode that is still to be recorded."""
        ...

    def write(self, episode: RecordedEpisode) -> None:
        """Add an episode."""
        ...

    def commit(self) -> None:
        """Make all episodes that were added readable."""
        ...

    def discard(self) -> None:
        """Drop what is not readable yet."""
        ...

    def finish(self) -> None:
        """Complete the recording."""
        ...


def record_environment(
    settings: "EnvironmentSettings",
    folder: str | Path,
    num_episodes: int,
    format: Format = "lerobot",
    num_workers: int = 0,
    progress: bool = False,
    num_twins: int = 0,
    twin_steps: int = STEPS,
) -> Path:
    """Record episodes of a Gymnasium environment, after those that the folder has.

    Args:
        settings: What is recorded.
        folder: Folder of the dataset.
        num_episodes: Episodes that it shall have.
        format: `lerobot`, or `clips` for a table.
        num_workers: Processes that play; 0 plays in this one. The result is the same.
        progress: Show a progress bar with the remaining time.
        num_twins: Pairs of twin futures that it shall have beside them (`worldmodel.data.twins`), of the
            held-out episodes; where none are, a tenth is held out from then on.
        twin_steps: Steps of these futures.

    Returns:
        The folder of a LeRobot dataset, or the path of a table.

    Raises:
        InputError: The environment cannot be recorded, or with twins is not reproducible; the episodes before
            are complete.
        OutputError: The folder cannot be written or has a recording of other settings.
    """
    if num_twins < 0:
        raise InputError(f"num_twins is {num_twins}; use 1 or more, or 0 for none.")
    episodes, folder = _open_environment(settings), Path(folder).expanduser()
    if num_twins:  # before hours are spent
        _twins(episodes, folder, num_episodes, twin_steps).check()
    path = record(episodes, folder, num_episodes, format, num_workers, settings, progress)
    remember(folder, settings)
    if num_twins:
        pairs = _twins(episodes, folder, num_episodes, twin_steps)
        record(pairs, folder / FOLDER, 2 * num_twins, format, progress=progress)
    return path


def record_twins(
    folder: str | Path,
    num_twins: int,
    budget_s: float,
    inside: Inside = FOLDER,
    progress: bool = False,
) -> int:
    """Record twin futures beside a recording of an environment, as many as a time allows.

    Args:
        folder: A recording that was made on this machine.
        num_twins: Most pairs that it shall have.
        budget_s: Seconds that they may take; `MIN_TWINS` are recorded in any case.
        inside: twins go on from held-out episodes; branches, from the others, are training data.
        progress: Show a progress bar with the remaining time.

    Returns:
        The number of pairs that it has.

    Raises:
        InputError: It was not recorded from an environment on this machine, or that has no twins.
        OutputError: The folder cannot be written.
    """
    folder = Path(folder).expanduser()
    origin, pairs = _twins_of_recording(folder, inside)
    count = max(min(MIN_TWINS, num_twins), min(num_twins, int(budget_s / pairs.check())))
    record(pairs, folder / inside, 2 * count, origin.format, progress=progress)
    return count


def uncertain_moments(folder: str | Path, num_moments: int, budget_s: float) -> tuple[int, int]:
    """Count the moments from which the same actions can lead to other frames, by playing episodes again.

    Args:
        folder: A recording that was made on this machine.
        num_moments: Most moments that are looked at.
        budget_s: Seconds after which no other is.

    Returns:
        The number of such moments, and of all that were looked at.

    Raises:
        InputError: It was not recorded from an environment on this machine, or that cannot be played again.
    """
    _, pairs = _twins_of_recording(Path(folder).expanduser(), FOLDER)
    began, found, looked_at = time.perf_counter(), 0, 0
    while looked_at < num_moments and (not looked_at or time.perf_counter() - began < budget_s):
        found += pairs.differs_by_chance(looked_at)
        looked_at += 1
    return found, looked_at


def _twins_of_recording(folder: Path, inside: Inside) -> tuple[Origin, "TwinEpisodes"]:
    """Open the environment of a recording to play its futures."""
    origin = origin_of(folder)
    if origin is None:
        raise InputError(
            f"{str(folder)!r} was not recorded from an environment on this machine; `worldmodel record` with "
            "--twins plays it again."
        )
    episodes = _open_environment(origin.settings)
    return origin, _twins(episodes, folder, origin.num_episodes, STEPS, inside)


def convert(
    kind: str,
    settings: "ConversionSettings",
    folder: str | Path,
    num_episodes: int | None = None,
    progress: bool = False,
) -> Path:
    """Write a dataset of another format as a LeRobot dataset, as `record_environment` does.

    Args:
        kind: One of `FORMATS`.
        settings: What is converted.
        folder: Folder to write.
        num_episodes: Episodes from the beginning; None takes all.
        progress: Show a progress bar with the remaining time.

    Raises:
        InputError: The dataset cannot be read; the episodes before are complete.
        OutputError: The folder cannot be written or has a recording of other settings.
    """
    if kind not in FORMATS:
        raise InputError(f"There is no format {kind!r}; use {' or '.join(FORMATS)}.")
    if settings.max_steps < 1:
        raise InputError(f"max_steps is {settings.max_steps}; use 1 or more.")
    try:
        opener = import_object(FORMATS[kind])
    except ImportError:
        raise InputError(f"Converting requires gymnasium: {pip_install('gym')}.") from None
    episodes = opener(settings)
    count = len(episodes) if num_episodes is None else min(num_episodes, len(episodes))
    return record(episodes, folder, count, "lerobot", progress=progress)


def record(
    episodes: Recordable,
    folder: str | Path,
    num_episodes: int,
    format: Format = "clips",
    num_workers: int = 0,
    settings: "EnvironmentSettings | None" = None,
    progress: bool = False,
) -> Path:
    """Record episodes, as `record_environment` does; worker processes open the environment of `settings`."""
    if num_episodes < 1 or num_workers < 0:
        raise OutputError(
            f"num_episodes is {num_episodes} and num_workers {num_workers}; use 1 or more, and 0 or more."
        )
    folder = Path(folder).expanduser()
    with _disk_errors(folder):
        store = _open_store(format, folder, episodes.format)
        first = store.start(num_episodes)
        for left in folder.glob(f"{TEMPORARY_PREFIX}*"):  # of a recorder that was killed
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    played = _play(episodes, settings, first, num_episodes, num_workers)
    if settings is not None:
        played = _watched(played, settings, min(LOOKED_AT, num_episodes - first))
    bar = tqdm(total=num_episodes, initial=first, unit="episode", disable=not progress)
    # Outermost, so that everything is closed when a signal takes effect.
    with _after_the_episode() as received, _disk_errors(folder), bar:
        try:
            for episode in played:
                store.write(episode)
                bar.update()
                if received:
                    break
            store.finish()
        except (OSError, OutputError):  # the disk: what is on it already is complete
            raise
        except BaseException:
            if len(received) < 2:  # a second signal may have interrupted `write`
                store.commit()  # episodes that are complete are kept
            raise
        finally:
            played.close()
            store.discard()
    return folder / "clips.jsonl" if format == "clips" else folder


@contextmanager
def _after_the_episode() -> Iterator[list[int]]:
    """Put off SIGTERM and Ctrl-C to the end of the block, so that no episode is cut while it is written.

    Yields a list to which a received signal is added; a second one takes effect at once. Signals that are
    ignored stay so.
    """
    received: list[int] = []
    block = ExitStack()

    def handle(number: int) -> None:
        received.append(number)
        if len(received) == 2:
            block.close()
            signal.raise_signal(number)

    heeded = [number for number in signals.STOP if signal.getsignal(number) != signal.SIG_IGN]
    with block:
        block.enter_context(signals.handled(handle, heeded))
        yield received
    if len(received) == 1:
        signal.raise_signal(received[0])


def _play(
    episodes: Recordable, settings: "EnvironmentSettings | None", first: int, end: int, num_workers: int
) -> Generator[RecordedEpisode, None, None]:
    """Yield the episodes in order."""
    if not num_workers or settings is None:
        yield from map(episodes.episode, range(first, end))
        return
    # Not `worldmodel.processes`: this pool imports the caller's script in each worker, and with it the
    # environments that the script registers.
    spawn = multiprocessing.get_context("spawn")
    # Ctrl-C reaches the workers, too: this process ends them after the episode.
    ignore = (signal.SIGINT, signal.SIG_IGN)
    with ProcessPoolExecutor(num_workers, spawn, signal.signal, ignore) as pool:
        waiting: deque[Future[RecordedEpisode]] = deque()
        try:
            for index in range(first, end):
                waiting.append(pool.submit(_play_one, settings, index))
                if len(waiting) > 2 * num_workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenExecutor:
            raise InputError(
                "A worker process was killed; if memory ran out, use fewer workers, and run the same command "
                "again, which goes on after the episodes that are complete."
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _watched(
    played: Generator[RecordedEpisode, None, None], settings: "EnvironmentSettings", count: int
) -> Generator[RecordedEpisode, None, None]:
    """Yield episodes, and refuse an environment if the first `count`, two or more, teach nothing."""
    still = short = 0
    with closing(played):
        for number, episode in enumerate(played, start=1):
            yield episode
            if number > count:
                continue
            still += all(bool((frames == frames[0]).all()) for frames in episode.cameras.values())
            short += len(episode.actions) == 1 < settings.max_steps
            if number == count > 1 and short == count:
                raise InputError(
                    f"Each of the first {count} episodes of {settings.env_id} ended with its first step; "
                    "check the policy and the arguments of the environment."
                )
            if number == count > 1 and still == count:
                raise InputError(
                    f"The picture of {settings.env_id} did not change in the first {count} episodes; record "
                    "another camera, or a policy that acts."
                )


_opened: dict[str, Recordable] = {}
"""The environment that a worker process plays, by its settings."""


def _play_one(settings: "EnvironmentSettings", index: int) -> RecordedEpisode:
    if repr(settings) not in _opened:
        _opened[repr(settings)] = _open_environment(settings)
    return _opened[repr(settings)].episode(index)


def _open_environment(settings: "EnvironmentSettings") -> "EnvironmentEpisodes":
    try:
        import gymnasium  # noqa: F401
    except ImportError:
        raise InputError(f"Recording an environment requires gymnasium: {pip_install('gym')}.") from None
    from worldmodel.recording.environment import EnvironmentEpisodes

    return EnvironmentEpisodes(settings)


def _twins(
    episodes: "EnvironmentEpisodes", folder: Path, num_episodes: int, num_steps: int, inside: Inside = FOLDER
) -> "TwinEpisodes":
    from worldmodel.recording.twins import TwinEpisodes

    if num_episodes < 2:
        raise InputError(
            "Twins begin with episodes that are held out, and there is one; record 2 or more episodes."
        )
    recorded = hold_out(folder, num_episodes)
    if inside == BRANCHES:
        held = set(recorded)
        recorded = [number for number in range(num_episodes) if number not in held]
    return TwinEpisodes(episodes, recorded, num_steps, HISTORY[inside])


def _open_store(format: Format, folder: Path, recording: RecordingFormat) -> Store:
    if format not in get_args(Format):
        raise OutputError(f"format is {format!r}; use {' or '.join(get_args(Format))}.")
    if format == "clips":
        from worldmodel.recording.clip_table import ClipTableStore

        return ClipTableStore(folder, recording)
    from worldmodel.recording.lerobot import LeRobotStore

    return LeRobotStore(folder, recording)


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Turn an error of the disk into one that says how to go on."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free some space" if full else "check its permissions"
        raise OutputError(
            f"{str(folder)!r} cannot be written ({error.strerror or error}); {remedy} and run the same "
            "command again, which goes on after the episodes that are complete."
        ) from None
