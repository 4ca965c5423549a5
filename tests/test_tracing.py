"""Spans of a request through both phases, in the client's trace, with the request's id."""

from __future__ import annotations

import asyncio

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from services.router import tracing
from services.router.tracing import NoTracer, OpenTelemetry
from shared.config import ConfigError
from shared.messages import Phase
from tests.test_router import body, cluster

P, D = Phase.PREFILL, Phase.DECODE
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


async def test_spans_of_one_request_share_the_clients_trace(redis_url, cluster_name):
    async with cluster(redis_url, cluster_name, ("p", P), ("d", D)) as (service, (p, d), http, _bus):
        exporter = InMemorySpanExporter()
        service.tracer = OpenTelemetry("", "router-x", exporter)
        p.prefill_script = ["moved"]  # a second try has a span of its own
        headers = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
        async with http.post("/v1/completions", json=body(), headers=headers) as answer:
            assert answer.status == 200
            rid = answer.headers["X-EI-Request-Id"]
        d.decode_script = ["error"]
        async with http.post("/v1/completions", json=body()) as answer:
            assert answer.status == 400
        await asyncio.to_thread(service.tracer.close)
        spans = exporter.get_finished_spans()
        ours = [span for span in spans if span.attributes["ei.request_id"] == rid]
        assert [span.name for span in ours] == ["prefill", "prefill", "decode", "POST /v1/completions"]
        assert {format(span.context.trace_id, "032x") for span in ours} == {TRACE}
        root = ours[-1]
        assert all(span.parent.span_id == root.context.span_id for span in ours[:-1])
        assert root.attributes["ei.outcome"] == "ok" and root.attributes["ei.prompt_tokens"] == 100
        # The decode node gets a parent of its own in the same trace, not the client's.
        sent = d.decodes[0][0]["traceparent"]
        assert sent.split("-")[1] == TRACE and sent.split("-")[2] == format(ours[2].context.span_id, "016x")
        assert (
            spans[-1].status.status_code is StatusCode.ERROR
            and spans[-1].attributes["ei.outcome"] == "rejected"
        )


def test_off_it_is_nothing_and_without_the_packages_an_error(monkeypatch):
    assert isinstance(tracing.tracer("", "x"), NoTracer)
    import builtins

    real = builtins.__import__

    def no_sdk(name, *args, **kw):
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return real(name, *args, **kw)

    monkeypatch.setattr(builtins, "__import__", no_sdk)
    with pytest.raises(ConfigError, match=r"evolving-infra\[tracing\]"):
        tracing.tracer("http://127.0.0.1:4318", "x")
