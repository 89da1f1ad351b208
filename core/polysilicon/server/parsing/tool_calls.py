"""Tool calls in the formats of the common model families."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from polysilicon.server.events import (
    Event,
    OutputParser,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from polysilicon.server.parsing.json_calls import CallList, CallScanner
from polysilicon.server.parsing.python_calls import python_calls
from polysilicon.server.parsing.text_hold import split_at

NewId = Callable[[], str]


class _CallsParser(ABC):
    """What the formats share: text up to `opening`, then calls; blanks beside calls are dropped."""

    opening: tuple[str, ...] = ()

    def __init__(self, new_id: NewId) -> None:
        self._new_id = new_id
        self._count = 0
        self._held = ""
        self._tag: str | None = None

    def push(self, text: str) -> Sequence[Event]:
        """What is certain after `text`."""
        self._held += text
        events: list[Event] = []
        while self._held:
            before = (self._tag, self._held)
            if self._tag is None:
                self._before_call(events)
            else:
                self._in_call(events)
            if (self._tag, self._held) == before:
                break
        return events

    def finish(self) -> Sequence[Event]:
        """The rest, when no more is to come."""
        events: list[Event] = []
        if self._tag is not None:
            self._end_call(events)
        rest, self._held = self._held, ""
        if rest and (rest.strip() or not self._count):
            events.append(TextDelta(rest))
        return events

    def _before_call(self, events: list[Event]) -> None:
        certain, self._tag, rest = split_at(self._held, self.opening)
        shown = certain.rstrip()
        if shown:
            events.append(TextDelta(shown))
        if self._tag is None:
            self._held = certain[len(shown) :] + rest
        else:
            self._held = rest
            self._begin_call(certain[len(shown) :])

    def _begin_call(self, blank: str) -> None:  # noqa: B027 (most formats need nothing)
        """After an opening tag; `blank` stood before it."""

    @abstractmethod
    def _in_call(self, events: list[Event]) -> None:
        """More of a call has come."""

    @abstractmethod
    def _end_call(self, events: list[Event]) -> None:
        """The output ends within a call."""


class HermesParser(_CallsParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen, SmolLM and others;
    a list of calls between the tags too."""

    opening = ("<tool_call>",)
    _closing = "</tool_call>"

    def _begin_call(self, blank: str) -> None:
        self._blank = blank
        self._calls = CallList(self._count, self._new_id)
        self._broken = ""

    def _in_call(self, events: list[Event]) -> None:
        if not self._broken:
            found, self._held = self._calls.push(self._held)
            events += found
            if self._calls.inside or not self._held:
                return
        inner, tag, self._held = split_at(self._held, (self._closing,))
        self._broken += inner
        if tag is not None:
            self._close(events, tag)

    def _end_call(self, events: list[Event]) -> None:
        ended, rest = self._calls.finish()
        events += ended
        self._broken += rest + self._held
        self._held = ""
        self._close(events, "")

    def _close(self, events: list[Event], closing: str) -> None:
        """Leave the call; what is none is text as it came."""
        if self._calls.count == self._count and self._broken:
            events.append(TextDelta(f"{self._blank}{self._tag}{self._broken}{closing}"))
        self._count = self._calls.count
        self._tag = None


