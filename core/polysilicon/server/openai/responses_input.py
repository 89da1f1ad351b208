"""Items of the responses interface as messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polysilicon.server.chat_plan import ChatInput
from polysilicon.server.errors import invalid
from polysilicon.server.openai.rendering import tool_use
from polysilicon.server.openai.responses_schema import Item, ResponsesBody

_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def chat_input(body: ResponsesBody) -> ChatInput:
    """The chat of a body. Raises ApiError (400)."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        for index, item in enumerate(body.input):
            _add(messages, item, f"input.{index}")
    extra = dict(body.chat_template_kwargs or {})
    if body.reasoning is not None and body.reasoning.effort is not None:
        extra.setdefault("reasoning_effort", body.reasoning.effort)
    use = tool_use(
        [_nested(tool, index) for index, tool in enumerate(body.tools or ())],
        body.tool_choice,
        body.parallel_tool_calls is not False,
    )
    return ChatInput(messages=messages, use=use, extra=extra)


def _add(messages: list[dict[str, Any]], item: Item, where: str) -> None:
    """Add an item; what an assistant thought, said and called in a row is one message."""
    kind = item.get("type", "message")
    if kind == "function_call_output":
        content = _text(item.get("output"), where)
        call_id = _string(item, "call_id", where)
        messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
    elif kind == "function_call":
        function = {key: _string(item, key, where) for key in ("name", "arguments")}
        call = {"id": _string(item, "call_id", where), "type": "function", "function": function}
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind == "reasoning":
        thought = _text(item.get("content") or item.get("summary") or "", where)
        if thought:
            _assistant(messages)["reasoning_content"] = thought
    elif kind == "message":
        role = _string(item, "role", where)
        text = _text(item.get("content"), where)
        last = messages[-1] if messages else {}
        if role == "assistant" and last.get("role") == role and last["content"] is None:
            last["content"] = text
        else:
            messages.append({"role": role, "content": text})
    else:
        raise invalid(f"{where}: items of type {str(kind)[:40]!r} are not supported", where)


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message at the end, begun if there is none."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(part, Mapping) or part.get("type") not in _TEXTS:
            raise invalid(f"{where}: only texts are supported as content", where)
        texts.append(_string(part, "text", where))
    return "\n".join(texts)


def _string(item: Mapping[str, Any], key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise invalid(f"{where}: {key} must be a text", where)
    return value


def _nested(tool: Mapping[str, Any], index: int) -> dict[str, Any]:
    """A tool in the form of chat completions."""
    if tool.get("type") != "function":
        place = f"tools.{index}"
        raise invalid(f"{place}: only tools of type function are supported", place)
    return {"type": "function", "function": tool}


def flat_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Tools as an answer repeats them."""
    return [{"strict": False, "parameters": None, **tool} for tool in tools or ()]
