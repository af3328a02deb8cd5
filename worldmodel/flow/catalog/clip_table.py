"""The clips of a catalog as rows: what became of each, in which stage, and why."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import sqlalchemy as sa
from sqlalchemy import Connection

from worldmodel.database import reads
from worldmodel.errors import InputError
from worldmodel.flow.catalog.catalog import ROWS, Catalog
from worldmodel.flow.catalog.chain import DEAD, DROPPED, PACK, REPLACED
from worldmodel.flow.catalog.records import BEGINNING, Place
from worldmodel.flow.catalog.schema import clip, outcome

Verdict = Literal["packed", "dropped", "dead", "divided", "waiting"]
"""`divided` clips go on as their parts; `waiting` ones are in a stage or in front of it."""
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@dataclass(frozen=True)
class ClipEntry:
    """One clip and its verdict."""

    id: str
    place: Place
    parent: str | None
    source: str
    address: str
    licence: str
    start_s: float | None
    end_s: float | None
    verdict: Verdict
    stage: str | None
    """Where it was dropped, failed or waits."""
    reason: str | None

    @property
    def ordinal(self) -> int:
        """Position of its row in the order of the catalog."""
        return self.place[0]


class ClipTable:
    """Reads clips in the order of the catalog. Parts that a former chain made are not among them."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog, self.engine = catalog, catalog.engine
        chain = catalog.chain
        self.keys = {**{link.name: link.key for link in chain.links}, PACK: chain.key}

    def pages(self, count: int = ROWS) -> Iterator[list[ClipEntry]]:
        """Yield all clips, `count` at a time."""
        place = BEGINNING
        while entries := self.page(place, count):
            yield entries
            place = entries[-1].place

    @reads
    def page(
        self,
        db: Connection,
        after: Place,
        count: int,
        verdict: Verdict | None = None,
        stage: str = "",
        reason: str = "",
    ) -> list[ClipEntry]:
        """Return up to `count` clips behind a place, which is that of the last clip of the page before.

        `verdict` chooses those that have it, `stage` those that were dropped, failed or wait there, and
        `reason` those whose reason contains these words.

        Raises:
            InputError: there is no such verdict or stage.
        """
        if verdict is not None and verdict not in VERDICTS:
            raise InputError(f"There is no verdict {verdict!r}; use one of {', '.join(VERDICTS)}.")
        if stage and stage not in self.keys:
            raise InputError(f"There is no stage {stage!r}; use one of {', '.join(self.keys)}.")
        query = sa.select(clip).where(
            sa.tuple_(clip.c.ordinal, clip.c.sub) > sa.tuple_(*map(sa.literal, after)),
            clip.c.state != REPLACED,
        )
        if verdict is not None:
            names = self.catalog.chain.names if verdict == "waiting" else [verdict]
            query = query.where(clip.c.state.in_(names))
        if stage or reason:
            ended = self._ended(stage).where(outcome.c.clip == clip.c.id)
            if reason:
                ended = ended.where(outcome.c.reason.icontains(reason, autoescape=True))
            found = sa.and_(clip.c.state.in_((DROPPED, DEAD)), ended.exists())
            query = query.where(found if reason else sa.or_(clip.c.state == stage, found))
        query = query.order_by(clip.c.ordinal, clip.c.sub).limit(count)
        rows = db.execute(query).mappings().all()
        return self._entries(db, rows)

    def _ended(self, stage: str = "") -> sa.Select[Any, Any, Any]:
        """Return a query for the results of clips that ended in a stage of the chain, or in any."""
        keys = [(stage, self.keys[stage])] if stage else list(self.keys.items())
        return sa.select(outcome.c.clip, outcome.c.stage, outcome.c.reason).where(
            sa.tuple_(outcome.c.stage, outcome.c.key).in_(keys), outcome.c.state.in_((DROPPED, DEAD))
        )

    def _entries(self, db: Connection, rows: Sequence[Any]) -> list[ClipEntry]:
        ids = [row["id"] for row in rows if row["state"] in (DROPPED, DEAD)]
        ended: dict[str, tuple[str, str | None]] = {}
        for found in db.execute(self._ended().where(outcome.c.clip.in_(ids))):
            ended.setdefault(found.clip, (found.stage, found.reason))
        entries = []
        for row in rows:
            waits = row["state"] in self.keys
            stage, reason = (row["state"], None) if waits else ended.get(row["id"], (None, None))
            entries.append(
                ClipEntry(
                    row["id"], (row["ordinal"], row["sub"]), row["parent"], row["source"], row["address"],
                    row["licence"], row["start_s"], row["end_s"], "waiting" if waits else row["state"],
                    stage, reason,
                )
            )  # fmt: skip
        return entries
