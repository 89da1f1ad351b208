"""Bodies of OpenAI's endpoints, with vLLM's additions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from polysilicon.server.bodies import FAIL_FAST, Body, Int
from polysilicon.server.openai.fields import GeneratingBody, Ids, Objects, TextsOrIds

_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
Message = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
                "content": {
                    "anyOf": [
                        {"type": "string"},
                        {"type": "array", "items": _TEXT_PART, "minItems": 1},
                    ]
                },
            },
            "required": ["role", "content"],
        }
    ),
]


class ChatBody(GeneratingBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], FAIL_FAST] = Field(min_length=1)
    max_tokens: Int | None = None
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    documents: Objects | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    echo: bool = False

    refused = GeneratingBody.refused | {
        "audio": (),
        "modalities": (["text"],),
        "functions": ([],),
        "function_call": ("none",),
        "web_search_options": (),
        "verbosity": ("medium",),
        "chat_template": (),
        "mm_processor_kwargs": ({},),
        "media_io_kwargs": ({},),
        "best_of": (1,),
        "suffix": ("",),
    }


class CompletionBody(GeneratingBody):
    """`POST /v1/completions`."""

    prompt: TextsOrIds
    max_tokens: Int | None = 16
    logprobs: Int | None = None
    echo: bool = False
    best_of: Int | None = None
    add_special_tokens: bool = True

    refused = GeneratingBody.refused | {
        "suffix": ("",),
        "prompt_embeds": (),
        "tools": ([],),
        "messages": (),
    }


class EmbeddingBody(Body):
    """`POST /v1/embeddings`. pooling: of the last layer's hidden states."""

    model: str | None = None
    input: TextsOrIds
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int | None = None
    pooling: Literal["mean", "last"] | None = None
    normalize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: Int | None = None
    priority: Int | None = None

    ignored = GeneratingBody.ignored
    refused = {"input_type": (), "embed_dtype": ("float32",), "endianness": ("native",)}  # noqa: RUF012


class TokenizeBody(Body):
    """`POST /tokenize`: of a `prompt` or of chat `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], FAIL_FAST] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool | None = None
    tools: Objects | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    refused = {"chat_template": (), "mm_processor_kwargs": ({},)}  # noqa: RUF012


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Ids
