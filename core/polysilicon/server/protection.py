"""What stands before the endpoints: API keys, the bound on bodies, web pages of other origins."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polysilicon.server.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Paths that need no key: load balancers ask them."""

Respond = Callable[[str, ApiError], Response]
"""The response of an error on a path, in the form that the path's clients read."""


class Protection:
    """ASGI middleware: asks for an API key and bounds a body's size and the time that it takes.

    A key comes as `Authorization: Bearer KEY`, or as `x-api-key: KEY`, which Anthropic's clients
    send. Without keys every request may pass.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: Sequence[str],
        max_body: int,
        body_seconds: float,
        respond: Respond,
    ) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in api_keys]
        self._max_body = max_body
        self._body_seconds = body_seconds
        self._respond = respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        path = scope["path"]
        if self._digests and path not in OPEN_PATHS and not self._opens(headers):
            error = ApiError(
                401,
                "the API key is missing or wrong: send it as Authorization: Bearer KEY",
                code="invalid_api_key",
            )
            await self._respond(path, error)(scope, receive, send)
            return
        length = headers.get("content-length", "0")
        if length.isdecimal() and len(length) < 20 and int(length) > self._max_body:
            await self._respond(path, _too_large(self._max_body))(scope, receive, send)
            return
        body = _BoundedBody(receive, self._max_body, self._body_seconds)
        await self._app(scope, body.receive, send)

    def _opens(self, headers: Headers) -> bool:
        given = headers.get("x-api-key", "")
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            given = token.strip()
        digest = _digest(given.encode("utf-8", "surrogateescape"))
        # Every key is compared, so that the time tells nothing of which one is near.
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body has more than {most:,} bytes: send a smaller one")


def _digest(key: bytes) -> bytes:
    """Of one length for every key, so that comparing takes one time."""
    return hashlib.sha256(key).digest()


class _BoundedBody:
    """A request's body as it comes in, up to a number of bytes and within a time."""

    def __init__(self, receive: Receive, most: int, seconds: float) -> None:
        self._receive = receive
        self._most = self._left = most
        self._seconds = seconds
        self._deadline = asyncio.get_running_loop().time() + seconds
        self._whole = False

    async def receive(self) -> Message:
        """The next message. Raises ApiError (413, 408)."""
        if self._whole:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(
                408, f"the body took more than {self._seconds:g} seconds to come"
            ) from None
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            self._whole = not message.get("more_body", False)
            if self._left < 0:
                raise _too_large(self._most)
        return message
