"""JSON as it is written: compact, and fast enough for every token."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from starlette.responses import Response

_encoder = msgspec.json.Encoder()


def encode(value: Any) -> bytes:
    """A value of plain JSON types as UTF-8; lone surrogates are written as escapes."""
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:
        # A model may write half a character as an escape in a tool call's JSON.
        return json.dumps(value, separators=(",", ":")).encode()


def event(data: bytes) -> bytes:
    """A server-sent event without a name."""
    return b"data: " + data + b"\n\n"


def response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(encode(value), status, headers, media_type="application/json")
