"""What a model thinks before it answers, between `<think>` and `</think>`."""

from __future__ import annotations

from collections.abc import Sequence

from polysilicon.server.events import Event, OutputParser, ReasoningDelta, TextDelta
from polysilicon.server.parsing.text_hold import split_at

OPEN, CLOSE = "<think>", "</think>"


class ReasoningParser:
    """Splits off reasoning that begins the text; the rest goes to `rest`, or is the answer.

    inside: the prompt has opened the reasoning already.
    """

    def __init__(self, *, inside: bool, rest: OutputParser | None = None) -> None:
        self._rest = rest
        self._held = ""
        self._stage = "reasoning" if inside else "start"
        self._begun = False

    def push(self, text: str) -> Sequence[Event]:
        """What is certain after `text`."""
        if self._stage == "answer":
            return self._answer(text)
        self._held += text
        events: list[Event] = []
        if self._stage == "start":
            start = self._held.lstrip()
            if OPEN.startswith(start) and start != OPEN:
                return events
            if not start.startswith(OPEN):
                return self._rest_of_held()
            self._stage = "reasoning"
            self._held = start[len(OPEN) :]
        if self._stage == "reasoning":
            thought, tag, rest = split_at(self._held, (CLOSE,))
            if not self._begun:
                thought = thought.lstrip()
                self._begun = bool(thought)
            kept = thought.rstrip()
            if kept:
                events.append(ReasoningDelta(kept))
            if tag is None:
                # Blanks before the closing tag are no part of it.
                self._held = thought[len(kept) :] + rest
                return events
            self._stage = "gap"
            self._held = rest
        self._held = self._held.lstrip()
        if self._held:
            events += self._rest_of_held()
        return events

    def finish(self) -> Sequence[Event]:
        """The rest, when no more is to come."""
        events: list[Event] = []
        if self._stage == "reasoning":
            thought = self._held.rstrip()
            events += [ReasoningDelta(thought)] if thought else []
        elif self._stage == "start":
            events += self._answer(self._held)
        self._held = ""
        return [*events, *(self._rest.finish() if self._rest is not None else ())]

    def _rest_of_held(self) -> Sequence[Event]:
        self._stage = "answer"
        held, self._held = self._held, ""
        return self._answer(held)

    def _answer(self, text: str) -> Sequence[Event]:
        if not text:
            return ()
        return self._rest.push(text) if self._rest is not None else (TextDelta(text),)
