"""Settings of the router."""

from __future__ import annotations

from typing import Annotated

from shared.config import Doc, Settings


class RouterSettings(Settings, kw_only=True):
    max_state_age_s: Annotated[float, Doc("wall seconds after which a node's reported state is not used")] = (
        5.0
    )
    copy_s_per_token: Annotated[float, Doc("price of copying KV between nodes, seconds a token")] = 1e-6
    place_timeout_s: Annotated[float, Doc("wall seconds a request waits for a node that can take it")] = 30.0
    prefill_timeout_s: Annotated[float, Doc("wall seconds for one prefill, its queue included")] = 600.0
    stream_timeout_s: Annotated[float, Doc("wall seconds without a byte from the decode node")] = 120.0
    deadline_s: Annotated[
        float, Doc("wall seconds for a whole request, 0 for no limit; a client's X-EI-Timeout may be shorter")
    ] = 0.0
    keepalive_s: Annotated[
        float, Doc("wall seconds between comments to a streaming client that waits; 0 for none")
    ] = 10.0
    max_attempts: Annotated[int, Doc("nodes that one request is tried on, each phase")] = 3
    max_requests: Annotated[int, Doc("requests in flight; more wait in line")] = 4096
    max_waiting: Annotated[int, Doc("requests in line; more are refused with 429")] = 1024
    max_body_bytes: Annotated[int, Doc("largest request body")] = 64 * 2**20
    max_connections: Annotated[int, Doc("client connections")] = 20_000
    branch_idle_s: Annotated[float, Doc("cluster seconds after which an idle branch is forgotten")] = 7200.0
    probe_s: Annotated[float, Doc("wall seconds between probes of a node that does not report")] = 1.0
    admin_port: Annotated[
        int, Doc("port of /metrics and /ei/v1, without keys; 0: on the client port, for administrators' keys")
    ] = 0
    keys_file: Annotated[str, Doc("TOML file of API keys; empty: everybody may use the router")] = ""
    allow_anonymous: Annotated[bool, Doc("listen beyond loopback without keys")] = False
    decision_log_rate: Annotated[float, Doc("part of the placements that are logged with all candidates")] = (
        0.0
    )
    token_cache_tokens: Annotated[int, Doc("token ids of conversations kept for their next steps")] = (
        16_000_000
    )
    tracing: Annotated[
        str, Doc("OTLP endpoint of OpenTelemetry spans, or 'env' for the OTEL_* variables; empty for none")
    ] = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        above_zero = (
            "max_state_age_s",
            "place_timeout_s",
            "prefill_timeout_s",
            "stream_timeout_s",
            "probe_s",
        )
        for name in above_zero:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("deadline_s", "keepalive_s", "max_waiting"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")
        for name in (
            "max_attempts",
            "max_requests",
            "max_body_bytes",
            "max_connections",
            "token_cache_tokens",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.decision_log_rate <= 1:
            raise ValueError(f"decision_log_rate must be 0 to 1, not {self.decision_log_rate}")
