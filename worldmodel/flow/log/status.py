"""The state of a flow, from the catalog alone."""

import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from worldmodel.config.flow import FlowConfig
from worldmodel.database import reads
from worldmodel.errors import InputError
from worldmodel.flow.catalog.catalog import Catalog
from worldmodel.flow.catalog.chain import DEAD, DROPPED, PACK, Chain
from worldmodel.flow.catalog.schema import clip, lease, listing, outcome, run, segment, tally
from worldmodel.leases import is_live

WINDOW_S = 60.0
"""Rates are measured over the last minute."""
NUMBERS = re.compile(r"(HTTP \d{3}\b|\d+(?:\.\d+){3})|\d+(?:\.\d+)?")
"""Codes of HTTP and IP addresses, which are kept, and other numbers."""
NEWEST = 10_000
"""Verdicts of a stage that are counted by their reason: the newest."""


@dataclass(frozen=True)
class StageStatus:
    """Where one stage stands; the last one, `pack`, is the writing of segments."""

    name: str
    done: int
    dropped: int
    dead: int
    """Dead letters: clips that failed in every attempt."""
    retried: int
    waiting: int
    """Clips that wait for it or are worked on."""
    worker_s: float
    """Seconds that its workers have spent on batches."""
    rate: float
    """Clips per second over the last minute, of all its workers together."""
    oldest_s: float | None
    """Age of the oldest clip that waits, in seconds since it was listed."""
    end_s: float | None
    """Seconds until it has worked on all clips in flight at this rate; None if nothing moves."""
    machines: Mapping[str, int]
    """Workers that are alive, by the name of their machine; of `pack`, those that list and pack."""

    @property
    def workers(self) -> int:
        """Workers that are alive."""
        return sum(self.machines.values())


@dataclass(frozen=True)
class TierStatus:
    """Machines that run the same stages now, such as those with a GPU."""

    machines: tuple[str, ...]
    stages: tuple[str, ...]
    workers: int
    """Workers that are alive."""
    rate: float
    """Sum of the rates of its stages: clips per second that one of them has finished."""


@dataclass(frozen=True)
class FlowStatus:
    """Where a flow stands."""

    listed: int
    all_listed: bool
    stages: tuple[StageStatus, ...]
    packed: int
    segments: int
    running: int
    """Runs that are alive."""
    error: str | None
    """Why the last run failed."""

    @property
    def end_s(self) -> float | None:
        """Seconds until all clips are packed; None while it cannot be estimated."""
        ends = [stage.end_s for stage in self.stages]
        known = [end for end in ends if end is not None]
        return max(known) if self.all_listed and len(known) == len(ends) else None

    @property
    def tiers(self) -> tuple[TierStatus, ...]:
        """Tiers of machines, in the order of their first stages; stages without workers are in none."""
        grouped: dict[tuple[str, ...], list[StageStatus]] = {}
        for stage in self.stages:
            if stage.machines:
                grouped.setdefault(tuple(sorted(stage.machines)), []).append(stage)
        return tuple(
            TierStatus(
                machines,
                tuple(stage.name for stage in stages),
                sum(stage.workers for stage in stages),
                sum(stage.rate for stage in stages),
            )
            for machines, stages in grouped.items()
        )


@dataclass(frozen=True)
class Verdict:
    """Why clips have ended in a stage."""

    state: str
    """dropped or dead."""
    reason: str
    """With `#` in place of the numbers in it."""
    count: int
    examples: tuple[dict[str, Any], ...]
    """A few of the newest clips: id, address, start_s, end_s, reason and fields."""


