"""Stages: pure functions from an Arrow batch to an Arrow batch, with a version.

A stage reads columns of clips and adds columns; executors decide where it runs. The result of a stage for a
clip is identified by (clip, stage, key): the key covers the stage's version, those of its settings that
change results, the weights of its models, and the keys of the stages whose columns it reads. So a changed
stage is computed again, with what reads its columns, and nothing else.
"""

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa

from worldmodel.errors import ConfigError
from worldmodel.flow.errors import StageError

CLIP, PARENT, DROP, RETRY, RETRY_AFTER = "clip", "parent", "drop", "retry", "retry_after_s"
"""Columns with a meaning of their own: the clip's id, the clip that a new one is a part of, verdicts, and the
seconds that a clip to be tried again waits at least."""

Function = Callable[[pa.RecordBatch], pa.RecordBatch]


@dataclass(frozen=True)
class Resources:
    """Resources that one worker of a stage needs."""

    cpu: float = 1.0
    """CPU cores."""
    gpu: float = 0.0
    """GPUs; a fraction shares one."""
    memory_gb: float = 1.0


@dataclass(frozen=True)
class Stage:
    """A stage: what it reads, what it adds, and how its function is made.

    Args:
        name: name in configs and in the catalog.
        version: changed by its author whenever its results change.
        inputs: columns that it reads, of clips or of earlier stages.
        outputs: columns that it adds; binary ones are stored in the buffer, others in the catalog.
        make: a function of a batch and the settings, or a class, which is made once in each worker with the
            settings and called with batches.
        settings: keyword arguments of `make`.
        uncounted: settings that do not change results, such as timeouts.
        batch_size: clips per call.
        timeout_s: how long a call may take.
        expands: whether it divides a clip into new ones: its rows then have the columns `parent`, `start_s`
            and `end_s`, and are as many as there are new clips.
        weights: returns, for the settings, what else its results depend on, such as a digest of the weights
            of the model that a setting names.
        origin: where the config says that it is, as `module:name`; empty for a built-in one.
    """

    name: str
    version: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    make: Callable[..., Any] = field(repr=False)
    settings: Mapping[str, Any] = field(default_factory=dict)
    uncounted: Sequence[str] = ()
    resources: Resources = Resources()
    batch_size: int = 16
    timeout_s: float = 300.0
    expands: bool = False
    weights: Callable[..., str] | None = field(default=None, repr=False)
    origin: str = ""

    def key(self, parents: Sequence[str] = ()) -> str:
        """Return the identity of its results, given the keys of the stages whose columns it reads.

        Raises:
            ModelError: its settings name a model that does not exist.
        """
        counted = {name: value for name, value in self.settings.items() if name not in self.uncounted}
        facts: list[Any] = [self.name, self.version, counted, sorted(parents)]
        if self.weights is not None:
            facts.append(self.weights(**self.settings))
        if self.origin:
            facts.append({"function": self.origin})
        text = json.dumps(facts, sort_keys=True, default=str)
        return f"{self.version}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def check_settings(self) -> None:
        """Check the names of the settings.

        Raises:
            ConfigError: one is unknown or missing.
        """
        accepted = dict(inspect.signature(self.make).parameters)
        if not inspect.isclass(self.make):
            accepted.pop(next(iter(accepted)))  # the batch
        known = ", ".join(accepted) or "none"
        for name in self.settings:
            if name not in accepted:
                raise ConfigError(f"The stage {self.name} has no setting {name!r}; its settings are {known}.")
        for name, parameter in accepted.items():
            if parameter.default is parameter.empty and name not in self.settings:
                raise ConfigError(f"The stage {self.name} needs the setting {name!r}.")

    def function(self) -> Function:
        """Return the function, whose results are checked.

        Raises:
            ConfigError: a setting is wrong.
        """
        function: Any = partial(self.make, **self.settings)
        if inspect.isclass(self.make):
            function = function()
        return lambda batch: self.checked(batch, function(batch))

    def checked(self, batch: pa.RecordBatch, result: Any) -> pa.RecordBatch:
        """Return the result of a call in the order of its input.

        Raises:
            StageError: it is not a batch of the rows that went in, or lacks a column.
        """
        if not isinstance(result, pa.RecordBatch):
            raise StageError(f"The stage {self.name} returned a {type(result).__name__}, not a RecordBatch.")
        for column in () if self.expands else result.schema:
            held = column.name in (CLIP, DROP, RETRY) or is_binary(column.type) or _is_json(column.type)
            if not held:
                raise StageError(
                    f"The stage {self.name} returned the column {column.name!r} of type {column.type}, which "
                    "no catalog holds; return numbers, texts, lists or structs of these, or binary values."
                )
        link = PARENT if self.expands else CLIP
        got, given = batch.column(CLIP).to_pylist(), _column(result, link)
        missing = [name for name in (link, *self.outputs) if name not in result.schema.names]
        if missing:
            raise StageError(f"The stage {self.name} returned no column {missing[0]!r}.")
        if self.expands:
            if strange := sorted(set(given) - set(got)):
                raise StageError(
                    f"The stage {self.name} returned parts of {strange[0]!r}, a clip that it did not get."
                )
            return result
        if sorted(given) != sorted(got):
            raise StageError(
                f"The stage {self.name} got {len(got)} clips and returned {len(given)} rows, not one each."
            )
        places = {clip: place for place, clip in enumerate(given)}
        return result.take(pa.array([places[clip] for clip in got]))


def is_binary(kind: pa.DataType) -> bool:
    """Return whether values of a type are stored in the buffer."""
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _is_json(kind: pa.DataType) -> bool:
    """Return whether values of a type can be written as JSON."""
    if pa.types.is_nested(kind):
        return all(_is_json(kind.field(index).type) for index in range(kind.num_fields))
    if pa.types.is_dictionary(kind):
        return _is_json(kind.value_type)
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    plain = (pa.types.is_null, pa.types.is_boolean, pa.types.is_integer, pa.types.is_floating, *texts)
    return any(check(kind) for check in plain)


def _column(batch: pa.RecordBatch, name: str) -> list[Any]:
    return batch.column(name).to_pylist() if name in batch.schema.names else []


def stage(
    version: str, inputs: Sequence[str], outputs: Sequence[str], name: str = "", **options: Any
) -> Callable[[Callable[..., Any]], Stage]:
    """Make a stage of a function or a class.

    A function takes the batch first and its settings as keyword arguments. A class takes the settings when
    it is constructed, once in each worker, and the batch in `__call__`. `options` are further arguments of
    `Stage`.

    Example:
        >>> @stage(version="1", inputs=["text"], outputs=["words"])
        ... def count_words(batch: pa.RecordBatch) -> pa.RecordBatch:
        ...     counts = [len(text.split()) for text in batch.column("text").to_pylist()]
        ...     return pa.record_batch({"clip": batch.column("clip"), "words": counts})
    """

    def decorate(made: Callable[..., Any]) -> Stage:
        return Stage(name or made.__name__.lower(), version, tuple(inputs), tuple(outputs), made, **options)

    return decorate
