"""Random histories through client and engine: arrivals, cancels, small pools, adapters, salts."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polysilicon.backend import Device, OutOfMemory
from polysilicon.config import Config
from polysilicon.engine.client import Client
from polysilicon.engine.engine import Engine
from polysilicon.engine.loading import build_engine
from polysilicon.errors import RequestError
from polysilicon.models.loading import load_model
from polysilicon.reference.device import ReferenceDevice, ReferenceProgram
from polysilicon.reference.ops import ReferenceOps
from polysilicon.request import FinishReason, Request, RequestOutput, SamplingParams
from polysilicon.testing.lazy import LazyBackend
from polysilicon.testing.tiny_models import VOCABULARY, TinyModel, tiny_gemma, tiny_llama
from polysilicon.tokenizer import Tokenizer
from polysilicon.tokenizer_vocabulary import BYTE_OF_STAND_IN
from polysilicon.weights.checkpoint import open_checkpoint

REQUESTS = 24
STEPS = 5000
"""A history that takes longer hangs."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token for each of the first bytes, and an end of text with the id of the tiny models."""
    tokens = list(BYTE_OF_STAND_IN)[: VOCABULARY - 1]
    tokens.insert(3, "<|endoftext|>")
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3 if token == "<|endoftext|>" else 1 for token in tokens],
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.eos_token_id": 3,
        }
    )


Start = Callable[[TinyModel, Device, Config, int], tuple[Client, Engine]]


@pytest.fixture
def start(tmp_path: Path, tokenizer: Tokenizer) -> Start:
    def build(
        model: TinyModel, device: Device, config: Config, adapters: int
    ) -> tuple[Client, Engine]:
        model.write(tmp_path)
        with open_checkpoint(tmp_path) as checkpoint:
            loaded = load_model(checkpoint, device)
        engine, _ = build_engine(
            config,
            device,
            loaded,
            identity="tiny",
            eos_ids=tokenizer.eos_ids,
            max_adapters=adapters,
        )
        for index in range(adapters):
            engine.add_adapter(f"adapter-{index}", model.adapter(np.random.default_rng(index)))
        return Client(engine, tokenizer), engine

    return build


def random_params(rng: random.Random) -> SamplingParams:
    max_tokens = rng.choice([0, 1, 2, 5, 20])
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, max_tokens]),
        n=rng.choice([1, 1, 1, 3]),
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.choice([None, 5]),
        top_k=rng.choice([0, 3]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        stop=rng.choice([(), (), ("a", "�", "é"), ("B",)]),
        bad_words=rng.choice([(), (), ((7,), (8, 9))]),
        allowed_token_ids=rng.choice([None, None, None, (5, 6, 7)]),
        logprobs=rng.choice([None, None, 2]),
        prompt_logprobs=rng.choice([None, None, 1]),
    )


def check_request(request: Request, choice: int, outputs: list[RequestOutput]) -> None:
    params, reason = request.params, outputs[-1].finish_reason
    ids = [token for output in outputs for token in output.ids]
    text = "".join(output.text for output in outputs)
    assert params.max_tokens is not None
    assert len(ids) <= params.max_tokens
    if params.allowed_token_ids is not None:
        assert set(ids) <= set(params.allowed_token_ids)
    if params.min_tokens == 0:
        assert not any(stop in text for stop in params.stop if reason is not FinishReason.CANCELLED)
    if reason is FinishReason.CANCELLED:
        return
    assert len(ids) >= params.min_tokens
    assert len(ids) == params.max_tokens or reason is FinishReason.STOP
    if params.logprobs is not None:
        assert [entry.id for output in outputs for entry in output.logprobs] == ids
    if params.prompt_logprobs is not None and choice == 0:
        scored = [entry.id for output in outputs for entry in output.prompt_logprobs]
        assert scored == list(request.prompt[1:])


