"""Both real models through the engine on torch's own operations, against what a float32 forward of
their weights says."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from polysilicon.config import Config
from polysilicon.engine.client import Client
from polysilicon.engine.loading import build_engine, load_tokenizer
from polysilicon.models.loading import load_model
from polysilicon.request import Request, RequestOutput, SamplingParams
from polysilicon.weights.checkpoint import open_checkpoint
from polysilicon_cuda.host import polysilicon_backends

FIXTURES = Path(__file__).parents[2] / "fixtures"
NAMES = {
    "smollm2_path": "SmolLM2-135M-Instruct.Q4_1",
    "gemma3_path": "gemma-3-270m-q4_k_m",
}
BOUNDS = {"bf16": 0.02, "f32": 0.005}
"""Mean |difference| of log-probabilities over the cases' last top 20, by `activations`."""

SURE_MARGIN = 0.15
"""Where the best two tokens are nearer than this, bf16 may take the other."""


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest) -> tuple[str, Path]:
    return NAMES[request.param], request.getfixturevalue(request.param)


@pytest.fixture(scope="module", params=BOUNDS)
def client(model: tuple[str, Path], request: pytest.FixtureRequest) -> Iterator[Client]:
    [backend] = polysilicon_backends()
    device = backend.open(0, {"activations": request.param, "kernels": "torch"})
    with open_checkpoint(model[1]) as checkpoint:
        tokenizer = load_tokenizer(checkpoint)
        loaded = load_model(checkpoint, device, max_length=512)
        config = Config(kv_pages=65, step_tokens=512)
        engine, _ = build_engine(
            config, device, loaded, identity=model[0], eos_ids=tokenizer.eos_ids
        )
    client = Client(engine, tokenizer)
    client.bound = BOUNDS[request.param]
    yield client
    client.close()
    device.close()


def cases(name: str) -> list[dict]:
    return json.loads((FIXTURES / f"logits-{name}.json").read_text())["cases"]


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


def test_log_probabilities(client, model):
    own = cases(model[0])
    outputs = score(client, [case["ids"] for case in own])
    found = [difference(o, case) for o, case in zip(outputs, own, strict=True)]
    print(model[0], client.bound, np.mean(found), np.max(found))
    assert np.mean(found) <= client.bound


def test_greedy_tokens_behind_their_own_prefix(client, model):
    own = cases(model[0])
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
