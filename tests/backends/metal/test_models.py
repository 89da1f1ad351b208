"""Both real models through the engine, against what a float32 forward of their weights says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed: pip install 'polysilicon[metal]'")

from polysilicon.config import Config
from polysilicon.engine.loading import load
from polysilicon.request import Request, SamplingParams

FIXTURES = Path(__file__).parents[2] / "fixtures"
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1"
GEMMA3 = "gemma-3-270m-q4_k_m"

BOUNDS = {("auto", "f32"): 0.005, ("f16", "f16"): 0.02, ("bf16", "bf16"): 0.05}
"""Mean |difference| of log-probabilities over the cases' last top 20, by activations and KV."""

SURE_MARGIN = 0.1
"""Where the best two tokens are nearer than this, another order of sums may take the other."""

MOST_TOKENS = 40
"""Of a case's prompt and continuation: MLX on a CPU multiplies slowly."""


@pytest.fixture(scope="module", params=[SMOLLM2, GEMMA3])
def model(request):
    fixture = "smollm2_path" if request.param == SMOLLM2 else "gemma3_path"
    return request.param, request.getfixturevalue(fixture)


@pytest.fixture(scope="module", params=BOUNDS, ids="-".join)
def client(model, request):
    activations, kv_dtype = request.param
    loaded = load(
        Config(
            backend="metal", backend_option={"activations": activations}, kv_dtype=kv_dtype,
            kv_pages=64, max_length=512, max_sequences=8,
        ),
        model[1],
    )  # fmt: skip
    loaded.client.bound = BOUNDS[request.param]
    yield loaded.client
    loaded.client.close()


def cases(name):
    return json.loads((FIXTURES / f"logits-{name}.json").read_text())["cases"]


def score(client, prompts):
    params = SamplingParams(max_tokens=0, prompt_logprobs=1, logprobs=20)
    requests = [Request(id=str(i), prompt=tuple(p), params=params) for i, p in enumerate(prompts)]
    outputs = {output.request_id: output for output in client.generate(requests)}
    return [outputs[request.id] for request in requests]


def test_log_probabilities(client, model):
    own = cases(model[0])
    outputs = score(client, [case["ids"] for case in own])
    found = []
    for output, case in zip(outputs, own, strict=True):
        assert output.error is None
        ours = dict(output.next_top)
        common = [(ours[token], value) for token, value in case["last_top"] if token in ours]
        assert len(common) >= 15
        found.append(float(np.mean([abs(a - b) for a, b in common])))
    print("mean difference", np.mean(found))
    assert np.mean(found) <= client.bound


def test_greedy_tokens_behind_their_own_prefix(client, model):
    own = cases(model[0])
    prompts = [(case["ids"] + case["greedy"])[:MOST_TOKENS] for case in own]
    outputs = score(client, prompts)
    compared = 0
    for output, case in zip(outputs, own, strict=True):
        continuation = output.prompt_logprobs[len(case["ids"]) - 1 :]
        for entry, truth, margin in zip(
            continuation, case["greedy"], case["greedy_margin"], strict=False
        ):
            assert entry.id == truth
            if margin > SURE_MARGIN:
                assert entry.top[0][0] == truth
                compared += 1
    assert compared >= 5 * len(own)
