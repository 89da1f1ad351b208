"""What an assistant's turn consists of, whatever the wire format that tells of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, Protocol

from polysilicon.request import RequestOutput

FinishedReason = Literal["stop", "length", "tool_calls"]


@dataclasses.dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer's text."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks before it answers."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A tool call begins. index: among the choice's calls, from 0."""

    index: int
    id: str
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of a tool call's arguments, a piece of their JSON."""

    index: int
    arguments: str


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """A tool call's arguments are complete."""

    index: int


Event = TextDelta | ReasoningDelta | ToolCallStart | ToolCallDelta | ToolCallEnd


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    """Why a choice ended. stop: the stop text or stop token id that ended it, if one did."""

    reason: FinishedReason
    stop: str | int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Update:
    """News of one choice. events: what its text means. output: its tokens and log-probabilities.
    finished: set with the last news of the choice."""

    choice: int
    events: Sequence[Event]
    output: RequestOutput
    finished: Finished | None = None


class OutputParser(Protocol):
    """Finds reasoning and tool calls in one choice's text as it comes.

    The events do not depend on how the text was cut into pieces, joined by kind. A parser never
    fails: what it cannot read is text.
    """

    def push(self, text: str) -> Sequence[Event]:
        """What is certain after `text`."""

    def finish(self) -> Sequence[Event]:
        """The rest, when no more is to come."""
