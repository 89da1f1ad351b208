"""The engine on the reference device: what it refuses, what it reports, what it counts."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polysilicon.backend import DeviceLost, OutOfMemory
from polysilicon.engine.engine import Engine
from polysilicon.errors import RequestError
from polysilicon.reference.device import ReferenceDevice
from polysilicon.request import FinishReason, Request
from polysilicon.testing.engine_bench import EngineBench, greedy
from polysilicon.testing.tiny_models import EOS, HIDDEN, VOCABULARY, tiny_llama

LENGTH = 40


@pytest.fixture
def bench(tmp_path: Path) -> EngineBench:
    return EngineBench(ReferenceDevice(), tiny_llama(), tmp_path, max_length=LENGTH)


@pytest.fixture
def engine(bench: EngineBench) -> Iterator[Engine]:
    engine = bench.engine()
    yield engine
    engine.close()


def request(prompt: Any = (5, 6, 7), id: str = "r", **fields: Any) -> Request:
    options = {name: fields.pop(name) for name in ("adapter", "salt", "priority") if name in fields}
    return Request(id=id, prompt=tuple(prompt), params=greedy(**fields), **options)


REFUSED = {
    "the prompt is empty": request(()),
    "must lie in": request((5, VOCABULARY)),
    "ids must lie in": request((-1,)),
    "no adapter 'none' is loaded": request(adapter="none"),
    f"must fit into the context of {LENGTH}": request(range(LENGTH)),
    "logit_bias names token": request(logit_bias={VOCABULARY: 1.0}),
    "stop_token_ids names token": request(stop_token_ids=(-1,)),
    "bad_words names token": request(bad_words=((1, VOCABULARY),)),
    "allowed_token_ids names token": request(allowed_token_ids=(VOCABULARY,)),
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused_requests_leave_nothing_behind(
    bench: EngineBench, engine: Engine, words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        engine.add(REFUSED[words])
    assert not engine.has_work
    good = request()
    bench.judge([good], bench.run(engine, [good]))


def test_one_id_is_served_once_at_a_time(bench: EngineBench, engine: Engine) -> None:
    engine.add(request())
    with pytest.raises(RequestError, match="'r' is being served already"):
        engine.add(request())
    while engine.has_work:
        engine.step()
    bench.run(engine, [request()])


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "output"),
    [(LENGTH - 1, 5, 1), (LENGTH - 3, None, 3), (LENGTH, 0, 0), (LENGTH - 3, 2, 2)],
)
def test_the_context_is_filled_and_not_passed(
    bench: EngineBench, engine: Engine, prompt: int, max_tokens: int | None, output: int
) -> None:
    asked = request(range(prompt), max_tokens=max_tokens)
    answer = bench.run(engine, [asked])["r", 0]
    assert len(answer.ids) == output
    assert answer.finish_reason is FinishReason.LENGTH


def test_counts(bench: EngineBench, engine: Engine) -> None:
    """Prompt tokens that were computed, output tokens, steps; cached tokens count for neither."""
    bench.run(engine, [request(range(20), max_tokens=4), request(range(3), id="s", max_tokens=2)])
    counts = engine.counts
    assert (counts.prompt_tokens, counts.output_tokens) == (23, 6)
    assert 4 <= counts.steps <= 6
    assert counts.core_seconds > 0
    bench.run(engine, [request(range(20), max_tokens=1)])
    assert (counts.prompt_tokens, counts.output_tokens) == (24, 7)


def test_fields_of_the_outputs(bench: EngineBench, engine: Engine) -> None:
    """What comes once comes with the first output, what ends with the last."""
    engine.add(request(range(10), max_tokens=3, logprobs=2, prompt_logprobs=1))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [len(output.ids) for output in outputs] == [1, 1, 1]
    assert [len(output.prompt_logprobs) for output in outputs] == [9, 0, 0]
    assert [len(output.next_top) for output in outputs] == [2, 0, 0]
    assert [len(output.logprobs) for output in outputs] == [1, 1, 1]
    assert [output.finish_reason for output in outputs] == [None, None, FinishReason.LENGTH]
    for output in outputs:
        assert (output.request_id, output.choice, output.error, output.text) == ("r", 0, None, "")
        [logprob] = output.logprobs
        assert logprob.id == output.ids[0]
        assert logprob.top[0] == (logprob.id, logprob.logprob)
    assert outputs[0].next_top == outputs[0].logprobs[0].top


@pytest.mark.parametrize("embed", [None, "mean"])
def test_waiting_ends_before_computing_begins(
    bench: EngineBench, engine: Engine, embed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference computes within the call that submits."""
    begun: list[float] = []

    def timed(call: Any) -> Any:
        def submit(*arguments: Any) -> Any:
            begun.append(time.monotonic())
            return call(*arguments)

        return submit

    for name in ("step", "embed"):
        monkeypatch.setattr(engine.executor, name, timed(getattr(engine.executor, name)))
    engine.add(dataclasses.replace(request(max_tokens=0), embed=embed))
    outputs = engine.step()
    while engine.has_work:
        outputs += engine.step()
    [output] = outputs
    assert output.times is not None
    assert output.times.first_scheduled is not None
    assert output.times.arrival <= output.times.first_scheduled <= begun[0]


