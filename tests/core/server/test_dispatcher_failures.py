"""Engine processes that die, hang or are left alone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from polysilicon.config import Config
from polysilicon.errors import ServiceUnavailable
from polysilicon.request import FinishReason, Request, RequestOutput, SamplingParams
from polysilicon.server.dispatcher import Dispatcher

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def request(name: str, *prompt: int, max_tokens: int = 8) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Request(id=name, prompt=prompt or (5, 6, 7), params=params)


@contextlib.asynccontextmanager
async def dispatching(path: Path, backend: str, **values: object) -> AsyncIterator[Dispatcher]:
    config = {"backend": backend, "max_sequences": 8, "kv_pages": 129, "prefix_cache": False}
    dispatcher = Dispatcher(Config.model_validate(config | values), path)
    try:
        await dispatcher.start()
        yield dispatcher
    finally:
        await dispatcher.close()


async def answer(dispatcher: Dispatcher, asked: Request) -> list[RequestOutput]:
    with dispatcher.submit(asked) as stream:
        return [output async for news in stream for output in news]


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.ids]


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.005)


def engine_processes(parent: int) -> list[int]:
    """Children of a process that run an engine."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes()
            if int(stat[1]) == parent and b"polysilicon.engine.process" in command:
                found.append(int(folder.name))
    return found


DEATHS = {
    "exception": (101, ["RuntimeError: the seam came apart"]),
    "segfault": (102, ["SIGSEGV", "Segmentation fault", "faulty_plugin.py"]),
    "device lost": (103, ["the cable was pulled"]),
    "killed": (104, ["SIGKILL", "memory"]),
    "exit": (105, ["status 7"]),
}


@pytest.mark.parametrize(("token", "words"), DEATHS.values(), ids=DEATHS)
def test_requests_of_an_engine_that_dies_are_told_why_and_later_ones_are_served(
    tiny_path: Path, faulty: str, token: int, words: list[str]
) -> None:
    async def serve() -> None:
        async with dispatching(tiny_path, faulty) as dispatcher:
            expected = await answer(dispatcher, request("before"))
            neighbours = [
                asyncio.create_task(answer(dispatcher, request(f"n{index}", max_tokens=400)))
                for index in range(3)
            ]
            await until(lambda: dispatcher.stats.running == 3)
            cause = (await answer(dispatcher, request("fatal", 5, token)))[-1]
            assert not dispatcher.health().healthy
            assert dispatcher.stats.running == 0
            for last in [cause] + [(await task)[-1] for task in neighbours]:
                assert last.finish_reason is FinishReason.ERROR
                assert last.error is not None
                assert len(last.error) < 1000
                for word in words:
                    assert word in last.error
            with pytest.raises(ServiceUnavailable, match=words[0]) as caught:
                dispatcher.submit(request("early"))
            assert caught.value.retry_after is not None
            assert caught.value.retry_after >= 1
            await until(lambda: dispatcher.health().ready)
            assert dispatcher.restarts == 1
            assert tokens(await answer(dispatcher, request("after"))) == tokens(expected)
            assert await dispatcher.check() is None
            assert dispatcher.stats.requests == dispatcher.num_requests == 0

    asyncio.run(serve())


@linux
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_an_idle_engine_that_is_killed_is_started_again(
    tiny_path: Path, faulty: str, number: signal.Signals
) -> None:
    async def serve() -> None:
        async with dispatching(tiny_path, faulty) as dispatcher:
            [process] = engine_processes(os.getpid())
            os.kill(process, number)
            began = time.monotonic()
            await until(lambda: not dispatcher.health().healthy)
            assert time.monotonic() - began < 1
            await until(lambda: number.name in dispatcher.health().reason)
            await until(lambda: dispatcher.health().ready)
            assert engine_processes(os.getpid()) != [process]
            assert await answer(dispatcher, request("after"))

    asyncio.run(serve())


@linux
def test_an_engine_leaves_signals_for_the_server_alone(tiny_path: Path, faulty: str) -> None:
    async def serve() -> None:
        async with dispatching(tiny_path, faulty) as dispatcher:
            [process] = engine_processes(os.getpid())
            os.kill(process, signal.SIGTERM)
            os.kill(process, signal.SIGINT)
            assert len(tokens(await answer(dispatcher, request("after", max_tokens=60)))) == 60
            assert dispatcher.restarts == 0

    asyncio.run(serve())


