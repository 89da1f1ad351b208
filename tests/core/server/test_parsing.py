"""Reasoning and tool calls in text, however it is cut into pieces."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polysilicon.server.events import (
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from polysilicon.server.parsing.reasoning import ReasoningParser
from polysilicon.server.parsing.tool_calls import (
    FirstCall,
    HermesParser,
    LlamaParser,
    MistralParser,
    NamedCall,
    PythonicParser,
    RequiredCalls,
)


def read(parser, pieces):
    """Text, reasoning and calls; every call begins, has its arguments and ends, in order."""
    text, reasoning, calls, open_call = "", "", [], None
    for event in itertools.chain(*map(parser.push, pieces), parser.finish()):
        match event:
            case TextDelta(more):
                assert more
                text += more
            case ReasoningDelta(more):
                assert more
                reasoning += more
            case ToolCallStart(index, call_id, name):
                assert (index, open_call) == (len(calls), None)
                assert call_id.startswith("id")
                calls.append([name, ""])
                open_call = index
            case ToolCallDelta(index, arguments):
                assert index == open_call
                assert arguments
                calls[index][1] += arguments
            case ToolCallEnd(index):
                assert index == open_call
                open_call = None
    assert open_call is None
    return text, reasoning, [tuple(call) for call in calls]


def make(kind, *arguments):
    count = itertools.count()
    return kind(lambda: f"id{next(count)}", *arguments)


F = '{"name": "f", "arguments": {"a": 1}}'
G = '{"arguments": {"b": "</tool_call> \\" } ["}, "name": "g.h"}'
CALL_F = ("f", '{"a": 1}')
CALL_G = ("g.h", '{"b": "</tool_call> \\" } ["}')

CASES = [
    (HermesParser, "Just text, with a < and a <tool.", "Just text, with a < and a <tool.", []),
    (HermesParser, f"<tool_call>\n{F}\n</tool_call>", "", [CALL_F]),
    (HermesParser, f"Wait.\n\n<tool_call>{F}</tool_call>\n<tool_call>{G}</tool_call>\n",
     "Wait.", [CALL_F, CALL_G]),
    (HermesParser, f"<tool_call>[{F}, {G}]</tool_call>", "", [CALL_F, CALL_G]),
    (HermesParser, f"<tool_call>{F}", "", [CALL_F]),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": [1, {"c"', "",
     [("f", '{"a": [1, {"c"')]),
    (HermesParser, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    (HermesParser, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 2}"}</tool_call>', "",
     [("f", '{"a": 2}')]),
    (HermesParser, '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    (HermesParser, "a <tool_call>not a call</tool_call> b", "a <tool_call>not a call</tool_call> b",
     []),
    (HermesParser, '<tool_call>{"to": 1}</tool_call>', '<tool_call>{"to": 1}</tool_call>', []),
    (HermesParser, '<tool_call>{"na', '<tool_call>{"na', []),
    (HermesParser, "<tool_call></tool_call>", "", []),
    (HermesParser, f"<tool_call>{F}</tool_call> then text", " then text", [CALL_F]),
    (HermesParser, " \n ", " \n ", []),
    (HermesParser, "", "", []),
    (MistralParser, f"[TOOL_CALLS][{F}, {G}]", "", [CALL_F, CALL_G]),
    (MistralParser, f"Sure [TOOL_CALLS] [{F}]", "Sure", [CALL_F]),
    (MistralParser, '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g.h[ARGS]{"b": "}"}', "",
     [CALL_F, ("g.h", '{"b": "}"}')]),
    (MistralParser, '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": {"b": [1]}}', "",
     [("f", '{"a": {"b": [1]}}')]),
    (MistralParser, '[TOOL_CALLS]f{"a": ', "", [("f", '{"a": ')]),
    (MistralParser, "[TOOL_CALLS]!? {}", "[TOOL_CALLS]!? {}", []),
    (MistralParser, "[TOOL_CALLS]", "", []),
    (MistralParser, "[TOOL_CALLS]word", "[TOOL_CALLS]word", []),
    (MistralParser, "[TOOL] is text", "[TOOL] is text", []),
    (LlamaParser, '{"name": "f", "parameters": {"a": 1}}', "", [CALL_F]),
    (LlamaParser, f"<|python_tag|>{F}; {G}", "", [CALL_F, CALL_G]),
    (LlamaParser, '{"type": "function", "name": "f", "parameters": {"a": 1}}', "", [CALL_F]),
    (LlamaParser, '{"answer": 42}', '{"answer": 42}', []),
    (LlamaParser, ' {"answer": {"name": 1}} ', ' {"answer": {"name": 1}} ', []),
    (LlamaParser, "No {braces} at first", "No {braces} at first", []),
    (LlamaParser, '{"name": 5}', '{"name": 5}', []),
    (PythonicParser, '[f(a=1), g.h(b="x, )]", c=[1, {"d": True}], e=-2.5, g=None)]', "",
     [CALL_F, ("g.h", '{"b": "x, )]", "c": [1, {"d": true}], "e": -2.5, "g": null}')]),
    (PythonicParser, "<|python_start|>[f(a=1)]<|python_end|>", "", [CALL_F]),
    (PythonicParser, "[f()]", "", [("f", "{}")]),
    (PythonicParser, "[1, 2]", "[1, 2]", []),
    (PythonicParser, "[see the list]", "[see the list]", []),
    (PythonicParser, "[f(1)]", "[f(1)]", []),
    (PythonicParser, "[f(a=__import__('os'))]", "[f(a=__import__('os'))]", []),
    (PythonicParser, "[f(a=1)", "[f(a=1)", []),
    (PythonicParser, "[f(a=" + "(" * 5000, "[f(a=" + "(" * 5000, []),
    (RequiredCalls, f"[{F}, {G}]", "", [CALL_F, CALL_G]),
    (RequiredCalls, f"[{F[:-3]}", "", [("f", '{"a": ')]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "given_text", "text", "calls"), CASES)
def test_calls_however_they_are_cut(kind, given_text, text, calls) -> None:
    cuts = [[given_text], list(given_text)]
    cuts += [[given_text[:at], given_text[at:]] for at in range(min(len(given_text), 200))]
    for pieces in cuts:
        assert read(make(kind), pieces) == (text, "", calls), pieces
    for name, arguments in calls:
        assert name
        if not given_text.endswith(arguments):
            json.loads(arguments)


THOUGHTS = [
    ("<think>\nHm.\n\nYes.\n</think>\n\nAnswer <think>", False, "Hm.\n\nYes.", "Answer <think>"),
    ("Hm. </think> Answer", True, "Hm.", "Answer"),
    ("never ends \n", True, "never ends", ""),
    ("<think></think>Answer", False, "", "Answer"),
    ("<think>  ", False, "", ""),
    ("No thought, </think> though", False, "", "No thought, </think> though"),
    ("  <thin", False, "", "  <thin"),
    (" leading", False, "", " leading"),
    ("a < b</think>c", True, "a < b", "c"),
]


@pytest.mark.parametrize(("given_text", "inside", "reasoning", "text"), THOUGHTS)
def test_reasoning_however_it_is_cut(given_text, inside, reasoning, text) -> None:
    for at in range(len(given_text) + 1):
        for pieces in ([given_text[:at], given_text[at:]], list(given_text)):
            parser = ReasoningParser(inside=inside)
            assert read(parser, [p for p in pieces if p]) == (text, reasoning, []), pieces


def test_reasoning_before_a_call() -> None:
    text = f"<think>I need f.</think>\n<tool_call>{F}</tool_call>"
    for at in range(len(text)):
        parser = ReasoningParser(inside=False, rest=make(HermesParser))
        assert read(parser, [text[:at], text[at:]]) == ("", "I need f.", [CALL_F])


def test_named_and_first_calls() -> None:
    assert read(make(NamedCall, "f"), ['{"a"', ": 1}"]) == ("", "", [CALL_F])
    assert read(make(NamedCall, "f"), []) == ("", "", [])
    pieces = [f"<tool_call>{F}</tool_call><tool_call>{G}</tool_call>"]
    assert read(FirstCall(make(HermesParser)), pieces) == ("", "", [CALL_F])


@given(
    st.sampled_from([HermesParser, MistralParser, LlamaParser, PythonicParser, RequiredCalls]),
    st.lists(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]", "{", "}",
             '"name"', ":", '"f"', ",", '"arguments"', '"parameters"', "[", "]", " ", "\n", "\\",
             '"', "f(", "a=1", ")", ";", "1", "text", "<", F, G]
        )
    ),
    st.data(),
)  # fmt: skip
def test_any_text_however_it_is_cut(kind, words, data) -> None:
    text = "".join(words)
    whole = read(make(kind), [text])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert read(make(kind), [piece for piece in pieces if piece]) == whole
