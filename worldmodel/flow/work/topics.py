"""Topics: what tells the workers of a stage which clips wait for it, so that they need not ask the catalog.

A flow has none, unless `topics` names a broker of a plug-in. A topic carries ids and decides nothing: a
worker claims what it receives from the catalog, which refuses what is done or held by another. So a topic
may deliver twice, late or in any order, and what it loses is found in the catalog a little later.
"""

from collections.abc import Sequence
from typing import Protocol
from urllib.parse import urlsplit

from worldmodel.config.flow import FlowConfig
from worldmodel.config.imports import find_extension
from worldmodel.flow.catalog.chain import Chain

GROUP = "worldmodel.flow.topics"
"""Entry points by the scheme of the address, each called with the address and the name of a topic."""


class Topic(Protocol):
    """The ids of clips on their way to the workers of one stage. Thread-safe; each process opens its own."""

    def announce(self, clips: Sequence[str]) -> None:
        """Say that clips wait."""
        ...

    def receive(self, count: int, wait_s: float) -> list[str]:
        """Return up to `count` ids; wait up to `wait_s` seconds for the first one."""
        ...

    def close(self) -> None:
        """Close the connections."""
        ...


def open_topics(config: FlowConfig, chain: Chain, names: Sequence[str] | None = None) -> dict[str, Topic]:
    """Open the topics of stages, of all if no names are given; none without a broker.

    Raises:
        ConfigError: the address is wrong, or a package is missing.
        FlowError: the broker cannot be used.
    """
    if not config.topics:
        return {}
    scheme = urlsplit(config.topics).scheme
    topic = find_extension("topics", scheme, GROUP, {})
    links = [link for link in chain.links if names is None or link.name in names]
    return {link.name: topic(config.topics, link.topic) for link in links}
