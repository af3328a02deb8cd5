"""What every kind of topic promises: nothing lost, leases, order, and one worker at a time per key."""

import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import topic_worker
from postgres import PostgresServer
from sqlalchemy import update
from topic_worker import deliveries

from worldmodel.database import connect, transaction
from worldmodel.errors import ConfigError
from worldmodel.flow.errors import FlowError
from worldmodel.flow.schema import message
from worldmodel.flow.topics import Claim, Message, Topic, open_topic

Open = Callable[[], Topic]
SHORT_S, LONG_S = 0.3, 60.0
WAIT_S = 60.0
"""Limit for what happens at once on an idle machine."""
HANGS_S = 600.0
"""Time after which processes that take seconds on an idle machine are taken to hang."""


@pytest.fixture
def name() -> str:
    return f"encode-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def opened(topic_url: str, name: str) -> Iterator[Open]:
    """Opens the same topic as often as it is called."""
    topics: list[Topic] = []

    def call() -> Topic:
        topics.append(open_topic(topic_url, name))
        return topics[-1]

    yield call
    for topic in topics:
        topic.close()


def publish(topic: Topic, count: int) -> list[str]:
    keys = [f"clip-{index:04}" for index in range(count)]
    topic.publish([Message(key, index) for index, key in enumerate(keys)])
    return keys


def keys_of(claims: list[Claim]) -> list[str]:
    return [claim.message.key for claim in claims]


