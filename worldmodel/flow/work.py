"""The work of one stage on some clips: read, compute, store, record. Every executor calls it."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from worldmodel.config.flow import FlowConfig
from worldmodel.errors import DatabaseError, OutputError, WorldModelError
from worldmodel.flow.buffer import open_buffer
from worldmodel.flow.buffer.base import Buffer
from worldmodel.flow.catalog import Catalog
from worldmodel.flow.chain import Chain
from worldmodel.flow.errors import FlowError
from worldmodel.flow.records import Result
from worldmodel.flow.stage import CLIP, DROP, PARENT, RETRY, is_binary
from worldmodel.flow.text import storable, storable_json

MAX_REASON = 500
"""Characters of a reason or an error that are kept."""


@dataclass
class Outcome:
    """What became of clips."""

    done: list[str] = field(default_factory=list)
    """Clips that go on."""
    ended: list[str] = field(default_factory=list)
    """Clips that were dropped, or that are dead letters."""
    retry: dict[str, str] = field(default_factory=dict)
    """Clips to try again, and why."""


class Work:
    """Runs one stage.

    Args:
        config: the flow.
        name: the stage.

    Raises:
        WorldModelError: a part cannot be opened, or a setting of the stage is wrong.
    """

    def __init__(self, config: FlowConfig, name: str) -> None:
        self.catalog = Catalog(config.place("catalog"), Chain.of(config))
        self.chain = self.catalog.chain
        self.link = self.chain.link(name)
        self.catalog.last_chain()  # the weights of a model may have changed since the run began
        self.buffer: Buffer = open_buffer(config.place("buffer"))
        self.function = self.link.stage.function()
        self.max_attempts = config.max_attempts

    def close(self) -> None:
        """Close the connections."""
        self.catalog.close()

    def process(self, clips: Sequence[str], again: bool = False) -> Outcome:
        """Run the stage on clips that have no result yet, and record the results.

        Args:
            clips: their ids.
            again: whether an earlier attempt failed, or its worker ended. Such clips are worked on alone, so
                that one that ends workers takes no other with it, and become dead letters after
                `max_attempts`.

        Raises:
            DatabaseError: the catalog cannot be used.
            FlowError: the buffer cannot be used, or the stage returns something else than its declaration
                says.
        """
        outcome = Outcome()
        known = self.catalog.done(self.link.name, clips)
        if known:
            self.catalog.pass_on(self.link.name, known)
        for clip, state in known.items():
            (outcome.done if state == "done" else outcome.ended).append(clip)
        new = [clip for clip in clips if clip not in known]
        for group in [[clip] for clip in new] if again else [new] if new else []:
            attempt, reason = self.catalog.attempt(self.link.name, group[0]) if again else (1, None)
            if attempt > self.max_attempts:
                reason = reason or f"its worker ended {self.max_attempts} times while working on it"
                self.catalog.record(self.link.name, [Result(group[0], "dead", reason)])
                outcome.ended += group
            else:
                self._process(group, attempt, outcome)
        return outcome

    def _process(self, clips: Sequence[str], attempt: int, outcome: Outcome) -> None:
        began = time.monotonic()
        results, retry = self._results(clips)
        if attempt >= self.max_attempts:
            results += [Result(clip, "dead", reason) for clip, reason in retry.items()]
            retry = {}
        self.catalog.record(self.link.name, results, time.monotonic() - began, retry)
        for result in results:
            (outcome.done if result.state == "done" else outcome.ended).append(result.clip)
        outcome.retry |= retry

    def _results(self, clips: Sequence[str]) -> tuple[list[Result], dict[str, str]]:
        """Return the results of clips, and reasons to try some again; an error is narrowed to its clip."""
        try:
            return self._run(clips)
        except (FlowError, DatabaseError, OutputError):
            raise
        except Exception as error:  # of the stage's own code, which may raise anything
            if len(clips) > 1:
                results, retry = [], {}
                for clip in clips:
                    more, again = self._results([clip])
                    results += more
                    retry |= again
                return results, retry
            kind = "" if isinstance(error, WorldModelError) else f"{type(error).__name__}: "
            return [], {clips[0]: reason_of(f"{kind}{error}")}

    def _run(self, clips: Sequence[str]) -> tuple[list[Result], dict[str, str]]:
        batch = self._inputs(clips)
        result = self.function(batch)
        if self.link.stage.expands:
            return self._divided(clips, result), {}
        names = result.schema.names
        drops = result.column(DROP).to_pylist() if DROP in names else [None] * len(clips)
        retries = result.column(RETRY).to_pylist() if RETRY in names else [None] * len(clips)
        kept = [i for i, (drop, retry) in enumerate(zip(drops, retries, strict=True)) if not (drop or retry)]
        columns = [name for name in names if name not in (CLIP, DROP, RETRY)]
        binary = [name for name in columns if is_binary(result.schema.field(name).type)]
        places: dict[int, str] = {}
        filled = [i for i in kept if any(result.column(name)[i].is_valid for name in binary)]
        if filled:
            part = result.select([CLIP, *binary]).take(pa.array(filled))
            places = dict(zip(filled, self.buffer.write(self.link.name, self.link.key, part), strict=True))
        plain = {name: result.column(name).to_pylist() for name in columns if name not in binary}
        results, again = [], {}
        for row, clip in enumerate(clips):
            values = {name: finite(column[row]) for name, column in plain.items() if column[row] is not None}
            if retries[row]:
                again[clip] = reason_of(retries[row])
            elif drops[row]:
                results.append(Result(clip, "dropped", reason_of(drops[row]), values))
            else:
                results.append(Result(clip, "done", None, values, places.get(row)))
        return results, again

    def _divided(self, clips: Sequence[str], result: pa.RecordBatch) -> list[Result]:
        parts: dict[str, list[tuple[float, float]]] = {clip: [] for clip in clips}
        reasons = dict.fromkeys(clips, "it has no part of the wanted length")
        for row in result.to_pylist():
            if row.get(DROP):
                reasons[row[PARENT]] = reason_of(row[DROP])
            else:
                parts[row[PARENT]].append((row["start_s"], row["end_s"]))
        return [
            Result(clip, "done", parts=tuple(sorted(found)))
            if found
            else Result(clip, "dropped", reasons[clip])
            for clip, found in parts.items()
        ]

    def _inputs(self, clips: Sequence[str]) -> pa.RecordBatch:
        """Return the columns that the stage reads."""
        return read_columns(self.catalog, self.buffer, clips, self.link.stage.inputs, self.link.name)


def read_columns(
    catalog: Catalog, buffer: Buffer, clips: Sequence[str], columns: Sequence[str], before: str
) -> pa.RecordBatch:
    """Return columns of clips as the stage `before` sees them, of the catalog and of the buffer."""
    values, places = catalog.columns(clips, columns, before)
    for column, found in places.items():
        stored = iter(buffer.read([place for place in found if place], column))
        values[column] = [
            (next(stored) if place else None) or value
            for place, value in zip(found, values[column], strict=True)
        ]
    arrays: dict[str, pa.Array] = {CLIP: pa.array(list(clips), pa.string())}
    for column in columns:
        arrays[column] = _array(values[column])
    return pa.RecordBatch.from_pydict(arrays)


def _array(values: list[Any]) -> pa.Array:
    """Return a column; as JSON if it has values of several types, for example of a JSON table."""
    if any(isinstance(value, bytes) for value in values):
        return pa.array(values, pa.large_binary())  # `binary` ends at 2 GiB a batch
    try:
        return pa.array(values)
    except UnicodeEncodeError:  # of catalogs that were made before such texts were mended
        return _array([storable_json(value) for value in values])
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):  # the last one for integers from 2^63 on
        return pa.array([None if value is None else json.dumps(value) for value in values], pa.string())


def reason_of(value: object) -> str:
    """Return a reason as it is kept."""
    return storable(str(value)[:MAX_REASON])


def finite(value: Any) -> Any:
    """Return a value as JSON holds it: without NaN and infinities, which databases refuse."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [finite(each) for each in value]
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    return value
