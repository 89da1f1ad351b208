"""A chat body as the input that every wire format shares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polysilicon.server.chat_plan import ChatInput
from polysilicon.server.errors import invalid
from polysilicon.server.openai.schemas import ChatBody
from polysilicon.server.tools import Tool, ToolUse, checked_tool

MOST_TOOLS = 1024


def chat_input(body: ChatBody) -> ChatInput:
    """The input of a chat completion. Raises ApiError (400)."""
    if (
        body.continue_final_message
        and body.add_generation_prompt
        and "add_generation_prompt" in (body.model_fields_set)
    ):
        raise invalid(
            "continue_final_message and add_generation_prompt exclude one another",
            "continue_final_message",
        )
    extra = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        extra.setdefault("reasoning_effort", body.reasoning_effort)
    return ChatInput(
        messages=body.messages,
        use=tool_use(body.tools, body.tool_choice, body.parallel_tool_calls is not False),
        documents=body.documents,
        extra=extra,
        add_generation_prompt=body.add_generation_prompt,
        open_end=body.continue_final_message,
    )


def tool_use(
    tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None, parallel: bool
) -> ToolUse:
    """OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`. Raises ApiError (400)."""
    found = [_tool(tool, index) for index, tool in enumerate(tools or ())]
    if len(found) > MOST_TOOLS or len({tool.name for tool in found}) < len(found):
        raise invalid(f"tools must be at most {MOST_TOOLS}, each with its own name", "tools")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        names = [_named(tool) for tool in _objects(allowed, "tools")]
        found = [_find(found, name) for name in names]
        choice = allowed.get("mode", "auto")
    if isinstance(choice, dict):
        return ToolUse([_find(found, _named(choice))], "named", parallel=False)
    if choice == "required" and not found:
        raise invalid("tool_choice required needs tools: send some", "tool_choice")
    match choice:
        case None | "auto":
            return ToolUse(found, "auto", parallel)
        case "required":
            return ToolUse(found, "required", parallel)
        case "none":
            return ToolUse(found, "none", parallel)
    raise invalid(
        "tool_choice must be none, auto, required or a function by its name", "tool_choice"
    )


def _tool(tool: Mapping[str, Any], index: int) -> Tool:
    place = f"tools.{index}"
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, Mapping):
        raise invalid(
            f'{place}: only {{"type": "function", "function": {{...}}}} is supported', place
        )
    return checked_tool(
        function.get("name"), function.get("description"), function.get("parameters"), place
    )


def _named(choice: Mapping[str, Any]) -> object:
    """The name in `{"type": "function", "function": {"name": ...}}`, or without `function`."""
    function = choice.get("function", choice)
    if choice.get("type") != "function" or not isinstance(function, Mapping):
        raise invalid("tool_choice must name a function", "tool_choice")
    return function.get("name")


def _find(tools: list[Tool], name: object) -> Tool:
    for tool in tools:
        if tool.name == name:
            return tool
    raise invalid(f"tool_choice names {str(name)[:128]!r}, which tools lacks", "tool_choice")


def _objects(value: object, key: str) -> list[Mapping[str, Any]]:
    items = value.get(key) if isinstance(value, Mapping) else None
    if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
        raise invalid(f"tool_choice.{key} must be a list of tools", "tool_choice")
    return items
