"""The state of a flow, from the catalog alone."""

import time
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from worldmodel.config.flow import FlowConfig
from worldmodel.flow.catalog import RUN_LIVES_S, Catalog
from worldmodel.flow.chain import PACK, Chain
from worldmodel.flow.schema import clip, listing, outcome, run, segment, tally
from worldmodel.flow.transactional import reads


@dataclass(frozen=True)
class StageStatus:
    """Where one stage stands."""

    name: str
    done: int
    dropped: int
    dead: int
    """Dead letters: clips that failed in every attempt."""
    retried: int
    waiting: int
    """Clips that wait for it or are worked on."""
    seconds: float
    """Seconds that its workers have spent."""
    rate: float
    """Clips per second of one worker."""
    oldest_s: float | None
    """Age of the clip that waits longest."""


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


class StatusReader:
    """Reads the status of a flow; its queries do not depend on the number of clips.

    Args:
        config: the flow.
    """

    def __init__(self, config: FlowConfig) -> None:
        self.catalog = Catalog(config.place("catalog"), Chain.of(config))
        self.engine = self.catalog.engine

    def close(self) -> None:
        """Close the connections."""
        self.catalog.close()

    @reads
    def read(self, db: Connection) -> FlowStatus:
        """Return the status now."""
        chain = self.catalog.chain
        waiting = self._waiting(db)
        stages = []
        for link in chain.links:
            sums = self._sums(db, link.name, link.key)
            ended = sums["done"] + sums["dropped"] + sums["dead"]
            count, oldest_s = waiting.get(link.name, (0, None))
            rate = ended / sums["seconds"] if sums["seconds"] else 0.0
            stages.append(
                StageStatus(
                    link.name, sums["done"], sums["dropped"], sums["dead"], sums["retried"], count,
                    sums["seconds"], rate, oldest_s,
                )
            )  # fmt: skip
        segments = db.execute(
            sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(segment.c.num_clips), 0)).where(
                segment.c.key == chain.key
            )
        ).one()
        listings = db.execute(sa.select(listing)).all()
        runs = db.execute(sa.select(run).order_by(run.c.started_at.desc())).all()
        return FlowStatus(
            listed=sum(row.rows for row in listings),
            all_listed=bool(listings) and all(row.finished for row in listings),
            stages=tuple(stages),
            packed=int(segments[1]),
            segments=int(segments[0]),
            running=sum(time.time() - row.seen_at < RUN_LIVES_S for row in runs),
            error=runs[0].error if runs else None,
        )

    def _sums(self, db: Connection, stage: str, key: str) -> dict[str, Any]:
        names = ("done", "dropped", "dead", "retried", "seconds")
        sums = [sa.func.coalesce(sa.func.sum(tally.c[name]), 0).label(name) for name in names]
        row = db.execute(sa.select(*sums).where(tally.c.stage == stage, tally.c.key == key)).one()
        return {
            name: float(value) if name == "seconds" else int(value) for name, value in row._mapping.items()
        }

    def _waiting(self, db: Connection) -> dict[str, tuple[int, float]]:
        """Return how many clips are in each state, and the age of the oldest; few are in flight."""
        names = [*(link.name for link in self.catalog.chain.links), PACK]
        query = (
            sa.select(clip.c.state, sa.func.count(), sa.func.min(clip.c.listed_at))
            .where(clip.c.state.in_(names))
            .group_by(clip.c.state)
        )
        return {state: (count, time.time() - oldest) for state, count, oldest in db.execute(query)}

    @reads
    def ended(self, db: Connection, stage: str, state: str, limit: int = 20) -> list[dict[str, Any]]:
        """Return some clips that a stage dropped, or that are dead letters there, and why."""
        query = (
            sa.select(
                clip.c.id, clip.c.address, clip.c.start_s, clip.c.end_s, outcome.c.reason, outcome.c.fields
            )
            .join(clip, clip.c.id == outcome.c.clip)
            .where(
                outcome.c.stage == stage,
                outcome.c.key == self.catalog.chain.link(stage).key,
                outcome.c.state == state,
            )
            .limit(limit)
        )
        return [dict(row) for row in db.execute(query).mappings()]
