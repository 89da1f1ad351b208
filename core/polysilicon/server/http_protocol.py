"""uvicorn's HTTP protocol with a bound on a request's head, which it lacks with httptools."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD_BYTES = 64 << 10
HEAD_SECONDS = 60.0


class BoundedHeadProtocol(HttpToolsProtocol):
    """Closes connections whose request line and headers are too long or do not come."""

    _head_bytes = 0
    _in_head = True
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("The request's headers are too long.")

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        if self._timer is None:
            self._await_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def _await_head(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(HEAD_SECONDS, self._too_late)

    def _too_late(self) -> None:
        self._timer = None
        if self._in_head and not self.transport.is_closing():
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
