"""Both real models through the engine, against what a float32 forward of their weights says."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from polysilicon.config import Config
from polysilicon.engine.loading import load
from polysilicon.request import Request, SamplingParams

FIXTURES = Path(__file__).parents[3] / "tests" / "fixtures"
MODELS = {"smollm2_path": "SmolLM2-135M-Instruct.Q4_1", "gemma3_path": "gemma-3-270m-q4_k_m"}
BOUNDS = {"f16": 0.02, "f32": 0.005}
"""Mean |difference| of log-probabilities over the cases' last top 20, by KV dtype; products are
float32 with either."""

SURE_MARGIN = 0.1
"""Where the best two tokens are nearer than this, the other one is no error."""

pytestmark = pytest.mark.skipif(not FIXTURES.is_dir(), reason="needs the repository's fixtures")


@pytest.fixture(scope="module", params=itertools.product(MODELS, BOUNDS), ids="-".join)
def loaded(request, backend):
    """A client, the fixture's name and the bound."""
    model, kv_dtype = request.param
    found = load(Config(backend="opencl", kv_dtype=kv_dtype), request.getfixturevalue(model))
    yield found.client, MODELS[model], BOUNDS[kv_dtype]
    found.client.close()


def cases(kind: str, name: str) -> list[dict]:
    data = json.loads((FIXTURES / f"{kind}-{name}.json").read_text())
    return data["cases"] if kind == "logits" else [data]


def score(client, prompts):
    params = SamplingParams(max_tokens=0, prompt_logprobs=1, logprobs=20)
    requests = [Request(id=str(i), prompt=tuple(p), params=params) for i, p in enumerate(prompts)]
    outputs = {output.request_id: output for output in client.generate(requests)}
    return [outputs[request.id] for request in requests]


def difference(output, case) -> float:
    """Mean |difference| over the fixture's top 20 of the last position that are in ours too."""
    assert output.error is None
    ours = dict(output.next_top)
    common = [(ours[token], value) for token, value in case["last_top"] if token in ours]
    assert len(common) >= 15
    return float(np.mean([abs(a - b) for a, b in common]))


@pytest.mark.parametrize("kind", ["logits", "long"])
def test_log_probabilities(loaded, kind, record_property):
    client, name, bound = loaded
    own = cases(kind, name)
    outputs = score(client, [case["ids"] for case in own])
    found = [difference(o, case) for o, case in zip(outputs, own, strict=True)]
    record_property("mean_difference", float(np.mean(found)))
    print(f"{name} {kind}: mean |delta log-prob| {np.mean(found):.5f}, worst {max(found):.5f}")
    # A single prompt may lie further off than the mean over many.
    assert np.mean(found) <= bound * (1 if kind == "logits" else 1.5)


def test_greedy_tokens_behind_their_own_prefix(loaded):
    client, name, _ = loaded
    own = cases("logits", name)
    outputs = score(client, [case["ids"] + case["greedy"] for case in own])
    compared = 0
    for output, case in zip(outputs, own, strict=True):
        continuation = output.prompt_logprobs[len(case["ids"]) - 1 :]
        for entry, truth, margin in zip(
            continuation, case["greedy"], case["greedy_margin"], strict=True
        ):
            assert entry.id == truth
            if margin > SURE_MARGIN:
                assert entry.top[0][0] == truth
                compared += 1
    assert compared >= 10 * len(own)
