"""Real models behind real engines, and what the fixtures say of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polysilicon.config import Config
from polysilicon.engine.client import Client
from polysilicon.engine.loading import Loaded, load
from polysilicon.request import Request, RequestOutput, SamplingParams

FIXTURES = Path(__file__).parents[2] / "fixtures"
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1"
GEMMA3 = "gemma-3-270m-q4_k_m"
SURE_MARGIN = 0.05
"""Where the best two tokens are nearer than this, another choice is no error."""


def fixture(kind: str, model: str) -> dict[str, Any]:
    return json.loads((FIXTURES / f"{kind}-{model}.json").read_text())


@pytest.fixture(scope="session")
def loaded_smollm2(smollm2_path: Path) -> Iterator[Loaded]:
    loaded = load(Config(backend="reference"), smollm2_path)
    yield loaded
    loaded.client.close()


@pytest.fixture(scope="session")
def loaded_gemma3(gemma3_path: Path) -> Iterator[Loaded]:
    loaded = load(Config(backend="reference"), gemma3_path)
    yield loaded
    loaded.client.close()


def collect(client: Client, requests: Sequence[Request]) -> Mapping[str, list[RequestOutput]]:
    """All outputs of requests that run as one batch, by request id."""
    outputs: dict[str, list[RequestOutput]] = {request.id: [] for request in requests}
    for output in client.generate(requests):
        assert output.error is None
        outputs[output.request_id].append(output)
    return outputs


def generated(outputs: Sequence[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.ids]


def score(client: Client, prompts: Sequence[Sequence[int]]) -> list[RequestOutput]:
    params = SamplingParams(max_tokens=0, prompt_logprobs=1, logprobs=20)
    requests = [
        Request(id=str(index), prompt=tuple(ids), params=params)
        for index, ids in enumerate(prompts)
    ]
    return [outputs[0] for outputs in collect(client, requests).values()]


def log_probability_differences(output: RequestOutput, case: Mapping[str, Any]) -> np.ndarray:
    """|difference| for every prompt token, and for the fixture's last top 20 that are ours too."""
    scored = [entry.logprob for entry in output.prompt_logprobs]
    ours = dict(output.next_top)
    theirs = dict(case["last_top"])
    common = [token for token in theirs if token in ours]
    # The last of 20 may be nearly tied with the 21st.
    assert len(common) >= 18
    return np.abs(
        [a - b for a, b in zip(scored, case["prompt_logprobs"], strict=True)]
        + [ours[token] - theirs[token] for token in common]
    )


def check_greedy(tokens: Sequence[int], case: Mapping[str, Any]) -> int:
    """Tokens equal the fixture's up to a near tie. Returns how many were compared."""
    for index, (token, truth, margin) in enumerate(
        zip(tokens, case["greedy"], case["greedy_margin"], strict=False)
    ):
        if token != truth:
            assert margin <= SURE_MARGIN, (index, token, truth, margin)
            return index
    return len(tokens)


@pytest.fixture
def greedy_requests() -> Callable[..., list[Request]]:
    def build(cases: Sequence[Mapping[str, Any]], tokens: int = 48) -> list[Request]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        return [
            Request(id=str(index), prompt=tuple(case["ids"]), params=params)
            for index, case in enumerate(cases)
        ]

    return build
