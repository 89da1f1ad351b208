"""A chat body as the prompt that the model reads, and how its answer is to be understood."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polysilicon.server.errors import invalid
from polysilicon.server.events import OutputParser
from polysilicon.server.openai.schemas import ChatBody, TokenizeBody
from polysilicon.server.service import Service

_MOST_MESSAGES = 10_000


@dataclasses.dataclass(frozen=True, slots=True)
class Rendered:
    """prompt: token ids. parser: makes the parser of one choice's text, if it needs one."""

    prompt: tuple[int, ...]
    parser: Callable[[], OutputParser] | None = None


async def render_chat(service: Service, body: ChatBody) -> Rendered:
    """The prompt of a chat completion. Raises ApiError (400) and TemplateError."""
    extra = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        extra.setdefault("reasoning_effort", body.reasoning_effort)
    text = await chat_text(service, body, tools=body.tools, documents=body.documents, extra=extra)
    prompt = await service.prompts.encode(text, add_special=body.add_special_tokens)
    return Rendered(service.truncated(prompt, body.truncate_prompt_tokens))


async def chat_text(
    service: Service,
    body: ChatBody | TokenizeBody,
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> str:
    """The prompt text of a body's messages. Raises ApiError (400) and TemplateError."""
    messages = [_message(message) for message in body.messages or ()]
    if not 0 < len(messages) <= _MOST_MESSAGES:
        raise invalid(f"messages must hold between 1 and {_MOST_MESSAGES} messages", "messages")
    if body.continue_final_message and body.add_generation_prompt:
        raise invalid(
            "continue_final_message needs add_generation_prompt: false", "continue_final_message"
        )
    reserved = {"messages", "tools", "documents", "add_generation_prompt"} & set(extra or ())
    if reserved:
        name = min(reserved)
        raise invalid(f"chat_template_kwargs may not hold {name}", "chat_template_kwargs")
    text = await service.prompts.render(
        messages,
        tools=tools or None,
        documents=documents,
        add_generation_prompt=body.add_generation_prompt,
        extra=extra,
    )
    return _cut_open(text, messages[-1]) if body.continue_final_message else text


def _message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message as templates know it: they have no `developer`, OpenAI's newer name for system."""
    if message.get("role") == "developer":
        return {**message, "role": "system"}
    return message


def _cut_open(text: str, last: Mapping[str, Any]) -> str:
    """A rendered chat up to the end of its last message's content, which the model goes on with."""
    content = last.get("content")
    if isinstance(content, list):
        content = content[-1].get("text") if content and isinstance(content[-1], dict) else None
    end = -1
    if isinstance(content, str) and content.strip():
        content = content.strip()
        end = text.rfind(content)
    if end < 0 or not isinstance(content, str):
        raise invalid(
            "continue_final_message needs a last message whose content the chat template writes "
            "as it is",
            "messages",
        )
    return text[: end + len(content)]