def test_without_a_seed_draws_differ(bench: EngineBench, engine: Engine) -> None:
    asked = request(temperature=1.5, max_tokens=20)
    first, second = (tuple(bench.run(engine, [asked])["r", 0].ids) for _ in range(2))
    assert first != second


def test_priority_goes_before_arrival(bench: EngineBench) -> None:
    engine = bench.engine(max_sequences=1)
    order = [("late", 1), ("middle", 0), ("early", -1)]
    for name, priority in order:
        engine.add(request(id=name, priority=priority, max_tokens=2))
    ended = []
    while engine.has_work:
        ended += [output.request_id for output in engine.step() if output.finish_reason]
    assert ended == ["early", "middle", "late"]
    engine.close()


def test_cancelling(bench: EngineBench, engine: Engine) -> None:
    """Waiting, running, one choice, unknown: each ends once, its news comes with the next step."""
    for id in ("a", "b"):
        engine.add(request(id=id, max_tokens=20, n=2))
    engine.cancel("a")
    outputs = engine.step()
    cancelled = [o for o in outputs if o.finish_reason is FinishReason.CANCELLED]
    assert [(o.request_id, o.choice, o.ids) for o in cancelled] == [("a", 0, ()), ("a", 1, ())]
    engine.step()
    engine.cancel("b", 1)
    engine.cancel("b", 7)
    engine.cancel("unknown")
    engine.cancel("a")
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    ends = {(o.request_id, o.choice): o.finish_reason for o in outputs if o.finish_reason}
    assert ends == {("b", 0): FinishReason.LENGTH, ("b", 1): FinishReason.CANCELLED}
    assert sum(len(o.ids) for o in outputs if o.choice == 1) == 0
    engine.kv.check_integrity()


