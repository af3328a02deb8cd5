"""A buffer of Lance datasets: one for every stage and key, with a row per clip and a column per output.

Notebooks and other tools read the datasets as tables; a new version of a stage is a new dataset beside the
old one, and no other is rewritten. Rows have stable ids, so places stay valid when fragments are merged.
"""

import contextlib
import json
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any

import pyarrow as pa

from worldmodel.errors import ConfigError, OutputError, pip_install
from worldmodel.flow.buffer.base import UNUSED_S
from worldmodel.flow.errors import FlowError
from worldmodel.flow.stages.base import CLIP
from worldmodel.flow.storage import Storage

try:
    lance: Any = import_module("lance")  # pyright would take this file for it
except ImportError as error:
    raise ConfigError(
        f"A buffer at lance: requires another package ({error}); {pip_install('lance')}."
    ) from None

BATCH, WRITTEN = "written_batch", "written_at"
"""Columns of every dataset: the call of `write` that a row comes from, and when that was."""
ATTEMPTS = 20
"""Commits that may be overtaken by others before one fails."""
ROWS = 4096
"""Rows that are looked up or removed together."""
LANCE_ERRORS = (OSError, RuntimeError, ValueError)
"""Errors that Lance raises when storage fails."""


class LanceBuffer:
    """Results in Lance datasets `STAGE/KEY.lance`, to which any number of processes may append.

    The place of a row is JSON: the dataset, and the row's id in it. Lance is not fork-safe, so a process
    opens its own datasets.

    Args:
        address: a folder, or an address such as `s3://bucket/path`; credentials and endpoint of S3 are those
            of the environment, `AWS_ACCESS_KEY_ID` and others.
    """

    def __init__(self, address: str) -> None:
        self.storage = Storage(address)
        self.address = self.storage.address if self.storage.is_remote else self.storage.root
        self.opened: dict[tuple[int, str], Any] = {}

    def write(self, stage: str, key: str, batch: pa.RecordBatch) -> list[str]:
        name, called = f"{stage}/{key}", uuid.uuid4().hex
        columns = {
            each: batch.column(each).cast(pa.large_binary()) for each in batch.schema.names if each != CLIP
        }
        count = batch.num_rows
        own = {
            CLIP: batch.column(CLIP),
            BATCH: pa.array([called] * count, pa.string()),
            WRITTEN: pa.array([time.time()] * count, pa.float64()),
        }
        with self._writing(name):
            dataset = self._append(name, pa.table({**own, **columns}))
            rows = _rows_of(dataset, called)
        assert len(rows) == count
        return [json.dumps({"dataset": name, "row": row}) for row in rows]

    def read(self, places: Sequence[str], column: str) -> list[bytes | None]:
        wanted: dict[str, set[int]] = {}
        parsed = [json.loads(place) for place in places]
        for place in parsed:
            if "dataset" not in place:
                raise FlowError(f"{place} is not a place in a buffer of Lance; set buffer as it was.")
            wanted.setdefault(place["dataset"], set()).add(place["row"])
        found = {name: self._values(name, sorted(rows), column) for name, rows in wanted.items()}
        return [found[place["dataset"]][place["row"]] for place in parsed]

    def sizes(self) -> dict[tuple[str, str], int]:
        sizes: dict[tuple[str, str], int] = {}
        for name, (size, _) in self.storage.files().items():
            stage, _, key = name.partition(".lance/")[0].partition("/")
            sizes[stage, key] = sizes.get((stage, key), 0) + size
        return sizes

    def compact(self, used: Iterable[str], older_than_s: float = UNUSED_S) -> int:
        """Remove unused rows, merge small fragments, and return how many bytes the files shrank by."""
        needed: dict[str, set[int]] = {}
        for place in map(json.loads, used):
            if "dataset" in place:
                needed.setdefault(place["dataset"], set()).add(place["row"])
        before = self.storage.files()
        names = sorted({file.split(".lance/")[0] for file in before if ".lance/" in file})
        for name in names:
            with self._writing(name):
                dataset = self._newest(name)
                old = f"{WRITTEN} <= {time.time() - older_than_s!r}"
                rows = dataset.to_table(columns=[], filter=old, with_row_id=True)["_rowid"].to_pylist()
                unused = sorted(set(rows) - needed.get(name, set()))
                for some in _portions(unused):
                    dataset.delete(_among(some))
                dataset.optimize.compact_files()
                dataset.cleanup_old_versions(older_than=timedelta(seconds=older_than_s))
        after = self.storage.files()
        freed = sum(size for size, _ in before.values()) - sum(size for size, _ in after.values())
        return max(freed, 0)  # old versions stay for a while beside what was merged

    def _append(self, name: str, table: pa.Table) -> Any:
        """Append rows, making the dataset or columns that it lacks; return it as it is then."""
        path, refused = self._path(name), None
        for attempt in range(ATTEMPTS):
            try:
                dataset = self._newest(name)
            except FileNotFoundError:
                if refused is not None:  # and nobody else has made it
                    raise refused from None
                # Not `write_dataset(mode="create")`, whose commit is repeated as one that overwrites what
                # another thread or process has made and filled meanwhile.
                try:
                    made = lance.LanceOperation.Overwrite(table.schema, [])
                    lance.LanceDataset.commit(
                        path,
                        made,
                        read_version=0,
                        max_retries=0,
                        enable_v2_manifest_paths=True,
                        enable_stable_row_ids=True,
                    )
                except LANCE_ERRORS as error:  # also where another thread or process made it at the same time
                    refused = error
                continue
            new = [field for field in table.schema if field.name not in dataset.schema.names]
            try:
                if new:
                    dataset.add_columns(pa.schema(new))
                return lance.write_dataset(table, dataset, mode="append")
            except LANCE_ERRORS as error:
                if attempt == ATTEMPTS - 1 or "conflict" not in str(error).lower():
                    raise
                time.sleep(0.02 * 2 ** min(attempt, 5))
        raise OSError(f"{path} cannot be made")

    def _values(self, name: str, rows: Sequence[int], column: str) -> dict[int, bytes | None]:
        """Return a column's values by row id."""
        dataset, found = None, {}
        for again in (False, True):  # what was opened may be older than the rows, or its files compacted
            try:
                dataset = self._newest(name) if again else self._dataset(name)
                if column in dataset.schema.names:
                    found = self._taken(dataset, rows, column)
                elif again:
                    found = self._taken(dataset, rows, CLIP)
            except LANCE_ERRORS as error:
                if again:
                    raise FlowError(f"{self._path(name)} cannot be read ({_short(error)}).") from None
                continue
            if len(found) == len(rows):
                break
        if missing := [row for row in rows if row not in found]:
            raise FlowError(f"{self._path(name)} has no row {missing[0]}.")
        assert dataset is not None
        return found if column in dataset.schema.names else dict.fromkeys(rows)

    @staticmethod
    def _taken(dataset: Any, rows: Sequence[int], column: str) -> dict[int, bytes | None]:
        found: dict[int, bytes | None] = {}
        for some in _portions(rows):
            table = dataset.to_table(columns=[column], filter=_among(some), with_row_id=True)
            found.update(zip(table["_rowid"].to_pylist(), table[column].to_pylist(), strict=True))
        return found

    def _path(self, name: str) -> str:
        return f"{self.address}/{name}.lance"

    def _dataset(self, name: str) -> Any:
        """Return a dataset as it was when this process last used it."""
        which = (os.getpid(), name)
        if which not in self.opened:
            try:
                self.opened[which] = lance.dataset(self._path(name))
            except ValueError as error:  # Lance's error for a path without a dataset
                raise FileNotFoundError(_short(error)) from None
        return self.opened[which]

    def _newest(self, name: str) -> Any:
        """Return the newest version of a dataset."""
        self.opened.pop((os.getpid(), name), None)
        return self._dataset(name)

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        try:
            yield
        except LANCE_ERRORS as error:
            raise OutputError(
                f"{self._path(name)} cannot be written ({_short(error)}); check the disk or the store."
            ) from None


def _rows_of(dataset: Any, called: str) -> list[int]:
    """Return the ids of the rows that a call appended, in order; they are at the end unless others append."""
    for fragments in (dataset.get_fragments()[-1:], None):
        scanner = dataset.scanner(
            columns=[], filter=f"{BATCH} = '{called}'", with_row_id=True, fragments=fragments
        )
        if rows := scanner.to_table()["_rowid"].to_pylist():
            return rows
    return []


def _among(rows: Sequence[int]) -> str:
    return f"_rowid IN ({', '.join(map(str, rows))})"


def _portions(rows: Sequence[int]) -> Iterator[Sequence[int]]:
    for first in range(0, len(rows), ROWS):
        yield rows[first : first + ROWS]


def _short(error: Exception) -> str:
    """Return the first line of an error, without the place in Lance's source."""
    return str(error).split("\n")[0].split(", /")[0][:300]
