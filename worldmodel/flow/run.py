"""Running of a flow, alone or with training beside it."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module

from worldmodel.config.flow import FlowConfig
from worldmodel.errors import ConfigError
from worldmodel.flow.catalog import RUN_LIVES_S, Catalog
from worldmodel.flow.chain import Chain
from worldmodel.flow.errors import FlowError

EXECUTORS = {"local": "worldmodel.flow.executors.local"}
"""Modules with a function `run(config, watch, stop)`."""

log = logging.getLogger(__name__)
Watch = Callable[[], None]


def run_flow(
    config: FlowConfig,
    watch: Watch = lambda: None,
    train: Sequence[str] = (),
    stop: threading.Event | None = None,
) -> int:
    """Run a flow until all clips of its sources are packed; return the exit code of the training.

    The same command after an interruption goes on where it ended: what is recorded is not done again.

    Args:
        config: the flow.
        watch: called several times a second, for example to show the state.
        train: command of a training that runs beside the stages. The flow ends when it ends.
        stop: ends the run when set; batches in progress are finished.

    Raises:
        ConfigError: a setting is wrong, or a package is missing.
        FlowError: the flow cannot go on; the message names the stage or part. What is recorded is kept.
    """
    stop = stop or threading.Event()
    if not config.sources:
        raise ConfigError("sources is empty; name at least one, for example {web: {path: clips.csv}}.")
    catalog = Catalog(config.place("catalog"), Chain.of(config))
    run = catalog.begin()
    trainer = subprocess.Popen(train) if train else None  # noqa: S603 -- the caller's command
    seen, error = time.monotonic(), None

    def watch_all() -> None:
        nonlocal seen
        if time.monotonic() - seen > RUN_LIVES_S / 3:
            catalog.beat(run)
            seen = time.monotonic()
        if trainer is not None and trainer.poll() is not None:
            stop.set()
        watch()

    try:
        import_module(EXECUTORS[config.executor]).run(config, watch_all, stop)
        if trainer is not None and not stop.is_set():
            log.info("All clips are packed; training goes on.")
            while trainer.poll() is None and not stop.is_set():
                watch_all()
                stop.wait(0.2)
        return trainer.wait(600) if trainer is not None and trainer.poll() is not None else 0
    except FlowError as failure:
        error = str(failure)
        raise
    finally:
        if trainer is not None and trainer.poll() is None:
            trainer.send_signal(signal.SIGTERM)  # it writes a checkpoint
            trainer.wait()
        catalog.end(run, error)
        catalog.close()


def train_command(config: FlowConfig, train: str, processes: int, overrides: Sequence[str]) -> list[str]:
    """Return the command that trains on the log of a flow with `torchrun`.

    The training config's `data.sources` must have a source of the kind `flow`, whose path is set here.
    """
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone"]
    module = ["--nproc-per-node", str(processes), "-m", "worldmodel", "train", train, *overrides]
    return [*torchrun, *module]


@contextmanager
def stopped_by_signals(stop: threading.Event) -> Iterator[None]:
    """Set `stop` at SIGTERM and at Ctrl-C; at a second one end at once."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            os._exit(130)
        log.warning("Stopping after the batches in progress; press Ctrl-C again to end at once.")
        stop.set()

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
