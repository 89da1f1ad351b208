"""The engine process behind the dispatcher answers as an engine in this process does."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path

import pytest

from polysilicon.config import Config
from polysilicon.engine.loading import load
from polysilicon.engine.stats import EngineStats
from polysilicon.errors import (
    ConfigError,
    ModelError,
    Overloaded,
    PluginError,
    RequestError,
    ServiceUnavailable,
)
from polysilicon.request import FinishReason, Request, RequestOutput, SamplingParams
from polysilicon.server.dispatcher import Dispatcher


@dataclasses.dataclass
class Answer:
    """All news of one choice together. scored: ids of which there are log-probabilities; those
    depend on the batch by rounding, and are compared apart."""

    ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    scored: list[int] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_text: str | None = None
    logprobs: list[float] = dataclasses.field(default_factory=list, compare=False)


Answers = dict[tuple[str, int], Answer]


def config(**values: object) -> Config:
    return Config.model_validate(
        {"backend": "reference", "max_sequences": 8, "kv_pages": 129} | values
    )


def request(name: str, prompt: Sequence[int] = (5, 6, 7), **params: object) -> Request:
    values: dict[str, object] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | params
    return Request(id=name, prompt=tuple(prompt), params=SamplingParams(**values))


def answers(outputs: Iterable[RequestOutput]) -> Answers:
    found: Answers = {}
    for output in outputs:
        answer = found.setdefault((output.request_id, output.choice), Answer())
        assert answer.finish_reason is None, "news of a choice that has ended"
        answer.ids += output.ids
        answer.text += output.text
        for entry in (*output.prompt_logprobs, *output.logprobs):
            answer.scored += [entry.id, *(token for token, _ in entry.top)]
            answer.logprobs += [entry.logprob, *(value for _, value in entry.top)]
        answer.finish_reason, answer.stop_text = output.finish_reason, output.stop_text
    return found


@contextlib.asynccontextmanager
async def dispatching(path: Path, **values: object) -> AsyncIterator[Dispatcher]:
    dispatcher = Dispatcher(config(**values), path)
    try:
        await dispatcher.start()
        yield dispatcher
    finally:
        await dispatcher.close()


async def answer(dispatcher: Dispatcher, asked: Request) -> list[RequestOutput]:
    outputs = []
    with dispatcher.submit(asked) as stream:
        async for news in stream:
            assert news
            outputs += news
    return outputs


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.005)


async def check_empty(dispatcher: Dispatcher) -> None:
    """That the engine holds nothing of any request, and that its books are right."""
    assert await dispatcher.check() is None
    stats = dispatcher.stats
    assert stats.requests == stats.running == stats.num_waiting == 0
    assert all(group.in_use == 0 for group in stats.kv)
    await until(lambda: all(group.limbo == 0 for group in dispatcher.stats.kv))
    assert dispatcher.num_requests == 0


def mixed_requests(rng: random.Random, count: int) -> list[Request]:
    common = [rng.randrange(4, 211) for _ in range(40)]
    kinds: list[dict[str, object]] = [
        {},
        {"temperature": 1.0, "seed": 7},
        {"n": 3, "temperature": 0.8, "seed": 2**64 - 1},
        {"logprobs": 3, "prompt_logprobs": 2},
        {"max_tokens": 0, "prompt_logprobs": 0},
        {"max_tokens": 1},
        {"stop": tuple("abcdefghijklm"), "temperature": 1.0, "seed": 3, "max_tokens": 60},
        {"ignore_eos": False, "temperature": 1.5, "seed": 11, "max_tokens": 60},
        {"logit_bias": {9: 100.0}, "bad_words": ((9, 9),), "repetition_penalty": 1.3},
        {"allowed_token_ids": (30, 31, 32), "frequency_penalty": 0.5},
    ]
    return [
        request(
            f"request-{index}",
            [*common[: rng.randrange(1, 40)], rng.randrange(4, 211)],
            **kinds[index % len(kinds)],
        )
        for index in range(count)
    ]


def offline(path: Path, requests: Sequence[Request]) -> Answers:
    loaded = load(config(), path)
    try:
        return answers(loaded.client.generate(requests))
    finally:
        loaded.client.close()
        loaded.checkpoint.close()


def test_answers_equal_those_of_an_engine_in_this_process(tiny_path: Path) -> None:
    requests = mixed_requests(random.Random(1), 20)
    expected = offline(tiny_path, requests)

    async def serve() -> list[RequestOutput]:
        async with dispatching(tiny_path) as dispatcher:
            assert dispatcher.facts.max_length == 512
            assert dispatcher.facts.vocab_size == 211
            assert dispatcher.facts.kv_pages == 128
            assert dispatcher.facts.eos_ids == dispatcher.tokenizer.eos_ids
            parts = await asyncio.gather(*(answer(dispatcher, asked) for asked in requests))
            await check_empty(dispatcher)
            return [output for part in parts for output in part]

    outputs = asyncio.run(serve())
    found = answers(outputs)
    assert found == expected
    for key, expected_answer in expected.items():
        assert found[key].logprobs == pytest.approx(expected_answer.logprobs, abs=1e-4)
    assert {answer.finish_reason for answer in expected.values()} == {
        FinishReason.STOP,
        FinishReason.LENGTH,
    }
    assert any(answer.stop_text for answer in expected.values())
    assert any(answer.logprobs for answer in expected.values())
    for last in (output for output in outputs if output.finish_reason is not None):
        times = last.times
        assert times is not None
        assert times.first_scheduled is not None
        assert times.finished is not None
        assert times.arrival <= times.first_scheduled <= times.finished <= time.monotonic()
        if times.first_token is not None:
            assert times.first_scheduled <= times.first_token <= times.finished


def test_200_requests_at_once_with_consumers_that_leave(tiny_path: Path) -> None:
    rng = random.Random(2)
    requests = [
        request(f"r{index}", [rng.randrange(4, 211) for _ in range(rng.randrange(1, 80))])
        for index in range(200)
    ]
    leaving = set(rng.sample(range(200), 60))
    expected = offline(tiny_path, [asked for i, asked in enumerate(requests) if i not in leaving])

    async def leave(dispatcher: Dispatcher, asked: Request, news: int) -> list[RequestOutput]:
        with dispatcher.submit(asked) as stream:
            for _ in range(news):
                with contextlib.suppress(StopAsyncIteration):
                    await stream.__anext__()
        return []

    async def serve() -> list[RequestOutput]:
        # The cache is too small for what runs at once, so that some of it is preempted.
        async with dispatching(tiny_path, kv_pages=33, max_waiting_kv=1e5) as dispatcher:
            parts = await asyncio.gather(
                *(
                    leave(dispatcher, asked, index % 4)
                    if index in leaving
                    else answer(dispatcher, asked)
                    for index, asked in enumerate(requests)
                )
            )
            await check_empty(dispatcher)
            return [output for part in parts for output in part]

    assert answers(asyncio.run(serve())) == expected


def test_a_consumer_that_leaves_frees_the_pages_of_its_request(
    tiny_path: Path, faulty: str
) -> None:
    async def serve() -> None:
        async with dispatching(tiny_path, backend=faulty) as dispatcher:
            for news in (0, 1, 3):
                with dispatcher.submit(request("long", n=2, max_tokens=500)) as stream:
                    for _ in range(news):
                        await stream.__anext__()
                    assert dispatcher.num_requests == 1
                began = time.monotonic()
                await check_empty(dispatcher)
                # All its tokens would take seconds.
                assert time.monotonic() - began < 1
                assert [news async for news in stream] == []
                assert stream.num_tokens < 100

    asyncio.run(serve())


def test_waiting_for_news_can_be_given_up_without_loss(tiny_path: Path) -> None:
    asked = request("patient", max_tokens=40)
    expected = offline(tiny_path, [asked])

    async def serve() -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        async with dispatching(tiny_path) as dispatcher:
            with dispatcher.submit(asked) as stream:
                while True:
                    try:
                        outputs += await asyncio.wait_for(anext(stream), 0.0005)
                    except TimeoutError:
                        continue
                    except StopAsyncIteration:
                        return outputs

    assert answers(asyncio.run(serve())) == expected


def test_what_cannot_be_served_is_refused(tiny_path: Path) -> None:
    async def serve() -> None:
        async with dispatching(tiny_path) as dispatcher:
            for asked, message in (
                (request("empty", ()), "is empty"),
                (request("long", [5] * 512), "has 512 tokens"),
                (request("foreign", (5, 211)), "must lie in"),
                (request("bias", logit_bias={400: 1.0}), "logit_bias names token 400"),
                (dataclasses.replace(request("priority"), priority=2**70), "cannot be sent"),
                (dataclasses.replace(request("salt"), salt="\ud800"), "cannot be sent"),
            ):
                with pytest.raises(RequestError, match=message):
                    dispatcher.submit(asked)
            for asked, message in (
                (dataclasses.replace(request("a", n=2), adapter="lost"), "no adapter 'lost'"),
                (dataclasses.replace(request("b"), salt=5), "Expected `str"),  # type: ignore[arg-type]
            ):
                with dispatcher.submit(asked) as stream, pytest.raises(RequestError, match=message):
                    await stream.__anext__()
            with dispatcher.submit(request("twice")), pytest.raises(RequestError, match="own id"):
                dispatcher.submit(request("twice"))
            assert len(await answer(dispatcher, request("good"))) > 0
            await check_empty(dispatcher)
            assert dispatcher.restarts == 0

    asyncio.run(serve())


def test_too_many_waiting_requests_are_turned_away(tiny_path: Path, faulty: str) -> None:
    async def serve() -> None:
        async with dispatching(
            tiny_path, backend=faulty, max_sequences=2, max_waiting=3
        ) as dispatcher:
            streams = [
                dispatcher.submit(request(f"r{index}", max_tokens=300)) for index in range(5)
            ]
            with pytest.raises(Overloaded, match="3 sequences wait") as caught:
                dispatcher.submit(request("last"))
            assert caught.value.retry_after is not None
            assert 1 <= caught.value.retry_after <= 60
            await until(lambda: dispatcher.stats.running == 2)
            with pytest.raises(Overloaded):
                dispatcher.submit(request("last"))
            streams[0].close()
            await until(lambda: dispatcher.stats.requests == 4)
            last = dispatcher.submit(request("last"))
            for stream in (*streams, last):
                stream.close()
            await check_empty(dispatcher)
            # What ended leaves nothing behind that counts as waiting.
            for index in range(20):
                assert await answer(dispatcher, request(f"again-{index}"))

    asyncio.run(serve())


def test_prompts_that_wait_may_need_only_so_many_pages(tiny_path: Path, faulty: str) -> None:
    async def serve() -> None:
        async with dispatching(
            tiny_path, backend=faulty, kv_pages=33, max_waiting_kv=2.0
        ) as dispatcher:
            # 25 pages each, and the cache has 32: 2.0 times that is 64.
            streams = [
                dispatcher.submit(request(f"r{index}", [5] * 390, max_tokens=10))
                for index in range(2)
            ]
            with pytest.raises(Overloaded, match="need 50 KV pages"):
                dispatcher.submit(request("third", [5] * 390, max_tokens=10))
            streams.append(dispatcher.submit(request("small", [5] * 20, max_tokens=10)))
            for stream in streams:
                assert [news async for news in stream]
            assert await answer(dispatcher, request("third", [5] * 390, max_tokens=10))

    asyncio.run(serve())


def test_draining_lets_running_requests_finish(tiny_path: Path, faulty: str) -> None:
    async def serve() -> None:
        async with dispatching(tiny_path, backend=faulty) as dispatcher:
            running = asyncio.create_task(answer(dispatcher, request("running", max_tokens=50)))
            await until(lambda: dispatcher.num_requests == 1)
            draining = asyncio.create_task(dispatcher.drain(30))
            await until(lambda: dispatcher.health().state == "draining")
            assert dispatcher.health().healthy
            assert not dispatcher.health().ready
            with pytest.raises(ServiceUnavailable, match="shutting down"):
                dispatcher.submit(request("late"))
            outputs = await running
            assert outputs[-1].finish_reason is FinishReason.LENGTH
            assert sum(len(output.ids) for output in outputs) == 50
            await asyncio.wait_for(draining, 1)

    asyncio.run(serve())


def test_draining_cancels_what_takes_too_long(tiny_path: Path, faulty: str) -> None:
    async def serve() -> None:
        async with dispatching(tiny_path, backend=faulty) as dispatcher:
            running = asyncio.create_task(answer(dispatcher, request("running", max_tokens=500)))
            await until(lambda: dispatcher.num_requests == 1)
            began = time.monotonic()
            await dispatcher.drain(0.3)
            assert 0.25 < time.monotonic() - began < 2
            outputs = await asyncio.wait_for(running, 1)
            assert outputs[-1].finish_reason is FinishReason.CANCELLED
            await check_empty(dispatcher)

    asyncio.run(serve())


def test_closing_ends_running_requests_with_an_error(tiny_path: Path, faulty: str) -> None:
    async def serve() -> None:
        async with dispatching(tiny_path, backend=faulty) as dispatcher:
            running = asyncio.create_task(answer(dispatcher, request("running", max_tokens=500)))
            await until(lambda: dispatcher.num_requests == 1)
            await dispatcher.close()
            outputs = await running
            assert outputs[-1].finish_reason is FinishReason.ERROR
            assert outputs[-1].error == "the server is shutting down"
            assert dispatcher.health().state == "failed"
            await dispatcher.close()

    asyncio.run(serve())


def test_observers_see_every_step(tiny_path: Path) -> None:
    async def serve() -> tuple[list[EngineStats], list[RequestOutput]]:
        seen: list[EngineStats] = []
        async with dispatching(tiny_path) as dispatcher:
            dispatcher.observe(seen.append)
            outputs: list[RequestOutput] = []
            for index in range(5):
                outputs += await answer(dispatcher, request(f"r{index}", max_tokens=30))
            await check_empty(dispatcher)
        return seen, outputs

    seen, outputs = asyncio.run(serve())
    last = seen[-1]
    assert sum(len(stats.step_seconds) for stats in seen) == last.steps
    assert all(seconds > 0 for stats in seen for seconds in stats.step_seconds)
    assert last.output_tokens == sum(len(output.ids) for output in outputs) == 150
    assert last.prompt_tokens == 15 - sum(output.num_cached_tokens for output in outputs)
    assert last.prefix_queries == 15
    assert last.prefix_hits == sum(output.num_cached_tokens for output in outputs)


def test_watchers_are_told_of_every_request(tiny_path: Path) -> None:
    class Recorder:
        def __init__(self) -> None:
            self.told: list[object] = []

        def submitted(self, request: Request) -> None:
            self.told.append(request.id)

        def news(self, output: RequestOutput) -> None:
            self.told.append(output)

        def abandoned(self, request_id: str) -> None:
            self.told.append(("abandoned", request_id))

    async def serve() -> None:
        recorder = Recorder()
        async with dispatching(tiny_path) as dispatcher:
            dispatcher.watch(recorder)
            outputs = await answer(dispatcher, request("whole"))
            assert recorder.told == ["whole", *outputs]
            recorder.told.clear()
            with dispatcher.submit(request("left", max_tokens=500)):
                pass
            await check_empty(dispatcher)
            assert recorder.told == ["left", ("abandoned", "left")]

    asyncio.run(serve())


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"backend": "nowhere"}, PluginError),
        ({"page_size": 10_000}, ConfigError),
        ({"max_length": 2**40}, ConfigError),
    ],
)
def test_an_engine_that_cannot_load_says_why(
    tiny_path: Path, values: dict[str, object], kind: type[Exception]
) -> None:
    with pytest.raises(kind) as expected:
        load(config(**values), tiny_path)

    async def serve() -> None:
        dispatcher = Dispatcher(config(**values), tiny_path)
        with pytest.raises(kind) as caught:
            await dispatcher.start()
        assert str(caught.value) == str(expected.value)
        assert dispatcher.health().state == "failed"
        assert dispatcher.health().reason == str(expected.value)
        with pytest.raises(ServiceUnavailable):
            dispatcher.submit(request("any"))

    asyncio.run(serve())


def test_a_model_that_is_missing_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        Dispatcher(config(), tmp_path / "missing.gguf")


def test_no_requests_are_taken_before_the_start(tiny_path: Path) -> None:
    async def serve() -> None:
        dispatcher = Dispatcher(config(), tiny_path)
        assert dispatcher.health().state == "starting"
        assert not dispatcher.health().healthy
        with pytest.raises(ServiceUnavailable) as caught:
            dispatcher.submit(request("early"))
        assert caught.value.retry_after is not None
        await dispatcher.close()

    asyncio.run(serve())


@pytest.mark.parametrize("depth", [0, 12])
def test_the_socket_is_nobody_elses(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """Also where the folder for temporary files has a path too long for a socket's address."""
    folder = tmp_path.joinpath(*["twenty-characters-xx"] * depth)
    folder.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    made: list[Path] = []
    make = tempfile.mkdtemp

    def remember(*arguments: object, **options: object) -> str:
        made.append(Path(make(*arguments, **options)))  # type: ignore[arg-type]
        assert made[-1].stat().st_mode & 0o777 == 0o700
        return str(made[-1])

    monkeypatch.setattr(tempfile, "mkdtemp", remember)

    async def serve() -> None:
        async with dispatching(tiny_path) as dispatcher:
            assert made
            assert not any(path.exists() for path in made)
            assert await answer(dispatcher, request("one"))

    asyncio.run(serve())
    assert not any(path.exists() for path in made)


def test_embeddings_come_through_as_they_are(tiny_path: Path) -> None:
    params = SamplingParams(max_tokens=0)
    requests = [
        Request(
            id=f"{kind}-{length}", prompt=tuple(range(5, 5 + length)), params=params, embed=kind
        )
        for kind in ("mean", "last")
        for length in (1, 40)
    ]
    loaded = load(config(), tiny_path)
    alone = [output for asked in requests for output in loaded.client.generate([asked])]
    expected = {output.request_id: output.embedding for output in alone}
    loaded.client.close()
    loaded.checkpoint.close()

    async def serve() -> dict[str, tuple[float, ...]]:
        async with dispatching(tiny_path) as dispatcher:
            with pytest.raises(RequestError, match="generates nothing"):
                dispatcher.submit(
                    Request(id="both", prompt=(5,), params=SamplingParams(), embed="mean")
                )
            parts = [await answer(dispatcher, asked) for asked in requests]
            await check_empty(dispatcher)
            return {output.request_id: output.embedding for part in parts for output in part}

    assert asyncio.run(serve()) == expected
    assert len({len(embedding) for embedding in expected.values()}) == 1
    assert expected["mean-1"] == expected["last-1"] != expected["mean-40"]
