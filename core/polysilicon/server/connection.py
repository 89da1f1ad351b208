"""A client's connection: work lasts while the client is there and no longer than allowed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from polysilicon.errors import PolysiliconError
from polysilicon.server.errors import ApiError, api_error

logger = logging.getLogger(__name__)


class ClientGone(Exception):
    """The client closed its connection: nobody waits for the answer."""


@contextlib.asynccontextmanager
async def connected(receive: Receive, seconds: float) -> AsyncIterator[None]:
    """Run the block for at most `seconds`, and only while the client is there.

    The body must have been read. Raises ClientGone, and ApiError (504) when the time is over.
    """
    watch: asyncio.Task[None] | None = None
    limit: asyncio.Timeout | None = None
    try:
        async with asyncio.timeout(seconds) as limit:
            watch = asyncio.create_task(_end_when_gone(receive, limit))
            yield
    except TimeoutError:
        if limit is None or not limit.expired():
            raise
        if watch is not None and watch.done():
            raise ClientGone from None
        raise ApiError(
            504, f"the request took more than {seconds:g} seconds, the server's --request-timeout"
        ) from None
    finally:
        if watch is not None:
            watch.cancel()


async def _end_when_gone(receive: Receive, limit: asyncio.Timeout) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    limit.reschedule(asyncio.get_running_loop().time())


class EventStream(Response):
    """Server-sent events, as a generator makes them.

    The status is sent with the first event, so that what fails before it has a status of its own;
    what fails later is sent as the event that `failure` makes of it. Every chunk is one write. The
    generator is closed in every case.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        *,
        seconds: float,
        failure: Callable[[ApiError], bytes],
    ) -> None:
        super().__init__(
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        del self.headers["content-length"]
        self._chunks = chunks
        self._seconds = seconds
        self._failure = failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async with connected(receive, self._seconds), contextlib.aclosing(self._chunks):
                async for chunk in self._chunks:
                    if not started:
                        started = True
                        await send(self._start())
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            last = b""
        except ClientGone:
            if not started:
                raise
            last = b""
        except PolysiliconError as error:
            if not started:
                raise
            last = self._failure(api_error(error))
        except Exception:
            if not started:
                raise
            logger.exception("a stream failed")
            last = self._failure(ApiError(500, "the server failed: see its log"))
        if not started:
            await send(self._start())
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _start(self) -> dict[str, object]:
        return {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
