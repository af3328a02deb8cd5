"""The loops of workers: one runs a stage on what it claims, another one lists, admits and packs clips.

An executor decides where they run: in processes, in threads, or on the machines of a cluster.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from worldmodel.config.flow import FlowConfig
from worldmodel.flow.catalog.catalog import Catalog
from worldmodel.flow.catalog.chain import Chain
from worldmodel.flow.catalog.claims import Claims
from worldmodel.flow.catalog.records import Claim
from worldmodel.flow.log.pack import Packer
from worldmodel.flow.work.attempts import groups
from worldmodel.flow.work.feeder import Feeder
from worldmodel.flow.work.topics import Topic, open_topics
from worldmodel.flow.work.work import Work

FEED = "feed"
"""Role of the worker that lists, admits and packs clips."""
BUSY, IDLE = "busy", "idle"
IDLE_S = 0.05
"""Pause of a worker that feeds and has nothing to do."""
WAIT_S = 0.5
"""How long a worker waits for clips before it looks whether it is to stop."""
LOOK_S = 5.0
"""How often a worker with a topic looks into the catalog, for clips that the topic lost, whose workers died,
or whose next attempt is due."""
Report = Callable[[Literal["busy", "idle"]], None]


def run_role(config: FlowConfig, role: str, stop: threading.Event, report: Report) -> None:
    """Run the worker of a stage, or the one that feeds and packs."""
    if role == FEED:
        run_feed(config, stop, report)
    else:
        run_stage(config, role, stop, report)


def run_stage(config: FlowConfig, name: str, stop: threading.Event, report: Report, owner: str = "") -> None:
    """Run one stage on the clips that wait for it until told to stop.

    Args:
        config: the flow.
        name: the stage.
        stop: ends the loop after a batch when set.
        report: told when a batch begins and ends.
        owner: name of the worker in its claims; empty takes a new one.

    Raises:
        WorldModelError: the catalog, the buffer or a topic cannot be used, or the stage is at fault.
    """
    work = Work(config, name, owner)
    size, following = work.link.stage.batch_size, work.chain.after(name)
    topics: Mapping[str, Topic] = {}
    try:
        claims = Claims(work.catalog, name, config.lease_s)
        topics = open_topics(config, work.chain, (name, following))
        incoming = Incoming(claims, topics.get(name))
        with claims.kept():
            while not stop.is_set():
                for some in groups(incoming.next(size), lambda claim: claim.delivery, size):
                    report(BUSY)
                    outcome = work.process([claim.clip for claim in some], some[0].delivery)
                    if following in topics and outcome.done:
                        topics[following].announce(_onward(work, outcome.done))
                    report(IDLE)
    finally:
        for topic in topics.values():
            topic.close()
        work.close()


class Incoming:
    """The next clips of a worker: the first ones of the catalog, or those that a topic names.

    Args:
        claims: the worker's.
        topic: what names clips; None if there is none.
    """

    def __init__(self, claims: Claims, topic: Topic | None) -> None:
        self.claims, self.topic = claims, topic
        self.looked = float("-inf")

    def next(self, count: int) -> list[Claim]:
        """Claim up to `count` clips; wait a little for the first one."""
        if self.topic is None:
            return self.claims.wait(count, WAIT_S)
        if time.monotonic() > self.looked + LOOK_S:
            found = self.claims.claim(count)
            if not found:  # else there may be more, and the next call looks again
                self.looked = time.monotonic()
            return found
        named = self.topic.receive(count, WAIT_S)
        return self.claims.claim(count, named) if named else []


def _onward(work: Work, done: Sequence[str]) -> Sequence[str]:
    """Return what goes on to the next stage of the clips that are done: they themselves, or their parts."""
    return [each.id for each in work.catalog.parts(done)] if work.link.stage.expands else done


def run_feed(config: FlowConfig, stop: threading.Event, report: Report) -> None:
    """List, admit and pack clips until all are packed, or until told to stop.

    Raises:
        WorldModelError: a source, the catalog, a topic or the log cannot be used.
    """
    catalog = Catalog(config.place("catalog"), Chain.of(config))
    feeder, packer = Feeder(config, catalog), Packer(config, catalog)
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
