"""Settings of a data flow."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from worldmodel.config.checks import check_numbers
from worldmodel.config.imports import check_extension
from worldmodel.errors import ConfigError

EXECUTORS = {
    "local": "worldmodel.flow.executors.local:run",
    "threads": "worldmodel.flow.executors.local:run",
    "ray": "worldmodel.flow.executors.ray_actors:run",
}
"""Functions `run(config, watch, stop)` by name; imported when they are used."""
EXECUTOR_GROUP = "worldmodel.flow.executors"
"""Entry points of further ones."""
FEED = "feed"
"""What lists, admits and packs clips, as if it were a stage."""
PACKED = ("video", "text", "caption", "events", "actions", "latents", "text_states")


@dataclass(frozen=True)
class FlowSourceConfig:
    """A list of clips to fetch."""

    kind: str = "table"
    """table (csv, jsonl or parquet with addresses), webdataset (tar shards), huggingface, or folder."""
    path: str = ""
    """The table, shards, dataset or folder; may be an address such as https:// or s3://."""
    root: str = ""
    """table: base folder or address of its relative addresses; empty takes the folder of the table."""
    columns: dict[str, str] = field(default_factory=dict)
    """table, huggingface: columns by content: address (of a file, or the file itself), text, licence, start,
    end, name and the fields of an action."""
    preset: str = ""
    """table: instead of `columns`, the name of a published one: webvid, panda70m, koala36m or openvid."""
    split: str = "train"
    """huggingface: name of the split."""
    licence: str = ""
    """Licence of clips that name none themselves."""
    limit: int = 0
    """Number of clips to take; 0 takes all."""

    def __post_init__(self) -> None:
        check_numbers(self, "limit", least=0, of=" of a source")


@dataclass(frozen=True)
class FlowStageConfig:
    """One stage of a flow; its name is the key in `stages`."""

    function: str = ""
    """Your own stage as `module:name`; empty takes the built-in one of this name."""
    workers: int = 1
    """Workers that run it on this machine; 0 leaves it to others."""
    batch_size: int = 0
    """Clips per call; 0 takes the stage's own."""
    timeout_s: float = 0.0
    """Time limit of a call, after which its worker is killed; 0 takes the stage's own."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the stage."""

    def __post_init__(self) -> None:
        check_numbers(self, "workers", "batch_size", "timeout_s", least=0, of=" of a stage")


@dataclass(frozen=True)
class FlowConfig:
    """A data flow: sources, stages in their order, and where its parts are kept."""

    folder: str = "runs/flow"
    """Folder of the parts that have no address of their own."""
    catalog: str = ""
    """Database of the catalog: sqlite:///PATH or postgresql+psycopg://USER@HOST/NAME; empty takes
    `catalog.db` in `folder`."""
    topics: str = ""
    """Broker that tells workers which clips wait, by a plug-in: pulsar://HOST:PORT. Empty: they ask the
    catalog, which also decides with a broker who works on what."""
    buffer: str = ""
    """Where results of stages are kept: a folder, s3://BUCKET/PATH, or lance:FOLDER; empty takes `buffer` in
    `folder`."""
    log: str = ""
    """Where sealed segments are kept, which training reads: a folder or s3://BUCKET/PATH; empty takes `log`
    in `folder`."""
    executor: str = "local"
    """What runs the stages: processes of this machine (local), threads of this process (threads), actors of
    Ray (ray), or a plug-in such as spark."""
    sources: dict[str, FlowSourceConfig] = field(default_factory=dict)
    """Lists of clips by name."""
    stages: dict[str, FlowStageConfig] = field(default_factory=dict)
    """Stages by name, in the order in which clips pass them."""
    feed: bool = True
    """Whether this machine lists, admits and packs clips; at least one has to."""
    pack: list[str] = field(default_factory=lambda: list(PACKED))
    """Columns that are stored in segments, where a clip has them."""
    segment_size: int = 64
    """Clips in a segment: training can begin when the first is full, and shuffles within a segment."""
    max_in_flight: int = 1024
    """Clips that are listed and not yet packed or dropped, at most: it bounds all queues and memory. The
    buffer keeps every file."""
    max_lead: int = 0
    """Segments that may be sealed ahead of the trainers that read; 0 does not wait for them."""
    max_attempts: int = 3
    """Attempts at a clip in a stage before it is a dead letter."""
    retry_delay_s: float = 2.0
    """Time before the second attempt; it doubles with every further one."""
    lease_s: float = 30.0
    """Time after which the work of a worker that has died is given to another."""

    def __post_init__(self) -> None:
        check_extension("executor", self.executor, EXECUTOR_GROUP, EXECUTORS)
        if "://" in self.folder:
            raise ConfigError(
                f"folder is {self.folder!r}, an address; set it to a folder of this machine, and buffer, log "
                "and catalog to addresses of their own."
            )
        check_numbers(self, "segment_size", "max_attempts", least=1)
        check_numbers(self, "retry_delay_s", "max_lead", least=0)
        if self.max_in_flight < 2 * self.segment_size:
            raise ConfigError(
                f"max_in_flight is {self.max_in_flight}; use at least two segments, {2 * self.segment_size}."
            )
        if self.lease_s <= 0:
            raise ConfigError(f"lease_s is {self.lease_s:g}; use a number of seconds above 0.")

    def only(self, parts: Sequence[str]) -> "FlowConfig":
        """Return the flow for a machine that runs some stages, and lists and packs if `feed` is among them.

        Raises:
            ConfigError: there is no such stage, or it has no workers.
        """
        if unknown := sorted({*parts} - {*self.stages, FEED}):
            raise ConfigError(f"There is no stage {unknown[0]!r}; use {', '.join([*self.stages, FEED])}.")
        if idle := [name for name in parts if name != FEED and not self.stages[name].workers]:
            raise ConfigError(f"stages.{idle[0]}.workers is 0; use 1 or more where the stage is to run.")
        stages = {
            name: stage if name in parts else replace(stage, workers=0) for name, stage in self.stages.items()
        }
        return replace(self, stages=stages, feed=FEED in parts)

    def place(self, name: str) -> str:
        """Return where a part is: the address of the setting `catalog`, `buffer` or `log`."""
        if address := getattr(self, name):
            return address
        folder = Path(self.folder).expanduser().absolute()
        return f"sqlite:///{folder / 'catalog.db'}" if name == "catalog" else str(folder / name)
