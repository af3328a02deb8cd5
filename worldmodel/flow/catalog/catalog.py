"""The catalog: which clips there are, and what each stage made of them.

It alone decides what is done: the first record of (clip, stage, key) counts, later ones change nothing. All
other parts may fail, repeat work or deliver twice.
"""

import heapq
import os
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from worldmodel.database import connect, insert, reads, writes
from worldmodel.flow.catalog.chain import DEAD, DROPPED, LISTED, PACK, PACKED, REPLACED, SPLIT, Chain
from worldmodel.flow.catalog.columns import Columns
from worldmodel.flow.catalog.records import BEGINNING, Listed, NewClip, Place, Result, Retry, Waiting, part_id
from worldmodel.flow.catalog.schema import (
    band,
    clip,
    identity,
    lease,
    listing,
    open_schema,
    outcome,
    segment,
    tally,
)
from worldmodel.leases import Lease, now

ROWS = 500
"""Rows per statement: databases limit the number of values."""


def new_owner() -> str:
    """Return a name for a worker that no other one has."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"


class Catalog(Columns):
    """Operations on the tables of `worldmodel.flow.catalog.schema`. Thread-safe; each process opens its own.

    Args:
        url: database, as `FlowConfig.catalog`.
        chain: the stages.
        create: whether it is created if there is none.
        owner: the worker that opens it, as its claims name it; empty takes a new name.

    Raises:
        ConfigError: the address is wrong, or a package is missing.
        DatabaseError: the database cannot be used.
        FlowError: it was written by another version, or has no catalog and is not to have one.
    """

    def __init__(self, url: str, chain: Chain, create: bool = True, owner: str = "") -> None:
        super().__init__(connect(url), chain)
        open_schema(self.engine, create)
        self.chain = chain.of_flow(self._identity() or self._identify(uuid.uuid4().hex))
        self.owner = owner or new_owner()

    def lease(self, stage: str, lease_s: float) -> Lease:
        """Return the lease of the worker that opened the catalog, for a stage or `pack`."""
        return Lease(lease, lease_s, self.owner, stage=stage, host=socket.gethostname())

    def close(self) -> None:
        self.engine.dispose()

    # ---- runs and states ----------------------------------------------------------------------------

    def begin(self) -> str:
        """Register a run and return its id; states of clips follow the chain afterwards.

        Raises:
            FlowError: a run with other stages uses the catalog.
        """
        name = uuid.uuid4().hex
        self._begin(name)
        return name

    @writes
    def _begin(self, db: Connection, name: str) -> None:
        """Begin in one transaction: other machines wait for it, and an interruption changes nothing."""
        self._lock(db)
        if self._last_chain(db) != self.chain.key:
            # The states of clips are a cache of their results under one chain. They are computed from the
            # results alone, whatever they were: so a stage that comes back finds what it made before.
            # Failures of a stage say nothing of another one that has its name.
            failed = sa.or_(clip.c.attempts > 0, clip.c.reason.is_not(None))
            db.execute(sa.update(clip).where(failed).values(attempts=0, reason=None))
            place: Place | None = BEGINNING
            while place is not None:
                place = self._restate(db, place)
            # Results do not say which clips are in the log: its segments do.
            for row in self._segments(db):
                for part in _parts([each["id"] for each in row["index"]["clips"]]):
                    db.execute(sa.update(clip).where(clip.c.id.in_(part)).values(_moved(PACKED)))
        self._register(db, name)

    def _restate(self, db: Connection, place: Place) -> Place | None:
        """Set the states of the next clips to their first stage without a result; return the last place."""
        rows = self.page(db, place)
        self.restate(db, rows)
        return (rows[-1].ordinal, rows[-1].sub) if rows else None

    def page(self, db: Connection, place: Place) -> Sequence[Any]:
        """Return id, ordinal, sub and parent of the next clips."""
        query = sa.select(clip.c.id, clip.c.ordinal, clip.c.sub, clip.c.parent).where(_after(place))
        return db.execute(query.order_by(clip.c.ordinal, clip.c.sub).limit(ROWS)).all()

    def results(self, db: Connection, rows: Sequence[Any]) -> dict[tuple[str, str, str], Any]:
        """Return the results of clips and of their wholes, given their ids, by clip, stage and key."""
        return self._results(db, [*(row.id for row in rows), *(row.parent for row in rows if row.parent)])

    def restate(self, db: Connection, rows: Sequence[Any]) -> None:
        """Set the states of clips, given their ids and the ids of their wholes, by their results."""
        known = self.results(db, rows)
        states: dict[str, list[str]] = {}
        for row in rows:
            states.setdefault(self.state_of(row.id, row.parent, known), []).append(row.id)
        for state, ids in states.items():
            changed = sa.update(clip).where(clip.c.id.in_(ids), clip.c.state != state)
            db.execute(changed.values(_moved(state)))

    def state_of(self, name: str, parent: str | None, known: Mapping[tuple[str, str, str], Any]) -> str:
        """Return the state of a clip whose results are known, as if none were packed."""
        if parent is not None:
            # A part exists for a chain only if its whole reaches the stage that divides, and if that stage
            # with its present key has made this very part.
            if self.state_of(parent, None, known) != SPLIT:
                return REPLACED  # until its whole has passed all stages before it, which may drop it
            split = self.chain.links[self.chain.split_at]
            if name not in known[parent, split.name, split.key].fields["parts"]:
                return REPLACED
        for link in self.chain.own(parent is not None):
            row = known.get((name, link.name, link.key))
            if row is None:
                return link.name  # the first stage without a result is the one that it waits for
            if row.state != "done":
                return row.state
            if link.stage.expands:
                return SPLIT
        dropped = known.get((name, PACK, self.chain.key))
        return PACK if dropped is None else dropped.state

    # ---- listing and order --------------------------------------------------------------------------

    @reads
    def listed(self, db: Connection, source: str) -> Listed:
        """Return how far a source is listed."""
        row = db.execute(sa.select(listing).where(listing.c.source == source)).first()
        return Listed() if row is None else Listed(row.rows, row.bookmark, row.digest)

    @writes
    def add(
        self, db: Connection, source: str, clips: Sequence[NewClip], rows: int, finished: bool,
        bookmark: Any = None, before: int = 0, digest: str | None = None,
    ) -> int | None:  # fmt: skip
        """Add the clips of further rows of a source, all or none; return how many were new.

        `rows` rows of the source are listed then, and `before` were; `finished` says whether these are all.
        If another process has listed rows meanwhile, nothing is added, and None is returned. `digest` is
        that of the settings that say what the source is.
        """
        self._lock(db)  # ordinals and positions follow those that other machines have given
        # The listing's own row counts how far it is. Whoever finds another number than it read has been
        # overtaken, and its clips, whose rows another process has listed, must not be added.
        position = db.execute(sa.select(sa.func.count()).select_from(listing)).scalar_one()
        entry = insert(db, listing).values(source=source, position=position)
        db.execute(entry.on_conflict_do_nothing())
        changed = sa.update(listing).where(listing.c.source == source, listing.c.rows == before)
        changed = changed.values(rows=rows, finished=int(finished), bookmark=bookmark, digest=digest)
        if not db.execute(changed.returning(listing.c.source)).all():
            return None
        first = db.execute(sa.select(sa.func.coalesce(sa.func.max(clip.c.ordinal), -1))).scalar_one() + 1
        now, state, added = time.time(), self.chain.names[0], 0
        values = [
            {
                "id": each.id, "source": source, "ordinal": first + index, "sub": 0, "parent": None,
                "address": each.address, "licence": each.licence, "start_s": each.start_s,
                "end_s": each.end_s, "row": dict(each.row), "state": state, "listed_at": now,
            }
            for index, each in enumerate(clips)
        ]  # fmt: skip
        for part in _parts(values):
            statement = insert(db, clip).values(part).on_conflict_do_nothing().returning(clip.c.id)
            added += len(db.execute(statement).all())
        stored = [Result(each.id, place=each.place) for each in clips if each.place]
        self._add_results(db, LISTED, LISTED, stored, 0.0)
        return added

    def waiting(self, after: Place, count: int) -> list[Waiting]:
        """Return the next clips that wait for a stage or a segment, in the order of the catalog."""
        # A query for each state reads `count` entries of its index; one for all states would sort all clips.
        found = [self.waiting_for(state, after, count) for state in self.chain.names]
        return list(heapq.merge(*found, key=lambda each: each.place))[:count]

    @reads
    def waiting_for(
        self, db: Connection, state: str, after: Place, count: int, up_to: Place | None = None
    ) -> list[Waiting]:
        """Return the next clips in one state, in the order of the catalog."""
        before = [] if up_to is None else [sa.not_(_after(up_to))]
        return _clips(db, clip.c.state == state, _after(after), *before, count=count)

    @reads
    def in_flight(self, db: Connection, up_to: Place | None = None) -> int:
        """Count the clips that wait for a stage or for a segment, up to a place or all."""
        query = sa.select(sa.func.count()).where(clip.c.state.in_(self.chain.names))
        if up_to is not None:
            query = query.where(sa.not_(_after(up_to)))
        return db.execute(query).scalar_one()

    @reads
    def all_packed(self, db: Connection, sources: Sequence[str]) -> bool:
        """Return whether all clips of some sources are listed, and none waits for a stage or a segment."""
        query = sa.select(listing.c.source).where(listing.c.source.in_(sources), listing.c.finished == 1)
        if {*db.execute(query).scalars()} != {*sources}:
            return False
        waits = sa.select(clip.c.id).where(clip.c.state.in_(self.chain.names)).limit(1)
        return db.execute(waits).first() is None

    @writes
    def admit(self, db: Connection, ordinal: int) -> None:
        """Let workers claim clips up to an ordinal."""
        db.execute(sa.update(identity).values(admitted=ordinal))

    @reads
    def after(self, db: Connection, place: Place, count: int) -> list[Waiting]:
        """Return the next clips in the order of the catalog, whatever their state."""
        return _clips(db, _after(place), count=count)

    # ---- results ------------------------------------------------------------------------------------

    @reads
    def done(self, db: Connection, stage: str, clips: Sequence[str]) -> dict[str, str]:
        """Return the state of the result of each clip that has one."""
        query = sa.select(outcome.c.clip, outcome.c.state).where(
            outcome.c.clip.in_(clips), outcome.c.stage == stage, outcome.c.key == self.chain.link(stage).key
        )
        return {row.clip: row.state for row in db.execute(query)}

    @writes
    def attempt(self, db: Connection, stage: str, name: str) -> tuple[int, str | None]:
        """Count a further attempt at a clip; return its number, from 2, and why the last one failed."""
        which = sa.update(clip).where(clip.c.id == name, clip.c.state == stage)
        counted = which.values(attempts=clip.c.attempts + 1).returning(clip.c.attempts, clip.c.reason)
        found = db.execute(counted).first()
        # A clip that another worker has moved on meanwhile is done again in vain: the first result counts.
        return (1, None) if found is None else (found.attempts + 1, found.reason)

    @writes
    def record(
        self,
        db: Connection,
        stage: str,
        results: Sequence[Result],
        seconds: float = 0.0,
        retry: Mapping[str, Retry] = MappingProxyType({}),
    ) -> None:
        """Record what a stage made of clips, in one transaction; results that exist stay as they are.

        `retry` has the clips to try again. Their claims end, unless others have claimed them meanwhile.
        """
        key = self.chain.link(stage).key
        each_s = seconds / max(len(results), 1)
        # Only results that are the first of their clip have effects: parts, states and sums of one that was
        # recorded twice would otherwise count twice.
        fresh = self._add_results(db, stage, key, results, each_s)
        added = sum(self._divide(db, stage, result) for result in fresh if result.state == "done")
        self._move(db, stage, {result.clip: result.state for result in fresh})
        for name, each in retry.items():
            mine = sa.or_(clip.c.holder.is_(None), clip.c.holder == self.owner)
            due = {"holder": None, "delayed_since": now(db), "delayed_until": now(db) + each.after_s}
            again = sa.update(clip).where(clip.c.id == name, clip.c.state == stage, mine)
            db.execute(again.values(**due, reason=each.reason))
        counts = {kind: sum(each.state == kind for each in fresh) for kind in ("done", "dropped", "dead")}
        self._count(db, stage, key, {**counts, "retried": len(retry), "added": added}, seconds)

    @writes
    def pass_on(self, db: Connection, stage: str, known: Mapping[str, str]) -> None:
        """Move on those clips that wait for a stage although it has results for them, given by their states.

        They do if a stage before it was changed or added, which it does not read.
        """
        self._move(db, stage, known)
        if self.chain.link(stage).stage.expands:
            wholes = [name for name, state in known.items() if state == "done"]
            parts = sa.select(clip.c.id, clip.c.parent).where(clip.c.parent.in_(wholes))
            self.restate(db, db.execute(parts.where(clip.c.state == REPLACED)).all())

    def _move(self, db: Connection, stage: str, results: Mapping[str, str]) -> None:
        """Move clips that wait for a stage on, by the states of its results for them."""
        after = SPLIT if self.chain.link(stage).stage.expands else self.chain.after(stage)
        for kind, state in (("done", after), ("dropped", DROPPED), ("dead", DEAD)):
            ids = [name for name, each in results.items() if each == kind]
            # Only from this stage: a result that comes late must not move back a clip that others moved on.
            changed = sa.update(clip).where(clip.c.id.in_(ids), clip.c.state == stage)
            db.execute(changed.values(_moved(state)))

    @writes
    def leave_out(self, db: Connection, results: Sequence[Result]) -> None:
        """Record why clips that passed all stages are dropped instead of packed."""
        fresh = self._add_results(db, PACK, self.chain.key, results, 0.0)
        for part in _parts([result.clip for result in results]):
            changed = sa.update(clip).where(clip.c.id.in_(part), clip.c.state == PACK)
            db.execute(changed.values(_moved(DROPPED)))
        counts = {"done": 0, "dropped": len(fresh), "dead": 0, "retried": 0, "added": 0}
        self._count(db, PACK, self.chain.key, counts, 0.0)

    def _add_results(
        self, db: Connection, stage: str, key: str, results: Sequence[Result], each_s: float
    ) -> list[Result]:
        """Add results and return the new ones."""
        # The primary key (clip, stage, key) decides which of two workers was first, in the database and so
        # for all machines: the insert of the second one changes nothing and returns no row. Asking before
        # the insert whether there is a result would leave a gap between the two.
        now, new = time.time(), set()
        rows = [
            {
                "clip": result.clip, "stage": stage, "key": key, "state": result.state,
                "reason": result.reason, "fields": self._fields(result), "place": result.place,
                "seconds": each_s, "finished_at": now,
            }
            for result in results
        ]  # fmt: skip
        for part in _parts(rows):
            statement = insert(db, outcome).values(part).on_conflict_do_nothing()
            new |= {row.clip for row in db.execute(statement.returning(outcome.c.clip))}
        return [result for result in results if result.clip in new]

    @staticmethod
    def _fields(result: Result) -> dict[str, Any]:
        parts = {"parts": [part_id(result.clip, *part) for part in result.parts]} if result.parts else {}
        return {**result.values, **parts}

    def _divide(self, db: Connection, stage: str, result: Result) -> int:
        """Add the parts of a clip; those that an earlier version of the stage made keep their results."""
        if not self.chain.link(stage).stage.expands:
            return 0
        # In the transaction that records the result of the whole: there is never a divided clip without its
        # parts, whenever a worker is killed, and the ids of parts follow from their times, so that a division
        # that runs again gives the same clips.
        whole = db.execute(sa.select(clip).where(clip.c.id == result.clip)).mappings().one()
        ids = [part_id(result.clip, *part) for part in result.parts]
        # Parts of a former version that the present one makes, too, have the same id and keep their results;
        # the others stay for the case that the version comes back.
        old = sa.update(clip).where(clip.c.parent == result.clip, clip.c.id.not_in(ids))
        db.execute(old.values(_moved(REPLACED)))
        known = self._results(db, [*ids, result.clip])
        for index, (name, (start_s, end_s)) in enumerate(zip(ids, result.parts, strict=True)):
            state = self.state_of(name, result.clip, known)
            row = {
                **whole, "id": name, "parent": result.clip, "sub": index + 1, "start_s": start_s,
                "end_s": end_s, **_moved(state),
            }  # fmt: skip
            changed = {"sub": index + 1, **_moved(state)}
            statement = insert(db, clip).values(row)
            db.execute(statement.on_conflict_do_update(index_elements=[clip.c.id], set_=changed))
        return len(ids)

    def _count(self, db: Connection, stage: str, key: str, counts: Mapping[str, int], seconds: float) -> None:
        # One row for each worker: all of them in one row would wait for each other.
        row = {"stage": stage, "key": key, "owner": self.owner, "seconds": seconds, "updated_at": time.time()}
        statement = insert(db, tally).values({**row, **counts})
        sums: dict[str, Any] = {name: tally.c[name] + value for name, value in counts.items()}
        sums |= {"seconds": tally.c.seconds + seconds, "updated_at": row["updated_at"]}
        keys = [tally.c.stage, tally.c.key, tally.c.owner]
        db.execute(statement.on_conflict_do_update(index_elements=keys, set_=sums))

    def uncount(self, db: Connection, stage: str, key: str, gone: Mapping[str, int]) -> None:
        """Take results that were removed out of the sums, given their number by state."""
        if gone:
            self._count(db, stage, key, {state: -count for state, count in gone.items()}, 0.0)

    @reads
    def parts(self, db: Connection, clips: Sequence[str]) -> list[Waiting]:
        """Return the parts of divided clips that wait for a stage."""
        return _clips(db, clip.c.parent.in_(clips), clip.c.state.in_(self.chain.names))

    # ---- the log ------------------------------------------------------------------------------------

    @reads
    def segments(self, db: Connection) -> list[Mapping[str, Any]]:
        """Return the segments of the chain's log, in order."""
        return self._segments(db)

    def _segments(self, db: Connection) -> list[Mapping[str, Any]]:
        query = sa.select(segment).where(segment.c.key == self.chain.key).order_by(segment.c.number)
        return [{**row} for row in db.execute(query).mappings()]

    @reads
    def last_segment(self, db: Connection) -> Mapping[str, Any] | None:
        """Return the newest segment, or None."""
        query = sa.select(segment).where(segment.c.key == self.chain.key)
        row = db.execute(query.order_by(segment.c.number.desc()).limit(1)).mappings().first()
        return None if row is None else {**row}

    @writes
    def seal(
        self,
        db: Connection,
        number: int,
        name: str,
        clips: Sequence[Waiting],
        up_to: Place,
        index: Mapping[str, Any],
        bands: Sequence[Mapping[str, Any]] = (),
    ) -> bool:
        """Record a segment, and that its clips are packed; return whether it is the one of its number.

        Up to the place `up_to` no clip is left for a later segment; `index` is the content of its .json
        file, and `bands` are rows of the fingerprints of its clips.
        """
        row = {
            "key": self.chain.key, "number": number, "name": name, "num_clips": len(clips),
            "num_bytes": index["num_bytes"], "last_ordinal": up_to[0], "last_sub": up_to[1],
            "index": dict(index), "sealed_at": time.time(),
        }  # fmt: skip
        # Several packers may have written files of this number. The primary key chooses one of them, and
        # its clips are packed in the same transaction, so that none is in two segments or in none.
        statement = insert(db, segment).values(row).on_conflict_do_nothing()
        if not db.execute(statement.returning(segment.c.number)).all():
            # Another packer was first. The name holds a digest of the content: it may have packed the same.
            which = (segment.c.key == self.chain.key, segment.c.number == number, segment.c.name == name)
            return bool(db.execute(sa.select(segment.c.number).where(*which)).all())
        for part in _parts([each.id for each in clips]):
            db.execute(sa.update(clip).where(clip.c.id.in_(part)).values(_moved(PACKED)))
        for part in _parts(bands):
            db.execute(insert(db, band).values(part).on_conflict_do_nothing())
        counts = {"done": len(clips), "dropped": 0, "dead": 0, "retried": 0, "added": 0}
        self._count(db, PACK, self.chain.key, counts, 0.0)
        return True

    # ---- dead letters and unused results ------------------------------------------------------------

    @writes
    def retry(self, db: Connection, stages: Sequence[str] = ()) -> int:
        """Forget that clips are dead in some stages (none: in all), so that they are tried again."""
        retried = 0
        for link in self.chain.links:
            if stages and link.name not in stages:
                continue
            which = (outcome.c.stage == link.name, outcome.c.key == link.key, outcome.c.state == DEAD)
            ids = [row.clip for row in db.execute(sa.select(outcome.c.clip).where(*which))]
            db.execute(sa.delete(outcome).where(*which))
            for part in _parts(ids):
                changed = sa.update(clip).where(clip.c.id.in_(part), clip.c.state == DEAD)
                db.execute(changed.values(_moved(link.name)))
            self._count(db, link.name, link.key, {"dead": -len(ids)}, 0.0)
            retried += len(ids)
        return retried

    def places(self) -> Iterator[str]:
        """Yield the places in the buffer of all recorded results."""
        # In pages, since a transaction over all results would hold back vacuuming for hours.
        last: tuple[str, str, str] | None = ("", "", "")
        while last is not None:
            found, last = self._places(last)
            yield from found

    @reads
    def _places(
        self, db: Connection, last: tuple[str, str, str]
    ) -> tuple[list[str], tuple[str, str, str] | None]:
        keys = (outcome.c.clip, outcome.c.stage, outcome.c.key)
        query = sa.select(*keys, outcome.c.place).where(sa.tuple_(*keys) > sa.tuple_(*map(sa.literal, last)))
        rows = db.execute(query.order_by(*keys).limit(20 * ROWS)).all()
        following = (rows[-1].clip, rows[-1].stage, rows[-1].key) if rows else None
        return [row.place for row in rows if row.place], following


def _moved(state: str) -> dict[str, Any]:
    """Return the columns of a clip that comes to a state: whatever was claimed, this claim has ended."""
    ended = {"holder": None, "delivery": 0, "delayed_since": None, "delayed_until": None}
    return {"state": state, "attempts": 0, "reason": None, **ended}


def _clips(db: Connection, *where: "sa.ColumnElement[bool]", count: int | None = None) -> list[Waiting]:
    """Return the clips of which some conditions hold, in the order of the catalog."""
    query = sa.select(clip.c.id, clip.c.ordinal, clip.c.sub, clip.c.state).where(*where)
    rows = db.execute(query.order_by(clip.c.ordinal, clip.c.sub).limit(count))
    return [Waiting(row.id, (row.ordinal, row.sub), row.state) for row in rows]


def _after(place: Place) -> sa.ColumnElement[bool]:
    return sa.tuple_(clip.c.ordinal, clip.c.sub) > sa.tuple_(*map(sa.literal, place))


def _parts(rows: Sequence[Any]) -> Iterator[list[Any]]:
    for first in range(0, len(rows), ROWS):
        yield list(rows[first : first + ROWS])
