"""`polysilicon bench serve` when the server does not do as it should."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from polysilicon.bench import serve as serve_module

from .conftest import Answer, event

ONE = ("--num-prompts", 1, "--output-tokens", 3)


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def test_a_server_that_is_down_is_named_with_the_mend(bench, closed_port):
    status, out, err = bench("--url", f"http://127.0.0.1:{closed_port}", *ONE)
    assert status == 1
    assert out == ""
    assert err.startswith(
        f"error: http://127.0.0.1:{closed_port} cannot be reached: cannot connect"
    )
    assert err.count("\n") == 1
    assert "--url" in err


@pytest.mark.parametrize(
    "url", ["ftp://127.0.0.1", "http://", "http://127.0.0.1:99999", "http://127.0.0.1/?a=1", "::"]
)
def test_addresses_that_are_none_are_refused(bench, url):
    status, _, err = bench("--url", url, *ONE)
    assert status == 2
    assert "--url" in err


def test_a_server_of_another_kind_is_told(bench, server):
    server.models = None
    status, _, err = bench("--url", server.url, *ONE)
    assert status == 1
    assert "lists no model (HTTP 404)" in err
    assert "--model" in err


@pytest.mark.parametrize("models", [{"data": []}, [], {"data": [{"name": "x"}]}, "x"])
def test_odd_lists_of_models_are_told(bench, server, models):
    server.models = models
    status, _, err = bench("--url", server.url, *ONE)
    assert status == 1
    assert "lists no model" in err


def test_a_model_may_be_named_where_none_is_listed(bench, server):
    server.models = None
    assert bench("--url", server.url, "--model", "mine", *ONE)[0] == 0
    assert server.seen[0].body["model"] == "mine"


def test_requests_that_are_refused_in_every_form_end_it_with_the_servers_words(bench, server):
    server.refuses = lambda body: "no such model: fake"
    status, out, err = bench("--url", server.url, *ONE)
    assert status == 1
    assert out == ""
    assert "no such model: fake" in err
    assert err.count("\n") == 1


MALFORMED = Answer(tokens=2, body=b'data: {"choices": [{\n\n')
WRONG = Answer(tokens=1, body=event(choices=[{"text": 5}]))


@pytest.mark.parametrize(
    ("answer", "cause", "words"),
    [
        (Answer(status=503, body=b'{"error": {"message": "full"}}'), "HTTP 503", "full"),
        (Answer(status=500, body=b"<html>Oops"), "HTTP 500", "<html>Oops"),
        (Answer(status=404, body=b'{"detail": "Not Found"}'), "HTTP 404", "Not Found"),
        (Answer(content_type="application/json", body=b"{}"), "no event stream", "json"),
        (Answer(tokens=2, cut=True), "connection lost", ""),
        (Answer(tokens=2, body=b": nothing more\n\n"), "stream cut short", "2 pieces"),
        (MALFORMED, "malformed stream", ""),
        (WRONG, "malformed stream", "5"),
        (Answer(tokens=1, body=event(error={"message": "died"})), "error in the stream", "died"),
        (Answer(tokens=0), "no tokens", "length"),
        (Answer(ttft=5), "timeout", ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_failures_are_counted_by_cause_and_the_run_goes_on(bench, server, answer, cause, words):
    server.answer = lambda index, body: answer if index % 3 == 0 else Answer()
    arguments = ["--num-prompts", 6, "--output-tokens", 3, "--timeout", 0.5, "--json"]
    status, out, err = bench("--url", server.url, *arguments, "--save-detailed")
    assert status == 0
    figures = json.loads(out)
    assert (figures["completed"], figures["failed"]) == (4, 2)
    assert figures["failures"] == {cause: 2}
    assert figures["total_output_tokens"] == 12
    assert f"2 failed: {cause}: " in err
    assert words in err
    assert sum(text.startswith(cause) for text in figures["errors"]) == 2


def test_a_run_without_a_completed_request_fails(bench, server):
    server.answer = lambda index, body: Answer(status=503)
    status, out, err = bench("--url", server.url, *ONE, "--goodput", "ttft:5", "--json")
    assert status == 1
    figures = json.loads(out)
    assert figures["completed"] == 0
    assert figures["request_goodput"] == figures["mean_ttft_ms"] == 0
    assert "no request completed" in err


def test_a_failed_warm_up_ends_it(bench, server):
    server.answer = lambda index, body: Answer(status=503, body=b"busy")
    status, out, err = bench("--url", server.url, *ONE, warm_ups=1)
    assert status == 1
    assert out == ""
    assert "the warm-up failed: HTTP 503: busy" in err


def test_a_server_that_dies_ends_the_run(bench, server, monkeypatch):
    monkeypatch.setattr(serve_module, "_GIVE_UP_SECONDS", 0.3)
    server.answer = lambda index, body: Answer(gap=0.05)

    def die():
        while len(server.seen) < 6:
            time.sleep(0.01)
        server.stop()

    threading.Thread(target=die, daemon=True).start()
    began = time.perf_counter()
    arguments = ["--num-prompts", 1000, "--request-rate", 20, "--output-tokens", 3, "--json"]
    status, out, err = bench("--url", server.url, *arguments)
    assert time.perf_counter() - began < 20
    assert status == 0
    figures = json.loads(out)
    assert figures["completed"] > 0
    assert figures["failures"]["cannot connect"] > 0
    assert figures["completed"] + figures["failed"] + figures["not_sent"] == 1000
    assert figures["not_sent"] > 900
    assert "nobody has listened" in err


def test_an_interrupt_reports_what_was_measured(server, tmp_path):
    """In a process of its own, as a terminal would do it."""
    server.answer = lambda index, body: Answer(gap=0.05 if index < 4 else 30)
    result = tmp_path / "result.json"
    command = ["bench", "serve", "--url", server.url, "--num-prompts", "50", "--max-concurrency"]
    command += ["8", "--output-tokens", "3", "--result", str(result), "--num-warmups", "0"]
    process = subprocess.Popen(
        [sys.executable, "-c", "from polysilicon.cli import main; main()", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while len(server.seen) < 12 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Completed requests" in out
    assert "Traceback" not in err
    assert "ended early: interrupted" in err
    figures = json.loads(result.read_text())
    assert figures["completed"] == 4
    assert figures["failures"] == {"interrupted": 8}
    assert figures["not_sent"] == 38


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--goodput", "speed:3"], "--goodput"),
        (["--goodput", "ttft:x"], "--goodput"),
        (["--goodput", "ttft:nan"], "--goodput"),
        (["stray"], "unexpected argument 'stray'"),
        (["--request-rate", "0"], "--request-rate"),
        (["--request-rate", "1,,2"], "--request-rate"),
        (["--request-rate", "nan"], "--request-rate"),
        (["--burstiness", "0"], "--burstiness"),
        (["--ramp-up-strategy", "linear"], "--ramp-up-start-rps"),
        (["--range-ratio", "1"], "--range-ratio"),
        (["--shared-prefix", "512"], "--shared-prefix"),
        (["--length-scale", "0"], "--length-scale"),
        (["--extra-body", "[1]"], "--extra-body"),
        (["--header", "X"], "--header"),
        (["--header", "a b=c"], "--header"),
        (["--mooncake", "a", "--sharegpt", "b"], "give one"),
        (["--mooncake", "missing.jsonl"], "missing.jsonl cannot be read"),
        (["--sharegpt", "missing.json"], "missing.json cannot be read"),
        (["--report", "missing/report.html"], "missing/report.html cannot be written"),
        (["--endpoint", "other"], "--endpoint"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_flags_that_cannot_be_used_name_the_mend(bench, closed_port, arguments, message):
    status, out, err = bench("--url", f"http://127.0.0.1:{closed_port}", *arguments)
    assert status == 2
    assert out == ""
    assert message in err
