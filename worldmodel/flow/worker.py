"""Workers: the loops of the local executor, each in a process of its own or in a thread.

A worker process says on its standard output when it begins and ends a batch, so that whoever started it sees
one that hangs. It ends when its standard input is closed, and after its batch when it gets SIGTERM.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from worldmodel.config import build
from worldmodel.config.flow import FlowConfig
from worldmodel.errors import WorldModelError
from worldmodel.flow.attempts import groups
from worldmodel.flow.catalog import Catalog
from worldmodel.flow.chain import PACK, Chain
from worldmodel.flow.feeder import Feeder
from worldmodel.flow.pack import Packer
from worldmodel.flow.topics import Claim, Message, Topic, open_topic
from worldmodel.flow.work import Work

FEED = "feed"
"""Role of the worker that lists and publishes clips and packs them."""
BUSY, IDLE = "busy", "idle"
IDLE_S = 0.05
"""Pause of a worker that has nothing to do."""
Report = Callable[[Literal["busy", "idle"]], None]


def run_stage(config: FlowConfig, name: str, topics: str, stop: threading.Event, report: Report) -> None:
    """Run one stage on the clips of its topic until told to stop.

    Raises:
        WorldModelError: the catalog, the buffer or a topic cannot be used, or the stage is at fault.
    """
    work = Work(config, name)
    chain, stage = work.chain, work.link.stage
    source = open_topic(topics, work.link.topic)
    following = chain.after(name)
    target = None if following == PACK else open_topic(topics, chain.link(following).topic)
    try:
        while not stop.is_set():
            claims = source.claim(stage.batch_size, config.lease_s, wait_s=0.5)
            if not claims:
                continue
            with renewed(source, claims, config.lease_s):
                for some in groups(claims, lambda claim: claim.attempt, stage.batch_size):
                    report(BUSY)
                    _serve(work, source, target, some)
                    report(IDLE)
    finally:
        source.close()
        if target is not None:
            target.close()
        work.close()


def _serve(work: Work, source: Topic, target: Topic | None, claims: list[Claim]) -> None:
    """Work on claims, pass on the clips that are done, and acknowledge those that need no other attempt."""
    outcome = work.process([claim.message.key for claim in claims], claims[0].attempt)
    if target is not None and outcome.done:
        target.publish(_onward(work, outcome.done, claims))
    source.ack([claim for claim in claims if claim.message.key not in outcome.retry])
    for claim in claims:
        if (wait_s := outcome.retry.get(claim.message.key)) is not None:
            source.nack([claim], wait_s)


def _onward(work: Work, done: Sequence[str], claims: Sequence[Claim]) -> list[Message]:
    if work.link.stage.expands:
        return [Message(each.id, each.place[0]) for each in work.catalog.parts(done)]
    ordinals = {claim.message.key: claim.message.ordinal for claim in claims}
    return [Message(clip, ordinals[clip]) for clip in done]


@contextmanager
def renewed(topic: Topic, claims: Sequence[Claim], lease_s: float) -> Iterator[None]:
    """Renew the leases of claims while the block runs."""
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(lease_s / 3):
            topic.extend(claims, lease_s)

    thread = threading.Thread(target=renew, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def run_feed(config: FlowConfig, topics: str, stop: threading.Event, report: Report) -> None:
    """List, publish and pack clips until all are packed, or until told to stop.

    Raises:
        WorldModelError: a source, the catalog, a topic or the log cannot be used.
    """
    catalog = Catalog(config.place("catalog"), Chain.of(config))
    feeder, packer = Feeder(config, catalog, topics), Packer(config, catalog)
    try:
        while not stop.is_set():
            report(BUSY)
            fed = feeder.feed()
            sealed = packer.seal_next(feeder.all_listed)
            report(IDLE)
            if fed or sealed:
                continue
            if feeder.all_listed and not catalog.in_flight():
                packer.finish()
                return
            stop.wait(IDLE_S)
    finally:
        feeder.close()
        catalog.close()


def run_role(config: FlowConfig, role: str, topics: str, stop: threading.Event, report: Report) -> None:
    """Run the worker of a stage, or the one that feeds and packs."""
    if role == FEED:
        run_feed(config, topics, stop, report)
    else:
        run_stage(config, role, topics, stop, report)


def main() -> None:
    """Run the worker that the first line of standard input describes."""
    task = json.loads(sys.stdin.readline())
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a stage prints must not be taken for a report

    def end_with_parent() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()

    def say(message: dict[str, object]) -> None:
        output.write(json.dumps(message) + "\n")

    def report(state: str) -> None:
        say({"state": state})

    try:
        run_role(build(FlowConfig, task["config"]), task["role"], task["topics"], stop, report)
        say({"ended": True})
    except WorldModelError as error:
        say({"error": str(error)})
        sys.exit(2)


if __name__ == "__main__":
    main()
