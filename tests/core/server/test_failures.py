"""What clients see when the engine dies, and when too much is asked of it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time

import openai
import pytest

FOREVER = {"ignore_eos": True}


def engine_processes(server) -> list[int]:
    """Processes of the server that run the engine."""
    listed = subprocess.run(
        ["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    return [
        int(pid)
        for pid, parent, command in rows
        if int(parent) == server.process.pid and "polysilicon.engine" in command
    ]


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_dead_engine_is_told_and_replaced(serve, smollm2_path) -> None:
    with serve(str(smollm2_path), "--served-model-name", "smollm2") as server:
        client = server.client()
        (engine,) = engine_processes(server)
        errors = []

        def whole() -> None:
            with pytest.raises(openai.InternalServerError) as raised:
                client.completions.create(
                    model="smollm2", prompt="Once", max_tokens=1500, extra_body=FOREVER
                )
            errors.append(raised.value.message)

        asker = threading.Thread(target=whole)
        asker.start()
        stream = client.completions.create(
            model="smollm2", prompt="Once", max_tokens=1500, stream=True, extra_body=FOREVER
        )
        chunks = iter(stream)
        next(chunks)
        os.kill(engine, signal.SIGKILL)
        with pytest.raises(openai.APIError) as raised:
            list(chunks)
        asker.join(30)
        for message in (raised.value.message, *errors):
            assert "SIGKILL" in message or "killed" in message
        assert len(errors) == 1
        assert server.get("/ready").status_code == 503
        answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
        if answer.status_code != 200:
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
        wait_until(lambda: server.get("/ready").status_code == 200)
        assert server.get("/health").status_code == 200
        assert client.completions.create(model="smollm2", prompt="a", max_tokens=2).usage
        assert engine_processes(server) != [engine]
        assert any("SIGKILL" in line and "started again" in line for line in server.lines)


def test_streams_of_an_engine_that_hangs_end_with_an_error(serve, smollm2_path) -> None:
    with serve(str(smollm2_path), "--drain-timeout", "0.1") as server:
        stream = server.client().completions.create(
            model=None, prompt="Once", max_tokens=1900, stream=True, extra_body=FOREVER
        )
        chunks = iter(stream)
        next(chunks)
        (engine,) = engine_processes(server)
        os.kill(engine, signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(chunks)
        assert server.process.wait(30) == 0
        assert not any("Traceback" in line for line in server.lines)


def test_overload_is_refused_with_a_time_to_come_back(serve, smollm2_path) -> None:
    with serve(str(smollm2_path), "--max-sequences", "1", "--max-waiting", "1") as server:
        client = server.client()
        begun = []
        for _ in range(2):
            thread = threading.Thread(
                target=lambda: begun.append(
                    client.completions.create(
                        model=None, prompt="Once", max_tokens=700, extra_body=FOREVER
                    )
                )
            )
            thread.start()
            time.sleep(0.3)
        for path, body in (
            ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
            ("/v1/completions", {"prompt": "a", "max_tokens": 1, "stream": True}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
        ):
            answer = server.post(path, body)
            assert answer.status_code == 503, answer.text
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["type"] == "overloaded_error"
        wait_until(lambda: len(begun) == 2)
        # The clients come back by themselves.
        retrying = server.client(max_retries=5)
        assert retrying.completions.create(model=None, prompt="a", max_tokens=1).usage
