"""Anthropic's messages and tools in the form that every wire format shares."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from polysilicon.request import Grammar
from polysilicon.server.anthropic.schemas import (
    Block,
    CountTokensBody,
    InputMessage,
    OutputConfig,
    ToolChoice,
)
from polysilicon.server.chat_plan import ChatInput, Message
from polysilicon.server.errors import invalid
from polysilicon.server.tools import Tool, ToolUse, checked_tool


def chat_input(body: CountTokensBody) -> ChatInput:
    """The input of a body. An assistant's message at the end is gone on with.

    Raises ApiError (400)."""
    messages: list[Message] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    for index, message in enumerate(body.messages):
        messages += _messages(message, f"messages.{index}")
    extra: dict[str, Any] = {}
    if body.thinking is not None:
        extra["enable_thinking"] = body.thinking.type != "disabled"
    if body.output_config is not None and body.output_config.effort is not None:
        extra["reasoning_effort"] = body.output_config.effort
    last = messages[-1] if messages else {}
    return ChatInput(
        messages=messages,
        use=_tool_use(body.tools or [], body.tool_choice),
        extra=extra,
        open_end=last.get("role") == "assistant" and "tool_calls" not in last,
    )


def grammar_of(config: OutputConfig | None) -> Grammar | None:
    """What the answer must be. Raises ApiError (400)."""
    if config is None or config.format is None:
        return None
    schema = config.format.get("schema")
    if config.format.get("type") != "json_schema" or not isinstance(schema, dict):
        raise invalid(
            'output_config.format must be {"type": "json_schema", "schema": {...}}',
            "output_config.format",
        )
    return Grammar(kind="json_schema", text=json.dumps(schema))


def _messages(message: InputMessage, place: str) -> Iterable[Message]:
    """A turn: results of tools come as messages of their own, before what is said."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    if not message.content:
        raise invalid(f"{place}.content is empty: give at least one block", f"{place}.content")
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for number, block in enumerate(message.content):
        where = f"{place}.content.{number}"
        kind = block.get("type")
        if kind == "text":
            texts.append(_string(block, "text", where))
        elif kind == "tool_result" and message.role == "user":
            content = block.get("content") or ""
            yield {
                "role": "tool",
                "tool_call_id": _string(block, "tool_use_id", where),
                "content": _text(content, where),
            }
        elif kind == "tool_use" and message.role == "assistant":
            calls.append(_call(block, where))
        elif kind == "thinking" and message.role == "assistant":
            thoughts.append(_string(block, "thinking", where))
        elif kind != "redacted_thinking":
            raise invalid(f"{where}: blocks of type {str(kind)[:40]!r} are not supported", where)
    said: dict[str, Any] = {"role": message.role, "content": "\n".join(texts)}
    if thoughts:
        said["reasoning_content"] = "\n".join(thoughts)
    if calls:
        said["content"] = said["content"] or None
        said["tool_calls"] = calls
    if texts or calls or thoughts:
        yield said


def _call(block: Block, where: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise invalid(f"{where}: input must be an object", where)
    function = {"name": _string(block, "name", where), "arguments": json.dumps(arguments)}
    return {"id": _string(block, "id", where), "type": "function", "function": function}


def _text(content: object, where: str) -> str:
    """A text, or blocks of texts one after another."""
    if isinstance(content, str):
        return content
    texts = []
    for block in content if isinstance(content, list) else [content]:
        if not isinstance(block, Mapping) or block.get("type") != "text":
            raise invalid(f"{where}: only texts and blocks of type text are supported", where)
        texts.append(_string(block, "text", where))
    return "\n".join(texts)


def _string(block: Mapping[str, Any], key: str, where: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise invalid(f"{where}: {key} must be a text", where)
    return value


def _tool_use(tools: Sequence[Mapping[str, Any]], choice: ToolChoice | None) -> ToolUse:
    found: list[Tool] = []
    for index, tool in enumerate(tools):
        place = f"tools.{index}"
        if tool.get("type") not in (None, "custom"):
            raise invalid(f"{place}: only tools with an input_schema are supported", place)
        found.append(
            checked_tool(tool.get("name"), tool.get("description"), tool.get("input_schema"), place)
        )
    if len({tool.name for tool in found}) < len(found):
        raise invalid("tools must each have their own name", "tools")
    if choice is None:
        return ToolUse(found)
    parallel = not choice.disable_parallel_tool_use
    if choice.type == "tool":
        named = [tool for tool in found if tool.name == choice.name]
        if not named:
            raise invalid(f"tool_choice names {choice.name!r}, which tools lacks", "tool_choice")
        return ToolUse(named, "named", parallel=False)
    if choice.type == "any":
        if not found:
            raise invalid("tool_choice any needs tools: send some", "tool_choice")
        return ToolUse(found, "required", parallel)
    return ToolUse(found, choice.type, parallel)
