"""A model that only llama.cpp knows, through the core's engine, against a float64 forward."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from polysilicon.engine.loading import Loaded
from polysilicon.errors import RequestError
from polysilicon.request import Request

from .conftest import EOS, Judge, count_preemptions, greedy, serve

Opened = Callable[..., Loaded]


def prompt(rng: np.random.Generator, length: int) -> tuple[int, ...]:
    return tuple(int(token) for token in rng.integers(0, EOS, length))


def nine(rng: np.random.Generator) -> list[Request]:
    """From one token to several pages of 16; some begin alike, also in the midst of a page."""
    common = prompt(rng, 40)
    prompts = [
        prompt(rng, 1), common + prompt(rng, 13), prompt(rng, 16), common, prompt(rng, 17),
        common + prompt(rng, 45), prompt(rng, 33), common[:25] + prompt(rng, 3), prompt(rng, 70),
    ]  # fmt: skip
    return [
        Request(id=f"r{index}", prompt=ids, params=greedy(6 + index % 4, logprobs=0))
        for index, ids in enumerate(prompts)
    ]


def test_auto_takes_it_for_an_architecture_of_its_own(opened: Opened, judge: Judge) -> None:
    loaded = opened()
    assert any("llamacpp" in note for note in loaded.notes)
    requests = nine(np.random.default_rng(1))
    judge(requests, serve(loaded, requests))


@pytest.mark.parametrize("step_tokens", [7, 512])
def test_nine_together_answer_as_each_alone(opened: Opened, judge: Judge, step_tokens: int) -> None:
    requests = nine(np.random.default_rng(2))
    loaded = opened(step_tokens=step_tokens)
    judge(requests, serve(loaded, requests))
    for request in requests:
        alone = opened(prefix_cache=False)
        judge([request], serve(alone, [request]))


def test_a_cached_prefix_is_found_and_right(opened: Opened, judge: Judge) -> None:
    """Also what several requests share at once, and a part of a page."""
    rng = np.random.default_rng(3)
    loaded = opened()
    common = prompt(rng, 100)
    first = Request(id="first", prompt=common + prompt(rng, 5), params=greedy())
    judge([first], serve(loaded, [first]))
    requests = [
        Request(id=f"{length}", prompt=common[:length] + prompt(rng, 3), params=greedy())
        for length in (100, 97, 64, 41, 2)
    ]
    answers = serve(loaded, requests)
    judge(requests, answers)
    cached = [answers[request.id, 0].cached for request in requests]
    assert cached == [100, 97, 64, 41, 2]
    again = serve(loaded, [first])
    judge([first], again)
    assert again["first", 0].cached == 104


def test_small_pages_preempt_and_evict(opened: Opened, judge: Judge) -> None:
    rng = np.random.default_rng(4)
    loaded = opened(kv_pages=14, page_size=8)
    for turn in range(4):
        requests = [
            Request(id=f"{turn}-{index}", prompt=prompt(rng, 11 + 3 * index), params=greedy(20))
            for index in range(6)
        ]
        judge(requests, serve(loaded, requests))
    assert count_preemptions(loaded.engine) > 0


def test_several_choices_and_prompt_log_probabilities(opened: Opened, judge: Judge) -> None:
    rng = np.random.default_rng(5)
    loaded = opened(step_tokens=32)
    params = greedy(5, n=3, logprobs=0, prompt_logprobs=0)
    requests = [Request(id=f"{n}", prompt=prompt(rng, n), params=params) for n in (2, 50, 150)]
    answers = serve(loaded, requests)
    judge(requests, answers)
    assert [len(answers[r.id, 0].prompt_logprobs) for r in requests] == [1, 49, 149]


def test_cancelled_requests_leave_nothing_wrong_behind(opened: Opened, judge: Judge) -> None:
    rng = np.random.default_rng(6)
    loaded = opened(kv_pages=40, page_size=8)
    common = prompt(rng, 30)
    for turn in range(5):
        dropped = Request(id="dropped", prompt=common + prompt(rng, 40), params=greedy(50))
        loaded.client.submit(dropped)
        for _ in range(turn + 1):
            loaded.client.poll()
        loaded.client.cancel("dropped")
        kept = Request(id=f"{turn}", prompt=common + prompt(rng, turn), params=greedy())
        answers = serve(loaded, [kept])
        judge([kept], answers)


def test_text_streams(opened: Opened) -> None:
    loaded = opened()
    ids = tuple(loaded.tokenizer.encode("nothing in there", add_special=True, parse_special=False))
    assert len(ids) == len("nothing in there") - 4
    (answer,) = serve(loaded, [Request(id="a", prompt=ids, params=greedy(30))]).values()
    assert answer.text
    assert answer.pieces > 3


def test_a_full_context(opened: Opened, judge: Judge) -> None:
    loaded = opened()
    assert loaded.engine.max_length == 256
    request = Request(id="long", prompt=prompt(np.random.default_rng(7), 226), params=greedy(30))
    judge([request], serve(loaded, [request]))
    with pytest.raises(RequestError, match="256"):
        loaded.client.submit(Request(id="more", prompt=(1,) * 256, params=greedy()))


def test_adapters_are_refused(opened: Opened) -> None:
    with pytest.raises(RequestError, match="--executor native"):
        opened().engine.add_adapter("style", {})
