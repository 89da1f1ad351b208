"""From messages and tools to a prompt, and to how its answer is to be understood: what every wire
format of chats has in common."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polysilicon.request import Grammar
from polysilicon.server.errors import invalid
from polysilicon.server.events import OutputParser
from polysilicon.server.parsing.tool_calls import FirstCall, NamedCall, RequiredCalls
from polysilicon.server.service import Service
from polysilicon.server.tools import Tool, ToolUse, calls_schema

_MOST_MESSAGES = 10_000
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})

Message = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class ChatInput:
    """A chat in the form of OpenAI's messages. extra: further variables of the template.
    open_end: go on with the last message."""

    messages: Sequence[Message]
    use: ToolUse = dataclasses.field(default_factory=ToolUse)
    documents: Sequence[Mapping[str, Any]] | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    add_generation_prompt: bool = True
    open_end: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class ChatPlan:
    """text: the rendered prompt. parser: makes the parser of one choice's text, None where all of
    it is the answer. grammar: what the answer must be because calls are required. show_special:
    control tokens must stay in the text for the parser. stops_for_calls: whether calls are why an
    answer ends, rather than that one was asked for by name."""

    text: str
    parser: Callable[[], OutputParser] | None = None
    grammar: Grammar | None = None
    show_special: bool = False
    stops_for_calls: bool = True


async def plan_chat(service: Service, chat: ChatInput) -> ChatPlan:
    """Render a chat. Raises ApiError (400) and TemplateError."""
    if not 0 < len(chat.messages) <= _MOST_MESSAGES:
        raise invalid(f"messages must hold between 1 and {_MOST_MESSAGES} messages", "messages")
    if reserved := _RESERVED & set(chat.extra):
        raise invalid(f"chat_template_kwargs may not hold {min(reserved)}", "chat_template_kwargs")
    form = service.chat_format
    messages = [_renamed(message) for message in chat.messages]
    use = chat.use
    told = use.tools if use.choice != "none" else ()
    if not form.knows_tools:
        messages = _plain(messages, told)
    text = await service.prompts.render(
        messages,
        tools=[tool.openai() for tool in told] or None,
        documents=chat.documents,
        add_generation_prompt=chat.add_generation_prompt and not chat.open_end,
        extra=chat.extra,
    )
    if chat.open_end:
        text = _cut_open(text, messages[-1])
    if not told:
        parser = form.parser(prompt=text, calls=None)
        return ChatPlan(text, parser, show_special=form.thinks and form.hides_thoughts)
    if use.choice == "named":
        (tool,) = told
        parameters = tool.parameters
        grammar = Grammar(kind="json_object")
        if parameters:
            grammar = Grammar(kind="json_schema", text=json.dumps(parameters))
        return ChatPlan(
            text, lambda: NamedCall(form.new_id, tool.name), grammar, stops_for_calls=False
        )
    if use.choice == "required":
        schema = calls_schema(
            {tool.name: tool.parameters or {"type": "object"} for tool in told},
            most=None if use.parallel else 1,
        )
        grammar = Grammar(kind="json_schema", text=json.dumps(schema))
        return ChatPlan(text, lambda: RequiredCalls(form.new_id), grammar)

    def calls() -> OutputParser:
        parser = form.calls(form.new_id)
        return parser if use.parallel else FirstCall(parser)

    return ChatPlan(
        text,
        form.parser(prompt=text, calls=calls),
        show_special=form.hides_calls or (form.thinks and form.hides_thoughts),
    )


def _renamed(message: Message) -> Message:
    """A message as templates know it: they have no `developer`, OpenAI's newer name for system."""
    if message.get("role") == "developer":
        return {**message, "role": "system"}
    return message


_TELL = """You may call functions to answer. They are described in <tools>:
<tools>
{tools}
</tools>
For each call write its name and arguments as JSON between tags:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument": "its value"}}}}
</tool_call>"""


def _plain(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Messages for a template that knows no tools: calls and results written as text, and `tools`
    described in the system message."""
    plain = [_without_calls(message) for message in messages]
    if not tools:
        return plain
    lines = "\n".join(json.dumps(tool.openai(), ensure_ascii=False) for tool in tools)
    told = _TELL.format(tools=lines)
    first = plain[0]
    if first.get("role") == "system":
        return [{**first, "content": f"{_text_of(first)}\n\n{told}"}, *plain[1:]]
    return [{"role": "system", "content": told}, *plain]


def _without_calls(message: Message) -> Message:
    role, calls = message.get("role"), message.get("tool_calls")
    if role == "tool":
        result = f"<tool_response>\n{_text_of(message)}\n</tool_response>"
        return {"role": "user", "content": result}
    if role != "assistant" or not isinstance(calls, list) or not calls:
        return message
    parts = [_text_of(message)] if message.get("content") else []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise invalid("messages: a tool call has no function", "messages")
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments)
        name = json.dumps(function.get("name"), ensure_ascii=False)
        written = f'{{"name": {name}, "arguments": {arguments}}}'
        parts.append(f"<tool_call>\n{written}\n</tool_call>")
    return {"role": "assistant", "content": "\n".join(parts)}


def _text_of(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, Mapping)]
        return "\n".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""


def _cut_open(text: str, last: Message) -> str:
    """A rendered chat up to the end of its last message's content, which the model goes on with."""
    content = _text_of(last).strip()
    end = text.rfind(content) if content else -1
    if end < 0:
        raise invalid(
            "the last message cannot be gone on with: give it content that the chat template "
            "writes as it is",
            "messages",
        )
    return text[: end + len(content)]
