"""OpenTelemetry spans of requests: one a request, one for each call to a prefill or decode node.

Rules that hold here
- Without the extra `tracing`, or with tracing off, everything here does nothing and costs nothing.
- A client's `traceparent` is continued; the nodes get one of their own in the same trace.
- A span that cannot be exported is dropped by the exporter: tracing never holds up or fails a request.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from shared.config import ConfigError

if TYPE_CHECKING:
    from services.router.exchange import Exchange
    from services.router.flight import Flight
    from shared.messages import NodeInfo


class RequestSpan(Protocol):
    def ended(self, flight: Flight) -> None:
        """The request is over: note how."""


class Tracer(Protocol):
    def request(
        self, flight: Flight, exchange: Exchange
    ) -> contextlib.AbstractContextManager[RequestSpan]: ...

    def phase(self, name: str, flight: Flight, node: NodeInfo) -> contextlib.AbstractContextManager[None]:
        """`flight.trace_headers` name the span while it lasts."""

    def close(self) -> None: ...


class _NoSpan:
    def ended(self, flight: Flight) -> None:
        pass


class NoTracer:
    """Tracing is off."""

    _span = contextlib.nullcontext(_NoSpan())
    _none: contextlib.nullcontext[None] = contextlib.nullcontext()

    def request(self, flight: Flight, exchange: Exchange) -> contextlib.AbstractContextManager[RequestSpan]:
        return self._span

    def phase(self, name: str, flight: Flight, node: NodeInfo) -> contextlib.AbstractContextManager[None]:
        return self._none

    def close(self) -> None:
        pass


class _Span:
    def __init__(self, span: Any) -> None:
        self._span = span

    def ended(self, flight: Flight) -> None:
        self._span.set_attributes(
            {
                "ei.request_id": flight.rid,
                "ei.branch": flight.branch,
                "ei.outcome": flight.outcome.value,
                "ei.prompt_tokens": flight.prompt_tokens,
                "ei.cached_tokens": flight.cached_tokens,
                "ei.output_tokens": flight.usage.output,
            }
        )
        if flight.error:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, flight.error))


class OpenTelemetry:
    """Spans over OTLP/HTTP to `endpoint`, or as the OTEL_* variables say for 'env'."""

    def __init__(self, endpoint: str, instance: str, exporter: Any = None) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                exporter = OTLPSpanExporter() if endpoint == "env" else OTLPSpanExporter(endpoint=endpoint)
        except ImportError as error:
            raise ConfigError(
                f"tracing needs the extra of that name: pip install 'evolving-infra[tracing]' ({error})"
            ) from None
        resource = Resource.create({"service.name": "evolving-router", "service.instance.id": instance})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("evolving")
        self._propagator = TraceContextTextMapPropagator()

    @contextlib.contextmanager
    def request(self, flight: Flight, exchange: Exchange) -> Iterator[RequestSpan]:
        context = self._propagator.extract(exchange.headers)
        with self._tracer.start_as_current_span(
            f"POST {exchange.path}", context=context, attributes={"ei.request_id": flight.rid}
        ) as span:
            yield _Span(span)

    @contextlib.contextmanager
    def phase(self, name: str, flight: Flight, node: NodeInfo) -> Iterator[None]:
        attributes = {"ei.request_id": flight.rid, "ei.node": node.node}
        with self._tracer.start_as_current_span(name, attributes=attributes):
            carrier: dict[str, str] = {}
            self._propagator.inject(carrier)
            flight.trace_headers = [(key.encode(), value.encode()) for key, value in carrier.items()]
            yield

    def close(self) -> None:
        self._provider.shutdown()


def tracer(endpoint: str, instance: str) -> Tracer:
    """Raises ConfigError when the packages are missing."""
    return OpenTelemetry(endpoint, instance) if endpoint else NoTracer()
