"""The fields that every generating body shares: sampling, structured output, scheduling."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from polysilicon.server.bodies import FAIL_FAST, Body, Int, Part

Ids = Annotated[list[int], FAIL_FAST]
Texts = Annotated[list[str], FAIL_FAST]
Objects = Annotated[list[dict[str, Any]], FAIL_FAST]
TextsOrIds = Annotated[
    str | Texts | Ids | Annotated[list[Ids], FAIL_FAST], Field(union_mode="left_to_right")
]
"""One text or many, as text or as token ids."""


class StreamOptions(BaseModel):
    """OpenAI's `stream_options`."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(BaseModel):
    """`response_format.json_schema`."""

    model_config = ConfigDict(
        extra="allow", frozen=True, strict=True, populate_by_name=True, protected_namespaces=()
    )

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's `response_format`."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Part):
    """vLLM's `structured_outputs`: one of these says what the output must be."""

    json_value: dict[str, Any] | str | bool | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class SLOFields(Part):
    """What the request must meet to count as goodput, in milliseconds."""

    ttft: float | None = None
    tpot: float | None = None


class GeneratingBody(Body):
    """What chat completions and completions share; names and meanings are vLLM's."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    n: Int | None = None
    min_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Int | None = None
    stop: str | Texts | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: dict[str, Any] | None = None
    bad_words: Texts | None = None
    allowed_token_ids: Ids | None = None
    prompt_logprobs: Int | None = None
    truncate_prompt_tokens: Int | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None

    priority: Int | None = None
    slo: SLOFields | None = None
    cache_salt: str | None = Field(default=None, max_length=1024)
    request_id: str | None = Field(default=None, max_length=128, pattern=r"^[A-Za-z0-9._:-]+$")

    ignored = frozenset(
        {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
         "prediction", "include_reasoning"}
    )  # fmt: skip
    refused = {  # noqa: RUF012
        "store": (False,),
        "service_tier": ("auto", "default"),
        "use_beam_search": (False,),
        "length_penalty": (1, 1.0),
        "logits_processors": ([],),
        "kv_transfer_params": (),
        "vllm_xargs": ({},),
        "thinking_token_budget": (),
        "repetition_detection": (),
        "guided_whitespace_pattern": (),
        "guided_decoding_backend": (),
        "structural_tag": (),
    }
