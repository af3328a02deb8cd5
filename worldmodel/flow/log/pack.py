"""The end of a flow: clips that passed all stages are written to the log, in the order of the catalog.

The order does not depend on which worker was faster or was killed: a segment waits for the slowest of its
clips. So the same catalog gives the same segments, byte by byte.
"""

import hashlib
import json
from itertools import takewhile

from worldmodel.config.flow import FlowConfig
from worldmodel.flow.buffer import open_buffer
from worldmodel.flow.buffer.base import UNUSED_S
from worldmodel.flow.buffer.tar import tar_bytes
from worldmodel.flow.catalog.catalog import Catalog
from worldmodel.flow.catalog.chain import ENDED, PACK, Chain
from worldmodel.flow.catalog.duplicates import Duplicates
from worldmodel.flow.catalog.records import BEGINNING, Place, Waiting
from worldmodel.flow.errors import FlowError
from worldmodel.flow.log.log import CURRENT, FINISHED, LAYOUT, READER, VERSION, segment_name
from worldmodel.flow.stages.base import CLIP, is_binary
from worldmodel.flow.storage import Storage
from worldmodel.flow.work.work import read_columns

PAGE = 1024
"""Clips that are looked at together."""
EXTENSIONS = {"video": "mp4", "image": "png"}
"""Extensions of members; other binary columns are safetensors."""


class Packer:
    """Writes segments. Several may run: the first to record a segment wins, and the others go on after it.

    Raises:
        FlowError: the log lacks segments that the catalog has recorded.
    """

    def __init__(self, config: FlowConfig, catalog: Catalog) -> None:
        self.chain: Chain = catalog.chain
        self.catalog, self.max_lead = catalog, config.max_lead
        self.duplicates = Duplicates(catalog)
        self.buffer = open_buffer(config.place("buffer"))
        self.top = Storage(config.place("log"))
        self.log = Storage(f"{self.top.address}/{self.chain.key}")
        unpublished = [row for row in catalog.segments() if not self.log.exists(segment_name(row["number"]))]
        for row in unpublished:  # a run that was killed may have recorded one and not published it
            if not self.log.exists(row["name"]):
                raise FlowError(
                    f"The catalog has recorded the segment {row['name']}, which is not in the log "
                    f"{self.log.address}; set log as it was, or another folder for a new flow."
                )
            self.log.write(segment_name(row["number"]), to_json(row["index"]))
        layout = {"segment_size": self.chain.segment_size, "columns": list(self.chain.pack)}
        self.log.write(LAYOUT, to_json(layout))
        self.ended = self.log.exists(FINISHED)
        self.top.write(CURRENT, to_json({"key": self.chain.key, "version": VERSION}))
        self.log.remove_interrupted(UNUSED_S)

    def seal_next(self, listed: bool) -> bool:
        """Seal the next segment, if all its clips are there; return whether something was sealed.

        Args:
            listed: whether all clips of the sources are listed, so that the last segment may be short.
        """
        if self.ended and self.catalog.in_flight():
            self.log.delete(FINISHED)  # now, since a trainer would take it for the end until the next segment
            self.ended = False
        last = self.catalog.last_segment()
        number = 0 if last is None else last["number"] + 1
        if self.max_lead and number > self._begun() + self.max_lead:
            return False
        place: Place = BEGINNING if last is None else (last["last_ordinal"], last["last_sub"])
        self.duplicates.begin(number)
        clips, place, complete = self._ready(place)
        if len(clips) < self.chain.segment_size and not (clips and listed and complete):
            return False
        data, index = self._segment(clips)
        name = f"{number:06d}-{index['sha256'][:8]}.tar"
        index |= {"number": number, "name": name}
        # The order makes a kill harmless at any point: a file that no index names is overwritten or ignored,
        # a recorded segment without its index gets it from the catalog when the next packer starts.
        self.log.delete(FINISHED)
        self.log.write(name, data)
        bands = self.duplicates.rows([each.id for each in clips])
        if self.catalog.seal(number, name, clips, place, index, bands):
            self.log.write(segment_name(number), to_json(index))
        return True

    def finish(self) -> None:
        """Say that no more segments follow."""
        segments = self.catalog.segments()
        clips = sum(row["num_clips"] for row in segments)
        self.log.write(FINISHED, to_json({"segments": len(segments), "clips": clips}))

    def _ready(self, place: Place) -> tuple[list[Waiting], Place, bool]:
        """Return the clips of the next segment, the place up to which none is left, and whether that is all.

        Clips behind the place of the last segment were dead letters then, and come first.
        """
        size = self.chain.segment_size
        late = self.catalog.waiting_for(PACK, BEGINNING, size, up_to=place)
        kept = self.duplicates.without([each.id for each in late], size)
        clips = [each for each in late if each.id in kept]
        while True:
            page = self.catalog.after(place, PAGE)
            decided = takewhile(lambda each: each.state in (PACK, *ENDED), page)
            ready = [each.id for each in decided if each.state == PACK]
            kept = self.duplicates.without(ready, size - len(clips))
            for each in page:
                if len(clips) == size:
                    return clips, place, False
                if each.id in kept:
                    clips.append(each)
                elif each.state not in (PACK, *ENDED):
                    return clips, place, False
                place = each.place
            if len(page) < PAGE:
                return clips, place, self.catalog.in_flight(up_to=place) == len(clips)

    def _segment(self, clips: list[Waiting]) -> tuple[bytes, dict]:
        """Return a segment's file and its index."""
        own = ["source", "address", "licence", "start_s", "end_s", "row"]
        ids, columns = [each.id for each in clips], [*own, *self.chain.pack]
        batch = read_columns(self.catalog, self.buffer, ids, columns, PACK)
        binary = [name for name in self.chain.pack if is_binary(batch.schema.field(name).type)]
        rows = batch.to_pylist()
        del batch  # a segment may be gigabytes
        members: list[tuple[str, str, bytes]] = []
        for row in rows:
            clip = row.pop(CLIP)
            plain = {name: value for name, value in row.items() if name not in binary and value is not None}
            members.append((clip, "json", to_json(plain)))
            for name in binary:
                if row[name] is not None:
                    members.append((clip, name, row[name]))
        names = [f"{clip}.{member_extension(part)}" for clip, part, _ in members]
        data, offsets = tar_bytes(zip(names, (content for _, _, content in members), strict=True))
        parts: dict[str, dict[str, list[int]]] = {}
        for (clip, part, content), offset in zip(members, offsets, strict=True):
            parts.setdefault(clip, {})[part] = [offset, len(content)]
        index = {
            "clips": [{"id": clip, "parts": found} for clip, found in parts.items()],
            "num_bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        return data, index

    def _begun(self) -> int:
        """Return the newest segment that a training has begun."""
        return int(self.log.read(READER)) if self.log.exists(READER) else 0


def member_extension(column: str) -> str:
    """Return the extension of the member that holds a column."""
    if column == "json":
        return "json"
    return EXTENSIONS.get(column, f"{column}.safetensors")


def to_json(value: object) -> bytes:
    """Return JSON that is the same for the same value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
