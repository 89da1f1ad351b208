"""`--deterministic`: log-probabilities to the bit, whatever else happens around a prompt."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polysilicon.config import Config
from polysilicon.engine.client import Client
from polysilicon.engine.loading import load
from polysilicon.request import Request, SamplingParams

FIXTURES = Path(__file__).parents[2] / "fixtures"
MODEL = "SmolLM2-135M-Instruct.Q4_1"
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=5)


def open_client(path: Path, **settings: Any) -> Client:
    return load(Config(backend="cpu", deterministic=True, **settings), path).client


def generated(
    client: Client, prompts: Sequence[Sequence[int]], params: SamplingParams = PARAMS
) -> list[list[Any]]:
    """Tokens with their log-probabilities and the best others', by prompt; all run together."""
    requests = [
        Request(id=str(index), prompt=tuple(prompt), params=params)
        for index, prompt in enumerate(prompts)
    ]
    results: dict[str, list[Any]] = {request.id: [] for request in requests}
    for output in client.generate(requests):
        assert output.error is None
        results[output.request_id] += [
            (token, entry.logprob, entry.top)
            for token, entry in zip(output.ids, output.logprobs, strict=True)
        ]
    return [results[request.id] for request in requests]


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    ids: list[int] = json.loads((FIXTURES / f"long-{MODEL}.json").read_text())["ids"]
    return ids[:150]


@pytest.fixture(scope="module")
def alone(smollm2_path: Path, prompt: list[int]) -> list[Any]:
    with closing(open_client(smollm2_path)) as client:
        (result,) = generated(client, [prompt])
    assert len(result) == PARAMS.max_tokens
    return result


def test_in_a_batch_of_33(smollm2_path, prompt, alone):
    rng = np.random.default_rng()
    others = [rng.integers(100, 40_000, rng.integers(1, 60)).tolist() for _ in range(32)]
    with closing(open_client(smollm2_path)) as client:
        assert generated(client, [*others[:9], prompt, *others[9:]])[9] == alone


def test_in_chunks_of_7(smollm2_path, prompt, alone):
    with closing(open_client(smollm2_path, step_tokens=7)) as client:
        assert generated(client, [prompt]) == [alone]


def test_after_a_prefix_hit(smollm2_path, prompt, alone):
    with closing(open_client(smollm2_path)) as client:
        generated(client, [[*prompt[:100], 17, 18]])
        assert generated(client, [prompt]) == [alone]
        assert generated(client, [prompt]) == [alone]


def test_after_preemption(smollm2_path, prompt):
    """Four sequences begin in the pages that there are, and grow to need half as many again."""
    params = dataclasses.replace(PARAMS, max_tokens=66)
    settings = {"kv_pages": 17, "max_length": 128, "prefix_cache": False}
    loaded = load(Config(backend="cpu", deterministic=True, **settings), smollm2_path)
    with closing(loaded.client) as client:
        (expected,) = generated(client, [prompt[:30]], params)
        assert generated(client, [prompt[:30]] * 4, params) == [expected] * 4
        assert loaded.engine.scheduler.num_preemptions > 0


def test_other_threads(smollm2_path, prompt, alone):
    with closing(open_client(smollm2_path, backend_option={"threads": "3"})) as client:
        assert generated(client, [prompt]) == [alone]
