"""Whole engines over a tiny model on the device under test, and a judge of what they answer.

The judge follows each answer with a float64 forward of prompt and answer in one go: whatever was
batched, chunked, cached or preempted on the way, every token must be one that could come there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from polysilicon.backend import AdapterWeights, Device
from polysilicon.config import Config
from polysilicon.engine.engine import Engine
from polysilicon.engine.loading import build_engine
from polysilicon.engine.model_executor import ModelExecutor
from polysilicon.models.loading import load_model
from polysilicon.request import (
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from polysilicon.testing.noise import gumbel
from polysilicon.testing.tiny_models import EOS, VOCABULARY, Float64, TinyModel
from polysilicon.weights.checkpoint import open_checkpoint

COMPUTE_BOUNDS = {"f32": 2e-3, "f16": 0.08, "bf16": 0.8, "int8": 1.2}
"""By how much a difference of two logits of the tiny models may be off, by declared compute: about
twice the most that rounding their products' inputs and outputs does. Logits vary by 4."""

STORE_BOUNDS = {"f32": 0.0, "f16": 0.02, "bf16": 0.15, "int8": 0.5, "fp8_e4m3": 2.5}
"""What may come on top where keys or values are rounded to the other neighbour of the KV dtype: as
much as rounding all of them does."""

MAX_LENGTH = 320
MAX_SEQUENCES = 16
Choice = tuple[str, int]
"""A request's id and the index of one of its choices."""


@dataclasses.dataclass(eq=False)
class Answer:
    """All news of one choice together; as in `RequestOutput`."""

    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    next_top: tuple[tuple[int, float], ...] = ()
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    embedding: tuple[float, ...] = ()

    def take(self, output: RequestOutput) -> None:
        assert self.finish_reason is None, "news of a choice that has ended"
        self.ids += output.ids
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.next_top += output.next_top
        self.num_cached_tokens += output.num_cached_tokens
        self.finish_reason = output.finish_reason
        self.error = output.error
        self.embedding = output.embedding


Answers = dict[Choice, Answer]


