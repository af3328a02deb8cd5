"""A topic of Apache Pulsar: partitioned, with one shared subscription.

The broker hands the id of a clip to one of the workers that listen, on any machine; the worker claims the
clip from the catalog and acknowledges at once. Whatever the broker repeats, reorders or loses is settled
there, so it needs no leases, no redelivery and no dead letters.
"""

import threading
import time
from collections.abc import Sequence
from urllib.parse import parse_qs, quote, urlsplit

import httpx

from worldmodel.errors import ConfigError, pip_install
from worldmodel.flow.errors import FlowError

try:
    import pulsar
except ModuleNotFoundError:
    raise ConfigError(f"Topics of Pulsar need its client: {pip_install('pulsar')}.") from None

SUBSCRIPTION = "flow"
PARTITIONS = 8
RECEIVER_QUEUE = 64
"""Ids that a process holds without having received them; nobody else gets them while it lives."""
TIMEOUT_S = 30


class PulsarTopic:
    """A topic of the broker at `pulsar://HOST:PORT[/TENANT/NAMESPACE][?admin=http://HOST:PORT]`.

    Raises:
        ConfigError: the URL is wrong.
        FlowError: the broker does not answer.
    """

    def __init__(self, url: str, name: str) -> None:
        parts = urlsplit(url)
        place = [part for part in parts.path.split("/") if part] or ["public", "default"]
        if not parts.hostname or len(place) != 2:
            raise ConfigError(
                f"{url!r} is not the URL of a broker; write pulsar://HOST:PORT/TENANT/NAMESPACE."
            )
        tenant, namespace = place
        self.name = quote(name, safe="").replace("%", "_")
        self.broker = f"{parts.scheme}://{parts.netloc}"
        self.topic = f"persistent://{tenant}/{namespace}/{self.name}"
        admin = parse_qs(parts.query).get("admin", [f"http://{parts.hostname}:8080"])[0]
        path = f"{admin}/admin/v2/persistent/{tenant}/{namespace}/{self.name}"
        self._make(path, "partitions", PARTITIONS)
        # Made now, so that what is announced before the first worker listens is kept for it.
        beginning = {"ledgerId": -1, "entryId": -1, "partitionIndex": -1}
        self._make(path, f"subscription/{SUBSCRIPTION}", beginning)
        self.client = pulsar.Client(
            self.broker,
            operation_timeout_seconds=TIMEOUT_S,
            connection_timeout_ms=1000 * TIMEOUT_S,
            logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
        )
        self.lock = threading.Lock()
        self.producer: pulsar.Producer | None = None
        self.consumer: pulsar.Consumer | None = None

    def announce(self, clips: Sequence[str]) -> None:
        """Say that clips wait.

        Raises:
            FlowError: the broker takes no messages.
        """
        failures: list[str] = []

        def sent(result: pulsar.Result, message_id: object) -> None:
            if result != pulsar.Result.Ok:
                failures.append(str(result))

        try:
            producer = self._producer()
            for clip in clips:
                producer.send_async(clip.encode(), sent, partition_key=clip)
            producer.flush()
        except pulsar.PulsarException as error:
            failures.append(str(error))
        if failures:
            raise FlowError(f"The broker {self.broker} took no messages of {self.topic} ({failures[0]}).")

    def receive(self, count: int, wait_s: float) -> list[str]:
        """Return up to `count` ids; wait up to `wait_s` seconds for the first one.

        Raises:
            FlowError: the broker does not answer.
        """
        deadline = time.monotonic() + wait_s
        clips: list[str] = []
        try:
            consumer = self._consumer()
        except pulsar.PulsarException as error:  # also Timeout, which here means that nobody answers
            raise FlowError(f"The broker {self.broker} does not answer ({error}).") from error
        try:
            while len(clips) < count:
                left_s = 0.0 if clips else deadline - time.monotonic()
                message = consumer.receive(timeout_millis=max(10, int(1000 * left_s)))
                clips.append(message.data().decode())
                consumer.acknowledge(message)
        except pulsar.Timeout:
            pass
        except pulsar.PulsarException as error:
            raise FlowError(f"The broker {self.broker} does not answer ({error}).") from error
        return clips

    def close(self) -> None:
        self.client.close()

    def _make(self, path: str, what: str, content: object) -> None:
        """Have the broker's administration make something, unless it exists."""
        try:
            with httpx.Client(transport=httpx.HTTPTransport(retries=3), timeout=TIMEOUT_S) as client:
                response = client.put(f"{path}/{what}", json=content)
            if response.status_code != httpx.codes.CONFLICT:
                response.raise_for_status()
        except httpx.HTTPError as error:
            raise FlowError(
                f"Pulsar's administration at {path} does not answer as it should ({error}); "
                "name it in the topic's URL: pulsar://HOST:PORT?admin=http://HOST:PORT."
            ) from error

    def _producer(self) -> pulsar.Producer:
        with self.lock:
            if self.producer is None:
                self.producer = self.client.create_producer(
                    self.topic, block_if_queue_full=True, send_timeout_millis=60_000
                )
            return self.producer

    def _consumer(self) -> pulsar.Consumer:
        with self.lock:
            if self.consumer is None:
                self.consumer = self.client.subscribe(
                    self.topic,
                    SUBSCRIPTION,
                    consumer_type=pulsar.ConsumerType.Shared,
                    initial_position=pulsar.InitialPosition.Earliest,
                    receiver_queue_size=RECEIVER_QUEUE,
                )
            return self.consumer
