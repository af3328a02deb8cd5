"""The chain of stages that a config describes, with the key of each."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from worldmodel.config.flow import FEED, FlowConfig, FlowStageConfig
from worldmodel.errors import ConfigError
from worldmodel.flow.stages import find_stage
from worldmodel.flow.stages.base import Stage

PACK = "pack"
"""State of clips that wait to be written to a segment, after the last stage."""
LISTED = "listed"
"""Stage and key of the files that came with the rows of a source: the results of its listing."""
PACKED, DROPPED, DEAD, SPLIT, REPLACED = ENDED = ("packed", "dropped", "dead", "divided", "replaced")
"""States of clips that no stage waits for; `divided` ones go on as their parts, `replaced` parts do not."""


@dataclass(frozen=True)
class Link:
    """A stage of a chain."""

    stage: Stage
    key: str
    workers: int = 1
    flow: str = ""
    """Identity of the flow's catalog."""

    @property
    def name(self) -> str:
        """Name of the stage."""
        return self.stage.name

    @property
    def topic(self) -> str:
        """Name of the topic in front of it, which it shares with no other flow of the same broker."""
        return "/".join(part for part in (self.flow, self.name, self.key) if part)


@dataclass(frozen=True)
class Chain:
    """Stages in the order in which clips pass them.

    Args:
        links: the stages.
        pack: columns that are stored in segments.
        segment_size: clips in a segment.
    """

    links: tuple[Link, ...]
    pack: tuple[str, ...]
    segment_size: int

    @classmethod
    def of(cls, config: FlowConfig) -> "Chain":
        """Return the chain of a config.

        Raises:
            ConfigError: there is no such stage, or one has a wrong setting.
        """
        if not config.stages:
            raise ConfigError("stages is empty; name at least one, for example {fetch: {}}.")
        links: list[Link] = []
        for name, settings in config.stages.items():
            if name in (FEED, PACK, LISTED, *ENDED):
                raise ConfigError(f"A stage cannot have the name {name!r}; choose another.")
            stage = _configured(name, settings)
            if stage.expands and any(link.stage.expands for link in links):
                raise ConfigError(f"stages.{name} divides clips as an earlier stage does; use one of them.")
            parents = [link.key for link in links if set(link.stage.outputs) & set(stage.inputs)]
            expanded = [link.key for link in links if link.stage.expands]  # decides which frames a clip has
            links.append(Link(stage, stage.key([*parents, *expanded]), settings.workers))
        return cls(tuple(links), tuple(config.pack), config.segment_size)

    def of_flow(self, flow: str) -> "Chain":
        """Return the chain as that of the flow whose catalog has some identity."""
        return replace(self, links=tuple(replace(link, flow=flow) for link in self.links))

    @property
    def key(self) -> str:
        """Identity of the log that the chain produces."""
        text = json.dumps([[link.key for link in self.links], self.pack, self.segment_size])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def names(self) -> list[str]:
        """Names of the stages, and `pack`: the states of clips in flight."""
        return [*(link.name for link in self.links), PACK]

    @property
    def split_at(self) -> int:
        """Index of the stage that divides clips; the number of stages if there is none."""
        return next((i for i, link in enumerate(self.links) if link.stage.expands), len(self.links))

    def link(self, name: str) -> Link:
        """Return a stage by name."""
        return self.links[self.names.index(name)]

    def after(self, name: str) -> str:
        """Return the state of a clip, or of its parts, that has passed a stage."""
        return self.names[self.names.index(name) + 1]

    def own(self, is_part: bool) -> Sequence[Link]:
        """Return the stages that a listed clip passes, or those that a part of one passes."""
        return self.links[self.split_at + 1 :] if is_part else self.links[: self.split_at + 1]

    def producer(self, column: str, before: str) -> Link | None:
        """Return the last stage ahead of the one named `before` that adds a column, or None.

        What a stage says of the parts that it makes, such as `start_s`, belongs to the clips themselves.
        """
        earlier = [link for link in self.links[: self.names.index(before)] if not link.stage.expands]
        return next((link for link in reversed(earlier) if column in link.stage.outputs), None)


def _configured(name: str, settings: FlowStageConfig) -> Stage:
    stage = find_stage(settings.function or name)
    stage = replace(
        stage,
        name=name,
        settings=dict(settings.settings),
        origin=settings.function,
        batch_size=settings.batch_size or stage.batch_size,
        timeout_s=settings.timeout_s or stage.timeout_s,
    )
    stage.check_settings()
    return stage