class EngineBench:
    """A tiny model on a device. page_size, kv_dtype: the device's first when None.

    adapters: those that engines load, by name. decided, positions: tokens judged, and those of them
    that no rounding could have made another.
    """

    def __init__(
        self,
        device: Device,
        model: TinyModel,
        folder: Path,
        *,
        page_size: int | None = None,
        kv_dtype: str | None = None,
        max_length: int = MAX_LENGTH,
    ) -> None:
        self.device = device
        self.model = model
        self.page_size = page_size or device.capabilities.page_sizes[0]
        self.kv_dtype = kv_dtype or device.capabilities.kv_dtypes[0]
        self.bound = COMPUTE_BOUNDS[device.capabilities.compute] + STORE_BOUNDS[self.kv_dtype]
        self.max_length = max_length
        self.adapters: dict[str, AdapterWeights] = {}
        self.positions = 0
        self.decided = 0
        if not (folder / "config.json").exists():
            model.write(folder)
        with open_checkpoint(folder) as checkpoint:
            self._loaded = load_model(checkpoint, device, max_length=max_length)
            self._identity = checkpoint.fingerprint()
        self._logits: dict[tuple[str | None, tuple[int, ...]], Float64] = {}

    def set_adapter(self, name: str, weights: AdapterWeights) -> None:
        """What engines load, and the judge applies, under this name from now on."""
        self.adapters[name] = weights
        self._logits = {key: value for key, value in self._logits.items() if key[0] != name}

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def engine(
        self, *, pages: int | None = None, run_ahead: bool = True, **config: object
    ) -> Engine:
        """An engine with the adapters loaded. pages: KV pages beside page 0, plenty when None."""
        if pages is None:
            pages = MAX_SEQUENCES * self.pages_for(self.max_length)
        values: dict[str, object] = {
            "page_size": self.page_size,
            "kv_dtype": self.kv_dtype,
            "kv_pages": pages + 1,
            "max_sequences": MAX_SEQUENCES,
        }
        engine, _ = build_engine(
            Config.model_validate(values | config),
            self.device,
            self._loaded,
            identity=self._identity,
            eos_ids=frozenset({EOS}),
            max_adapters=len(self.adapters),
            max_adapter_rank=4,
            run_ahead=run_ahead,
        )
        for name, weights in self.adapters.items():
            engine.add_adapter(name, weights)
        return engine

    def run(
        self,
        engine: Engine,
        requests: Iterable[Request],
        *,
        before_step: Mapping[int, Callable[[], None]] | None = None,
    ) -> Answers:
        """Serve the requests as one batch; every page must be free or cached afterwards.

        before_step: what to do before the step of this number.
        """
        answers: Answers = {}
        for request in requests:
            engine.add(request)
            for choice in range(request.params.n):
                answers[request.id, choice] = Answer()
        step = 0
        while engine.has_work:
            if before_step and step in before_step:
                before_step[step]()
            for output in engine.step():
                answers[output.request_id, output.choice].take(output)
            engine.kv.check_integrity()
            step += 1
            assert step < 5000, "the engine goes on without getting anywhere"
        for name, answer in answers.items():
            assert answer.finish_reason is not None, f"{name} never ended"
        for usage in engine.kv.usage():
            assert usage.in_use == usage.limbo == 0, f"pages were not given back: {usage}"
        return answers

    def close(self, engine: Engine) -> None:
        """Free an engine's pools; the device stays open."""
        executor = engine.executor
        assert isinstance(executor, ModelExecutor)
        for pool in executor.pools:
            pool.close()
        if executor.adapters is not None:
            executor.adapters.close()

    def serve(
        self,
        requests: Sequence[Request],
        *,
        times: int = 1,
        pages: int | None = None,
        run_ahead: bool = True,
        **config: object,
    ) -> Answers:
        """Run the requests on an engine of their own, `times` over, and judge each answer."""
        engine = self.engine(pages=pages, run_ahead=run_ahead, **config)
        for _ in range(times):
            answers = self.run(engine, requests)
            self.judge(requests, answers)
        self.close(engine)
        return answers

    def judge(self, requests: Iterable[Request], answers: Answers) -> None:
        """Hold the answers to the float64 forward of their own tokens."""
        for request in requests:
            for choice in range(request.params.n):
                self._judge(request, choice, answers[request.id, choice])

    def check_power(self) -> None:
        """That the judge could tell: of many positions, only one token would do in a good part."""
        assert self.positions >= 20, f"only {self.positions} tokens were judged"
        assert self.decided >= 0.2 * self.positions, (
            f"in {self.decided} of {self.positions} positions the best two are apart: prompts or "
            "models of this test say too little"
        )

    def logits(self, tokens: Sequence[int], adapter: str | None) -> Float64:
        key = adapter, tuple(tokens)
        if key not in self._logits:
            weights = None if adapter is None else self.adapters[adapter]
            self._logits[key] = self.model.logits(tokens, kv_dtype=self.kv_dtype, adapter=weights)
        return self._logits[key]

    def _judge(self, request: Request, choice: int, answer: Answer) -> None:
        params, start = request.params, len(request.prompt)
        logits = self.logits([*request.prompt, *answer.ids], request.adapter)
        for index, token in enumerate(answer.ids):
            possible = _possible(
                logits[start - 1 + index], request, choice, answer.ids[:index], self.bound
            )
            self.positions += 1
            self.decided += len(possible) == 1
            assert token in possible, (
                f"request {request.id}, choice {choice}: output token {index} is {token}; only "
                f"{possible.tolist()} can come there"
            )
        _judge_end(request, answer)
        log_probabilities = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        if params.logprobs is not None:
            rows = range(start - 1, start - 1 + len(answer.ids))
            self._judge_logprobs(
                log_probabilities[rows], answer.ids, answer.logprobs, params.logprobs
            )
        if answer.finish_reason is FinishReason.CANCELLED and not answer.ids:
            return
        if params.logprobs is not None:
            expected = np.sort(log_probabilities[start - 1])[::-1][: params.logprobs]
            self._judge_top(answer.next_top, log_probabilities[start - 1], expected)
        if params.prompt_logprobs is not None and choice == 0:
            self._judge_logprobs(
                log_probabilities[: start - 1],
                request.prompt[1:],
                answer.prompt_logprobs,
                params.prompt_logprobs,
            )

    def _judge_logprobs(
        self,
        rows: Float64,
        ids: Sequence[int],
        reported: Sequence[TokenLogprobs],
        count: int,
    ) -> None:
        assert [item.id for item in reported] == list(ids)
        for row, item in zip(rows, reported, strict=True):
            assert abs(item.logprob - row[item.id]) <= self.bound
            self._judge_top(item.top, row, np.sort(row)[::-1][:count])

    def _judge_top(self, top: Sequence[tuple[int, float]], row: Float64, expected: Float64) -> None:
        values = np.array([value for _, value in top])
        assert values.shape == expected.shape
        assert np.all(np.abs(values - expected) <= self.bound)
        assert np.all(np.abs(values - row[[token for token, _ in top]]) <= self.bound)
        assert np.all(np.diff(values) <= 0)


