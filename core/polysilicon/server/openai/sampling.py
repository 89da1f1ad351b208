"""From a body's fields to sampling parameters, grammars and the engine's request."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

import msgspec

from polysilicon.request import SLO, Grammar, SamplingParams
from polysilicon.server.errors import invalid
from polysilicon.server.openai.fields import GeneratingBody, StructuredOutputs
from polysilicon.server.service import Service, stop_texts
from polysilicon.tokenizer import Tokenizer

_SAME_NAME = (
    "n", "min_tokens", "temperature", "top_p", "min_p", "typical_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "ignore_eos", "prompt_logprobs",
    "skip_special_tokens",
)  # fmt: skip
_MOST_BAD_WORDS = 1024
_MOST_BAD_WORD_CHARACTERS = 16_384


def sampling_params(
    service: Service, body: GeneratingBody, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """The body's sampling over the server's and the model's defaults.

    Raises ApiError (400) and RequestError, which name the field.
    """
    said: dict[str, Any] = {name: getattr(body, name) for name in _SAME_NAME}
    said["max_tokens"] = max_tokens
    said["logprobs"] = logprobs
    said["include_stop_text"] = body.include_stop_str_in_output
    if body.top_k is not None:
        said["top_k"] = max(body.top_k, 0) if body.top_k >= -1 else body.top_k
    if body.seed is not None and body.seed != -1:
        if not -(2**63) <= body.seed < 2**64:
            raise invalid("seed must be an integer of 64 bits", "seed")
        said["seed"] = body.seed % 2**64
    if body.stop is not None:
        stops = [body.stop] if isinstance(body.stop, str) else body.stop
        said["stop"] = stop_texts(stops, "stop")
    if body.stop_token_ids is not None:
        said["stop_token_ids"] = tuple(body.stop_token_ids)
    if body.allowed_token_ids is not None:
        said["allowed_token_ids"] = tuple(body.allowed_token_ids)
    if body.logit_bias is not None:
        said["logit_bias"] = _logit_bias(body.logit_bias)
    if body.bad_words is not None:
        said["bad_words"] = _bad_words(body.bad_words, service.tokenizer)
    if body.prompt_logprobs is not None and body.stream:
        raise invalid(
            "prompt_logprobs do not come in a stream: leave one of the two out", "prompt_logprobs"
        )
    given = {name: value for name, value in said.items() if value is not None}
    return SamplingParams(**{"max_tokens": None} | service.sampling_defaults | given)


class EngineFields(TypedDict):
    """What a body says of a request beside its prompt and sampling."""

    salt: str | None
    priority: int
    slo: SLO | None
    grammar: Grammar | None


def engine_fields(body: GeneratingBody) -> EngineFields:
    """Fields of Request. Raises ApiError (400) and RequestError."""
    priority = body.priority or 0
    if not -(2**31) <= priority < 2**31:
        raise invalid("priority must be an integer of 32 bits", "priority")
    return {
        "salt": body.cache_salt or None,
        "priority": priority,
        "slo": None if body.slo is None else SLO(ttft=body.slo.ttft, tpot=body.slo.tpot),
        "grammar": grammar_of(body),
    }


def grammar_of(body: GeneratingBody) -> Grammar | None:
    """What the output must be. Raises ApiError (400) where more than one field says it."""
    found = [grammar for _, grammar in _grammars(body)]
    if len(found) > 1:
        names = ", ".join(name for name, _ in _grammars(body))
        raise invalid(f"{names} each say what the output must be: send one of them")
    return found[0] if found else None


def _grammars(body: GeneratingBody) -> Iterable[tuple[str, Grammar]]:
    form = body.response_format
    if form is not None and form.type == "json_object":
        yield "response_format", Grammar(kind="json_object")
    if form is not None and form.type == "json_schema":
        if form.json_schema is None or form.json_schema.json_schema is None:
            raise invalid(
                "response_format of type json_schema needs json_schema.schema",
                "response_format.json_schema.schema",
            )
        yield "response_format", _json_schema(form.json_schema.json_schema, "response_format")
    if body.structured_outputs is not None:
        yield from _structured(body.structured_outputs)
    if body.guided_json is not None:
        yield "guided_json", _json_schema(body.guided_json, "guided_json")
    if body.guided_regex is not None:
        yield "guided_regex", Grammar(kind="regex", text=body.guided_regex)
    if body.guided_choice is not None:
        yield "guided_choice", _choice(body.guided_choice, "guided_choice")
    if body.guided_grammar is not None:
        yield "guided_grammar", Grammar(kind="lark", text=body.guided_grammar)


def _structured(outputs: StructuredOutputs) -> Iterable[tuple[str, Grammar]]:
    for name in (
        "structural_tag",
        "disable_any_whitespace",
        "disable_additional_properties",
        "whitespace_pattern",
    ):
        if getattr(outputs, name):
            raise invalid(
                f"structured_outputs.{name} is not supported: leave it out",
                f"structured_outputs.{name}",
            )
    if outputs.json_value is not None:
        yield (
            "structured_outputs.json",
            _json_schema(outputs.json_value, "structured_outputs.json"),
        )
    if outputs.regex is not None:
        yield "structured_outputs.regex", Grammar(kind="regex", text=outputs.regex)
    if outputs.choice is not None:
        yield "structured_outputs.choice", _choice(outputs.choice, "structured_outputs.choice")
    if outputs.grammar is not None:
        yield "structured_outputs.grammar", Grammar(kind="lark", text=outputs.grammar)
    if outputs.json_object:
        yield "structured_outputs.json_object", Grammar(kind="json_object")


def _json_schema(schema: Mapping[str, Any] | str | bool, field: str) -> Grammar:
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise invalid(f"{field} is no JSON schema: {error}", field) from None
    return Grammar(kind="json_schema", text=json.dumps(schema))


def _choice(texts: list[str], field: str) -> Grammar:
    if not texts:
        raise invalid(f"{field} is empty: give at least one text", field)
    return Grammar(kind="choice", text=json.dumps(texts))


def _logit_bias(bias: Mapping[str, Any]) -> dict[int, float]:
    result = {}
    for key, value in bias.items():
        if not key.isascii() or not key.isdigit() or len(key) > 9:
            raise invalid(f"logit_bias: {key[:40]!r} is no token id", "logit_bias")
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise invalid(f"logit_bias: {value!r:.40} is no number", "logit_bias")
        try:
            result[int(key)] = float(value)
        except OverflowError:
            raise invalid("logit_bias holds a number that is too large", "logit_bias") from None
    return result


def _bad_words(words: list[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word's tokens as it begins a text and as it follows a space."""
    if len(words) > _MOST_BAD_WORDS or sum(map(len, words)) > _MOST_BAD_WORD_CHARACTERS:
        raise invalid(
            f"bad_words holds more than {_MOST_BAD_WORDS} words, or more than "
            f"{_MOST_BAD_WORD_CHARACTERS} characters: send fewer, shorter ones",
            "bad_words",
        )
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        if not bare:
            raise invalid("bad_words holds an empty word: leave it out", "bad_words")
        for text in (bare, f" {bare}"):
            found[tuple(tokenizer.encode(text, add_special=False, parse_special=True))] = None
    return tuple(ids for ids in found if ids)
