"""The work of one stage on some clips: read, compute, store, record. Every executor calls it."""

import json
import math
import time
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from worldmodel.config.flow import FlowConfig
from worldmodel.errors import DatabaseError, OutputError, WorldModelError
from worldmodel.flow.buffer import open_buffer
from worldmodel.flow.buffer.base import Buffer
from worldmodel.flow.catalog.catalog import Catalog
from worldmodel.flow.catalog.chain import Chain
from worldmodel.flow.catalog.records import Result, Retry
from worldmodel.flow.errors import FlowError
from worldmodel.flow.stages.base import CLIP, DROP, PARENT, RETRY, RETRY_AFTER, is_binary
from worldmodel.flow.text import storable

MAX_REASON = 500
"""Characters of a reason or an error that are kept."""
MAX_DELAY_S = 600.0
"""The longest wait that a stage can ask for."""


class Work:
    """Runs one stage.

    Args:
        config: the flow.
        name: the stage.
        owner: the worker, as its claims name it; empty takes a new name.

    Raises:
        WorldModelError: a part cannot be opened, or a setting of the stage is wrong.
    """

    def __init__(self, config: FlowConfig, name: str, owner: str = "") -> None:
        self.catalog = Catalog(config.place("catalog"), Chain.of(config), owner=owner)
        self.chain = self.catalog.chain
        self.link = self.chain.link(name)
        self.catalog.last_chain()  # the weights of a model may have changed since the run began
        self.buffer: Buffer = open_buffer(config.place("buffer"))
        self.function = self.link.stage.function()
        self.config = config

    def close(self) -> None:
        self.catalog.close()

    def process(self, clips: Sequence[str], delivery: int = 1) -> list[str]:
        """Run the stage on clips that have no result yet, record the results, and return what goes on.

        Args:
            clips: their ids; one if this is not their first delivery.
            delivery: how often they have been delivered, from 1: a delivery is a clip that a worker claims,
                and the worker may end before it begins with it. They become dead letters after
                `max_attempts`.

        Raises:
            DatabaseError: the catalog cannot be used.
            FlowError: the buffer cannot be used, or the stage returns something else than its declaration
                says.
        """
        # A clip may have a result already: of a worker that lost its lease, or of an earlier order of the
        # stages.
        known = self.catalog.done(self.link.name, clips)
        if known:
            self.catalog.pass_on(self.link.name, known)
        done = [clip for clip, state in known.items() if state == "done"]
        new = [clip for clip in clips if clip not in known]
        # First deliveries are not counted in the catalog: that spares a write for every batch. From the
        # second on, a clip comes alone, and is counted before it is begun, since it may be what ends the
        # worker.
        attempt, reason = 1, None
        if new and delivery > 1:
            attempt, reason = self.catalog.attempt(self.link.name, new[0])
        # With one attempt at each clip, those of a batch whose worker ended have another alone.
        if attempt > max(self.config.max_attempts, 2):
            reason = reason or f"its worker ended {attempt - 1} times while working on it"
            self.catalog.record(self.link.name, [Result(new[0], "dead", reason)])
            return done
        return done + self._process(new, delivery, attempt) if new else done

    def _process(self, clips: Sequence[str], delivery: int, attempt: int) -> list[str]:
        began = time.monotonic()
        results, retry = self._results(clips)
        if attempt >= self.config.max_attempts:
            results += [Result(clip, "dead", each.reason) for clip, each in retry.items()]
            retry = {}
        due = {
            clip: Retry(each.reason, delay_s(self.config, delivery, each.after_s))
            for clip, each in retry.items()
        }
        self.catalog.record(self.link.name, results, time.monotonic() - began, due)
        return [result.clip for result in results if result.state == "done"]

    def _results(self, clips: Sequence[str]) -> tuple[list[Result], dict[str, Retry]]:
        """Return the results of clips, and reasons to try some again; an error is narrowed to its clip."""
        try:
            return self._run(clips)
        except (FlowError, DatabaseError, OutputError):
            raise
        except Exception as error:  # of the stage's own code, which may raise anything
            if len(clips) > 1:
                # One clip of the batch is at fault; the others are not to fail with it.
                results, retry = [], {}
                for clip in clips:
                    more, again = self._results([clip])
                    results += more
                    retry |= again
                return results, retry
            kind = "" if isinstance(error, WorldModelError) else f"{type(error).__name__}: "
            return [], {clips[0]: Retry(reason_of(f"{kind}{error}"))}

    def _run(self, clips: Sequence[str]) -> tuple[list[Result], dict[str, Retry]]:
        inputs = read_columns(self.catalog, self.buffer, clips, self.link.stage.inputs, self.link.name)
        result = self.function(inputs)
        if self.link.stage.expands:
            return self._divided(clips, result), {}
        names = result.schema.names
        drops, retries, waits = (
            result.column(name).to_pylist() if name in names else [None] * len(clips)
            for name in (DROP, RETRY, RETRY_AFTER)
        )
        kept = [i for i, (drop, retry) in enumerate(zip(drops, retries, strict=True)) if not (drop or retry)]
        columns = [name for name in names if name not in (CLIP, DROP, RETRY, RETRY_AFTER)]
        binary = [name for name in columns if is_binary(result.schema.field(name).type)]
        places: dict[int, str] = {}
        # Files are written before they are recorded: a worker that ends in between leaves files that no
        # result names, which `compact` removes, and never a result without its files.
        filled = [i for i in kept if any(result.column(name)[i].is_valid for name in binary)]
        if filled:
            part = result.select([CLIP, *binary]).take(pa.array(filled))
            places = dict(zip(filled, self.buffer.write(self.link.name, self.link.key, part), strict=True))
        plain = {name: result.column(name).to_pylist() for name in columns if name not in binary}
        results, again = [], {}
        for row, clip in enumerate(clips):
            values = {name: finite(column[row]) for name, column in plain.items() if column[row] is not None}
            if retries[row]:
                again[clip] = Retry(reason_of(retries[row]), float(waits[row] or 0.0))
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


def delay_s(config: FlowConfig, delivery: int, asked_s: float = 0.0) -> float:
    """Return the seconds between a failed delivery and the next one; a stage may ask for more."""
    return max(config.retry_delay_s * 2 ** (delivery - 1), min(asked_s, MAX_DELAY_S))


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
