"""Embeddings by OpenAI's client."""

from __future__ import annotations

import base64
import dataclasses
import re

import numpy as np
import openai
import pytest

from polysilicon.testing.tiny_models import tiny_llama
from polysilicon.testing.tiny_text import write_text_side

TEXTS = [
    "The cat sat on the mat.",
    "A cat was sitting on a rug.",
    "Interest rates rose by a point.",
]


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    return server.client()


def embedded(client, texts, **options) -> np.ndarray:
    answer = client.embeddings.create(
        model="smollm2", input=texts, encoding_format="float", **options
    )
    assert [item.index for item in answer.data] == list(range(len(answer.data)))
    return np.array([item.embedding for item in answer.data])


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_pooled_and_normalised(client, server, pooling) -> None:
    extra = {"extra_body": {"pooling": pooling}}
    vectors = embedded(client, TEXTS, **extra)
    assert vectors.shape == (3, 576)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    alone = np.concatenate([embedded(client, text, **extra) for text in TEXTS])
    np.testing.assert_allclose(alone, vectors, atol=0.02)
    likeness = vectors @ vectors.T
    assert likeness[0, 1] > likeness[0, 2]
    raw = embedded(client, TEXTS, extra_body={"pooling": pooling, "normalize": False})
    assert np.linalg.norm(raw, axis=1).min() > 1.5
    np.testing.assert_allclose(raw / np.linalg.norm(raw, axis=1, keepdims=True), vectors, atol=0.02)


def test_mean_is_of_every_token_and_last_of_the_last(client) -> None:
    ids = [50, 60, 70, 80]

    def raw(prompt, pooling):
        extra = {"pooling": pooling, "normalize": False}
        return embedded(client, [prompt], extra_body=extra)[0]

    lasts = [raw(ids[: end + 1], "last") for end in range(len(ids))]
    whole = raw(ids, "mean")
    error = np.abs(whole - np.mean(lasts, axis=0)).max() / np.abs(whole).max()
    assert error < 0.02


def test_base64_and_usage(client, server) -> None:
    answer = server.post("/v1/embeddings", {"input": TEXTS, "encoding_format": "base64"}).json()
    vectors = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in answer["data"]]
    np.testing.assert_allclose(np.stack(vectors), embedded(client, TEXTS), atol=0.02)
    tokens = sum(server.post("/tokenize", {"prompt": text}).json()["count"] for text in TEXTS)
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    defaults = client.embeddings.create(model="smollm2", input=TEXTS[0])
    assert len(defaults.data[0].embedding) == 576


def test_many_inputs(client) -> None:
    texts = [f"Number {n}." for n in range(150)]
    vectors = embedded(client, texts)
    np.testing.assert_allclose(
        vectors[[7, 149]], embedded(client, [texts[7], texts[149]]), atol=0.02
    )


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [10**9]}, "input"),
        ({"input": ["a"] * 3000}, "input"),
        ({"dimensions": 5}, "dimensions"),
        ({"pooling": "max"}, "pooling"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"input": [5] * 100_000}, "context"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_errors(server, change, word) -> None:
    answer = server.post("/v1/embeddings", {"input": "a"} | change)
    assert answer.status_code == 400, answer.text
    assert word in answer.json()["error"]["message"]


def test_hidden_states_that_are_no_numbers(serve, tmp_path) -> None:
    """No embedding, and what can be answered without them stays JSON."""
    model = tiny_llama()
    norm = {"model.norm.weight": np.full_like(model.tensors["model.norm.weight"], np.nan)}
    dataclasses.replace(model, tensors=model.tensors | norm).write(tmp_path / "model")
    write_text_side(tmp_path / "model")
    with serve(str(tmp_path / "model"), "--backend", "reference", "--kv-pages", "40") as served:
        for form in ("float", "base64"):
            answer = served.post("/v1/embeddings", {"input": "ab", "encoding_format": form})
            assert answer.status_code == 500
            assert "NaN or infinite" in answer.json()["error"]["message"]
        asked = {"prompt": "ab", "max_tokens": 2, "logprobs": 2, "echo": True}
        answer = served.post("/v1/completions", asked)
        assert answer.status_code == 200
        assert not {"NaN", "Infinity"} & set(re.findall(r"\w+", answer.text))
        assert answer.json()["choices"][0]["logprobs"]["token_logprobs"][1] == -9999
