"""Topics of Pulsar: a broker that does not answer is named; with PULSAR_URL, a real one is told of clips."""

import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from flow_stages import flow_config, write_table

from worldmodel.errors import ConfigError
from worldmodel.flow.errors import FlowError
from worldmodel.flow.log.log import Log
from worldmodel.flow.work.run import run_flow
from worldmodel.plugins.pulsar import topic as pulsar_topic
from worldmodel.plugins.pulsar.topic import PulsarTopic


class Administration(BaseHTTPRequestHandler):
    """Answers as that of Pulsar does when a topic is made."""

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *arguments: object) -> None: ...


@contextmanager
def administration() -> Iterator[int]:
    """The port of an administration without a broker."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Administration)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.slow
def test_a_broker_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulsar_topic, "TIMEOUT_S", 1)
    with administration() as port:
        url = f"pulsar://127.0.0.1:1?admin=http://127.0.0.1:{port}"
        topic = PulsarTopic(url, "encode")
    with pytest.raises(FlowError, match=r"127\.0\.0\.1:1"):
        topic.receive(1, 0.1)
    with pytest.raises(FlowError, match=r"127\.0\.0\.1:1"):
        topic.announce(["clip"])
    topic.close()
    with pytest.raises(FlowError, match=str(port)):
        PulsarTopic(url, "encode")


@pytest.mark.parametrize("url", ["pulsar://", "pulsar://127.0.0.1/tenant", "pulsar://127.0.0.1/a/b/c"])
def test_addresses_that_name_no_broker_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="TENANT/NAMESPACE"):
        PulsarTopic(url, "encode")


if "PULSAR_URL" in os.environ:

    def test_a_broker_hands_each_clip_to_one_worker() -> None:
        name = f"encode-{uuid.uuid4().hex[:8]}"
        first, second = (PulsarTopic(os.environ["PULSAR_URL"], name) for _ in range(2))
        clips = [f"clip-{index}" for index in range(40)]
        first.announce(clips)
        received: list[str] = []
        while len(received) < len(clips):
            received += first.receive(4, 1.0) + second.receive(4, 1.0)
        assert sorted(received) == sorted(clips)
        first.close()
        second.close()

    def test_a_flow_with_a_broker_gives_the_log_of_one_without(tmp_path: Path) -> None:
        (tmp_path / "files").mkdir()
        table, logs = write_table(tmp_path / "files", 30), []
        for folder, topics in (("without", ""), ("with", os.environ["PULSAR_URL"])):
            config = flow_config(tmp_path / folder, table, topics=topics)
            run_flow(config)
            log = Log(config.place("log"))
            logs.append([log.storage.read(f"{n:06d}.json") for n in range((log.end() or (0,))[0])])
        assert logs[0] == logs[1]
