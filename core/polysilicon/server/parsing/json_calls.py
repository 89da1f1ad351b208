"""Tool calls that models write as JSON objects with a name and arguments."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable

from polysilicon.server.events import Event, ToolCallDelta, ToolCallEnd, ToolCallStart

_NAME = "name"
_ARGUMENTS = ("arguments", "parameters")
_OTHER_KEYS = ("type", "id", "function")
_SPACE = " \t\r\n"


class _State(enum.Enum):
    OPEN = enum.auto()
    KEY = enum.auto()
    IN_KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    IN_VALUE = enum.auto()
    COMMA = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


class CallScanner:
    """Follows one JSON object `{"name": ..., "arguments": {...}}` character by character.

    The arguments' text is passed on as it comes, once the name is known. An object with other first
    keys, or that is no JSON, fails: it is then no call, and `raw` is its text.
    """

    def __init__(self, index: int, call_id: str) -> None:
        self.raw = ""
        self.started = False
        self._index = index
        self._id = call_id
        self._state = _State.OPEN
        self._key = ""
        self._value = ""
        self._depth = 0
        self._quoted = False
        self._escaped = False
        self._name: str | None = None
        self._arguments: str | None = None
        """Those that are known and were not passed on."""
        self._passed = False

    @property
    def done(self) -> bool:
        """Whether the object is complete."""
        return self._state is _State.DONE

    @property
    def between(self) -> bool:
        """Whether a key's value is complete and another or the end must follow."""
        return self._state is _State.COMMA

    @property
    def failed(self) -> bool:
        """Whether this is no call."""
        return self._state is _State.FAILED

    def push(self, text: str) -> int:
        """Take text in; returns how much of it belongs to the object, which may have ended."""
        for position, character in enumerate(text):
            self._step(character)
            if self._state is _State.FAILED:
                self.raw += text[:position]
                return position
            if self._state is _State.DONE:
                self.raw += text[: position + 1]
                return position + 1
        self.raw += text
        return len(text)

    def events(self) -> list[Event]:
        """What came since the last time."""
        events: list[Event] = []
        if self._name is None:
            return events
        if not self.started and (self._arguments is not None or self.done):
            self.started = True
            events.append(ToolCallStart(self._index, self._id, self._name))
        if self._arguments:
            self._passed = True
            events.append(ToolCallDelta(self._index, self._arguments))
            self._arguments = ""
        if self.done:
            if not self._passed:
                events.append(ToolCallDelta(self._index, "{}"))
            events.append(ToolCallEnd(self._index))
        return events

    def _step(self, character: str) -> None:
        state = self._state
        if state is _State.IN_VALUE:
            self._in_value(character)
        elif state is _State.IN_KEY:
            self._in_key(character)
        elif character in _SPACE:
            return
        elif state is _State.OPEN:
            self._state = _State.KEY if character == "{" else _State.FAILED
        elif state is _State.KEY:
            self._key = character
            if character == '"':
                self._state = _State.IN_KEY
            elif character == "}" and self._name is not None:
                self._finish()
            else:
                self._state = _State.FAILED
        elif state is _State.COLON:
            self._state = _State.VALUE if character == ":" else _State.FAILED
        elif state is _State.VALUE:
            self._begin_value(character)
        elif state is _State.COMMA:
            self._after_value(character)

    def _in_key(self, character: str) -> None:
        self._key += character
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._state = _State.COLON
            key = _decoded(self._key)
            self._key = key if isinstance(key, str) else ""
            if self._key not in (_NAME, *_ARGUMENTS, *_OTHER_KEYS) and self._name is None:
                self._state = _State.FAILED

    def _begin_value(self, character: str) -> None:
        self._value = ""
        self._depth = 0
        self._quoted = self._escaped = False
        self._state = _State.IN_VALUE
        if character in ",}]:":
            self._state = _State.FAILED
            return
        self._in_value(character)

    def _in_value(self, character: str) -> None:
        if self._quoted:
            self._take(character)
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._quoted = False
                if not self._depth:
                    self._end_value()
            return
        if not self._depth and (character in ",}" or character in _SPACE):
            self._end_value()  # Of a number or a word, which nothing of its own ends.
            if self._state is _State.COMMA and character not in _SPACE:
                self._after_value(character)
            return
        self._take(character)
        if character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if not self._depth:
                self._end_value()

    def _take(self, character: str) -> None:
        self._value += character
        if self._streams:
            self._arguments = (self._arguments or "") + character

    @property
    def _streams(self) -> bool:
        """Whether the value is an object of arguments, passed on as it comes."""
        return self._key in _ARGUMENTS and self._value[:1] == "{"

    def _end_value(self) -> None:
        self._state = _State.COMMA
        if self._key == _NAME:
            name = _decoded(self._value)
            if isinstance(name, str) and name:
                self._name = name
            else:
                self._state = _State.FAILED
        elif self._key in _ARGUMENTS and not self._streams:
            value = _decoded(self._value)
            # Some models write the arguments' JSON as a text, as OpenAI's API has it.
            if isinstance(value, str) and isinstance(_decoded(value), dict):
                self._arguments = value
            elif value is not None:
                self._state = _State.FAILED

    def _after_value(self, character: str) -> None:
        if character == ",":
            self._state = _State.KEY
        elif character == "}" and self._name is not None:
            self._finish()
        else:
            self._state = _State.FAILED

    def _finish(self) -> None:
        self._state = _State.DONE


def _decoded(text: str) -> object:
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value


class CallList:
    """Follows calls one after another, in a list or not: `[{...}, {...}]`, `{...}; {...}`.

    count: calls that came, from the first index on.
    """

    def __init__(self, first_index: int, new_id: Callable[[], str]) -> None:
        self.count = first_index
        self._first = first_index
        self._new_id = new_id
        self._call: CallScanner | None = None
        self._skipped = ""
        """What stood before the first call, which may be text after all."""
        self._broken = False

    @property
    def inside(self) -> bool:
        """Whether an object has begun and not ended."""
        return self._call is not None

    def push(self, text: str) -> tuple[list[Event], str]:
        """The events of what is certain, and the text from the first on that is no call; where an
        object fails to be one, all of it."""
        events: list[Event] = []
        while text and not self._broken:
            if self._call is None:
                rest = text.lstrip(" \t\r\n[],;")
                self._skipped += text[: len(text) - len(rest)]
                text = rest
                if not text.startswith("{"):
                    break
                self._call = CallScanner(self.count, self._new_id())
            call = self._call
            text = text[call.push(text) :]
            events += call.events()
            if call.failed:
                text = self._give_up(call, events) + text
                break
            if call.done:
                self.count += 1
                self._call = None
        return events, self._with_skipped(text)

    def finish(self) -> tuple[list[Event], str]:
        """The last events, and the text of an object that did not come to be a call."""
        events: list[Event] = []
        rest = self._give_up(self._call, events) if self._call is not None else ""
        return events, self._with_skipped(rest)

    def _give_up(self, call: CallScanner, events: list[Event]) -> str:
        self._call = None
        self._broken = True
        if not call.started:
            return call.raw
        events.append(ToolCallEnd(self.count))
        self.count += 1
        return ""

    def _with_skipped(self, text: str) -> str:
        if not text or self.count > self._first:
            return text
        skipped, self._skipped = self._skipped, ""
        return skipped + text
