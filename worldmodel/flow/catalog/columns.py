"""Columns of clips, of their tables and of stages, as a stage sees them."""

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from worldmodel.database import reads
from worldmodel.flow.catalog.chain import LISTED
from worldmodel.flow.catalog.runs import Runs
from worldmodel.flow.catalog.schema import clip, outcome
from worldmodel.flow.times import in_part

VIDEO = "video"
"""Column of a clip's file; it may have come with the row of its source."""


class Columns(Runs):
    """The part of a catalog that reads what is known of clips."""

    def columns(
        self, clips: Sequence[str], columns: Sequence[str], before: str
    ) -> tuple[dict[str, list[Any]], dict[str, list[str | None]]]:
        """Return columns of clips as a stage sees them.

        Args:
            clips: their ids.
            columns: names of columns.
            before: the stage that reads.

        Returns:
            Values by column, and for the columns of the buffer the places of each clip's.
        """
        values: dict[str, list[Any]] = {}
        places: dict[str, list[str | None]] = {}
        rows, known = self._rows(clips)
        for column in columns:
            link = self.chain.producer(column, before)
            brought = [_brought(rows[name], known) if column == VIDEO else None for name in clips]
            if link is None:
                own = [None if any(brought) else _own(rows[name], column) for name in clips]
                values[column] = _in_parts(column, own, [rows[name] for name in clips])
                if any(brought):
                    places[column] = brought
                continue
            shared = self.chain.names.index(link.name) <= self.chain.split_at
            owners = [(rows[name]["parent"] if shared else None) or name for name in clips]
            made = [known.get((owner, link.name, link.key)) for owner in owners]
            values[column] = [each and each.fields.get(column) for each in made]
            if shared:
                values[column] = _in_parts(column, values[column], [rows[name] for name in clips])
            found = [(each and each.place) or file for each, file in zip(made, brought, strict=True)]
            if any(found):
                places[column] = found
        return values, places

    @reads
    def _rows(
        self, db: Connection, clips: Sequence[str]
    ) -> tuple[dict[str, Mapping[str, Any]], dict[tuple[str, str, str], Any]]:
        """Return the rows of clips, and the results for them and for those that they are parts of.

        `whole_start_s` in a row is where the clip that it is a part of begins.
        """
        whole = clip.alias()
        query = sa.select(clip, whole.c.start_s.label("whole_start_s"))
        query = query.outerjoin(whole, whole.c.id == clip.c.parent).where(clip.c.id.in_(clips))
        rows: dict[str, Mapping[str, Any]] = {row["id"]: {**row} for row in db.execute(query).mappings()}
        wholes = [row["parent"] for row in rows.values() if row["parent"]]
        return rows, self._results(db, [*clips, *wholes])

    def _results(self, db: Connection, ids: Sequence[str]) -> dict[tuple[str, str, str], Any]:
        query = sa.select(outcome).where(outcome.c.clip.in_(list(set(ids))))
        return {(row.clip, row.stage, row.key): row for row in db.execute(query)}


def _brought(row: Mapping[str, Any], known: Mapping[tuple[str, str, str], Any]) -> str | None:
    """Return the location of the file that came with the row of a clip or of its whole."""
    found = known.get((row["parent"] or row["id"], LISTED, LISTED))
    return found and found.place


def _own(row: Mapping[str, Any], column: str) -> Any:
    """Return a column of a clip itself: of its table, or one that its source has."""
    if column in ("address", "licence", "start_s", "end_s", "source", "parent", "row", "ordinal"):
        return row[column]
    return row["row"].get(column)


def _in_parts(column: str, values: Sequence[Any], rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return a column of whole clips as one of their parts, given the rows of the parts read."""
    found = list(values)
    for index, row in enumerate(rows):
        if row["parent"]:
            start_s = row["whole_start_s"] or 0.0
            found[index] = in_part(column, values[index], row["start_s"] - start_s, row["end_s"] - start_s)
    return found
