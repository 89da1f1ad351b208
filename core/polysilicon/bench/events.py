"""Server-sent events of OpenAI-compatible servers, read with little work for each token."""

from __future__ import annotations

from typing import Any

import msgspec

MAX_EVENT_BYTES = 16 << 20
"""A longer event, or as much without an end, is no answer of a language model."""

DONE = b"[DONE]"


class MalformedStream(Exception):
    """Bytes that are no event stream, or an event that no completion has."""


class EventParser:
    """Turns the bytes of an event stream, as they come, into the data of its events.

    Lines end with LF or CRLF; fields other than `data`, and comments, are skipped; several data
    lines of one event are joined by LF. Source: WHATWG HTML, 9.2.6.
    """

    def __init__(self) -> None:
        self._tail = b""
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> list[bytes]:
        """Data of the events that these bytes complete. Raises MalformedStream for an event past
        MAX_EVENT_BYTES."""
        lines = (self._tail + received).split(b"\n")
        self._tail = lines.pop()
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip(b" \r"))
            elif line in (b"", b"\r") and self._data:
                events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                self._data = []
        if len(self._tail) > MAX_EVENT_BYTES or sum(map(len, self._data)) > MAX_EVENT_BYTES:
            raise MalformedStream(f"an event is longer than {MAX_EVENT_BYTES >> 20} MiB")
        return events


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def brings_tokens(self) -> bool:
        """Whether the event stands for output. Tokens may have no text yet, as the first half of a
        character has none; events that only open the answer or close it bring none."""
        delta = self.delta
        if self.text or (
            delta is not None
            and (delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)
        ):
            return True
        return self.finish_reason is None and (delta is None or delta.role is None)


class Chunk(msgspec.Struct):
    """What a streamed completion or chat completion holds of interest here."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(Chunk)


def decode(data: bytes) -> Chunk:
    """The chunk of an event. Raises MalformedStream."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise MalformedStream(f"{error}: {data[:80]!r}") from None


def error_text(body: bytes) -> str:
    """What the body of a failed request says, in one line, whether it is JSON or not."""
    try:
        return error_message(msgspec.json.decode(body))
    except msgspec.DecodeError:
        return error_message(body.decode(errors="replace"))


def error_message(said: object) -> str:
    """The words in an error object of a server, whichever form it has."""
    while isinstance(said, dict):
        said = next((said[name] for name in ("error", "message", "detail") if said.get(name)), None)
    return " ".join(str(said).split())[:300] if said else "no message"
