"""Clients that go away, and servers that are told to end."""

from __future__ import annotations

import re
import signal
import socket
import threading
import time
from urllib.parse import urlsplit

import httpx
import openai
import pytest

LONG = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True}


def running(server) -> float:
    """Sequences in the engine, by the server's metrics."""
    text = server.get("/metrics").text
    counts = re.findall(r"^polysilicon:num_requests_(?:running|waiting)\S* (\S+)$", text, re.M)
    assert counts
    return sum(map(float, counts))


def wait_until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_goes_away_cancels_its_request(server, stream, n) -> None:
    body = httpx.Request("POST", server.url, json={**LONG, "stream": stream, "n": n}).content
    place = urlsplit(server.url)
    wait_until(lambda: running(server) == 0)
    with socket.create_connection((place.hostname, place.port), timeout=30) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        wait_until(lambda: running(server) == n)
        if stream:
            assert b"200" in client.recv(1000)
    wait_until(lambda: running(server) == 0)


def test_bodies_that_end_too_soon_are_no_failure_of_the_server(server) -> None:
    place = urlsplit(server.url)
    before = len(server.lines)
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/tokenize"):
        with socket.create_connection((place.hostname, place.port), timeout=30) as client:
            client.sendall(
                b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b'Content-Length: 100\r\n\r\n{"prompt":' % path.encode()
            )
    for _ in range(3):
        assert server.get("/health").status_code == 200
        time.sleep(0.2)
    assert not any("Traceback" in line for line in server.lines[before:])


def test_a_stream_that_is_left_cancels_its_request(server) -> None:
    with server.client() as client:
        stream = client.completions.create(
            model="smollm2", prompt="Once", max_tokens=1500, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        next(iter(stream))
        stream.close()
    wait_until(lambda: running(server) == 0)
    assert server.post("/v1/completions", {**LONG, "max_tokens": 3}).is_success


def test_sigterm_lets_running_streams_finish(serve, smollm2_path) -> None:
    with serve(str(smollm2_path), "--served-model-name", "smollm2") as server:
        client = server.client()
        stream = client.completions.create(
            model="smollm2", prompt="Once", max_tokens=150, stream=True,
            extra_body={"ignore_eos": True}, stream_options={"include_usage": True},
        )  # fmt: skip
        chunks = iter(stream)
        next(chunks)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.get("/ready").status_code == 503)
        answer = server.post("/v1/completions", {**LONG, "max_tokens": 3})
        assert answer.status_code == 503
        assert server.get("/health").status_code == 200
        assert list(chunks)[-1].usage.completion_tokens == 150
        assert server.process.wait(20) == 0


def test_the_drain_timeout_ends_what_runs(serve, smollm2_path) -> None:
    with serve(str(smollm2_path), "--drain-timeout", "0.5") as server:
        failures = []

        def ask(stream):
            try:
                answer = server.client().completions.create(
                    model=None, prompt="Once", max_tokens=1900, stream=stream,
                    extra_body={"ignore_eos": True},
                )  # fmt: skip
                list(answer)
            except openai.APIError as error:
                failures.append(error)

        askers = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
        for asker in askers:
            asker.start()
        wait_until(lambda: running(server) == 2)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        for asker in askers:
            asker.join(20)
        assert len(failures) == 2
