"""What a client asks for and what it gets: requests, sampling parameters, finish reasons."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from typing import Literal

from polysilicon.errors import RequestError

MAX_TOP_LOGPROBS = 20


class FinishReason(enum.StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled; the names and meanings are those of vLLM.

    n: independent choices. max_tokens: most tokens to generate, None up to the context's end.
    min_tokens: tokens before which no end-of-sequence or stop token may come, and no stop text is
    looked for.
    temperature: 0 is greedy. top_k: 0 is off. top_p, min_p, typical_p: cuts, off at 1, 0 and 1.
    repetition_penalty: on prompt and output; presence_penalty, frequency_penalty: on output.
    seed: None draws one. stop: texts that end the output, removed from it unless
    include_stop_text. stop_token_ids: ids that end it. ignore_eos: go on past end-of-sequence.
    logit_bias: id to additive bias. bad_words: token sequences never completed.
    allowed_token_ids: the only ids that may come. logprobs: how many of the most likely ids are
    reported for each output token (0: only the token itself), None for no log-probabilities.
    prompt_logprobs: the same for the prompt. skip_special_tokens: leave them out of the text.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_text: bool = False
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:  # also refuses NaN
                raise RequestError(f"{name} must lie between {low} and {high}, not {value}")
        if self.repetition_penalty <= 0 or self.top_p <= 0 or self.typical_p <= 0:
            raise RequestError("repetition_penalty, top_p and typical_p must be above 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} must not exceed max_tokens {self.max_tokens}"
            )
        if "" in self.stop or () in self.bad_words:
            raise RequestError("stop texts and bad words must not be empty")
        if any(not math.isfinite(bias) for bias in self.logit_bias.values()):
            raise RequestError("logit_bias values must be finite numbers")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids must name at least one token")

    @property
    def uses_counts(self) -> bool:
        """Whether penalties count the tokens that came before."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("n", 1, 128),
    ("max_tokens", 0, 2**31 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("temperature", 0, 100),
    ("top_k", 0, 2**31 - 1),
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    ("typical_p", 0, 1),
    ("repetition_penalty", 0, 100),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("seed", 0, 2**64 - 1),
    ("logprobs", 0, MAX_TOP_LOGPROBS),
    ("prompt_logprobs", 0, MAX_TOP_LOGPROBS),
)


GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grammar:
    """What a whole output must be; an output that ends with STOP is a complete match.

    kind and text: `json_object`, any JSON object, no text; `json_schema`, the schema as JSON;
    `regex`, a regular expression; `choice`, a JSON list of texts, one of which comes; `lark`, a
    grammar in the Lark dialect of llguidance.
    """

    kind: GrammarKind
    text: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SLO:
    """What a request must meet to count as goodput. ttft, tpot: milliseconds, None for no bound."""

    ttft: float | None = None
    tpot: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft", "tpot"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1e9:  # also refuses NaN
                raise RequestError(f"slo {name} must lie above 0 and up to 1e9 ms, not {value}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One request as the engine takes it.

    prompt: token ids, at least one. adapter: name of a loaded LoRA adapter, or None. salt: cached
    KV is shared only among requests of equal salt. priority: smaller comes first. slo: over the
    engine's default. grammar: what the output must be, or None. arrival: when it came, in seconds
    of time.monotonic(), None for now. embed: nothing is generated; the result is the prompt's
    hidden state, the mean over its tokens or the last one's, and max_tokens must be 0.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    adapter: str | None = None
    salt: str | None = None
    priority: int = 0
    slo: SLO | None = None
    grammar: Grammar | None = None
    arrival: float | None = None
    embed: Literal["mean", "last"] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestTimes:
    """When what happened to one choice, in seconds of time.monotonic(), which processes of one
    machine share; None for what has not happened."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    num_preemptions: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one place: of the token that is there, and of the most likely ids."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """News of one choice of a request: what came since the last one.

    ids, text: new tokens and the text they completed (text lags behind ids while a character or a
    stop text is incomplete). prompt_logprobs: once, with the first output: one entry for each
    prompt token after the first. next_top: with logprobs and the first output, the most likely ids
    after the prompt.
    num_cached_tokens: prompt tokens that came from the prefix cache.
    finish_reason: set on the last news of this choice; stop_text says which stop text ended it;
    error is the cause when the reason is ERROR, and refused says that the request itself is at
    fault. times: with the first and the last news. embedding: for requests that embed, with the
    last news; not normalised.
    """

    request_id: str
    choice: int
    ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    next_top: tuple[tuple[int, float], ...] = ()
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_text: str | None = None
    error: str | None = None
    refused: bool = False
    times: RequestTimes | None = None
    embedding: tuple[float, ...] = ()
