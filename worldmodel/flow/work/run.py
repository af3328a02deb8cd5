"""Running of a flow, alone or with training beside it."""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from worldmodel import signals
from worldmodel.config import load
from worldmodel.config.flow import EXECUTOR_GROUP, EXECUTORS, FlowConfig
from worldmodel.config.imports import find_extension, import_object
from worldmodel.errors import ConfigError, WorldModelError
from worldmodel.flow.catalog.catalog import Catalog
from worldmodel.flow.catalog.chain import Chain
from worldmodel.flow.catalog.runs import RUN_LIVES_S
from worldmodel.flow.log.log import current_key
from worldmodel.flow.storage import Storage
from worldmodel.processes import Child, run_main

log = logging.getLogger(__name__)
Watch = Callable[[], None]
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
Program = tuple[str, list[str]]
"""The `main` of a program as `module:function`, and its arguments."""


def run_flow(
    config: FlowConfig,
    watch: Watch = lambda: None,
    train: Program | None = None,
    stop: threading.Event | None = None,
) -> int:
    """Run a flow until all clips of its sources are packed; return the exit code of the training.

    The same command after an interruption goes on where it ended: what is recorded is not done again.

    Args:
        config: the flow.
        watch: called several times a second, for example to show the state.
        train: a training that runs beside the stages. The flow ends when it ends, and it ends with the flow,
            also with one that is killed.
        stop: ends the run when set; batches in progress are finished.

    Raises:
        ConfigError: a setting is wrong, or a package is missing.
        DatabaseError: the catalog cannot be used.
        FlowError: the flow cannot go on; the message names the stage or part. What is recorded is kept.
    """
    stop = stop or threading.Event()
    if not config.sources:
        raise ConfigError("sources is empty; name at least one, for example {web: {path: clips.csv}}.")
    chain = Chain.of(config)
    catalog = Catalog(config.place("catalog"), chain)
    run = catalog.begin()
    log_folder = Storage(config.place("log"))
    trainer: Child | None = None
    seen, error = time.monotonic(), None

    def watch_all() -> None:
        nonlocal seen, trainer
        if time.monotonic() - seen > RUN_LIVES_S / 3:
            catalog.beat(run)
            seen = time.monotonic()
        if train and trainer is None and current_key(log_folder) == chain.key:  # it waits for segments itself
            # What it prints appears at once, also in a file.
            trainer = Child(f"{run_main.__module__}:{run_main.__name__}", *train, environment=UNBUFFERED)
        if trainer is not None and not trainer.alive:
            stop.set()
        watch()

    try:
        execute = find_extension("executor", config.executor, EXECUTOR_GROUP, EXECUTORS)
        if isinstance(execute, str):  # one of the package's own
            execute = import_object(execute)
        execute(config, watch_all, stop)
        watch_all()
        while trainer is not None and trainer.alive and not stop.is_set():
            watch_all()
            stop.wait(0.2)
    except WorldModelError as failure:
        error = str(failure)
        raise
    finally:
        code = 0
        if trainer is not None:
            trainer.process.terminate()  # it writes a checkpoint
            code = trainer.process.wait()
            trainer.close()
        catalog.end(run, error)
        catalog.close()
    return code


def train_program(config: FlowConfig, train: str, processes: int, overrides: Sequence[str]) -> Program:
    """Return the program that trains on the log of a flow: torchrun, if there are several processes.

    Args:
        config: the flow.
        train: training config; its `data.sources` has one of the kind `flow`, whose path is set to the log.
        processes: processes of this machine.
        overrides: further settings of the training.

    Raises:
        ConfigError: the training config is wrong, or has no such source.
    """
    sources = load(train, list(overrides)).data.sources
    names = [name for name, source in sources.items() if source.kind == "flow"]
    if not names:
        raise ConfigError(f"{train} does not train on a flow; add data.sources.NAME: {{kind: flow}}.")
    paths = [f"data.sources.{name}.path={config.place('log')}" for name in names]
    arguments = ["train", train, *overrides, *paths]
    if processes == 1:
        return "worldmodel.cli:main", arguments
    # -P: never a folder worldmodel/ where it is run, such as a clone's
    python = ["--no-python", sys.executable, "-P", "-m", "worldmodel"]
    options = ["--standalone", "--nproc-per-node", str(processes)]
    return "torch.distributed.run:main", [*options, *python, *arguments]


@contextmanager
def stopped_by_signals(stop: threading.Event) -> Iterator[None]:
    """Set `stop` at SIGTERM and at Ctrl-C; at a second one end at once."""

    def handle(number: int) -> None:
        if stop.is_set():
            os._exit(130)
        log.warning("Stopping after the batches in progress; press Ctrl-C again to end at once.")
        stop.set()

    with signals.handled(handle):
        yield
