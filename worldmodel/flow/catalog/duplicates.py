"""Clips that show the same as an earlier one of the log.

They are found when clips are packed, in the order of the catalog, so the first of several copies is kept,
whichever worker was faster. The search is exact: 256 bits are divided into more bands than bits may differ,
so fingerprints within the distance are equal in at least one band, and the catalog has an index of bands.

Where clips are divided after their fingerprints were made, the parts of a clip have that of the whole. They
are not compared with each other: they are copies of the parts of another clip, or all of them are kept.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from worldmodel.database import reads
from worldmodel.flow.catalog.catalog import ROWS, Catalog
from worldmodel.flow.catalog.chain import PACK
from worldmodel.flow.catalog.records import Result
from worldmodel.flow.catalog.schema import band
from worldmodel.flow.errors import FlowError
from worldmodel.flow.stages.base import PARENT

FINGERPRINT = "fingerprint"
"""Column whose values are compared: 64 hexadecimal digits."""
NUM_BITS = 256
NEAR, MAX_DISTANCE = 12, 15
"""Default and limit of the distance; 16 bands have 16 bits each, of fewer values they would find too much."""


@dataclass(frozen=True)
class Fingerprint:
    """A fingerprint, or None."""

    bits: int | None
    clip: str
    """Owner of the fingerprint: the clip itself, or the clip that it is a part of."""


class Duplicates:
    """Finds copies among clips that are ready to be packed.

    Args:
        catalog: an open catalog; the stage of its chain that has the column `fingerprint` may have a setting
            `max_distance`.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.catalog, self.engine = catalog, catalog.engine
        link = catalog.chain.producer(FINGERPRINT, PACK)
        self.stage = link.name if link else ""
        self.max_distance = int(link.stage.settings.get("max_distance", NEAR)) if link else 0
        self.number = -1
        self.shared = link is not None and catalog.chain.names.index(link.name) < catalog.chain.split_at
        """Whether parts have the fingerprints of their wholes."""
        self.prints: dict[str, Fingerprint] = {}
        """Fingerprints of the clips that were looked at for one segment."""
        self.packed: dict[str, tuple[str, int]] = {}
        """The packed clip that each of them is a copy of, and how many bits differ."""
        self.chosen: dict[tuple[int, int], list[str]] = {}
        """Clips of the next segment by their bands."""

    def begin(self, number: int) -> None:
        """Begin to choose the clips of a segment."""
        self.chosen = {}
        if number != self.number:
            self.number, self.prints, self.packed = number, {}, {}

    def without(self, clips: Sequence[str], count: int) -> set[str]:
        """Return the first `count` of the next clips that are not copies; record that copies are dropped.

        Raises:
            FlowError: a fingerprint is not one of 256 bits.
        """
        if not self.stage:
            return set(clips[:count])
        kept: set[str] = set()
        copies: list[Result] = []
        step = min(max(count, 1), ROWS)
        for index, clip in enumerate(clips):
            if len(kept) == count:
                break
            if index % step == 0:
                self._look_up([each for each in clips[index : index + step] if each not in self.prints])
            if found := self.packed.get(clip) or self._among_chosen(clip):
                reason = f"it shows the same as the clip '{found[0]}' ({found[1]} of {NUM_BITS} bits differ)"
                copies.append(Result(clip, "dropped", reason, {"copy_of": found[0]}))
                continue
            kept.add(clip)
            for each in self._bands(self.prints[clip].bits):
                self.chosen.setdefault(each, []).append(clip)
        if copies:
            self.catalog.leave_out(copies)
        return kept

    def rows(self, clips: Sequence[str]) -> list[dict[str, Any]]:
        """Return the rows of the table `band` for the clips of a segment."""
        return [
            {"key": self.catalog.chain.key, "number": number, "value": value, "clip": clip}
            for clip in clips
            if clip in self.prints
            for number, value in self._bands(self.prints[clip].bits)
        ]

    def _look_up(self, clips: Sequence[str]) -> None:
        """Read the fingerprints of clips, and find which of them are copies of packed ones."""
        self.prints |= self._fingerprints(clips)
        wanted = {clip: self._bands(self.prints[clip].bits) for clip in clips}
        near = self._in_bands(sorted({each for bands in wanted.values() for each in bands}))
        others = self._fingerprints(sorted({other for found in near.values() for other in found}))
        for clip, bands in wanted.items():
            candidates = {other for each in bands for other in near.get(each, ())}
            if found := self._nearest(clip, {other: others[other] for other in candidates}):
                self.packed[clip] = found

    def _fingerprints(self, clips: Sequence[str]) -> dict[str, Fingerprint]:
        found: dict[str, Fingerprint] = {}
        for first in range(0, len(clips), ROWS):
            part = clips[first : first + ROWS]
            columns = self.catalog.columns(part, [FINGERPRINT, PARENT], PACK)[0]
            for clip, value, whole in zip(part, columns[FINGERPRINT], columns[PARENT], strict=True):
                found[clip] = Fingerprint(self._parse(value), (self.shared and whole) or clip)
        return found

    def _parse(self, value: Any) -> int | None:
        if value is None:
            return None
        try:
            if len(value) == NUM_BITS // 4:
                return int(value, 16)
        except (TypeError, ValueError):
            pass
        raise FlowError(f"The stage {self.stage} gave the fingerprint {value!r}; it must have 64 hex digits.")

    def _bands(self, bits: int | None) -> list[tuple[int, int]]:
        """Return number and value of each band: bits that are spread over all of the fingerprint."""
        if bits is None:
            return []
        text, count = f"{bits:0{NUM_BITS}b}", self.max_distance + 1
        digests = (hashlib.sha256(text[number::count].encode()).digest() for number in range(count))
        return [(number, int.from_bytes(each[:8], signed=True)) for number, each in enumerate(digests)]

    @reads
    def _in_bands(self, db: Connection, bands: Sequence[tuple[int, int]]) -> dict[tuple[int, int], list[str]]:
        """Return the packed clips in each band."""
        found: dict[tuple[int, int], list[str]] = {}
        for number, values in _by_number(bands):
            query = sa.select(band.c.value, band.c.clip).where(
                band.c.key == self.catalog.chain.key, band.c.number == number, band.c.value.in_(values)
            )
            for row in db.execute(query):
                found.setdefault((number, row.value), []).append(row.clip)
        return found

    def _among_chosen(self, clip: str) -> tuple[str, int] | None:
        bands = self._bands(self.prints[clip].bits)
        found = {other for each in bands for other in self.chosen.get(each, ())}
        return self._nearest(clip, {other: self.prints[other] for other in found})

    def _nearest(self, clip: str, others: Mapping[str, Fingerprint]) -> tuple[str, int] | None:
        """Return the nearest of other clips within the distance, by id if several are, and its distance."""
        mine = self.prints[clip]
        near = [
            (distance, other)
            for other, each in others.items()
            if mine.bits is not None and each.bits is not None and each.clip != mine.clip
            and (distance := (mine.bits ^ each.bits).bit_count()) <= self.max_distance
        ]  # fmt: skip
        return (min(near)[1], min(near)[0]) if near else None


def _by_number(bands: Sequence[tuple[int, int]]) -> Iterator[tuple[int, list[int]]]:
    """Yield the values of bands by their number, at most `ROWS` together."""
    for number in sorted({number for number, _ in bands}):
        values = [value for each, value in bands if each == number]
        for first in range(0, len(values), ROWS):
            yield number, values[first : first + ROWS]
