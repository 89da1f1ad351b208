"""Whole engines: what single requests ask for, beside others in one batch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from polysilicon.request import FinishReason, Request
from polysilicon.testing.engine_bench import (
    EngineBench,
    greedy,
    mixed_requests,
    random_prompt,
    skip_without_adapters,
    small_page_size,
)
from polysilicon.testing.kit import Kit
from polysilicon.testing.tiny_models import VOCABULARY, tiny_gemma, tiny_llama


@pytest.fixture
def bench(kit: Kit, tmp_path: Path) -> EngineBench:
    return EngineBench(kit.device, tiny_llama(), tmp_path)


def test_choices_share_their_prompt(kit: Kit, bench: EngineBench) -> None:
    """Each choice draws with its own index; all but the first find the prompt's pages cached."""
    params = greedy(8, n=4, temperature=1.0, seed=99, logprobs=1)
    requests = [
        *mixed_requests(kit.rng)[:3],
        Request(id="choices", prompt=random_prompt(kit.rng, 50), params=params),
        Request(id="short", prompt=random_prompt(kit.rng, 1), params=greedy(4, n=3)),
    ]
    for step_tokens in (16, 512):
        answers = bench.serve(requests, step_tokens=step_tokens)
        cached = [answers["choices", choice].num_cached_tokens for choice in range(4)]
        assert cached == [0] + 3 * [49 - 49 % bench.page_size]
        assert len({tuple(answers["choices", choice].ids) for choice in range(4)}) > 1
    bench.check_power()


@pytest.mark.parametrize("run_ahead", [True, False])
@pytest.mark.parametrize("step_tokens", [16, 512])
def test_sampling_parameters(
    kit: Kit, bench: EngineBench, step_tokens: int, run_ahead: bool
) -> None:
    """Sequences that wait for their last token beside others that run ahead."""
    rng = kit.rng
    few = tuple(int(token) for token in rng.choice(VOCABULARY, 12, replace=False))
    pairs = tuple((token, other) for token in few for other in range(0, VOCABULARY, 2))
    variants = {
        "plain": greedy(10),
        "repetition": greedy(12, repetition_penalty=1.3, allowed_token_ids=few),
        "presence": greedy(10, presence_penalty=1.5, frequency_penalty=0.5),
        "drawn-penalties": greedy(
            12, temperature=1.0, seed=3, frequency_penalty=2.0, allowed_token_ids=few[:4]
        ),
        "bias": greedy(8, logit_bias=dict.fromkeys(few, 6.0)),
        "drawn-bias": greedy(8, temperature=0.9, seed=4, top_k=8, logit_bias={few[0]: 5.0}),
        "allowed": greedy(8, allowed_token_ids=few[:3]),
        "one-allowed": greedy(4, temperature=1.0, seed=5, allowed_token_ids=few[:1]),
        "bad-word": greedy(8, bad_words=((few[0],), (few[1],)), allowed_token_ids=few[:4]),
        "bad-pairs": greedy(12, bad_words=pairs, allowed_token_ids=few),
    }
    requests = [
        Request(id=name, prompt=random_prompt(rng, int(rng.integers(1, 40))), params=params)
        for name, params in variants.items()
    ]
    answers = bench.serve(requests, step_tokens=step_tokens, run_ahead=run_ahead)
    assert set(answers["one-allowed", 0].ids) == {few[0]}
    bench.check_power()


def test_ends(kit: Kit, bench: EngineBench) -> None:
    """Stop tokens and end-of-sequence, not before `min_tokens`; what a run without them gives tells
    which tokens will come."""
    prompts = [random_prompt(kit.rng, length) for length in (5, 18, 33)]
    free = bench.serve(
        [Request(id=f"{i}", prompt=prompt, params=greedy(10)) for i, prompt in enumerate(prompts)]
    )
    outputs = [free[f"{i}", 0].ids for i in range(3)]
    requests = [
        Request(id=f"{kind}-{i}", prompt=prompt, params=params)
        for i, prompt in enumerate(prompts)
        for kind, params in {
            "stop": greedy(10, stop_token_ids=(outputs[i][3], outputs[i][7])),
            "late": greedy(10, stop_token_ids=(outputs[i][2],), min_tokens=6),
            "eos": greedy(10, ignore_eos=False, logit_bias={3: 100.0}),
            "late-eos": greedy(10, ignore_eos=False, logit_bias={3: 100.0}, min_tokens=4),
            "ignored-eos": greedy(6, logit_bias={3: 100.0}),
        }.items()
    ]
    for run_ahead in (True, False):
        answers = bench.serve(requests, run_ahead=run_ahead, step_tokens=24)
        for i in range(3):
            assert len(answers[f"stop-{i}", 0].ids) <= 4
            assert answers[f"stop-{i}", 0].finish_reason is FinishReason.STOP
            assert len(answers[f"late-{i}", 0].ids) >= 6
            assert answers[f"eos-{i}", 0].ids == [3]
            assert len(answers[f"late-eos-{i}", 0].ids) == 5
            assert answers[f"ignored-eos-{i}", 0].finish_reason is FinishReason.LENGTH


