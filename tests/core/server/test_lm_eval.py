"""The calls that lm-eval's `local-completions` makes, and what it reads from the answers."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.special

from polysilicon.testing.tiny_models import tiny_llama

NEAR = 2e-3
ENCODED = {"context": "the cat sat", "continuations": [" on", " in the hat", "s", "!"]}


@pytest.fixture(scope="module")
def server(serve, tiny_path):
    options = ("--backend", "reference", "--kv-dtype", "f32", "--served-model-name", "tiny")
    with serve(str(tiny_path), *options) as served:
        yield served


def encode(server, text):
    """As its remote tokenizer does."""
    answer = server.post("/tokenize", {"prompt": text, "add_special_tokens": False})
    assert answer.status_code == 200
    return answer.json()["tokens"]


@pytest.fixture
def pairs(server):
    """Token ids of (context, continuation)."""
    context = encode(server, ENCODED["context"])
    return [
        (context, encode(server, ENCODED["context"] + text)[len(context) :])
        for text in ENCODED["continuations"]
    ]


def scored(server, prompt, **fields):
    body = {
        "model": "tiny",
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    answer = server.post("/v1/completions", body | fields)
    assert answer.status_code == 200, answer.text
    return sorted(answer.json()["choices"], key=lambda choice: choice["index"])


def read(choice, length):
    """What it takes for the continuation behind `length` tokens: its log-probability, and whether
    it is what greedy decoding gives. The token that is generated comes last and is left out."""
    logprobs = choice["logprobs"]["token_logprobs"][length:-1]
    top = choice["logprobs"]["top_logprobs"][length:-1]
    return sum(logprobs), all(
        value == max(best.values()) for value, best in zip(logprobs, top, strict=True)
    )


def check(choices, pairs):
    assert len(choices) == len(pairs)
    for choice, (context, continuation) in zip(choices, pairs, strict=True):
        ids = [*context, *continuation]
        rows = scipy.special.log_softmax(tiny_llama().logits(ids, kv_dtype="f32"), axis=1)
        places = np.arange(len(context), len(ids))
        tokens = np.array(ids)[places]
        logprob, greedy = read(choice, len(context))
        assert logprob == pytest.approx(rows[places - 1, tokens].sum(), abs=NEAR)
        assert greedy == (rows[places - 1].argmax(axis=1) == tokens).all()
        lists = choice["logprobs"]
        assert {len(values) for values in lists.values()} == {len(ids) + 1}
        assert lists["token_logprobs"][0] is None
        assert lists["top_logprobs"][0] is None


def test_its_tokenizer_finds_what_it_needs(server):
    info = server.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>"
    assert info["bos_token"] is None
    assert info["model_max_length"] == 512
    assert "im_start" in info["chat_template"]
    (end,) = encode(server, info["eos_token"])
    back = server.post("/detokenize", {"tokens": [end, *encode(server, "ab")]}).json()["prompt"]
    assert back == "<|im_end|>ab"


def test_log_likelihoods_of_one_request(server, pairs):
    for pair in pairs:
        check(scored(server, [[*pair[0], *pair[1]]]), [pair])


def test_log_likelihoods_of_a_batch(server, pairs):
    check(scored(server, [[*context, *rest] for context, rest in pairs]), pairs)


def test_log_likelihoods_of_texts(server, pairs):
    """With tokenized_requests=False."""
    texts = [ENCODED["context"] + text for text in ENCODED["continuations"]]
    check(scored(server, texts), pairs)
    check(scored(server, texts[0]), pairs[:1])


def test_what_greedy_decoding_gives_is_greedy(server, pairs):
    context = pairs[0][0]
    ids = list(context)
    for _ in range(3):
        ids.append(int(tiny_llama().logits(ids, kv_dtype="f32")[-1].argmax()))
    (choice,) = scored(server, [ids])
    assert read(choice, len(context))[1]
    other = [*ids[:-1], (ids[-1] + 1) % 200]
    (choice,) = scored(server, [other])
    assert not read(choice, len(context))[1]


def test_an_end_of_text_right_behind_the_prompt_counts_as_a_token(server, pairs):
    """Even where the token that is generated is hidden, or ends the answer."""
    context, continuation = pairs[0]
    (choice,) = scored(server, [[*context, *continuation]], logit_bias={"3": 1000})
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"]["tokens"][-1] == "<|im_end|>"
    check([choice], [pairs[0]])


def test_without_a_generated_token_the_prompt_s_are_the_same(server, pairs):
    """As `max_tokens: 0` asks for, which other clients send."""
    prompt = [[*context, *rest] for context, rest in pairs]
    for bare, choice in zip(
        scored(server, prompt, max_tokens=0), scored(server, prompt), strict=True
    ):
        assert bare["logprobs"]["tokens"] == choice["logprobs"]["tokens"][:-1]
        assert bare["logprobs"]["token_logprobs"] == pytest.approx(
            choice["logprobs"]["token_logprobs"][:-1], abs=NEAR, nan_ok=True
        )


def test_texts_that_are_generated(server):
    body = {
        "prompt": ["the cat", "a"],
        "model": "tiny",
        "max_tokens": 5,
        "temperature": 0,
        "stop": ["\n", "<|im_end|>"],
        "seed": 1234,
    }
    answer = server.post("/v1/completions", body).json()
    texts = [None, None]
    for choice in answer["choices"]:
        texts[choice["index"]] = choice["text"]
    for prompt, text in zip(body["prompt"], texts, strict=True):
        ids = encode(server, prompt)
        for _ in range(5):
            ids.append(int(tiny_llama().logits(ids, kv_dtype="f32")[-1].argmax()))
        whole = server.post("/detokenize", {"tokens": ids}).json()["prompt"]
        expected = whole.removeprefix(prompt)
        for stop in body["stop"]:
            expected = expected.split(stop)[0]
        assert text == expected
