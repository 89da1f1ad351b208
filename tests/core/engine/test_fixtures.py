"""Both real models against what a float32 forward of their weights says."""

from __future__ import annotations

import numpy as np
import pytest

from polysilicon.request import Request, SamplingParams

from .conftest import (
    GEMMA3,
    SMOLLM2,
    SURE_MARGIN,
    check_greedy,
    collect,
    fixture,
    generated,
    log_probability_differences,
    score,
)

MODELS = [("loaded_smollm2", SMOLLM2), ("loaded_gemma3", GEMMA3)]
BOUND = 0.005


@pytest.mark.parametrize(("loaded", "name"), MODELS)
def test_log_probabilities(loaded, name, request):
    client = request.getfixturevalue(loaded).client
    cases = fixture("logits", name)["cases"]
    outputs = score(client, [case["ids"] for case in cases])
    for output, case in zip(outputs, cases, strict=True):
        assert log_probability_differences(output, case).mean() <= BOUND, case["prompt"]


@pytest.mark.parametrize(("loaded", "name"), MODELS)
def test_prompts_are_tokenized_alike(loaded, name, request):
    tokenizer = request.getfixturevalue(loaded).tokenizer
    for case in fixture("logits", name)["cases"]:
        ids = tokenizer.encode(case["prompt"], add_special=True, parse_special=True)
        assert ids == case["ids"]


@pytest.mark.parametrize(("loaded", "name"), MODELS)
def test_greedy_tokens(loaded, name, request, greedy_requests):
    client = request.getfixturevalue(loaded).client
    cases = fixture("logits", name)["cases"]
    outputs = collect(client, greedy_requests(cases))
    compared = [
        check_greedy(generated(outputs[str(index)]), case) for index, case in enumerate(cases)
    ]
    assert sum(compared) >= 0.5 * 48 * len(cases)


@pytest.mark.parametrize(("loaded", "name"), MODELS)
def test_every_greedy_token_behind_its_own_prefix(loaded, name, request):
    """Also the tokens that come after a near tie, where free running may take another way."""
    client = request.getfixturevalue(loaded).client
    cases = fixture("logits", name)["cases"]
    outputs = score(client, [case["ids"] + case["greedy"] for case in cases])
    for output, case in zip(outputs, cases, strict=True):
        continuation = output.prompt_logprobs[len(case["ids"]) - 1 :]
        for entry, truth, margin in zip(
            continuation, case["greedy"], case["greedy_margin"], strict=True
        ):
            assert entry.id == truth
            assert entry.top[0][0] == truth or margin <= SURE_MARGIN


@pytest.mark.parametrize(("loaded", "name"), MODELS)
def test_a_long_prompt(loaded, name, request):
    """About 1,400 tokens: beyond Gemma's window, and many chunks of prefill."""
    client = request.getfixturevalue(loaded).client
    case = fixture("long", name)
    (output,) = score(client, [case["ids"]])
    differences = log_probability_differences(output, case)
    assert differences.mean() <= BOUND
    assert np.quantile(differences, 0.99) <= 4 * BOUND


def test_a_prefix_hit_behind_the_window_changes_nothing(loaded_gemma3):
    """The second run takes almost the whole prompt from the cache, window pages included."""
    client = loaded_gemma3.client
    case = fixture("long", GEMMA3)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
    requests = [
        Request(id=name, prompt=tuple(case["ids"]), params=params) for name in ("cold", "warm")
    ]
    for expect_hit, one in zip((False, True), requests, strict=True):
        (output,) = collect(client, [one])[one.id]
        if expect_hit:
            assert output.num_cached_tokens >= len(case["ids"]) - 32
        ours = dict(output.next_top)
        theirs = dict(case["last_top"])
        common = ours.keys() & theirs.keys()
        assert len(common) >= 18
        assert np.mean([abs(ours[token] - theirs[token]) for token in common]) <= BOUND