class StatusReader:
    """Reads the status of a flow; its queries do not depend on the number of clips.

    Args:
        config: the flow.
        create: whether its catalog is created if there is none.

    Raises:
        FlowError: there is no catalog.
        DatabaseError: it cannot be read.
    """

    def __init__(self, config: FlowConfig, create: bool = False) -> None:
        self.catalog = Catalog(config.place("catalog"), Chain.of(config), create)
        self.engine = self.catalog.engine

    def close(self) -> None:
        self.catalog.close()

    @reads
    def read(self, db: Connection) -> FlowStatus:
        """Return the status now."""
        chain, now = self.catalog.chain, time.time()
        runs = db.execute(sa.select(run).order_by(run.c.started_at.desc())).all()
        window_s = min(WINDOW_S, max(1.0, now - runs[0].started_at)) if runs else WINDOW_S
        waiting = self._waiting(db, now)
        machines = self._machines(db)
        stages, remaining = [], 0
        for name, key in [*((link.name, link.key) for link in chain.links), (PACK, chain.key)]:
            sums = self._sums(db, name, key)
            count, oldest_s = waiting.get(name, (0, None))
            remaining += count
            rate = self._finished(db, name, key, now - window_s) / window_s
            end_s = 0.0 if not remaining else remaining / rate if rate else None
            moving = {"rate": rate, "oldest_s": oldest_s, "end_s": end_s, "machines": machines.get(name, {})}
            stages.append(StageStatus(name, waiting=count, **moving, **sums))
        segments = db.execute(
            sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(segment.c.num_clips), 0)).where(
                segment.c.key == chain.key
            )
        ).one()
        running = sa.select(sa.func.count()).select_from(run).join(lease, lease.c.id == run.c.id)
        running = running.where(is_live(db, lease))
        listings = db.execute(sa.select(listing)).all()
        return FlowStatus(
            listed=sum(row.rows for row in listings),
            all_listed=bool(listings) and all(row.finished for row in listings),
            stages=tuple(stages),
            packed=int(segments[1]),
            segments=int(segments[0]),
            running=db.execute(running).scalar_one(),
            error=runs[0].error if runs else None,
        )

    def _sums(self, db: Connection, stage: str, key: str) -> dict[str, Any]:
        names = ("done", "dropped", "dead", "retried")
        sums = [sa.func.coalesce(sa.func.sum(tally.c[name]), 0).label(name) for name in (*names, "seconds")]
        row = db.execute(sa.select(*sums).where(tally.c.stage == stage, tally.c.key == key)).one()._mapping
        return {**{name: int(row[name]) for name in names}, "worker_s": float(row["seconds"])}

    def _finished(self, db: Connection, stage: str, key: str, since: float) -> int:
        """Count the clips that a stage has finished since a time."""
        if stage == PACK:
            query = sa.select(sa.func.coalesce(sa.func.sum(segment.c.num_clips), 0)).where(
                segment.c.key == key, segment.c.sealed_at > since
            )
        else:
            query = sa.select(sa.func.count()).where(
                outcome.c.stage == stage,
                outcome.c.key == key,
                outcome.c.state.in_(("done", DROPPED, DEAD)),  # so that the index is used
                outcome.c.finished_at > since,
            )
        return int(db.execute(query).scalar_one())

    def _waiting(self, db: Connection, now: float) -> dict[str, tuple[int, float]]:
        """Return how many clips are in each state, and the age of the oldest; few are in flight."""
        query = (
            sa.select(clip.c.state, sa.func.count(), sa.func.min(clip.c.listed_at))
            .where(clip.c.state.in_(self.catalog.chain.names))
            .group_by(clip.c.state)
        )
        return {state: (count, max(0.0, now - oldest)) for state, count, oldest in db.execute(query)}

    def _machines(self, db: Connection) -> dict[str, dict[str, int]]:
        """Return how many workers of each stage are alive on each machine."""
        query = sa.select(lease.c.stage, lease.c.host, sa.func.count()).where(is_live(db, lease))
        query = query.where(lease.c.stage.is_not(None)).group_by(lease.c.stage, lease.c.host)
        machines: dict[str, dict[str, int]] = {}
        for stage, host, count in db.execute(query.order_by(lease.c.host)):
            machines.setdefault(stage, {})[host] = count
        return machines

    @reads
    def verdicts(self, db: Connection, stage: str, num_examples: int = 3) -> list[Verdict]:
        """Return why a stage has dropped clips, or why they are dead letters, the most frequent first.

        The newest 10,000 of both kinds are counted; reasons that differ only in their numbers count as one.

        Raises:
            InputError: there is no such stage.
        """
        key, names = self._key(stage), ("id", "address", "start_s", "end_s")
        counts: Counter[tuple[str, str]] = Counter()
        examples: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for state in (DROPPED, DEAD):
            query = (
                sa.select(*(clip.c[name] for name in names), outcome.c.reason, outcome.c.fields)
                .join(clip, clip.c.id == outcome.c.clip)
                .where(outcome.c.stage == stage, outcome.c.key == key, outcome.c.state == state)
                .order_by(outcome.c.finished_at.desc())
                .limit(NEWEST)
            )
            for row in db.execute(query).mappings():
                group = (state, general(row["reason"] or ""))
                counts[group] += 1
                if len(examples.setdefault(group, [])) < num_examples:
                    examples[group].append(dict(row))
        return [Verdict(*group, count, tuple(examples[group])) for group, count in counts.most_common()]

    @reads
    def retried(self, db: Connection, stage: str, limit: int = 3) -> list[tuple[str, str]]:
        """Return some clips that wait for another attempt, and why the last one failed."""
        self._key(stage)  # or there is none
        query = sa.select(clip.c.id, clip.c.reason).where(clip.c.state == stage, clip.c.reason.is_not(None))
        return [(row.id, row.reason) for row in db.execute(query.limit(limit))]

    def _key(self, stage: str) -> str:
        chain = self.catalog.chain
        if stage not in chain.names:
            raise InputError(f"There is no stage {stage!r}; use one of {', '.join(chain.names)}.")
        return chain.key if stage == PACK else chain.link(stage).key


def general(reason: str) -> str:
    """Return a reason without numbers, quoted values and paths, to count it with others like it.

    Hosts and the codes of their answers stay: one that refuses all its files is another matter than some
    files that are missing.
    """
    reason = re.sub(r"'[^']*'", "…", re.sub(r"(https?://[^/\s']+)[^\s']*", r"\1/…", reason))
    return NUMBERS.sub(lambda found: found[1] or "#", reason)
