"""Whole engines: embeddings are the hidden states behind the last norm, pooled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from polysilicon.request import FinishReason, Request, SamplingParams
from polysilicon.testing.engine_bench import (
    Answers,
    EngineBench,
    greedy,
    mixed_requests,
    random_prompt,
    small_page_size,
)
from polysilicon.testing.kit import Kit
from polysilicon.testing.tiny_models import HIDDEN, TinyModel, tiny_gemma, tiny_llama

MODELS = pytest.mark.parametrize("model", [tiny_llama, tiny_gemma], ids=["full", "hybrid"])
Models = Callable[[], TinyModel]
LENGTHS = (1, 2, 15, 16, 17, 60, 140)


def embedding_requests(rng: np.random.Generator) -> list[Request]:
    common = random_prompt(rng, 30)
    kinds: tuple[Literal["mean", "last"], ...] = ("mean", "last")
    return [
        Request(
            id=f"{kind}-{length}",
            prompt=(common + random_prompt(rng, length))[-max(length, 1) :],
            params=SamplingParams(max_tokens=0),
            embed=kind,
        )
        for kind in kinds
        for length in LENGTHS
    ]


def judge(bench: EngineBench, requests: list[Request], answers: Answers) -> None:
    # Logits are products of these states with rows that make them vary by 4; differences of two
    # are what the bound is for.
    bound = bench.bound / 8
    for request in requests:
        answer = answers[request.id, 0]
        assert answer.finish_reason is FinishReason.LENGTH
        assert not answer.ids
        assert len(answer.embedding) == HIDDEN
        states = bench.model.states(request.prompt, kv_dtype=bench.kv_dtype)
        expected = states.mean(axis=0) if request.embed == "mean" else states[-1]
        error = np.linalg.norm(np.array(answer.embedding) - expected)
        assert error <= bound * np.linalg.norm(states, axis=1).max(), request.id


@MODELS
@pytest.mark.parametrize("step_tokens", [7, 512])
def test_embeddings_beside_answers(
    kit: Kit, model: Models, tmp_path: Path, step_tokens: int
) -> None:
    """In chunks or whole, in one batch with requests that generate, twice over: what is cached of a
    prompt changes nothing."""
    bench = EngineBench(kit.device, model(), tmp_path)
    embedded, generated = embedding_requests(kit.rng), mixed_requests(kit.rng)
    engine = bench.engine(step_tokens=step_tokens)
    for _ in range(2):
        answers = bench.run(engine, [*embedded, *generated])
        judge(bench, embedded, answers)
        bench.judge(generated, answers)
    assert answers["last-60", 0].num_cached_tokens > 0
    assert answers["mean-60", 0].num_cached_tokens == 0
    bench.close(engine)
    bench.check_power()


@MODELS
@pytest.mark.parametrize("kind", ["mean", "last"])
def test_embeddings_survive_preemption(
    kit: Kit, model: Models, tmp_path: Path, kind: Literal["mean", "last"]
) -> None:
    """A long prompt, a few tokens a step, beside an answer that grows and comes before it."""
    bench = EngineBench(kit.device, model(), tmp_path, page_size=small_page_size(kit.device))
    growing = Request(id="growing", prompt=random_prompt(kit.rng, 16), params=greedy(100))
    embedded = Request(
        id="embedded",
        prompt=random_prompt(kit.rng, 140),
        params=SamplingParams(max_tokens=0),
        embed=kind,
    )
    engine = bench.engine(pages=bench.pages_for(160) + 1, step_tokens=5, max_length=160)
    answers = bench.run(engine, [growing, embedded])
    assert engine.scheduler.num_preemptions > 0
    judge(bench, [embedded], answers)
    bench.judge([growing], answers)
    bench.close(engine)