class MistralParser(_CallsParser):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, and the newer
    `[TOOL_CALLS]name[ARGS]{...}`, with or without `[CALL_ID]` and `[ARGS]`."""

    opening = ("[TOOL_CALLS]",)
    _name = re.compile(r"\s*([A-Za-z0-9_.-]+)\s*(?:\[CALL_ID\][A-Za-z0-9]*\s*)?(?:\[ARGS\])?\s*")
    _longest_name = 256

    def _begin_call(self, blank: str) -> None:
        self._blank = blank
        self._calls = CallList(self._count, self._new_id)
        self._named: CallScanner | None = None
        self._in_list = False

    def _in_call(self, events: list[Event]) -> None:
        if self._named is not None:
            self._follow_named(self._named, events)
        elif self._in_list:
            self._follow_list(events)
        else:
            self._choose_form(events)

    def _choose_form(self, events: list[Event]) -> None:
        text = self._held.lstrip()
        if text[:1] in ("[", "{"):
            self._in_list = True
            self._follow_list(events)
            return
        brace = text.find("{")
        if brace < 0 and len(text) <= self._longest_name:
            return
        matched = self._name.fullmatch(text[:brace]) if brace >= 0 else None
        if matched is None:
            events.append(TextDelta(f"{self._blank}{self._tag}"))
            self._tag = None
            return
        # Followed as the object that the other form would have.
        self._named = CallScanner(self._count, self._new_id())
        self._named.push(f'{{"name": "{matched[1]}", "arguments": ')
        self._held = text[brace:]

    def _follow_list(self, events: list[Event]) -> None:
        found, self._held = self._calls.push(self._held)
        events += found
        if self._held and not self._calls.inside:
            if self._calls.count == self._count:
                events.append(TextDelta(f"{self._blank}{self._tag}"))
            self._count = self._calls.count
            self._tag = None

    def _follow_named(self, call: CallScanner, events: list[Event]) -> None:
        for position, character in enumerate(self._held):
            call.push(character)
            if call.between or call.failed:
                call.push("}")
                self._held = self._held[position + 1 :]
                break
        else:
            self._held = ""
        events += call.events()
        if call.done or call.failed:
            if not call.done and call.started:
                events.append(ToolCallEnd(self._count))
            self._count += call.started
            self._tag = None

    def _end_call(self, events: list[Event]) -> None:
        if self._named is not None:
            if self._named.started:
                events.append(ToolCallEnd(self._count))
                self._count += 1
        else:
            ended, rest = self._calls.finish()
            events += ended
            if self._calls.count == self._count and rest + self._held:
                self._held = f"{self._blank}{self._tag}{rest}{self._held}"
            self._count = self._calls.count
        self._tag = None


class LlamaParser(_CallsParser):
    """A whole answer `{"name": ..., "parameters": {...}}`, more of them after `;`, with or without
    `<|python_tag|>` before: Llama 3."""

    opening = ("<|python_tag|>",)

    def __init__(self, new_id: NewId) -> None:
        super().__init__(new_id)
        self._begun = False

    def _before_call(self, events: list[Event]) -> None:
        if not self._begun:
            start = self._held.lstrip()
            if not start:
                return
            self._begun = True
            if start.startswith("{"):
                self._tag = ""
                self._begin_call(self._held[: len(self._held) - len(start)])
                self._held = start
                return
        super()._before_call(events)

    def _begin_call(self, blank: str) -> None:
        self._blank = blank
        self._calls = CallList(self._count, self._new_id)

    def _in_call(self, events: list[Event]) -> None:
        found, self._held = self._calls.push(self._held)
        events += found
        if self._held and not self._calls.inside:
            self._leave()

    def _end_call(self, events: list[Event]) -> None:
        ended, rest = self._calls.finish()
        events += ended
        self._held = rest + self._held
        self._leave()

    def _leave(self) -> None:
        if self._calls.count == self._count:
            self._held = f"{self._blank}{self._held}"
        self._count = self._calls.count
        self._tag = None


class PythonicParser:
    """A whole answer `[name(key=value, ...), ...]` in Python's literals: Llama 4 and others. A call
    comes when its list is complete."""

    _opening = "<|python_start|>"
    _longest = 1 << 16

    def __init__(self, new_id: NewId) -> None:
        self._new_id = new_id
        self._held = ""
        self._is_text = False

    def push(self, text: str) -> Sequence[Event]:
        """Holds the text back while it may be a list of calls."""
        self._held += text
        start = self._held.removeprefix(self._opening).lstrip()
        if not self._is_text and len(start) <= self._longest:
            opens = self._opening.startswith(self._held)
            if opens or not start or _MAY_BE_CALLS.match(start):
                return ()
        self._is_text = True
        held, self._held = self._held, ""
        return (TextDelta(held),) if held else ()

    def finish(self) -> Sequence[Event]:
        """The calls, or the text that was held back."""
        held, self._held = self._held, ""
        text = held.strip().removeprefix(self._opening).removesuffix("<|python_end|>").strip()
        calls = None if self._is_text else python_calls(text)
        if calls is None:
            return (TextDelta(held),) if held else ()
        events: list[Event] = []
        for index, (name, arguments) in enumerate(calls):
            events.append(ToolCallStart(index, self._new_id(), name))
            events.append(ToolCallDelta(index, arguments))
            events.append(ToolCallEnd(index))
        return events


_MAY_BE_CALLS = re.compile(r"\[\s*(?:[A-Za-z_][A-Za-z0-9_.-]*\s*(?:\(|$)|$)")


class RequiredCalls:
    """The whole output is a list of calls, as a grammar made it."""

    def __init__(self, new_id: NewId) -> None:
        self._calls = CallList(0, new_id)
        self._unread = ""

    def push(self, text: str) -> Sequence[Event]:
        """The events of what is certain."""
        events, self._unread = self._calls.push(self._unread + text)
        return events

    def finish(self) -> Sequence[Event]:
        """The end of a call that the output's length cut off."""
        events, rest = self._calls.finish()
        rest += self._unread
        return [*events, TextDelta(rest)] if rest else events


class NamedCall:
    """The whole output is the arguments of one call whose name is settled."""

    def __init__(self, new_id: NewId, name: str) -> None:
        self._start: ToolCallStart | None = ToolCallStart(0, new_id(), name)

    def push(self, text: str) -> Sequence[Event]:
        """The arguments as they come."""
        start, self._start = self._start, None
        delta = ToolCallDelta(0, text)
        return (delta,) if start is None else (start, delta)

    def finish(self) -> Sequence[Event]:
        """The call's end."""
        return (ToolCallEnd(0),) if self._start is None else ()


class FirstCall:
    """Lets one call through: parallel_tool_calls is false."""

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser

    def push(self, text: str) -> Sequence[Event]:
        """The events that concern no further call."""
        return _of_first_call(self._parser.push(text))

    def finish(self) -> Sequence[Event]:
        """As `push`."""
        return _of_first_call(self._parser.finish())


def _of_first_call(events: Sequence[Event]) -> Sequence[Event]:
    calls = (ToolCallStart, ToolCallDelta, ToolCallEnd)
    return [event for event in events if not isinstance(event, calls) or event.index == 0]
