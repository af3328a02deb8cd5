"""Traces: what a collector receives of the requests of a server."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_client import LocalClient

from worldmodel.media import encoding
from worldmodel.models.world_model import WorldModel
from worldmodel.serving import tracing
from worldmodel.serving.app import create_app
from worldmodel.serving.settings import HttpOptions, ServerConfig
from worldmodel.serving.worlds.service import WorldService

service_pb2 = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
pytest.importorskip("opentelemetry.instrumentation.fastapi")

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A collector of OTLP over HTTP; returns the resource spans that it has received."""
    received: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            received.extend(service_pb2.ExportTraceServiceRequest.FromString(body).resource_spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield received
    server.shutdown()
    thread.join()
    server.server_close()
    tracing.configure(False)


def test_a_step_is_a_trace_with_its_phases(
    model: WorldModel, tmp_path: Path, image: np.ndarray, collector: list[Any]
) -> None:
    app = create_app(WorldService(model), ServerConfig("tiny", tmp_path, http=HttpOptions(traces=True)))
    with LocalClient(app) as client:
        upload = {"observation": ("x.png", encoding.encode_png(image))}
        world = client.post("/v1/worlds", files=upload).json()["id"]
        client.get("/health")
        header = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        action = {"step_id": 1, "action": "the red ball jumps"}
        assert client.post(f"/v1/worlds/{world}/step", json=action, headers=header).status_code == 200

    (name,) = {
        each.value.string_value
        for resource in collector
        for each in resource.resource.attributes
        if each.key == "service.name"
    }
    assert name == "worldmodel"
    spans = [span for resource in collector for scope in resource.scope_spans for span in scope.spans]
    assert not [span for span in spans if "health" in span.name]
    step = {span.name: span for span in spans if span.trace_id.hex() == TRACE}
    (request,) = (span for span in step.values() if span.parent_span_id.hex() == PARENT)
    phases = ("prepare", "predict states", "denoise", "decode")
    assert set(step) == {request.name, *phases}
    assert all(step[phase].parent_span_id == request.span_id for phase in phases)
    ends = [(step[phase].start_time_unix_nano, step[phase].end_time_unix_nano) for phase in phases]
    assert ends == sorted(ends)
    assert request.start_time_unix_nano <= ends[0][0]
    assert ends[-1][1] <= request.end_time_unix_nano
    assert f"/v1/worlds/{world}" not in request.name  # names have few values; ids are attributes
