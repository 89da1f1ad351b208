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

CASES = {"auto": 6, "f16": 2, "bf16": 2}
"""Those with the shortest prompts, by activations: MLX on a CPU multiplies slowly, and more so in
16 bits. `ci/accuracy.py` takes them all."""

SURE_MARGIN = 0.1
"""Where the best two tokens are nearer than this, another order of sums may take the other."""

CONTINUED = 10
"""Tokens of each greedy continuation that stand behind its prompt."""


@pytest.fixture(scope="module", params=[SMOLLM2, GEMMA3])
def model(request):
    fixture = "smollm2_path" if request.param == SMOLLM2 else "gemma3_path"
    return request.param, request.getfixturevalue(fixture)


@pytest.mark.parametrize(("activations", "kv_dtype"), BOUNDS)
def test_log_probabilities_and_greedy_tokens(model, activations, kv_dtype, record_property):
    name, path = model
    loaded = load(
        Config(
            backend="metal", backend_option={"activations": activations}, kv_dtype=kv_dtype,
            kv_pages=64, max_length=512, max_sequences=8,
        ),
        path,
    )  # fmt: skip
    own = json.loads((FIXTURES / f"logits-{name}.json").read_text())["cases"]
    own = sorted(own, key=lambda case: len(case["ids"]))[: CASES[activations]]
    params = SamplingParams(max_tokens=0, prompt_logprobs=20)
    prompts = [(*case["ids"], *case["greedy"][:CONTINUED]) for case in own]
    requests = [Request(id=str(i), prompt=p, params=params) for i, p in enumerate(prompts)]
    outputs = {output.request_id: output for output in loaded.client.generate(requests)}
    loaded.client.close()
    found, compared = [], 0
    for request, case in zip(requests, own, strict=True):
        output = outputs[request.id]
        assert output.error is None
        continuation = output.prompt_logprobs[len(case["ids"]) - 1 :]
        assert len(continuation) == CONTINUED
        ours = dict(continuation[0].top)
        common = [(ours[token], value) for token, value in case["last_top"] if token in ours]
        assert len(common) >= 15
        found.append(float(np.mean([abs(a - b) for a, b in common])))
        for entry, truth, margin in zip(
            continuation, case["greedy"], case["greedy_margin"], strict=False
        ):
            assert entry.id == truth
            if margin > SURE_MARGIN:
                assert entry.top[0][0] == truth
                compared += 1
    record_property("mean_difference", round(float(np.mean(found)), 6))
    assert np.mean(found) <= BOUNDS[activations, kv_dtype]
    assert compared >= CONTINUED // 2 * len(own)
