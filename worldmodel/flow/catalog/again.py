"""What a run would do with the clips that are listed, and which of them a stage is to work on again."""

from collections import Counter
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import Connection

from worldmodel.database import reads, writes
from worldmodel.errors import InputError
from worldmodel.flow.catalog.catalog import ROWS, Catalog
from worldmodel.flow.catalog.chain import PACK, PACKED, Link
from worldmodel.flow.catalog.records import BEGINNING, Place
from worldmodel.flow.catalog.schema import clip, lease, outcome, run
from worldmodel.flow.errors import FlowError
from worldmodel.leases import is_live


@dataclass(frozen=True)
class StagePlan:
    """What a run would do in one stage."""

    name: str
    num_kept: int
    """Clips with a result of its present version and settings."""
    num_open: int
    """Clips that it would work on, at most: stages in front of it may drop some, or divide them."""


@dataclass(frozen=True)
class Range:
    """Clips of a range in the order of the catalog."""

    num_open: int
    """Listed clips that are worked on again, each with its parts."""
    num_packed: int
    """Those that stay as they are, since a segment holds them or a part of them, and no segment changes."""


class Planner:
    """Looks at the results in a catalog, and forgets some. It writes nothing but in `forget`."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog, self.engine, self.chain = catalog, catalog.engine, catalog.chain

    def stages(self) -> list[StagePlan]:
        """Return what a run with the catalog's chain would do in each stage, whatever ran before."""
        kept: Counter[str] = Counter()
        open_: Counter[str] = Counter()
        packed = {each["id"] for row in self.catalog.segments() for each in row["index"]["clips"]}
        place: Place | None = BEGINNING
        while place is not None:
            place = self._count_page(place, packed, kept, open_)
        return [StagePlan(link.name, kept[link.name], open_[link.name]) for link in self.chain.links]

    @reads
    def _count_page(
        self, db: Connection, place: Place, packed: set[str], kept: Counter[str], open_: Counter[str]
    ) -> Place | None:
        rows = self.catalog.page(db, place)
        known = self.catalog.results(db, rows)
        for row in rows:
            state = self.catalog.state_of(row.id, row.parent, known)
            own = self.chain.own(row.parent is not None)
            done = [link.name for link in own if (row.id, link.name, link.key) in known]
            kept.update(done)
            names = [link.name for link in own]
            if row.id not in packed and state in names:
                open_.update(name for name in names[names.index(state) :] if name not in done)
        return (rows[-1].ordinal, rows[-1].sub) if rows else None

    def readers(self, stage: str) -> list[Link]:
        """Return a stage and those whose results depend on its own.

        Raises:
            InputError: there is no such stage.
        """
        names = [link.name for link in self.chain.links]
        if stage not in names:
            raise InputError(f"There is no stage {stage!r}; use one of {', '.join(names)}.")
        found: list[Link] = []
        for link in self.chain.links[names.index(stage) :]:
            reads_one = any({*each.stage.outputs} & {*link.stage.inputs} for each in found)
            if not found or reads_one or any(each.stage.expands for each in found):
                found.append(link)
        return found

    @reads
    def within(self, db: Connection, first: int, last: int) -> Range:
        """Return how many clips from an ordinal up to another, but without it, can be worked on again."""
        counted = sa.select(sa.func.count(sa.distinct(clip.c.ordinal))).where(
            clip.c.ordinal >= first, clip.c.ordinal < last
        )
        packed = db.execute(counted.where(clip.c.state == PACKED)).scalar_one()
        return Range(db.execute(counted).scalar_one() - packed, packed)

    def forget(self, stage: str, first: int, last: int) -> Range:
        """Forget what a stage and its readers made of clips of a range; the next run makes it again.

        Clips that a segment holds stay as they are, since no segment changes. Another `version` of the stage
        begins a new log with all clips.

        Raises:
            InputError: there is no such stage.
            FlowError: a run is alive, whose workers may hold results of before.
        """
        links, found = self.readers(stage), self.within(first, last)
        self._check_idle()
        for begin in range(first, last, ROWS):
            if not self._forget(links, begin, min(begin + ROWS, last)):
                break
        return found

    @reads
    def _check_idle(self, db: Connection) -> None:
        live = sa.select(run.c.host, run.c.pid).join(lease, lease.c.id == run.c.id).where(is_live(db, lease))
        if (row := db.execute(live).first()) is not None:
            raise FlowError(f"Process {row.pid} on {row.host} runs this flow; stop it first.")

    @writes
    def _forget(self, db: Connection, links: list[Link], first: int, last: int) -> bool:
        """Forget the results of some clips; return whether there are clips from here on."""
        beyond = sa.select(sa.func.max(clip.c.ordinal)).scalar_subquery()
        packed = sa.select(clip.c.ordinal).where(clip.c.state == PACKED)
        here = (clip.c.ordinal >= first, clip.c.ordinal < last)
        query = sa.select(clip.c.id, clip.c.parent).where(*here, clip.c.ordinal.not_in(packed.where(*here)))
        rows = db.execute(query).all()
        ids = [row.id for row in rows]
        for name, key in [*((link.name, link.key) for link in links), (PACK, self.chain.key)]:
            which = (outcome.c.clip.in_(ids), outcome.c.stage == name, outcome.c.key == key)
            gone = sa.delete(outcome).where(*which).returning(outcome.c.state)
            self.catalog.uncount(db, name, key, Counter(db.execute(gone).scalars()))
        self.catalog.restate(db, rows)
        return (db.execute(sa.select(beyond)).scalar() or 0) >= last
