"""The body of `POST /v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from polysilicon.server.bodies import FAIL_FAST, Int, Part
from polysilicon.server.openai.fields import GeneratingBody, Objects

Item = dict[str, Any]
_Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]


class TextFormat(BaseModel):
    """`text.format`."""

    model_config = ConfigDict(
        extra="allow", frozen=True, strict=True, populate_by_name=True, protected_namespaces=()
    )

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Part):
    """`text`."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(BaseModel):
    """`reasoning`."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    effort: str | None = None
    summary: str | None = None


class ResponsesBody(GeneratingBody):
    """`POST /v1/responses`, of which nothing is stored."""

    input: str | Objects
    instructions: str | None = None
    max_output_tokens: Int | None = None
    top_logprobs: Int | None = None
    include: Annotated[list[_Included], FAIL_FAST] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None

    refused = GeneratingBody.refused | {
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "max_tool_calls": (),
        "moderation": (),
        "previous_response_id": (),
        "prompt": (),
        "truncation": ("disabled",),
    }