@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_lost_and_nothing_is_left(
    seed: int, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    lazy = seed % 2 == 1
    config = Config(
        kv_pages=rng.choice([3, 5, 9, 17]),
        page_size=16 if lazy else rng.choice([2, 4, 16]),
        max_sequences=rng.choice([1, 3, 9]),
        step_tokens=rng.choice([1, 7, 64]),
    )
    device = LazyBackend().open(0, {}) if lazy else ReferenceDevice()
    client, engine = start(rng.choice([tiny_llama, tiny_gemma])(), device, config, 2)
    call = ReferenceProgram.__call__

    def sometimes_full(self: ReferenceProgram, batch: object, previous: object) -> object:
        if len(batch.tokens) > 1 and rng.random() < 0.02:  # type: ignore[attr-defined]
            raise OutOfMemory("full")
        return call(self, batch, previous)  # type: ignore[arg-type]

    monkeypatch.setattr(ReferenceProgram, "__call__", sometimes_full)
    beginnings = [[rng.randrange(4, VOCABULARY) for _ in range(40)] for _ in range(3)]
    requests: dict[str, Request] = {}
    living: dict[str, set[int]] = {}
    outputs: dict[tuple[str, int], list[RequestOutput]] = {}
    refused = steps = 0
    while len(requests) + refused < REQUESTS or client.has_work:
        if len(requests) + refused < REQUESTS and rng.random() < 0.5:
            beginning = rng.choice(beginnings)[: rng.randint(1, 40)]
            request = Request(
                id=str(len(requests)),
                prompt=(*beginning, *rng.choices(range(4, VOCABULARY), k=rng.choice([0, 3]))),
                params=random_params(rng),
                adapter=rng.choice([None, "adapter-0", "adapter-1"]),
                salt=rng.choice([None, "one", "two"]),
                priority=rng.choice([0, 0, -1]),
            )
            try:
                client.submit(request)
            except RequestError as error:
                if "context" not in str(error):
                    raise
                refused += 1
            else:
                requests[request.id] = request
                living[request.id] = set(range(request.params.n))
        if living and rng.random() < 0.05:
            client.cancel(rng.choice(list(living)))
        for output in client.poll():
            assert output.error is None
            assert output.choice in living[output.request_id]
            outputs.setdefault((output.request_id, output.choice), []).append(output)
            if output.finish_reason is not None:
                living[output.request_id].remove(output.choice)
                if not living[output.request_id]:
                    del living[output.request_id]
        steps += 1
        assert steps < STEPS
        if steps % 16 == 0:
            engine.kv.check_integrity()
    assert not living
    assert outputs
    engine.kv.check_integrity()
    assert all(usage.in_use == usage.limbo == 0 for usage in engine.kv.usage())
    for (request_id, choice), news in outputs.items():
        length = len(requests[request_id].prompt) + sum(len(output.ids) for output in news)
        assert length <= engine.max_length
        if length < engine.max_length:
            check_request(requests[request_id], choice, news)
    client.close()


def test_an_id_can_be_used_again_after_a_stop_text(start: Start) -> None:
    client, _ = start(tiny_llama(), ReferenceDevice(), Config(), 0)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    request = Request(id="same", prompt=(5, 6, 7), params=params)
    news = list(client.generate([request]))
    text = "".join(output.text for output in news)
    stop = next(character for character in text[1:] if character != "�")
    stopping = Request(
        id="same",
        prompt=(5, 6, 7),
        params=SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, stop=(stop,)),
    )
    client.submit(stopping)
    while not any(output.finish_reason for output in client.poll()):
        pass
    again = list(client.generate([request]))
    assert [output.ids for output in again] == [output.ids for output in news]
    assert again[-1].finish_reason is FinishReason.LENGTH


def test_an_id_is_taken_until_its_end_was_seen(start: Start) -> None:
    client, _ = start(tiny_llama(), ReferenceDevice(), Config(), 0)
    request = Request(id="same", prompt=(5,), params=SamplingParams(max_tokens=9))
    client.submit(request)
    client.cancel("same")
    with pytest.raises(RequestError, match="'same' has not ended"):
        client.submit(request)
    assert [output.finish_reason for output in client.drain()] == [FinishReason.CANCELLED]
    client.submit(request)
    assert list(client.drain())[-1].finish_reason in (FinishReason.LENGTH, FinishReason.STOP)


def test_a_cancelled_request_does_not_stop_at_half_a_character(start: Start) -> None:
    """The last of a text, U+FFFD for a character that was never finished, may be a stop text."""
    client, _ = start(tiny_llama(), ReferenceDevice(), Config(), 0)
    lead_byte = [
        token for token in range(4, VOCABULARY) if client.tokenizer.token_bytes(token) == b"\xc3"
    ]
    params = SamplingParams(max_tokens=9, stop=("�",))
    client.submit(Request(id="r", prompt=(5, *lead_byte[:1]), params=params))
    client.cancel("r")
    [output] = client.drain()
    assert lead_byte
    assert (output.finish_reason, output.stop_text) == (FinishReason.CANCELLED, None)


def test_the_same_matrices_in_another_place_are_another_adapter(start: Start) -> None:
    """KV that was cached under an adapter must not serve one of its name and numbers that changes
    another layer."""
    client, engine = start(tiny_llama(), ReferenceDevice(), Config(), 1)
    engine.remove_adapter("adapter-0")
    pair = next(iter(tiny_llama().adapter(np.random.default_rng(0))["layers.0.down"]))
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    request = Request(id="r", prompt=tuple(range(5, 60)), params=params, adapter="a")
    answers, cached = [], []
    for layer, prefix_cache in ((0, True), (1, True), (1, False)):
        engine.kv.prefix_cache = prefix_cache
        engine.add_adapter("a", {f"layers.{layer}.down": [pair]})
        outputs = list(client.generate([request]))
        answers.append([output.ids for output in outputs])
        cached.append(outputs[0].num_cached_tokens)
        while engine.has_work:
            engine.step()
        engine.remove_adapter("a")
    assert cached == [0, 0, 0]
    assert answers[1] == answers[2]


def test_a_step_that_numpy_has_no_memory_for_is_made_smaller(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, engine = start(tiny_llama(), ReferenceDevice(), Config(prefix_cache=False), 0)
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    request = Request(id="r", prompt=tuple(range(5, 45)), params=params)
    expected = [output.ids for output in client.generate([request])]
    attention = ReferenceOps.attention
    sizes: list[int] = []

    def narrow(self: ReferenceOps, q: Any, *arguments: Any, **named: Any) -> Any:
        sizes.append(len(q))
        if len(q) > 16:
            raise MemoryError("no room")
        return attention(self, q, *arguments, **named)

    monkeypatch.setattr(ReferenceOps, "attention", narrow)
    assert [output.ids for output in client.generate([request])] == expected
    assert sizes[0] == 40
    assert max(sizes[2:]) <= 16
    engine.kv.check_integrity()
