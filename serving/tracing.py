"""Traces in the format of OpenTelemetry: a span for every request, and for the phases of a round inside it.

They go to the collector that `OTEL_EXPORTER_OTLP_ENDPOINT` names (http://localhost:4318 by default). Other
variables of the OpenTelemetry SDK work, too, such as `OTEL_TRACES_SAMPLER`.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from worldmodel.errors import ConfigError, pip_install

SERVICE = "worldmodel"
UNTRACED = "health,ready,metrics"
"""Routes that probes and scrapers call all the time."""

_tracer: Any = None


def configure(enabled: bool) -> Any:
    """Begin to send spans, and return their provider; None where they are not wanted.

    Raises:
        ConfigError: the packages are missing.
    """
    global _tracer
    _tracer = None
    if not enabled:
        return None
    try:
        import opentelemetry.instrumentation.fastapi  # noqa: F401
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigError(f"--traces needs extra packages; run {pip_install('otel')}.") from None
    name = os.environ.get("OTEL_SERVICE_NAME", SERVICE)
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    _tracer = provider.get_tracer(SERVICE)
    return provider


def span(name: str) -> AbstractContextManager[Any]:
    """Return a context whose duration is a span of the current request; nothing without traces."""
    return _tracer.start_as_current_span(name) if _tracer is not None else nullcontext()


def current_trace() -> str | None:
    """Return the id of the trace of the current request, 32 hexadecimal digits."""
    if _tracer is None:
        return None
    from opentelemetry import trace

    context = trace.get_current_span().get_span_context()
    return trace.format_trace_id(context.trace_id) if context.is_valid else None


def instrument(app: Any, provider: Any) -> None:
    """Give every request a span, which continues the caller's trace (header `traceparent`)."""
    from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor

    FastAPIInstrumentor.instrument_app(
        app, tracer_provider=provider, excluded_urls=UNTRACED, exclude_spans=["receive", "send"]
    )
