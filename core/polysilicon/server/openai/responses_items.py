"""An answer as items of the responses interface, and the events that tell of them."""

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
from polysilicon.server.service import new_id


class OutputItems:
    """items: the answer's so far. Each event is numbered and named as OpenAI's are."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._number = 0
        self._logprobs: list[dict[str, Any]] = []
        """Of tokens whose text has not come."""

    def event(self, kind: str, **fields: Any) -> bytes:
        """A server-sent event with the next number."""
        data = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), json_text.encode(data))

    def take(self, events: Sequence[Event], logprobs: list[dict[str, Any]]) -> list[bytes]:
        """Add what an update tells; the events for it. logprobs: of the update's tokens."""
        pieces: list[bytes] = []
        self._logprobs += logprobs
        for item in events:
            match item:
                case TextDelta(text):
                    self._enter(pieces, "message")
                    scored, self._logprobs = self._logprobs, []
                    self._part()["logprobs"] += scored
                    self._grow(pieces, text, logprobs=scored)
                case ReasoningDelta(text):
                    self._enter(pieces, "reasoning")
                    self._grow(pieces, text)
                case ToolCallStart(_, call_id, name):
                    self._leave(pieces)
                    self._begin(
                        pieces,
                        {
                            "id": new_id("fc"),
                            "type": "function_call",
                            "status": "in_progress",
                            "call_id": call_id,
                            "name": name,
                            "arguments": "",
                        },
                    )
                case ToolCallDelta(_, arguments):
                    self._argue(pieces, arguments)
                case ToolCallEnd():
                    self._leave(pieces)
        return pieces

    def finish(self, *, complete: bool) -> list[bytes]:
        """End the item that is open; the last one is incomplete where the answer is."""
        pieces: list[bytes] = []
        if not self.items:
            self._enter(pieces, "message")
        self._leave(pieces, complete=complete)
        if not complete:
            self.items[-1]["status"] = "incomplete"
        return pieces

    def _enter(self, pieces: list[bytes], kind: str) -> None:
        """Have an item of this kind open, with a part for its text."""
        if self._open is not None and self._open["type"] == kind:
            return
        self._leave(pieces)
        item: dict[str, Any] = {"id": new_id("msg"), "type": kind, "status": "in_progress"}
        part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
            part["logprobs"] = []
        else:
            item |= {"id": new_id("rs"), "summary": [], "content": []}
            part = {"type": "reasoning_text", "text": ""}
        self._begin(pieces, item)
        item["content"].append(part)
        pieces.append(self.event("response.content_part.added", **self._place(), part=part))

    def _begin(self, pieces: list[bytes], item: dict[str, Any]) -> None:
        self._open = item
        self.items.append(item)
        index = len(self.items) - 1
        pieces.append(self.event("response.output_item.added", output_index=index, item=item))

    def _grow(self, pieces: list[bytes], text: str, **more: Any) -> None:
        part = self._part()
        part["text"] += text
        kind = f"response.{part['type']}.delta"
        pieces.append(self.event(kind, **self._place(), delta=text, **more))

    def _argue(self, pieces: list[bytes], arguments: str) -> None:
        assert self._open is not None
        self._open["arguments"] += arguments
        pieces.append(
            self.event(
                "response.function_call_arguments.delta",
                item_id=self._open["id"],
                output_index=len(self.items) - 1,
                delta=arguments,
            )
        )

    def _leave(self, pieces: list[bytes], *, complete: bool = True) -> None:
        item = self._open
        if item is None:
            return
        item["status"] = "completed" if complete else "incomplete"
        if item["type"] == "function_call":
            pieces.append(
                self.event(
                    "response.function_call_arguments.done",
                    item_id=item["id"],
                    output_index=len(self.items) - 1,
                    name=item["name"],
                    arguments=item["arguments"],
                )
            )
        else:
            part, place = self._part(), self._place()
            more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            kind = f"response.{part['type']}.done"
            pieces.append(self.event(kind, **place, text=part["text"], **more))
            pieces.append(self.event("response.content_part.done", **place, part=part))
        index = len(self.items) - 1
        pieces.append(self.event("response.output_item.done", output_index=index, item=item))
        self._open = None

    def _part(self) -> dict[str, Any]:
        assert self._open is not None
        part: dict[str, Any] = self._open["content"][0]
        return part

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {
            "item_id": self._open["id"],
            "output_index": len(self.items) - 1,
            "content_index": 0,
        }
