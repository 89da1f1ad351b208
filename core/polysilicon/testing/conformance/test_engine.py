"""Whole engines: an answer does not depend on batching, chunks, the prefix cache or preemption."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from polysilicon.backend import Device
from polysilicon.request import Request
from polysilicon.testing.engine_bench import (
    Answers,
    EngineBench,
    greedy,
    mixed_requests,
    random_prompt,
    small_page_size,
)
from polysilicon.testing.kit import Kit
from polysilicon.testing.tiny_models import TinyModel, tiny_gemma, tiny_llama

MODELS = pytest.mark.parametrize("model", [tiny_llama, tiny_gemma], ids=["full", "hybrid"])
Models = Callable[[], TinyModel]


@pytest.fixture
def bench(kit: Kit, model: Models, tmp_path: Path) -> EngineBench:
    return EngineBench(kit.device, model(), tmp_path)


@MODELS
def test_alone(kit: Kit, bench: EngineBench) -> None:
    requests = mixed_requests(kit.rng)
    engine = bench.engine(prefix_cache=False)
    for request in requests:
        bench.judge([request], bench.run(engine, [request]))
    bench.close(engine)
    bench.check_power()


@MODELS
@pytest.mark.parametrize("step_tokens", [1, 7, 16, 512])
def test_chunks_in_a_mixed_batch(kit: Kit, bench: EngineBench, step_tokens: int) -> None:
    bench.serve(mixed_requests(kit.rng), step_tokens=step_tokens)
    bench.check_power()


@MODELS
@pytest.mark.parametrize("run_ahead", [True, False])
def test_without_prefix_cache(kit: Kit, bench: EngineBench, run_ahead: bool) -> None:
    answers = bench.serve(
        mixed_requests(kit.rng), prefix_cache=False, step_tokens=32, run_ahead=run_ahead
    )
    assert not any(answer.num_cached_tokens for answer in answers.values())
    bench.check_power()


@MODELS
@pytest.mark.parametrize("run_ahead", [True, False])
def test_warm_prefix_cache(kit: Kit, bench: EngineBench, run_ahead: bool) -> None:
    """The same prompts again, and prompts that leave the cached ones after some tokens."""
    requests = mixed_requests(kit.rng)
    engine = bench.engine(step_tokens=64, run_ahead=run_ahead)
    bench.judge(requests, bench.run(engine, requests))
    changed = [
        dataclasses.replace(
            request,
            id=f"{request.id}-changed",
            prompt=request.prompt[: -len(request.prompt) // 3] + random_prompt(kit.rng, 9),
        )
        for request in requests[1:]
    ]
    answers = bench.run(engine, [*requests, *changed])
    bench.judge([*requests, *changed], answers)
    for request in requests:
        cached = answers[request.id, 0].num_cached_tokens
        assert cached == len(request.prompt) - 1, "all but the last token of the prompt is cached"
    assert sum(answers[request.id, 0].num_cached_tokens > 0 for request in changed) >= 4
    bench.close(engine)
    bench.check_power()


@MODELS
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("run_ahead", [True, False])
def test_preemption(
    kit: Kit, model: Models, tmp_path: Path, prefix_cache: bool, run_ahead: bool
) -> None:
    """Pages for little more than one sequence, while each grows by three pages."""
    size = small_page_size(kit.device)
    bench = EngineBench(kit.device, model(), tmp_path, page_size=size)
    kinds = [greedy(3 * size, logprobs=1), greedy(3 * size, temperature=0.8, seed=5)]
    requests = [
        Request(
            id=f"growing-{index}",
            prompt=random_prompt(kit.rng, 10 + index),
            params=kinds[index % 2],
            priority=index % 3,
        )
        for index in range(6)
    ]
    engine = bench.engine(
        pages=bench.pages_for(15 + 3 * size) + 2,
        prefix_cache=prefix_cache,
        step_tokens=24,
        run_ahead=run_ahead,
    )
    bench.judge(requests, bench.run(engine, requests))
    assert engine.scheduler.num_preemptions, "nothing was preempted: the test has too many pages"
    bench.close(engine)
    bench.check_power()


@MODELS
def test_page_sizes_and_kv_dtypes(kit: Kit, model: Models, tmp_path: Path) -> None:
    """The first two page sizes, each with every KV dtype. Models as small as these amplify rounding
    so much that fp8, or int8 behind int8 products, leaves most tokens possible; all are served."""
    requests = mixed_requests(kit.rng)
    for page_size in kit.capabilities.page_sizes[:2]:
        for kv_dtype in kit.capabilities.kv_dtypes:
            bench = EngineBench(
                kit.device, model(), tmp_path, page_size=page_size, kv_dtype=kv_dtype
            )
            bench.serve(requests, step_tokens=48)
            if bench.bound < 1.5:
                bench.check_power()


@MODELS
def test_deterministic(
    kit: Kit, model: Models, tmp_path: Path, open_device: Callable[..., Device]
) -> None:
    """Where it is declared, log-probabilities are the same to the bit in whatever company."""
    if not kit.capabilities.deterministic:
        pytest.skip("declares no determinism")
    bench = EngineBench(open_device({"deterministic": "1"}), model(), tmp_path)
    requests = [
        dataclasses.replace(
            request, params=dataclasses.replace(request.params, logprobs=3, prompt_logprobs=None)
        )
        for request in mixed_requests(kit.rng)
    ]
    alone: Answers = {}
    engine = bench.engine(prefix_cache=False)
    for request in requests:
        alone |= bench.run(engine, [request])
    bench.close(engine)
    longest = max(len(request.prompt) for request in requests) + 9
    variations: list[dict[str, object]] = [
        {"step_tokens": 1},
        {"step_tokens": 7},
        {"step_tokens": 16},
        {"step_tokens": 512},
        {"times": 2},
        {"prefix_cache": False, "run_ahead": False},
        {"pages": bench.pages_for(longest) + 2, "step_tokens": 24},
    ]
    for variation in variations:
        answers = bench.serve(requests, **variation)  # type: ignore[arg-type]
        for choice, expected in alone.items():
            assert answers[choice].ids == expected.ids, variation
            assert answers[choice].logprobs == expected.logprobs, variation
