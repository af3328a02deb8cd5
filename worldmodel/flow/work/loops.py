"""The loops of workers: one runs a stage on what it claims, another one lists, admits and packs clips.

An executor decides where they run: in processes, in threads, or on the machines of a cluster.
"""

import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Literal

from worldmodel.config.flow import FEED, FlowConfig
from worldmodel.flow.catalog.catalog import Catalog
from worldmodel.flow.catalog.chain import PACK, Chain
from worldmodel.flow.catalog.claims import Claims
from worldmodel.flow.catalog.records import Claim
from worldmodel.flow.log.pack import Packer
from worldmodel.flow.work.feeder import Feeder
from worldmodel.flow.work.topics import Topic, open_topics
from worldmodel.flow.work.work import Work

BUSY, IDLE = "busy", "idle"
IDLE_S = 0.05
"""Pause of a worker that feeds and has nothing to do."""
WAIT_S = 0.5
"""How long a worker waits for clips before it looks whether it is to stop."""
PACKED_S = 1.0
"""How often a machine that does not feed looks whether all clips are packed."""
LOOK_S = 5.0
"""How often a worker with a topic looks into the catalog, for clips that the topic lost, whose workers died,
or whose next attempt is due."""
Report = Callable[[Literal["busy", "idle"]], None]


def run_role(config: FlowConfig, role: str, stop: threading.Event, report: Report) -> None:
    """Run the worker of a stage, or the one that feeds and packs, or waits until others have."""
    if role == FEED and config.feed:
        run_feed(config, stop, report)
    elif role == FEED:
        wait_packed(config, stop)
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
    try:
        with StageWorker.claiming(work) as worker:
            while not stop.is_set():
                worker.next(report, WAIT_S)
    finally:
        work.close()


def run_waiting(stages: Sequence[Work], owner: str, idle_s: float) -> None:
    """Run all stages in turn until none had a clip for some seconds; a batch that hangs ends the process.

    Args:
        stages: the stages in their order.
        owner: name of the worker in its claims. One that goes on under the name of a worker that has ended
            gets what that one had claimed at once, each clip alone.
        idle_s: how long it looks for clips in vain.

    Raises:
        WorldModelError: as `run_stage`.
    """
    with ExitStack() as stack:
        workers = []
        for index, work in enumerate(stages):
            work.catalog.owner = f"{owner}-{index}"
            workers.append(stack.enter_context(StageWorker.claiming(work)))
        last = time.monotonic()
        while time.monotonic() - last < idle_s:
            for worker in workers:
                while worker.next(ends_hanging(worker.work.link.stage.timeout_s), 0.0):
                    last = time.monotonic()
            time.sleep(IDLE_S)


def ends_hanging(timeout_s: float) -> Report:
    """Return a report that ends the process if a batch takes too long.

    A batch that hangs may hold the GIL, so no thread of Python could end it.
    """

    def report(state: str) -> None:
        if state == BUSY:
            faulthandler.dump_traceback_later(timeout_s, exit=True, file=sys.__stderr__ or sys.stderr)
        else:
            faulthandler.cancel_dump_traceback_later()

    return report


class StageWorker:
    """Runs a stage on the first clips of the catalog that wait for it, or on those that a topic names.

    Args:
        work: the stage.
        claims: the worker's.
        topics: those of the stage and of the one after it; none without a broker.
    """

    def __init__(self, work: Work, claims: Claims, topics: Mapping[str, Topic]) -> None:
        self.work, self.claims, self.topics = work, claims, topics
        self.looked = float("-inf")
        """When the catalog last had nothing that the topic had not named."""

    @classmethod
    @contextmanager
    def claiming(cls, work: Work) -> Iterator["StageWorker"]:
        """Open the topics and hold the lease of the claims while the block runs."""
        name = work.link.name
        claims = Claims(work.catalog, name, work.config.lease_s)
        topics = open_topics(work.config, work.chain, (name, work.chain.after(name)))
        try:
            with claims.kept():
                yield cls(work, claims, topics)
        finally:
            for topic in topics.values():
                topic.close()

    def next(self, report: Report, wait_s: float) -> bool:
        """Claim some clips and run the stage on them; return whether there were any within a time."""
        size = self.work.link.stage.batch_size
        claimed = self._claim(size, wait_s)
        # A clip that was claimed before comes alone, so that one that ends workers takes no other with it.
        new = [claim for claim in claimed if claim.delivery == 1]
        again = [[claim] for claim in claimed if claim.delivery > 1]
        for some in [new, *again] if new else again:
            report(BUSY)
            done = self.work.process([claim.clip for claim in some], some[0].delivery)
            self._announce(done)
            report(IDLE)
        return bool(claimed)

    def _claim(self, count: int, wait_s: float) -> list[Claim]:
        topic = self.topics.get(self.work.link.name)
        if topic is None:
            return self.claims.wait(count, wait_s)
        if time.monotonic() > self.looked + LOOK_S:
            found = self.claims.claim(count)
            if not found:  # else there may be more, and the next call looks again
                self.looked = time.monotonic()
            return found
        named = topic.receive(count, wait_s)
        return self.claims.claim(count, named) if named else []

    def _announce(self, done: Sequence[str]) -> None:
        """Tell the next stage what goes on to it: the clips that are done, or their parts."""
        topic = self.topics.get(self.work.chain.after(self.work.link.name))
        if topic is not None and done:
            divided = self.work.link.stage.expands
            topic.announce([each.id for each in self.work.catalog.parts(done)] if divided else done)


def run_feed(config: FlowConfig, stop: threading.Event, report: Report) -> None:
    """List, admit and pack clips until all are packed, or until told to stop.

    Raises:
        WorldModelError: a source, the catalog, a topic or the log cannot be used.
    """
    catalog = Catalog(config.place("catalog"), Chain.of(config))
    feeder, packer = Feeder(config, catalog), Packer(config, catalog)
    try:
        with catalog.lease(PACK, config.lease_s).kept(catalog.engine):
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


def wait_packed(config: FlowConfig, stop: threading.Event) -> None:
    """Wait until other machines have listed and packed all clips, or until told to stop.

    Raises:
        WorldModelError: the catalog cannot be used.
    """
    with closing(Catalog(config.place("catalog"), Chain.of(config))) as catalog:
        while not catalog.all_packed(list(config.sources)) and not stop.wait(PACKED_S):
            pass
