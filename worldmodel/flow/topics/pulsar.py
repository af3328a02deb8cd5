"""A topic of Apache Pulsar: partitioned, with one key-shared subscription.

Pulsar delivers in the order of publishing and not of `ordinal`, and cannot tell that a message is published
twice; the catalog makes the second one a no-op. It knows no leases either: a claim is returned when its
process ends or is cut off, and by the process itself, at its next `claim`, when the lease has ended.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import parse_qs, quote, urlsplit

import httpx

from worldmodel.errors import ConfigError
from worldmodel.flow.errors import FlowError
from worldmodel.flow.topics.base import Claim, Message

try:
    import pulsar
except ModuleNotFoundError:
    raise ConfigError("Topics of Pulsar need its client: pip install 'worldmodel[pulsar]'.") from None

SUBSCRIPTION = "flow"
PARTITIONS = 8
RECEIVER_QUEUE = 64
"""Messages that a process holds without having claimed them; nobody else can get them."""
DEAD_LETTER_AFTER = 64
"""Redeliveries after which the broker gives up; workers do so long before, unless the message kills them."""
TIMEOUT_S = 30
RETURN_MS = 50
"""Pulsar's own delay after a negative acknowledgement; longer delays are measured here."""


@dataclass
class _Held:
    delivery: pulsar.Message
    until: float


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
        self.admin = httpx.Client(
            base_url=f"{admin}/admin/v2/persistent/{tenant}/{namespace}/{self.name}",
            transport=httpx.HTTPTransport(retries=3),
            timeout=TIMEOUT_S,
        )
        self._ask("PUT", "partitions", PARTITIONS)
        # Made now, so that what is published before the first claim is kept for it.
        self._ask(
            "PUT", f"subscription/{SUBSCRIPTION}", {"ledgerId": -1, "entryId": -1, "partitionIndex": -1}
        )
        self.client = pulsar.Client(
            self.broker,
            operation_timeout_seconds=TIMEOUT_S,
            connection_timeout_ms=1000 * TIMEOUT_S,
            logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
        )
        self.lock = threading.RLock()
        self.producer: pulsar.Producer | None = None
        self.consumer: pulsar.Consumer | None = None
        self.held: dict[str, _Held] = {}
        """Deliveries to be returned when their leases or delays end."""

    def publish(self, messages: Sequence[Message]) -> None:
        """Add messages."""
        failures: list[str] = []

        def sent(result: pulsar.Result, message_id: object) -> None:
            if result != pulsar.Result.Ok:
                failures.append(str(result))

        producer = self._producer()
        try:
            for message in messages:
                producer.send_async(str(message.ordinal).encode(), sent, partition_key=message.key)
            producer.flush()
        except pulsar.PulsarException as error:
            failures.append(str(error))
        if failures:
            raise FlowError(f"The broker {self.broker} took no messages of {self.topic} ({failures[0]}).")

    def claim(self, count: int, lease_s: float, wait_s: float = 0.0) -> list[Claim]:
        """Take the messages that were published first; wait up to `wait_s` seconds for the first one."""
        consumer = self._consumer()
        deadline = time.monotonic() + wait_s
        claims: list[Claim] = []
        while len(claims) < count:
            next_return = self._return_due(consumer)
            left = 0.0 if claims else min(deadline, next_return) - time.monotonic()
            try:
                delivery = consumer.receive(timeout_millis=max(10, int(1000 * left)))
            except pulsar.Timeout:
                if claims or time.monotonic() >= deadline:
                    break
                continue
            message = Message(delivery.partition_key(), int(delivery.data()))
            claims.append(Claim(message, delivery.redelivery_count() + 1, delivery))
            self._hold(delivery, lease_s)
        return claims

    def extend(self, claims: Sequence[Claim], lease_s: float) -> None:
        """Renew the leases of claims that have not been returned."""
        with self.lock:
            for claim in claims:
                if _id(claim.handle) in self.held:
                    self._hold(claim.handle, lease_s)

    def ack(self, claims: Sequence[Claim]) -> None:
        """Remove messages; one whose broker is away is delivered again."""
        consumer = self._consumer()
        for claim in claims:
            with self.lock:
                self.held.pop(_id(claim.handle), None)
            try:
                consumer.acknowledge(claim.handle)
            except (pulsar.NotConnected, pulsar.Timeout):
                consumer.negative_acknowledge(claim.handle)

    def nack(self, claims: Sequence[Claim], delay_s: float = 0.0) -> None:
        """Return messages, to be claimed after a delay: at once by this process ending, or being cut off."""
        with self.lock:
            for claim in claims:
                self._hold(claim.handle, delay_s)
        self._return_due(self._consumer())

    def depth(self) -> int:
        """Return the number of messages that wait or are claimed, as the broker counts them."""
        stats = self._ask("GET", "partitioned-stats?getPreciseBacklog=true").json()
        return int(stats["subscriptions"][SUBSCRIPTION]["msgBacklog"])

    def close(self) -> None:
        """Close the connection; messages that are claimed are delivered again at once."""
        self.client.close()
        self.admin.close()

    def _ask(self, method: str, path: str, content: object = None) -> httpx.Response:
        """Ask the broker's administration; that something exists already is no error."""
        try:
            response = self.admin.request(method, path, json=content)
            if response.status_code != httpx.codes.CONFLICT:
                response.raise_for_status()
        except httpx.HTTPError as error:
            raise FlowError(
                f"Pulsar's administration at {self.admin.base_url} does not answer as it should ({error}); "
                "name it in the topic's URL: pulsar://HOST:PORT?admin=http://HOST:PORT."
            ) from error
        return response

    def _producer(self) -> pulsar.Producer:
        with self.lock:
            if self.producer is None:
                with _Connecting(self.broker):
                    # Messages are small, and one by one they are also returned and counted one by one.
                    self.producer = self.client.create_producer(
                        self.topic,
                        block_if_queue_full=True,
                        batching_enabled=False,
                        send_timeout_millis=60_000,
                    )
            return self.producer

    def _consumer(self) -> pulsar.Consumer:
        with self.lock:
            if self.consumer is None:
                with _Connecting(self.broker):
                    self.consumer = self.client.subscribe(
                        self.topic,
                        SUBSCRIPTION,
                        consumer_type=pulsar.ConsumerType.KeyShared,
                        initial_position=pulsar.InitialPosition.Earliest,
                        receiver_queue_size=RECEIVER_QUEUE,
                        negative_ack_redelivery_delay_ms=RETURN_MS,
                        dead_letter_policy=pulsar.ConsumerDeadLetterPolicy(
                            DEAD_LETTER_AFTER, f"{self.topic}-dead", SUBSCRIPTION
                        ),
                    )
            return self.consumer

    def _hold(self, delivery: pulsar.Message, seconds: float) -> None:
        with self.lock:
            self.held[_id(delivery)] = _Held(delivery, time.monotonic() + seconds)

    def _return_due(self, consumer: pulsar.Consumer) -> float:
        """Return the messages whose lease or delay has ended; the result is when the next one's does."""
        with self.lock:
            now = time.monotonic()
            for key, held in list(self.held.items()):
                if held.until <= now:
                    consumer.negative_acknowledge(held.delivery)
                    del self.held[key]
            return min((held.until for held in self.held.values()), default=float("inf"))


class _Connecting:
    """Turns the client's errors into ones that name the broker."""

    def __init__(self, broker: str) -> None:
        self.broker = broker

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, pulsar.PulsarException):
            raise FlowError(f"The broker {self.broker} does not answer ({error}).") from error


def _id(delivery: pulsar.Message) -> str:
    return delivery.message_id().serialize().hex()
