"""The shapes of errors in each API: what routers and engines both send."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared.api_errors import error_body, error_event
from shared.openai import ApiError

OPENAI = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/generate", "/v1/messagesx"]
ERROR = ApiError(502, "It broke.", type="server_error", param="p", code="node_failed")


def data_of(event: bytes) -> dict[str, Any]:
    assert event.endswith(b"\n\n") and event.count(b"\n\n") == 1
    found: dict[str, Any] = json.loads(event.rpartition(b"data: ")[2])
    return found


@pytest.mark.parametrize("path", OPENAI)
def test_openais_shape(path: str) -> None:
    told = {"message": "It broke.", "type": "server_error", "param": "p", "code": "node_failed"}
    assert json.loads(error_body(ERROR, path)) == {"error": told}
    if path != "/v1/responses":
        event = error_event(ERROR, path)
        assert event.startswith(b"data: ") and data_of(event) == {"error": told}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (499, "api_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
        (529, "overloaded_error"),
    ],
)
def test_anthropics_shape(path: str, status: int, kind: str) -> None:
    told = json.loads(error_body(ApiError(status, "It broke."), path))
    assert told.pop("request_id").startswith("req_")
    assert told == {"type": "error", "error": {"type": kind, "message": "It broke."}}
    event = error_event(ApiError(status, "It broke."), path)
    assert event.startswith(b"event: error\ndata: ") and data_of(event)["error"]["type"] == kind
    assert json.loads(error_body(ERROR, path, "req_1"))["request_id"] == "req_1"


def test_responses_have_an_event_of_their_own() -> None:
    event = error_event(ERROR, "/v1/responses", 7)
    assert event.startswith(b"event: error\ndata: ")
    assert data_of(event) == {
        "type": "error", "code": "node_failed", "message": "It broke.", "param": "p", "sequence_number": 7
    }  # fmt: skip
    assert data_of(error_event(ApiError(500, "x"), "/v1/responses"))["code"] == "invalid_request_error"


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_harnesses_know() -> None:
    error = ApiError(400, "9000 tokens.", code="context_length_exceeded")
    assert (
        json.loads(error_body(error, "/v1/messages"))["error"]["message"]
        == "prompt is too long: 9000 tokens."
    )
    assert json.loads(error_body(error, "/v1/responses"))["error"]["message"] == "9000 tokens."
