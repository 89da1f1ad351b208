"""An answer's content blocks as Anthropic streams them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polysilicon.server import json_text
from polysilicon.server.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)


def event(data: dict[str, Any]) -> bytes:
    """A server-sent event, named by the data's type."""
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), json_text.encode(data))


class Blocks:
    """Opens and closes blocks as the kind of content changes. called: whether a tool was."""

    def __init__(self) -> None:
        self.called = False
        self._index = -1
        self._open: str | None = None

    def take(self, events: Sequence[Event]) -> list[bytes]:
        """The wire's events for an update's."""
        pieces: list[bytes] = []
        for item in events:
            match item:
                case TextDelta(text):
                    self._enter(pieces, "text", {"type": "text", "text": ""})
                    pieces.append(self._text(text))
                case ReasoningDelta(text):
                    block = {"type": "thinking", "thinking": "", "signature": ""}
                    self._enter(pieces, "thinking", block)
                    delta = {"type": "thinking_delta", "thinking": text}
                    pieces.append(self._delta(delta))
                case ToolCallStart(_, call_id, name):
                    self.called = True
                    call: dict[str, Any] = {
                        "type": "tool_use",
                        "id": call_id,
                        "name": name,
                        "input": {},
                    }
                    self._leave(pieces)
                    self._enter(pieces, "tool_use", call)
                case ToolCallDelta(_, arguments):
                    delta = {"type": "input_json_delta", "partial_json": arguments}
                    pieces.append(self._delta(delta))
                case ToolCallEnd():
                    self._leave(pieces)
        return pieces

    def finish(self) -> list[bytes]:
        """The end of the block that is open."""
        pieces: list[bytes] = []
        self._leave(pieces)
        return pieces

    def _enter(self, pieces: list[bytes], kind: str, block: dict[str, Any]) -> None:
        if self._open == kind:
            return
        self._leave(pieces)
        self._open = kind
        self._index += 1
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        pieces.append(event(start))

    def _leave(self, pieces: list[bytes]) -> None:
        if self._open is not None:
            self._open = None
            pieces.append(event({"type": "content_block_stop", "index": self._index}))

    def _text(self, text: str) -> bytes:
        return (
            b"event: content_block_delta\n"
            b'data: {"type":"content_block_delta","index":%d,'
            b'"delta":{"type":"text_delta","text":%b}}\n\n' % (self._index, json_text.encode(text))
        )

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return event({"type": "content_block_delta", "index": self._index, "delta": delta})
