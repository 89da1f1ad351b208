"""Bodies of Anthropic's endpoints."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from polysilicon.server.bodies import FAIL_FAST, Body, Int, Part

Block = dict[str, Any]
Blocks = Annotated[list[Block], FAIL_FAST]


class InputMessage(BaseModel):
    """One turn of the conversation."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class ToolChoice(Part):
    """Whether and which tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(Part):
    """How hard the model thinks, and what its answer must be."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class ThinkingConfig(BaseModel):
    """Whether the model thinks before it answers."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    type: Literal["enabled", "disabled", "adaptive"]


class CountTokensBody(Body):
    """`POST /v1/messages/count_tokens`."""

    model: str | None = None
    messages: Annotated[list[InputMessage], FAIL_FAST] = Field(min_length=1)
    system: str | Blocks | None = None
    tools: Blocks | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None

    ignored = frozenset(
        {"metadata", "cache_control", "inference_geo", "user_profile_id", "workspace_id",
         "diagnostics", "speed"}
    )  # fmt: skip
    refused = {  # noqa: RUF012
        "container": (),
        "mcp_servers": ([],),
        "context_management": ({},),
    }


class MessagesBody(CountTokensBody):
    """`POST /v1/messages`."""

    max_tokens: Annotated[Int, Field(ge=1)]
    stop_sequences: Annotated[list[str], FAIL_FAST] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None

    refused = CountTokensBody.refused | {"service_tier": ("auto", "standard_only")}