def _judge_end(request: Request, answer: Answer) -> None:
    """That an answer ended where it had to, and for the reason that it says."""
    params = request.params
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    ending = [
        index
        for index, token in enumerate(answer.ids)
        if token in ends and index >= params.min_tokens
    ]
    last = len(answer.ids) - 1
    assert ending in ([], [last]), f"{request.id} went on after its end"
    if answer.finish_reason is FinishReason.STOP:
        assert ending == [last]
    elif answer.finish_reason is FinishReason.LENGTH:
        assert not ending
        assert params.max_tokens is not None
        assert len(answer.ids) == params.max_tokens
    else:
        assert answer.finish_reason is FinishReason.CANCELLED


def _possible(
    logits: Float64, request: Request, choice: int, output: Sequence[int], bound: float
) -> npt.NDArray[np.intp]:
    """Tokens that may come after `output` when differences of logits are off by up to `bound`."""
    params = request.params
    x = _adjusted(logits, request, output)
    bound *= max(1.0, params.repetition_penalty, 1 / params.repetition_penalty)
    if params.temperature == 0:
        return np.flatnonzero(x >= x.max() - bound)
    x = (x - x.max()) / params.temperature
    bound = bound / params.temperature + 1e-5
    threshold = -np.inf
    if params.top_k:
        threshold = float(np.sort(x)[-params.top_k])
    if params.min_p:
        threshold = max(threshold, float(np.log(params.min_p)))
    assert params.seed is not None
    position = len(request.prompt) + len(output)
    noisy = x + gumbel(params.seed, choice, position, len(x))
    best = noisy[x >= threshold + bound].max(initial=-np.inf)
    return np.flatnonzero((x >= threshold - bound) & (noisy >= best - bound) & (x > -np.inf))


def _adjusted(logits: Float64, request: Request, output: Sequence[int]) -> Float64:
    """Bias, forbidden tokens and penalties, in the order that `SamplingBatch` gives."""
    params, x = request.params, logits.copy()
    for token, bias in params.logit_bias.items():
        x[token] += bias
    forbidden = set()
    if params.allowed_token_ids is not None:
        forbidden = set(range(VOCABULARY)) - set(params.allowed_token_ids)
    text = [*request.prompt, *output]
    for word in params.bad_words:
        if tuple(text[len(text) - len(word) + 1 :]) == word[:-1]:
            forbidden.add(word[-1])
    if len(output) < params.min_tokens:
        forbidden |= set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    x[sorted(forbidden)] = -np.inf
    for token in set(text):
        penalty = params.repetition_penalty
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    for token in set(output):
        x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return x


def greedy(max_tokens: int = 8, **changes: object) -> SamplingParams:
    """Greedy parameters that do not end before `max_tokens`."""
    values: dict[str, object] = {
        "temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True,
    }  # fmt: skip
    return SamplingParams(**values | changes)  # type: ignore[arg-type]


def random_prompt(rng: np.random.Generator, length: int) -> tuple[int, ...]:
    return tuple(int(token) for token in rng.integers(0, VOCABULARY, length))


def mixed_requests(
    rng: np.random.Generator, adapters: Sequence[str | None] = (None,)
) -> list[Request]:
    """Nine requests: prompts of one token up to several pages, some with a common beginning; greedy
    and drawn; adapters in turn."""
    common = random_prompt(rng, 40)
    prompts = [
        random_prompt(rng, 1),
        common + random_prompt(rng, 13),
        random_prompt(rng, 16),
        common,
        random_prompt(rng, 17),
        common + random_prompt(rng, 45),
        random_prompt(rng, 33),
        common[:25] + random_prompt(rng, 3),
        random_prompt(rng, 70),
    ]
    drawn = [
        {"temperature": 0.7, "seed": 11},
        {"temperature": 1.2, "top_k": 5, "seed": 2**63 + 5},
        {"temperature": 0.9, "min_p": 0.05, "seed": 7},
    ]
    requests = []
    for index, prompt in enumerate(prompts):
        params = greedy(6 + index % 4, logprobs=2) if index % 3 else greedy(9, **drawn[index // 3])
        requests.append(
            Request(
                id=f"mixed-{index}",
                prompt=prompt,
                params=params,
                adapter=adapters[index % len(adapters)],
            )
        )
    return requests


def small_page_size(device: Device) -> int:
    """A page size that a sequence of a tiny model outgrows repeatedly, not at every token."""
    sizes = [size for size in device.capabilities.page_sizes if 4 <= size <= 32]
    if not sizes:
        pytest.skip("declares no page size from 4 to 32, which sequences of a tiny model outgrow")
    return sizes[0]


def skip_without_adapters(device: Device) -> None:
    if device.capabilities.adapters < 3 or device.capabilities.max_adapter_rank < 4:
        pytest.skip("declares no two adapters of rank 4")
