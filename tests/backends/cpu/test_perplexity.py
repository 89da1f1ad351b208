"""Perplexity by rounding of inputs, keys and values, against the float32 reference's."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from polysilicon.config import Config
from polysilicon.engine.loading import load
from polysilicon.request import Request, SamplingParams

FIXTURES = Path(__file__).parents[2] / "fixtures"
BOUNDS = {"bf16": 0.003, "int8": 0.005}
"""Relative, by KV dtype."""


@pytest.mark.parametrize(
    ("activations", "kv_dtype"), [("auto", "bf16"), ("bf16", "bf16"), ("auto", "int8")]
)
@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct.Q4_1", "gemma-3-270m-q4_k_m"])
def test_perplexity_is_that_of_the_float32_reference(name, activations, kv_dtype, request):
    path = request.getfixturevalue("smollm2_path" if name.startswith("Smol") else "gemma3_path")
    text = (FIXTURES / "perplexity.txt").read_text(encoding="utf-8")
    expected = json.loads((FIXTURES / "perplexity.json").read_text())[name]
    loaded = load(Config(backend="cpu", activations=activations, kv_dtype=kv_dtype), path)
    try:
        ids = loaded.tokenizer.encode(text, add_special=True, parse_special=False)
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        (output,) = loaded.client.generate([Request(id="text", prompt=tuple(ids), params=params)])
    finally:
        loaded.client.close()
        loaded.checkpoint.close()
    assert output.error is None
    assert len(ids) == expected["tokens"] > 1500
    costs = [-entry.logprob for entry in output.prompt_logprobs]
    assert len(costs) == len(ids) - 1
    perplexity = math.exp(math.fsum(costs) / len(costs))
    assert perplexity == pytest.approx(expected["perplexity"], rel=BOUNDS[kv_dtype])