def claimed_by_any(topics: list[Topic]) -> list[Claim]:
    """Return what one of them is delivered."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        for topic in topics:
            if claims := topic.claim(8, LONG_S, wait_s=0.05):
                return claims
    return []


def test_messages_come_in_the_order_of_their_ordinals(topic_url: str, opened: Open) -> None:
    if topic_url.startswith("pulsar"):
        pytest.skip("Pulsar delivers in the order of publishing")
    topic = opened()
    topic.publish([Message(f"clip-{9 - ordinal}", ordinal) for ordinal in (5, 3, 9, 1)])
    topic.publish([Message("clip-9", 0)])
    first = topic.claim(3, LONG_S)
    assert [claim.message.ordinal for claim in first] == [0, 1, 3]
    topic.nack(first[1:])
    assert [claim.message.ordinal for claim in topic.claim(8, LONG_S)] == [1, 3, 5, 9]


def test_a_key_is_worked_on_by_one_worker_at_a_time_and_in_order(opened: Open) -> None:
    topics = [opened(), opened()]
    for ordinal in range(3):
        topics[0].publish([Message("clip", ordinal)])
    first = claimed_by_any(topics)
    topics[1].publish([Message("clip", 3)])
    others = [claim for topic in topics for claim in topic.claim(8, LONG_S, wait_s=0.1)]
    ordinals = [claim.message.ordinal for claim in first + others]
    assert ordinals == sorted(ordinals)
    assert len({claim.handle for claim in first}) == len(first)


def test_a_message_that_is_published_twice_is_delivered_once(topic_url: str, opened: Open) -> None:
    if topic_url.startswith("pulsar"):
        pytest.skip("Pulsar cannot tell; the catalog makes the second delivery a no-op")
    topic = opened()
    publish(topic, 3)
    keys = publish(topic, 4)
    assert keys_of(topic.claim(10, LONG_S)) == keys
    publish(topic, 4)  # also while it is claimed
    assert topic.claim(10, LONG_S) == []


def test_an_acknowledged_message_is_gone_and_may_come_again(opened: Open) -> None:
    topic = opened()
    publish(topic, 2)
    topic.ack(topic.claim(2, LONG_S, wait_s=WAIT_S))
    assert topic.claim(2, LONG_S, wait_s=0.1) == []
    keys = publish(topic, 2)
    again = topic.claim(2, LONG_S, wait_s=WAIT_S)
    assert sorted(keys_of(again)) == keys
    assert {claim.attempt for claim in again} == {1}


def test_a_claim_whose_lease_ends_is_delivered_again(opened: Open) -> None:
    lost, other = opened(), opened()
    publish(lost, 2)
    expired = lost.claim(2, LONG_S, wait_s=WAIT_S)
    assert other.claim(2, LONG_S) == []
    lost.extend(expired, 0.0)
    again = claimed_by_any([other, lost])
    assert keys_of(again) == keys_of(expired)
    assert [claim.attempt for claim in expired + again] == [1, 1, 2, 2]


def test_a_worker_whose_lease_ended_cannot_take_the_message_from_another(
    topic_url: str, opened: Open
) -> None:
    if topic_url.startswith("pulsar"):
        pytest.skip("Pulsar's acknowledgements name the message and not the delivery")
    slow, other = opened(), opened()
    publish(slow, 1)
    expired = slow.claim(1, SHORT_S)
    current = other.claim(1, LONG_S, wait_s=WAIT_S)
    slow.nack(expired)
    slow.extend(expired, 0.0)
    slow.ack(expired)
    assert slow.claim(1, LONG_S, wait_s=0.1) == []
    assert other.depth() == 1
    other.ack(current)
    assert other.depth() == 0


def test_work_that_is_recorded_late_is_not_delivered_again(opened: Open) -> None:
    topic = opened()
    publish(topic, 1)
    late = topic.claim(1, 0.0, wait_s=WAIT_S)
    topic.publish([Message("other", -1)])
    others = topic.claim(1, LONG_S, wait_s=WAIT_S)
    topic.ack(late + others)
    assert topic.depth() == 0
    publish(topic, 1)
    assert [claim.attempt for claim in topic.claim(8, LONG_S, wait_s=WAIT_S)] == [1]
    assert topic.claim(8, LONG_S, wait_s=0.1) == []


def test_an_extended_lease_lasts(opened: Open) -> None:
    topic, other = opened(), opened()
    publish(topic, 1)
    claims = topic.claim(1, SHORT_S, wait_s=WAIT_S)
    topic.extend(claims, LONG_S)
    assert topic.claim(1, LONG_S, wait_s=2 * SHORT_S) == []
    assert other.claim(1, LONG_S) == []
    topic.ack(claims)


def test_a_returned_message_comes_again_after_its_delay(opened: Open) -> None:
    topic = opened()
    publish(topic, 1)
    for attempt in (1, 2, 3):
        claims = topic.claim(1, LONG_S, wait_s=WAIT_S)
        assert [claim.attempt for claim in claims] == [attempt]
        topic.nack(claims)
    claims = topic.claim(1, LONG_S, wait_s=WAIT_S)
    returned = time.monotonic()
    topic.nack(claims, delay_s=SHORT_S)
    assert keys_of(topic.claim(1, LONG_S, wait_s=WAIT_S)) == ["clip-0000"]
    assert time.monotonic() - returned >= SHORT_S


def test_a_claim_waits_for_what_is_published(opened: Open) -> None:
    consumer, producer = opened(), opened()
    consumer.claim(1, LONG_S)
    thread = threading.Timer(0.1, publish, (producer, 1))
    thread.start()
    assert keys_of(consumer.claim(1, LONG_S, wait_s=WAIT_S)) == ["clip-0000"]
    thread.join()


def test_depth_counts_what_waits_and_what_is_claimed(opened: Open) -> None:
    topic = opened()
    topic.claim(1, LONG_S)  # a subscription of Pulsar counts from its beginning
    publish(topic, 5)
    claims = topic.claim(2, LONG_S, wait_s=WAIT_S)
    assert topic.depth() == 5
    topic.ack(claims)
    assert topic.depth() == 5 - len(claims)


def test_a_producer_that_heeds_the_depth_is_slowed_down(opened: Open) -> None:
    producer, consumer = opened(), opened()
    consumer.claim(1, LONG_S)
    depths: list[int] = []

    def produce() -> None:
        for index in range(20):
            while producer.depth() >= 4:
                time.sleep(0.005)
            producer.publish([Message(f"clip-{index}", index)])

    thread = threading.Thread(target=produce)
    thread.start()
    received: set[str] = set()
    while len(received) < 20 and (claims := consumer.claim(1, LONG_S, wait_s=WAIT_S)):
        depths.append(consumer.depth())
        received.update(keys_of(claims))
        consumer.ack(claims)
    thread.join()
    assert len(received) == 20
    assert max(depths) <= 4


def test_topics_of_one_place_do_not_mix(topic_url: str, opened: Open) -> None:
    other = open_topic(topic_url, f"caption-{uuid.uuid4().hex[:8]}")
    other.claim(1, LONG_S)
    publish(opened(), 1)
    assert other.claim(1, LONG_S, wait_s=0.1) == []
    other.close()


def test_threads_share_the_work_without_loss_or_double_delivery(
    topic_url: str, name: str, opened: Open, tmp_path: Path
) -> None:
    opened().claim(1, LONG_S)
    keys = publish(opened(), 200)
    outputs = [tmp_path / f"{index}.txt" for index in range(4)]
    threads = [
        threading.Thread(target=topic_worker.work, args=(topic_url, name, output, LONG_S))
        for output in outputs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(deliveries(outputs)) == [(key, 1) for key in keys]


def start(url: str, name: str, output: Path, lease_s: float, count: int, work_s: float) -> subprocess.Popen:
    arguments = [url, name, str(output), str(lease_s), str(count), str(work_s)]
    return subprocess.Popen([sys.executable, topic_worker.__file__, *arguments])


@pytest.mark.slow
def test_processes_share_the_work_and_one_that_is_killed_loses_nothing(
    topic_url: str, name: str, opened: Open, tmp_path: Path
) -> None:
    if topic_url.startswith("memory"):
        pytest.skip("memory is for the threads of one process")
    opened().claim(1, LONG_S)
    keys = publish(opened(), 400)
    outputs = [tmp_path / f"{index}.txt" for index in range(5)]
    victim = start(topic_url, name, outputs[0], 3.0, 8, 1000.0)
    while not deliveries(outputs[:1]):
        assert victim.poll() is None
        time.sleep(0.01)
    workers = [start(topic_url, name, output, 3.0, 8, 0.01) for output in outputs[1:]]
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert [worker.wait(HANGS_S) for worker in workers] == [0] * 4
    held = {key for key, _ in deliveries(outputs[:1])}
    assert held
    done = deliveries(outputs[1:])
    assert {key for key, _ in done} == {*keys}
    assert len({*done}) == len(done)  # a busy machine may end a lease, but no delivery is made twice
    assert held <= {key for key, attempt in done if attempt > 1}
    assert opened().depth() == 0


@pytest.mark.slow
def test_a_database_that_is_killed_under_load_loses_nothing(name: str, tmp_path: Path) -> None:
    server = PostgresServer()
    try:
        url = server.database()
        topic = open_topic(url, name)
        keys = publish(topic, 3000)
        outputs = [tmp_path / f"{index}.txt" for index in range(3)]
        workers = [start(url, name, output, 20.0, 8, 0.0) for output in outputs]
        for kill_at in (500, 1500):
            while len(deliveries(outputs)) < kill_at:
                assert all(worker.poll() is None for worker in workers)
                time.sleep(0.01)
            server.kill()
            server.start()
        assert [worker.wait(HANGS_S) for worker in workers] == [0] * 3
        done = deliveries(outputs)
        assert {key for key, _ in done} == {*keys}
        assert len({*done}) == len(done)
        assert topic.depth() == 0
        topic.close()
    finally:
        server.stop()


def test_a_lease_from_a_clock_that_was_set_back_does_not_strand_its_message(database_url: str) -> None:
    topic = open_topic(database_url, "encode")
    publish(topic, 2)
    topic.claim(1, LONG_S)
    ahead = {"hidden_since": message.c.hidden_since + 3600, "hidden_until": message.c.hidden_until + 3600}
    transaction(connect(database_url), lambda connection: connection.execute(update(message).values(ahead)))
    topic.claim(1, LONG_S)
    assert [(claim.message.key, claim.attempt) for claim in topic.claim(2, LONG_S)] == [("clip-0000", 2)]


@pytest.mark.parametrize("url", ["redis://127.0.0.1", "encode", ""])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="memory:"):
        open_topic(url, "encode")


class Administration(BaseHTTPRequestHandler):
    """Answers as that of Pulsar does when a topic is made."""

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *arguments: object) -> None: ...


@pytest.mark.slow
def test_a_broker_of_pulsar_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = pytest.importorskip("worldmodel.flow.topics.pulsar", exc_type=ConfigError)
    monkeypatch.setattr(kind, "TIMEOUT_S", 1)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Administration)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    topic = open_topic(f"pulsar://127.0.0.1:1?admin=http://127.0.0.1:{server.server_port}", "encode")
    server.shutdown()
    server.server_close()
    thread.join()
    with pytest.raises(FlowError, match=r"127\.0\.0\.1:1"):
        topic.claim(1, LONG_S)
    with pytest.raises(FlowError, match=r"127\.0\.0\.1:1"):
        topic.publish([Message("clip")])
    with pytest.raises(FlowError, match=str(server.server_port)):
        topic.depth()
    topic.close()


@pytest.mark.parametrize(
    ("package", "url", "extra"),
    [("pulsar", "pulsar://127.0.0.1", "pulsar"), ("psycopg", "postgresql://127.0.0.1/flow", "pg")],
)
def test_a_missing_package_is_named(
    package: str, url: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "worldmodel.flow.topics.pulsar", raising=False)
    with pytest.raises(ConfigError, match=rf"worldmodel\[{extra}\]"):
        open_topic(url, "encode")
