"""Errors in Anthropic's forms."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from polysilicon.server import json_text
from polysilicon.server.errors import ApiError

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


def failure_response(error: ApiError) -> Response:
    """The response of a request that failed."""
    return json_text.response(_body(error), error.status, error.headers)


def failure_event(error: ApiError) -> bytes:
    """The last event of a stream that failed."""
    return b"event: error\ndata: " + json_text.encode(_body(error)) + b"\n\n"


def _body(error: ApiError) -> dict[str, Any]:
    kind = "api_error" if error.status >= 500 else "invalid_request_error"
    return {
        "type": "error",
        "error": {"type": _KINDS.get(error.status, kind), "message": str(error)},
    }
