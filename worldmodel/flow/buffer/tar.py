"""A buffer of tar files: one for every batch that a worker finishes, and none is ever changed."""

import io
import json
import re
import tarfile
import time
import uuid
from collections.abc import Iterable, Sequence

import pyarrow as pa

from worldmodel.flow.buffer.base import UNUSED_S
from worldmodel.flow.errors import FlowError
from worldmodel.flow.stages.base import CLIP
from worldmodel.flow.storage import Storage
from worldmodel.io import TEMPORARY_PREFIX

OWN = re.compile(rf"[^/]+/[^/]+/(?:[0-9a-f]{{32}}|{re.escape(TEMPORARY_PREFIX)}[0-9a-f]+)\.tar")
"""Names of the files that a buffer writes; others in its folder are not its own."""


class TarBuffer:
    """Results in tar files `STAGE/KEY/ID.tar`, whose members are `CLIP.COLUMN`.

    The place of a row is JSON: the file, and offset and size of each of its columns.

    Args:
        address: a folder, or an address such as `s3://bucket/path`.
    """

    def __init__(self, address: str) -> None:
        self.storage = Storage(address)

    def write(self, stage: str, key: str, batch: pa.RecordBatch) -> list[str]:
        columns = {name: batch.column(name).to_pylist() for name in batch.schema.names if name != CLIP}
        name = f"{stage}/{key}/{uuid.uuid4().hex}.tar"
        parts = {
            (row, column): (f"{clip}.{column}", values[row])
            for row, clip in enumerate(batch.column(CLIP).to_pylist())
            for column, values in columns.items()
            if values[row] is not None
        }
        data, offsets = tar_bytes(parts.values())
        self.storage.write(name, data)
        places: list[dict[str, list[int]]] = [{} for _ in range(batch.num_rows)]
        for (row, column), (_, content), offset in zip(parts, parts.values(), offsets, strict=True):
            places[row][column] = [offset, len(content)]
        return [json.dumps({"file": name, "columns": columns}) for columns in places]

    def read(self, places: Sequence[str], column: str) -> list[bytes | None]:
        found: list[bytes | None] = []
        for place in map(json.loads, places):
            if "file" not in place:
                raise FlowError(f"{place} is not a place in a buffer of tar files; set buffer as it was.")
            range_ = place["columns"].get(column)
            found.append(range_ and self.storage.read(place["file"], range_[0], sum(range_)))
        return found

    def sizes(self) -> dict[tuple[str, str], int]:
        sizes: dict[tuple[str, str], int] = {}
        for name, (size, _) in self.storage.files().items():
            if OWN.fullmatch(name):
                stage, key, _ = name.split("/")
                sizes[stage, key] = sizes.get((stage, key), 0) + size
        return sizes

    def compact(self, used: Iterable[str], older_than_s: float = UNUSED_S) -> int:
        needed = {json.loads(place).get("file") for place in used}
        latest, freed = time.time() - older_than_s, 0
        for name, (size, changed) in self.storage.files().items():
            if OWN.fullmatch(name) and name not in needed and changed <= latest:
                self.storage.delete(name)
                freed += size
        return freed


def tar_bytes(members: Iterable[tuple[str, bytes]]) -> tuple[bytes, list[int]]:
    """Return a tar file of named contents, the same for the same contents, and the offset of each."""
    offsets, stream = [], io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in members:
            header = tarfile.TarInfo(name)
            header.size = len(content)
            offsets.append(stream.tell() + tarfile.BLOCKSIZE)
            tar.addfile(header, io.BytesIO(content))
    return stream.getvalue(), offsets