@linux
def test_an_engine_that_is_stopped_counts_as_hung_once_work_waits(
    tiny_path: Path, faulty: str
) -> None:
    async def serve() -> None:
        async with dispatching(tiny_path, faulty, step_timeout=1.0) as dispatcher:
            [process] = engine_processes(os.getpid())
            os.kill(process, signal.SIGSTOP)
            await asyncio.sleep(1.5)
            assert dispatcher.health().healthy
            began = time.monotonic()
            [output] = await answer(dispatcher, request("stuck"))
            assert 1 <= time.monotonic() - began < 5
            assert output.finish_reason is FinishReason.ERROR
            assert "no step for 1 seconds while work waited" in (output.error or "")
            await until(lambda: dispatcher.health().ready)
            assert await answer(dispatcher, request("after"))
            assert dispatcher.restarts == 1

    asyncio.run(serve())


def test_a_step_that_never_ends_counts_as_hung(tiny_path: Path, faulty: str) -> None:
    async def serve() -> None:
        async with dispatching(tiny_path, faulty, step_timeout=1.0) as dispatcher:
            outputs = await answer(dispatcher, request("endless", 5, 106))
            assert "no step for 1 seconds" in (outputs[-1].error or "")
            await until(lambda: dispatcher.health().ready)
            assert await answer(dispatcher, request("after"))

    asyncio.run(serve())


def test_a_long_step_is_no_death(tiny_path: Path, faulty: str) -> None:
    async def serve() -> None:
        async with dispatching(tiny_path, faulty, step_timeout=5.0) as dispatcher:
            task = asyncio.create_task(answer(dispatcher, request("slow", 5, 107)))
            while not task.done():
                assert dispatcher.health().healthy
                await asyncio.sleep(0.05)
            assert task.result()[-1].finish_reason is FinishReason.LENGTH
            assert dispatcher.restarts == 0

    asyncio.run(serve())


def test_an_engine_that_goes_on_dying_is_given_up(tiny_path: Path, faulty: str) -> None:
    async def serve() -> None:
        async with dispatching(tiny_path, faulty, max_restarts=1) as dispatcher:
            await answer(dispatcher, request("first", 5, 105))
            await until(lambda: dispatcher.health().ready)
            await answer(dispatcher, request("second", 5, 105))
            await until(lambda: dispatcher.health().state == "failed")
            assert "status 7" in dispatcher.health().reason
            assert "--max-restarts" in dispatcher.health().reason
            with pytest.raises(ServiceUnavailable) as caught:
                dispatcher.submit(request("third"))
            assert caught.value.retry_after is None
            assert dispatcher.restarts == 1

    asyncio.run(serve())


def test_an_engine_that_dies_while_draining_is_not_started_again(
    tiny_path: Path, faulty: str
) -> None:
    async def serve() -> None:
        async with dispatching(tiny_path, faulty) as dispatcher:
            running = asyncio.create_task(answer(dispatcher, request("fatal", 5, 107, 104)))
            await until(lambda: dispatcher.num_requests == 1)
            await asyncio.wait_for(dispatcher.drain(20), 10)
            assert "SIGKILL" in ((await running)[-1].error or "")
            await until(lambda: dispatcher.health().state == "failed")
            assert dispatcher.restarts == 0

    asyncio.run(serve())


PARENT = """
import asyncio, sys
from pathlib import Path
from polysilicon.config import Config
from polysilicon.request import Request, SamplingParams
from polysilicon.server.dispatcher import Dispatcher

async def main():
    dispatcher = Dispatcher(Config(backend="faulty"), Path(sys.argv[1]))
    await dispatcher.start()
    params = SamplingParams(max_tokens=500, ignore_eos=True)
    stream = dispatcher.submit(Request(id="a", prompt=(5, int(sys.argv[2])), params=params))
    print("running", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@linux
@pytest.mark.parametrize("token", [5, 106], ids=["stepping", "hanging"])
def test_an_engine_does_not_outlive_its_parent(tiny_path: Path, faulty: str, token: int) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), str(tiny_path), str(token)],
        stdout=subprocess.PIPE,
    )
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"running\n"
        [process] = engine_processes(parent.pid)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{process}/stat").exists():
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "Z":  # Nobody may be there to wait for it.
            break
        assert time.monotonic() < deadline, "the engine lives on"
        time.sleep(0.01)
