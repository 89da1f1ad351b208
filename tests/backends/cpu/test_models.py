"""Both real models through the engine, against what a float32 forward of their weights says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from polysilicon.config import Config
from polysilicon.engine.client import Client
from polysilicon.engine.loading import load
from polysilicon.request import Request, RequestOutput, SamplingParams

FIXTURES = Path(__file__).parents[2] / "fixtures"
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1"
GEMMA3 = "gemma-3-270m-q4_k_m"
BOUNDS = {
    ("bf16", "bf16"): 0.03,
    ("bf16", "f16"): 0.03,
    ("auto", "bf16"): 0.08,
    ("auto", "f16"): 0.08,
    ("auto", "int8"): 0.12,
}
"""Mean |difference| of log-probabilities over cases' last top 20, by `activations` and KV dtype.

One of the cases is three times as sensitive to any rounding as the others.
"""

SURE_MARGIN = 0.15
"""Where the best two tokens are nearer than this, bf16 may take the other."""


@pytest.fixture(scope="module", params=[SMOLLM2, GEMMA3])
def model(request: pytest.FixtureRequest) -> tuple[str, Path]:
    fixture = "smollm2_path" if request.param == SMOLLM2 else "gemma3_path"
    return request.param, request.getfixturevalue(fixture)


@pytest.fixture(scope="module", params=BOUNDS, ids="-".join)
def client(model, request) -> Iterator[Client]:
    activations, kv_dtype = request.param
    loaded = load(Config(backend="cpu", activations=activations, kv_dtype=kv_dtype), model[1])
    loaded.client.bound = BOUNDS[request.param]
    yield loaded.client
    loaded.client.close()


def cases(kind: str, name: str) -> list[dict]:
    data = json.loads((FIXTURES / f"{kind}-{name}.json").read_text())
    return data["cases"] if kind == "logits" else [data]


def score(client: Client, prompts: list[list[int]]) -> list[RequestOutput]:
    params = SamplingParams(max_tokens=0, prompt_logprobs=1, logprobs=20)
    requests = [Request(id=str(i), prompt=tuple(p), params=params) for i, p in enumerate(prompts)]
    outputs = {output.request_id: output for output in client.generate(requests)}
    return [outputs[request.id] for request in requests]


def difference(output: RequestOutput, case: dict) -> float:
    """Mean |difference| over the fixture's top 20 of the last position that are in ours too."""
    assert output.error is None
    ours = dict(output.next_top)
    common = [(ours[token], value) for token, value in case["last_top"] if token in ours]
    assert len(common) >= 15
    return float(np.mean([abs(a - b) for a, b in common]))


@pytest.mark.parametrize("kind", ["logits", "long"])
def test_log_probabilities(client, model, kind):
    own = cases(kind, model[0])
    outputs = score(client, [case["ids"] for case in own])
    found = [difference(o, case) for o, case in zip(outputs, own, strict=True)]
    # A single prompt may lie further off than the mean over many.
    assert np.mean(found) <= client.bound * (1 if kind == "logits" else 1.5)


def test_greedy_tokens_behind_their_own_prefix(client, model):
    own = cases("logits", model[0])
    outputs = score(client, [case["ids"] + case["greedy"] for case in own])
    compared = 0
    for output, case in zip(outputs, own, strict=True):
        continuation = output.prompt_logprobs[len(case["ids"]) - 1 :]
        for entry, truth, margin in zip(
            continuation, case["greedy"], case["greedy_margin"], strict=True
        ):
            assert entry.id == truth
            if margin > SURE_MARGIN * (1 + 4 * (client.bound > 0.05)):
                assert entry.top[0][0] == truth
                compared += 1
    assert compared >= 10 * len(own)
