"""Real models through llama.cpp: our fixtures by a loose margin, llama-cpp-python exactly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polysilicon.config import Config
from polysilicon.engine.loading import Loaded, load
from polysilicon.request import Request, SamplingParams

from .conftest import greedy, serve

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

FIXTURES = Path(__file__).parents[2] / "fixtures"
SURE_MARGIN = 1.0
"""llama.cpp's rounding of activations moves log-probabilities by 0.05 to 0.25 on average."""


def fixture(kind: str, model: str) -> dict[str, Any]:
    return json.loads((FIXTURES / f"{kind}-{model}.json").read_text())


def config(**values: object) -> Config:
    options = {"executor": "llamacpp", "backend_option": {"threads": "1"}, "max_sequences": 16}
    return Config.model_validate(options | values)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Iterator[Loaded]:
    loaded = load(config(), smollm2_path)
    yield loaded
    loaded.client.close()


def cases() -> list[dict[str, Any]]:
    return fixture("logits", "SmolLM2-135M-Instruct.Q4_1")["cases"]


def test_greedy_tokens_of_the_fixture(smollm2: Loaded) -> None:
    requests = [
        Request(id=str(index), prompt=tuple(case["ids"]), params=greedy(24))
        for index, case in enumerate(cases())
    ]
    answers = serve(smollm2, requests)
    compared = 0
    for index, case in enumerate(cases()):
        ids = answers[str(index), 0].ids
        for token, truth, margin in zip(ids, case["greedy"], case["greedy_margin"], strict=False):
            if token != truth:
                assert margin <= SURE_MARGIN, (index, token, truth, margin)
                break
            compared += 1
    assert compared >= 5 * len(requests)


def test_the_tokens_of_llama_cpp_python(smollm2: Loaded, smollm2_path: Path) -> None:
    theirs = llama_cpp.Llama(
        str(smollm2_path), n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False
    )
    for index, case in enumerate(cases()[:3]):
        request = Request(id=f"same-{index}", prompt=tuple(case["ids"]), params=greedy(16))
        (answer,) = serve(smollm2, [request]).values()
        theirs.reset()
        expected = []
        for token in theirs.generate(case["ids"], temp=0.0):
            expected.append(token)
            if len(expected) == 16:
                break
        assert answer.ids == expected
    theirs.close()


def test_a_prefix_shared_behind_a_sliding_window(gemma3_path: Path) -> None:
    """A prompt past the window of 512 tokens, cold, from the cache, and cut short in its midst."""
    case = fixture("long", "gemma-3-270m-q4_k_m")
    loaded = load(config(max_sequences=64), gemma3_path)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
    top: list[dict[int, float]] = []
    cached = []
    short = tuple(case["ids"][:700])
    try:
        for name, ids in (("cold", case["ids"]), ("warm", case["ids"]), ("short", short)):
            loaded.client.submit(Request(id=name, prompt=tuple(ids), params=params))
            for output in loaded.client.drain():
                assert output.error is None, output.error
                top.append(dict(output.next_top))
                cached.append(output.num_cached_tokens)
        alone = load(config(prefix_cache=False), gemma3_path)
        alone.client.submit(Request(id="alone", prompt=short, params=params))
        (output,) = alone.client.drain()
        alone.client.close()
        top.append(dict(output.next_top))
    finally:
        loaded.client.close()
    assert cached == [0, len(case["ids"]) - 1, len(short) - 1]
    truth = dict(case["last_top"])
    for ours, expected in ((top[0], truth), (top[1], truth), (top[2], top[3])):
        common = ours.keys() & expected.keys()
        assert len(common) >= 12
        assert np.mean([abs(ours[token] - expected[token]) for token in common]) <= 0.25
