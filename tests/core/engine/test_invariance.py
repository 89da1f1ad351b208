"""What a request gets does not depend on caching, chunking, batching or preemption."""

from __future__ import annotations

import pytest

from polysilicon.config import Config
from polysilicon.engine.loading import load
from polysilicon.request import Request, SamplingParams

from .conftest import SMOLLM2, check_greedy, collect, fixture, generated

TOKENS = 16


def mixed_requests(cases):
    """Nine requests: the fixtures' prompts, greedy, and three of other kinds beside them."""
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    requests = [
        Request(id=str(index), prompt=tuple(case["ids"]), params=greedy)
        for index, case in enumerate(cases)
    ]
    beside = [
        SamplingParams(temperature=1.5, seed=7, max_tokens=20),
        SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=20, logprobs=5),
        SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=10, prompt_logprobs=3),
    ]
    prompts = [cases[1]["ids"], cases[2]["ids"], cases[1]["ids"][:9]]
    return requests + [
        Request(id=f"beside{index}", prompt=tuple(prompt), params=params)
        for index, (prompt, params) in enumerate(zip(prompts, beside, strict=True))
    ]


@pytest.mark.parametrize(
    "setting",
    [
        {"prefix_cache": True},
        {"prefix_cache": False},
        {"step_tokens": 1},
        {"step_tokens": 7},
        {"step_tokens": 16},
        {"page_size": 16, "kv_pages": 7, "max_length": 96},
    ],
    ids=str,
)
def test_greedy_tokens_hold(setting, smollm2_path):
    loaded = load(Config(backend="reference", **setting), smollm2_path)
    cases = fixture("logits", SMOLLM2)["cases"]
    try:
        requests = mixed_requests(cases)
        assert len(requests) == 9
        # Twice: the second time finds the first one's pages.
        for _ in range(2):
            outputs = collect(loaded.client, requests)
            for index, case in enumerate(cases):
                tokens = generated(outputs[str(index)])
                assert len(tokens) == TOKENS
                check_greedy(tokens, case)
        alone = requests[0]
        check_greedy(generated(collect(loaded.client, [alone])[alone.id]), cases[0])
        if "kv_pages" in setting:
            assert loaded.engine.scheduler.num_preemptions > 0
        if setting.get("prefix_cache") is False:
            assert loaded.engine.kv.prefix_hits == 0
        loaded.engine.kv.check_integrity()
        assert all(usage.in_use == usage.limbo == 0 for usage in loaded.engine.kv.usage())
    finally:
        loaded.client.close()
