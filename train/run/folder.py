"""The folder of a run: its lock, its resolved config, and whether another config may go on with it."""

import dataclasses
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from worldmodel import config as configs
from worldmodel.config import StageConfig, TrainConfig
from worldmodel.data.sources import stage_weights
from worldmodel.errors import ConfigError, OutputError, WorldModelError
from worldmodel.io import atomic_file
from worldmodel.parallel.mesh import Mesh
from worldmodel.train.trainer import Progress

CONFIG, LOCK = "config.json", ".lock"
LOCK_WAIT_S = 40.0
"""Longest wait for a run that is just ending: it may end its step and write a checkpoint first."""
SHORT_WAIT_S = 3.0
"""Time after which the wait is announced."""
KEPT_WITHIN = ("objective", "batch_size", "optimizer")
"""Settings of a stage that its checkpoints belong to; whether it averages weights is one, too."""
FREE = {"microbatch_size": 0}
"""Settings of a stage, and any value of them, that do not change what it learns."""


@contextmanager
def locked(run: Path, mesh: Mesh, hang_timeout_s: float) -> Iterator[None]:
    """Make the folder of a run, which no other run uses within the block; every process must call this.

    The first process holds the lock, which the system releases when that process ends, however it ends.
    Who only reads a run needs no lock.

    Raises:
        OutputError: the folder cannot be written, or another run holds it.
    """
    # A process that torchrun replaces may still hang on another machine, and ends after its own timeout.
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    lock = FileLock(run / LOCK, timeout=hang_timeout_s / 2 if restarted else LOCK_WAIT_S)

    def acquire() -> None:
        try:
            run.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(timeout=min(SHORT_WAIT_S, lock.timeout))
            except Timeout:
                print(f"waiting up to {lock.timeout:g} s for the run that uses {run}", flush=True)
                lock.acquire()
        except Timeout:
            raise OutputError(
                f"run_dir {str(run)!r} is in use by another run; wait for its end, or choose another run_dir."
            ) from None
        except OSError as error:
            raise OutputError(
                f"run_dir {str(run)!r} cannot be written ({error.strerror}); choose another run_dir."
            ) from None
        except NotImplementedError:
            pass  # a file system without locks

    on_first(mesh, acquire)
    try:
        yield
    finally:
        lock.release()


def on_first(mesh: Mesh, work: Callable[[], None]) -> None:
    """Call a function on the first process, whose error all processes raise; every process must call this."""
    failed: WorldModelError | None = None
    if mesh.first:
        try:
            work()
        except WorldModelError as error:  # the others would wait for this process
            failed = error
    if failed := mesh.all_gather(failed)[0]:
        raise failed


def write_config(config: TrainConfig, run: Path, origin: Mapping[str, Any]) -> None:
    """Write the resolved config into the run's folder, with its origin and the commit of the code."""
    written = {"origin": {**origin, "commit": commit()}, **configs.to_dict(config)}
    with atomic_file(run / CONFIG) as temporary:
        temporary.write_text(json.dumps(written, indent=2), encoding="utf-8")


def commit(package: Path = Path(__file__).parents[1]) -> str | None:
    """Return the commit of the code, if it lies in a clone of its own and git is installed."""
    if not (package / ".git").exists():  # an installed package may lie within another project's clone
        return None
    try:
        found = subprocess.run(  # noqa: S603
            ["git", "-C", str(package), "rev-parse", "HEAD"],  # noqa: S607
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return None
    return found.stdout.strip() or None


def check_unchanged(config: TrainConfig, run: Path, progress: Progress) -> None:
    """Check that a config continues what a run has done: its model, data, seed, and the stages it has begun.

    Stages that have not begun may change, and so may all settings that only say how to run.

    Raises:
        ConfigError: it is another run; the message names the first setting that differs.
    """
    if progress.stage not in config.stages:
        raise ConfigError(
            f"{run} is at stage {progress.stage!r}, which is not in stages ({', '.join(config.stages)}); "
            "choose another run_dir."
        )
    found = _first_difference("seed", progress.seed, config.seed)
    if not found and (stored := _stored(run)):
        found = _difference(stored, config, progress)
    if found:
        raise ConfigError(f"{run} was trained with other settings: {found}; choose another run_dir.")


def _stored(run: Path) -> TrainConfig | None:
    """Read the config of the run; None if it is missing, or of a version whose settings were others."""
    try:
        values = json.loads((run / CONFIG).read_text(encoding="utf-8"))
        values.pop("origin", None)
        return configs.build(TrainConfig, values)
    except (OSError, ValueError, AttributeError):  # a ConfigError is a ValueError
        return None


def _difference(old: TrainConfig, new: TrainConfig, progress: Progress) -> str | None:
    names = list(old.stages)
    if progress.stage not in names:
        return None
    begun = names[: names.index(progress.stage) + 1]
    if begun != list(new.stages)[: len(begun)]:
        return f"it began with the stages {', '.join(begun)}"
    if found := _first_difference("model", configs.to_dict(old.model), configs.to_dict(new.model)):
        return found
    # The digests of checkpoints compare the content of the models.
    started = ({key: bool(name) for key, name in each.init_sources.items()} for each in (old, new))
    if found := _first_difference("init_from", *started):
        return "init_from has other components"
    for name in begun:
        ended = name != progress.stage or progress.ended
        kept = [_kept(each, name, ended) for each in (old, new)]
        if found := _first_difference(f"stages.{name}", *kept):
            return found
        if found := _first_difference("data.sources", _drawn(old, name), _drawn(new, name)):
            return found
    return None


def _kept(config: TrainConfig, name: str, ended: bool) -> dict[str, Any]:
    """Return the settings of a stage that must not change any more."""
    stage: StageConfig = config.stages[name]
    if ended:
        return configs.to_dict(dataclasses.replace(stage, **FREE))
    return {each: getattr(stage, each) for each in KEPT_WITHIN} | {
        "ema_decay": "on" if stage.ema_decay else "off"
    }


def _drawn(config: TrainConfig, name: str) -> dict[str, Any]:
    """Return the sources that a stage draws from, with their weights."""
    weights = stage_weights(config.data, config.stages[name])
    return {
        source: configs.to_dict(dataclasses.replace(settings, weight=weights[source]))
        for source, settings in config.data.sources.items()
        if weights[source]
    }


def _first_difference(key: str, old: Any, new: Any) -> str | None:
    """Return the first setting that differs between two nested mappings, and its values."""
    if old == new:
        return None
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys((*old, *new)):
            if name not in old or name not in new:
                return f"{key}.{name} is {'new' if name in new else 'missing'}"
            if found := _first_difference(f"{key}.{name}", old[name], new[name]):
                return found
        return None
    return f"{key} was {old!r} and is {new!r}"