class TestAdapters:
    @pytest.fixture
    def engine(self, bench: EngineBench) -> Iterator[Engine]:
        rng = np.random.default_rng(5)
        for name in ("one", "two"):
            bench.set_adapter(name, tiny_llama().adapter(rng))
        engine = bench.engine()
        yield engine
        engine.close()

    def test_names_and_slots(self, bench: EngineBench, engine: Engine) -> None:
        weights = bench.adapters["one"]
        with pytest.raises(RequestError, match="'one' is loaded already"):
            engine.add_adapter("one", weights)
        with pytest.raises(RequestError, match="all adapter slots are taken"):
            engine.add_adapter("three", weights)
        with pytest.raises(RequestError, match="no adapter 'three' is loaded"):
            engine.remove_adapter("three")
        with pytest.raises(RequestError, match=r"loaded: one, two"):
            engine.add(request(adapter="three"))

    def test_weights_that_do_not_fit_take_no_slot(self, bench: EngineBench, engine: Engine) -> None:
        engine.remove_adapter("two")
        down = np.zeros((1, HIDDEN), np.float32)
        for wrong in (
            {"layers.9.down": [None]},
            {"layers.0.qkv": [None]},
            {"layers.0.o": [(down, np.zeros((HIDDEN, 1), np.float32))]},
            {"layers.0.gate_up": [(np.repeat(down, 9, 0), np.zeros((96, 9), np.float32)), None]},
        ):
            with pytest.raises(RequestError, match="adapter 'wrong' does not fit the model"):
                engine.add_adapter("wrong", wrong)
        engine.add_adapter("two", bench.adapters["two"])
        asked = request(adapter="two")
        bench.judge([asked], bench.run(engine, [asked]))

    def test_one_in_use_stays(self, bench: EngineBench, engine: Engine) -> None:
        engine.add(request(adapter="one", max_tokens=3))
        for _ in range(2):
            with pytest.raises(RequestError, match="'one' is in use"):
                engine.remove_adapter("one")
            engine.step()
        while engine.has_work:
            engine.step()
        engine.remove_adapter("one")
        with pytest.raises(RequestError, match="no adapter 'one' is loaded"):
            engine.add(request(adapter="one"))

    def test_a_name_for_other_weights_finds_no_old_pages(
        self, bench: EngineBench, engine: Engine
    ) -> None:
        prompt = range(30)
        asked = request(prompt, adapter="one")
        for cached in (0, 29):
            assert bench.run(engine, [asked])["r", 0].num_cached_tokens == cached
        weights = bench.adapters["one"]
        changed = {
            target: [None if pair is None else (pair[0], 2 * pair[1]) for pair in parts]
            for target, parts in weights.items()
        }
        for content, cached in ((changed, 0), (weights, 29)):
            engine.remove_adapter("one")
            engine.add_adapter("one", content)
            assert bench.run(engine, [asked])["r", 0].num_cached_tokens == cached


@pytest.mark.parametrize("place", ["submitting", "collecting"])
def test_news_survive_the_loss_of_the_device(
    engine: Engine, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that was cancelled just before is reported, as the others are."""
    engine.add(request(id="cancelled", max_tokens=9))
    engine.add(request(id="lost", max_tokens=9))
    engine.step()
    engine.cancel("cancelled")

    def fail(*_: Any) -> Any:
        raise DeviceLost("gone")

    if place == "submitting":
        monkeypatch.setattr(engine.executor, "step", fail)
    else:
        flight = engine._in_flight[0]
        pending = type("Lost", (), {"result": fail})()
        engine._in_flight[0] = dataclasses.replace(flight, pending=pending)
    outputs = engine.step()
    ends = {output.request_id: (output.finish_reason, output.error) for output in outputs}
    assert ends == {
        "cancelled": (FinishReason.CANCELLED, None),
        "lost": (FinishReason.ERROR, "the device failed: gone"),
    }
    assert engine.failure == "the device failed: gone"
    assert not engine.has_work


@pytest.mark.parametrize("run_ahead", [True, False])
def test_streams_share_a_device_that_takes_fewer_than_there_are(
    bench: EngineBench, run_ahead: bool
) -> None:
    """Where decodes alone are more than fits some of them wait; sizes that failed are not tried
    over and over."""
    engine = bench.engine(run_ahead=run_ahead)
    step, refused = engine.executor.step, []

    def limited(batch: Any, *rest: Any) -> Any:
        if len(batch.tokens) > 3:
            refused.append(len(batch.tokens))
            raise OutOfMemory("no more than 3 tokens fit")
        return step(batch, *rest)

    engine.executor.step = limited  # type: ignore[method-assign]
    requests = [request((index,), id=f"{index}", max_tokens=5) for index in range(8)]
    bench.judge(requests, bench.run(engine, requests))
    assert refused == [8, 4]
    engine.close()


def test_end_of_sequence_is_reported_with_its_token(bench: EngineBench, engine: Engine) -> None:
    asked = request(ignore_eos=False, logit_bias={EOS: 100.0})
    answer = bench.run(engine, [asked])["r", 0]
    assert answer.ids == [EOS]
    assert answer.finish_reason is FinishReason.STOP
