"""Content of the Data tab: counts of a flow, its clips with their verdicts, and a picture of each."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import groupby

from worldmodel.config.flow import FlowConfig
from worldmodel.errors import WorldModelError
from worldmodel.flow.buffer import open_buffer
from worldmodel.flow.catalog.chain import PACK
from worldmodel.flow.catalog.clip_table import ClipEntry, ClipTable, Verdict
from worldmodel.flow.catalog.records import Place
from worldmodel.flow.log.status import StatusReader
from worldmodel.media import sample_frames
from worldmodel.media.encoding import encode_jpeg

PAGE = 64
"""Clips of a page."""
SIDE = 240
"""Longer side of a picture in pixels."""
KEPT = 16 * PAGE
"""Pictures in memory, of some kilobytes each."""


class FlowReader:
    """Reads a flow's catalog and buffer, and changes neither. Thread-safe.

    Args:
        config: the flow.

    Raises:
        ConfigError: a setting is wrong, or a package is missing.
        FlowError: the flow was not started yet.
    """

    def __init__(self, config: FlowConfig) -> None:
        self.status = StatusReader(config)
        self.table, self.catalog = ClipTable(self.status.catalog), self.status.catalog
        self.buffer = open_buffer(config.place("buffer"))
        self.pictures: OrderedDict[tuple[str, str], bytes | None] = OrderedDict()

    @property
    def stages(self) -> list[str]:
        """Names of the stages, and `pack`."""
        return self.catalog.chain.names

    def page(
        self, after: Place, verdict: Verdict | None, stage: str, reason: str
    ) -> tuple[list[tuple[ClipEntry, bytes | None]], bool]:
        """Return the clips of a page with their pictures, and whether another page follows.

        Raises:
            InputError: as `ClipTable.page`.
            DatabaseError: the catalog cannot be read.
        """
        entries = self.table.page(after, PAGE + 1, verdict, stage, reason)
        shown = entries[:PAGE]
        seen = dict(self._pictures(shown))
        return [(entry, seen.get(entry.id)) for entry in shown], len(entries) > PAGE

    def _pictures(self, entries: Sequence[ClipEntry]) -> Iterator[tuple[str, bytes | None]]:
        """Yield ids and pictures of clips, of the video as the stage that they ended in saw it."""

        def stage(entry: ClipEntry) -> str:
            return entry.stage or PACK

        for name, group in groupby(sorted(entries, key=stage), key=stage):
            clips = list(group)
            missing = [each for each in clips if (each.id, name) not in self.pictures]
            places = self.catalog.columns([each.id for each in missing], ["video"], name)[1].get("video", [])
            for entry, place in zip(missing, places, strict=False):  # one video in memory at a time
                if place:  # without one, it may be fetched later
                    self.pictures[entry.id, name] = self._picture(entry, place)
            for entry in clips:
                yield entry.id, self.pictures.get((entry.id, name))
        while len(self.pictures) > KEPT:
            self.pictures.popitem(last=False)

    def _picture(self, entry: ClipEntry, place: str) -> bytes | None:
        """Return the first frame of a clip as a JPEG; None if it cannot be read or decoded."""
        try:
            (video,) = self.buffer.read([place], "video")
            for _, frame in sample_frames(video or b"", None, SIDE, entry.start_s or 0.0, entry.end_s):
                return encode_jpeg(frame)
        except WorldModelError:
            pass
        return None
