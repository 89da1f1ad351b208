"""Errors in OpenAI's forms: as responses, and as events of a stream that has begun."""

from __future__ import annotations

from starlette.responses import Response

from polysilicon.server import json_text
from polysilicon.server.errors import ApiError

DONE = b"data: [DONE]\n\n"


def failure_response(error: ApiError) -> Response:
    """The response of a request that failed."""
    return json_text.response(error.body(), error.status, error.headers)


def failure_event(error: ApiError) -> bytes:
    """The last events of a stream that failed."""
    body = error.body()
    body["error"]["code"] = body["error"]["code"] or error.status
    return json_text.event(json_text.encode(body)) + DONE
