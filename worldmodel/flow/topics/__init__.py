"""Topics: queues of clip ids between stages."""

from worldmodel.errors import ConfigError
from worldmodel.flow.topics.base import Claim, Message, Topic

__all__ = ["Claim", "Message", "Topic", "open_topic"]


def open_topic(url: str, name: str) -> Topic:
    """Open a topic, which is made when it is first opened.

    Args:
        url: where it is: `memory:` for threads of one process, `sqlite:///FILE` for processes of one machine,
            `postgresql://USER@HOST/DATABASE` or `pulsar://HOST:PORT` for many machines.
        name: name of the topic.

    Raises:
        ConfigError: the URL is of none of these kinds, or a package is missing.
        FlowError: the broker cannot be used, or the database holds something else.
        DatabaseError: the database cannot be used.
    """
    match url.split(":")[0].split("+")[0]:
        case "memory":
            from worldmodel.flow.topics.memory import MemoryTopic

            return MemoryTopic(url, name)
        case "sqlite" | "postgresql":
            from worldmodel.flow.topics.sql import SqlTopic

            return SqlTopic(url, name)
        case "pulsar":
            from worldmodel.flow.topics.pulsar import PulsarTopic

            return PulsarTopic(url, name)
    raise ConfigError(
        f"{url!r} is not the URL of topics; use memory:, sqlite:///FILE, postgresql://… or pulsar://…."
    )
