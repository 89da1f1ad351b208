"""One streamed request, timed."""

from __future__ import annotations

import asyncio
import time

import aiohttp

from polysilicon.bench.events import (
    DONE,
    EventParser,
    MalformedStream,
    decode,
    error_message,
    error_text,
)
from polysilicon.bench.records import Failure, Record

_HEADERS = {"Content-Type": "application/json", "Accept": "text/event-stream"}

_MAX_BODY_BYTES = 4 << 20


async def stream(record: Record, session: aiohttp.ClientSession, address: str, body: bytes) -> None:
    """Send a request and write its answer into the record, as it comes. Whatever the server does
    wrong becomes the record's failure. A cancelled call leaves by CancelledError, and the record
    then holds what came before."""
    record.sent = time.perf_counter()
    try:
        async with session.post(address, data=body, headers=_HEADERS) as response:
            if response.status != 200:
                message = error_text(await read_bounded(response.content))
                record.failure = Failure(cause=f"HTTP {response.status}", message=message)
            elif response.content_type != "text/event-stream":
                record.failure = Failure(
                    cause="no event stream",
                    message=f"the answer to `stream: true` is {response.content_type}",
                )
            else:
                record.failure = await _read(record, response.content)
    except (aiohttp.ClientError, OSError, ValueError, MalformedStream) as error:
        record.failure = describe(error)


async def read_bounded(content: aiohttp.StreamReader) -> bytes:
    """A body, of which what is past 4 MiB is left."""
    body = bytearray()
    while len(body) < _MAX_BODY_BYTES and (received := await content.readany()):
        body += received
    return bytes(body)


async def _read(record: Record, content: aiohttp.StreamReader) -> Failure | None:
    """Take the events of a stream into the record; why the answer is not whole, or None."""
    parser = EventParser()
    pieces = 0
    done = False
    while received := await content.readany():
        now = time.perf_counter()
        for data in parser.feed(received):
            if data == DONE:
                done = True
                continue
            chunk = decode(data)
            if chunk.error is not None:
                return Failure(cause="error in the stream", message=error_message(chunk.error))
            for choice in chunk.choices:
                record.end = now
                record.finish_reason = choice.finish_reason or record.finish_reason
                if choice.brings_tokens:
                    pieces += 1
                    record.times.append(now)
            usage = chunk.usage
            if usage is not None:
                record.counted = True
                record.prompt_tokens = usage.prompt_tokens
                record.output_tokens = usage.completion_tokens
                if usage.prompt_tokens_details is not None:
                    record.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0
    if not record.counted:
        record.output_tokens = pieces
    if record.finish_reason == "error":
        return Failure(cause="error in the stream", message="the answer ends with reason `error`")
    if not done and record.finish_reason is None:
        return Failure(cause="stream cut short", message=f"it ended after {pieces} pieces")
    if not pieces:
        return Failure(cause="no tokens", message=f"finish reason {record.finish_reason!r}")
    return None


def describe(error: Exception) -> Failure:
    """The cause and the words for what went wrong on the way."""
    cause = next((name for kinds, name in _CAUSES if isinstance(error, kinds)), "other")
    if isinstance(error, aiohttp.ClientConnectorError):
        message = f"{error.host}:{error.port}: {error.os_error.strerror or error.os_error}"
    else:
        message = str(error) or type(error).__name__
    return Failure(cause=cause, message=" ".join(message.split())[:300])


CANNOT_CONNECT = "cannot connect"

_CAUSES: tuple[tuple[type[Exception] | tuple[type[Exception], ...], str], ...] = (
    # What aiohttp raises for a total time that ran out is a TimeoutError too.
    ((asyncio.TimeoutError, aiohttp.ServerTimeoutError), "timeout"),
    (aiohttp.ClientConnectorError, CANNOT_CONNECT),
    (MalformedStream, "malformed stream"),
    (aiohttp.InvalidURL, "invalid address"),
    (aiohttp.ClientResponseError, "malformed answer"),
    ((aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError), "connection lost"),
)