def test_prompt_logprobs(kit: Kit, bench: EngineBench) -> None:
    """Of every prompt token, in whatever chunks; with no output at all, and beside others."""
    requests = [
        *mixed_requests(kit.rng)[:4],
        Request(
            id="score",
            prompt=random_prompt(kit.rng, 150),
            params=greedy(0, prompt_logprobs=3, logprobs=5),
        ),
        Request(
            id="score-and-go-on",
            prompt=random_prompt(kit.rng, 60),
            params=greedy(5, prompt_logprobs=0, logprobs=0, n=2, temperature=1.0, seed=1),
        ),
        Request(id="one", prompt=(7,), params=greedy(0, prompt_logprobs=1, logprobs=1)),
    ]
    for step_tokens in (1, 37, 512):
        answers = bench.serve(requests, step_tokens=step_tokens, times=2)
        assert len(answers["score", 0].prompt_logprobs) == 149
        assert len(answers["score", 0].next_top) == 5
        assert answers["score", 0].ids == []
        assert answers["score", 0].num_cached_tokens == 0
        assert not answers["score-and-go-on", 1].prompt_logprobs


def test_prompt_logprobs_after_preemption(kit: Kit, tmp_path: Path) -> None:
    """A prompt that is computed twice, because its pages were taken half-way, is scored once."""
    size = small_page_size(kit.device)
    bench = EngineBench(kit.device, tiny_llama(), tmp_path, page_size=size)
    requests = [
        Request(id="first", prompt=random_prompt(kit.rng, 10), params=greedy(2 * size)),
        Request(
            id="scored",
            prompt=random_prompt(kit.rng, 2 * size + 10),
            params=greedy(4, prompt_logprobs=1),
            priority=1,
        ),
    ]
    engine = bench.engine(pages=bench.pages_for(2 * size + 14), step_tokens=4)
    bench.judge(requests, bench.run(engine, requests))
    assert engine.scheduler.num_preemptions
    bench.close(engine)
    bench.check_power()


def test_adapters(kit: Kit, tmp_path: Path) -> None:
    """Two adapters and none in one batch, and prompts that another adapter has cached."""
    skip_without_adapters(kit.device)
    for model in (tiny_llama(), tiny_gemma()):
        bench = EngineBench(kit.device, model, tmp_path / model.name)
        for new in ("first", "second"):
            bench.set_adapter(new, model.adapter(kit.rng))
        names = (None, "first", "second")
        requests = mixed_requests(kit.rng, names)
        bench.serve(requests, step_tokens=40)
        for request in requests[:3]:
            bench.serve([request])
        prompt = random_prompt(kit.rng, 50)
        engine = bench.engine()
        for name in names:
            request = Request(id=f"{name}", prompt=prompt, params=greedy(6), adapter=name)
            for cached in (0, 49):
                answers = bench.run(engine, [request])
                bench.judge([request], answers)
                assert answers[request.id, 0].num_cached_tokens == cached
        # Others in the slots of those that were removed, one of them under the same name.
        for old, new in (("second", "third"), ("first", "first")):
            engine.remove_adapter(old)
            bench.set_adapter(new, model.adapter(kit.rng))
            engine.add_adapter(new, bench.adapters[new])
            request = Request(id=f"new-{new}", prompt=prompt, params=greedy(6), adapter=new)
            answers = bench.run(engine, [request])
            assert answers[request.id, 0].num_cached_tokens == 0
            bench.judge([request], answers)
        bench.close(engine)
        bench.check_power()


def test_salts_keep_caches_apart(kit: Kit, bench: EngineBench) -> None:
    prompt = random_prompt(kit.rng, 40)
    engine = bench.engine()
    for salt, cached in ((None, 0), ("a", 0), ("a", 39), ("b", 0), (None, 39)):
        request = Request(id="salted", prompt=prompt, params=greedy(4), salt=salt)
        answers = bench.run(engine, [request])
        bench.judge([request], answers)
        assert answers["salted", 0].num_cached_tokens == cached
    bench.close(engine)


@pytest.mark.parametrize("run_ahead", [True, False])
@pytest.mark.parametrize("step_tokens", [8, 512])
def test_cancel(kit: Kit, tmp_path: Path, step_tokens: int, run_ahead: bool) -> None:
    """In the middle of prefill and decode, of all choices or one; the others notice nothing."""
    bench = EngineBench(kit.device, tiny_gemma(), tmp_path)
    requests = [
        dataclasses.replace(request, params=dataclasses.replace(request.params, n=1 + (index == 5)))
        for index, request in enumerate(mixed_requests(kit.rng))
    ]
    engine = bench.engine(step_tokens=step_tokens, run_ahead=run_ahead)
    answers = bench.run(
        engine,
        requests,
        before_step={
            1: lambda: engine.cancel("mixed-1"),
            2: lambda: engine.cancel("mixed-8"),
            3: lambda: engine.cancel("mixed-5", 1),
            4: lambda: engine.cancel("mixed-0"),
        },
    )
    bench.judge(requests, answers)
    cancelled = {
        choice
        for choice, answer in answers.items()
        if answer.finish_reason is FinishReason.CANCELLED
    }
    assert cancelled == {("mixed-1", 0), ("mixed-8", 0), ("mixed-5", 1), ("mixed-0", 0)}
    again = [dataclasses.replace(request, id=f"again-{request.id}") for request in requests]
    bench.judge(again, bench.run(engine, again))
    bench.close(engine)
    bench.check_power()


def test_requests_that_come_and_go(kit: Kit, bench: EngineBench) -> None:
    """Requests that arrive while others run, more of them than may run at once."""
    engine = bench.engine(max_sequences=5, step_tokens=32)
    first, later = mixed_requests(kit.rng), mixed_requests(kit.rng)
    later = [dataclasses.replace(request, id=f"later-{request.id}") for request in later]
    answers = bench.run(engine, [*first, *later[:3]])
    bench.judge([*first, *later[:3]], answers)
    order = [int(index) for index in np.argsort([kit.rng.random() for _ in later])]
    shuffled = [later[index] for index in order]
    bench.judge(shuffled, bench.run(engine, shuffled))
    bench.close(engine)
    bench.check_power()
