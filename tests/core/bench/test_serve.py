"""`polysilicon bench serve` against a server whose delays are known."""

from __future__ import annotations

import itertools
import json
import statistics
import time

import pytest

from .conftest import Answer

TOLERANCE_MS = 40.0
"""What a busy machine may add to a delay, in the median."""

VLLM_NAMES = {
    "date", "endpoint_type", "backend", "model_id", "tokenizer_id", "num_prompts", "request_rate",
    "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens",
    "total_output_tokens", "request_throughput", "request_goodput", "output_throughput",
    "total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests",
    *(
        f"{statistic}_{metric}_ms"
        for metric in ("ttft", "tpot", "itl", "e2el")
        for statistic in ("mean", "median", "std", "p99")
    ),
}  # fmt: skip
DETAILED_NAMES = {"input_lens", "output_lens", "ttfts", "itls", "start_times", "errors"}


def test_figures_are_those_of_the_server(server, bench):
    server.answer = lambda index, body: Answer(ttft=0.1, gap=0.03, cached=3)
    arguments = ["--num-prompts", 8, "--prompt-tokens", 40, "--output-tokens", 11, "--json"]
    status, out, err = bench("--url", server.url, *arguments, "--save-detailed")
    assert status == 0
    assert err == ""
    figures = json.loads(out)
    assert set(figures) >= VLLM_NAMES | DETAILED_NAMES
    assert figures["completed"] == figures["num_prompts"] == 8
    assert figures["failed"] == 0
    assert figures["total_input_tokens"] == 8 * 40
    assert figures["total_output_tokens"] == 8 * 11
    assert figures["total_cached_tokens"] == 8 * 3
    assert figures["request_rate"] == "inf"
    assert figures["tokens_counted_by"] == "usage"
    assert 100 <= figures["median_ttft_ms"] <= 100 + TOLERANCE_MS
    assert figures["median_tpot_ms"] == pytest.approx(30, abs=TOLERANCE_MS / 10)
    assert figures["median_itl_ms"] == pytest.approx(30, abs=TOLERANCE_MS)
    assert 400 <= figures["median_e2el_ms"] <= 400 + TOLERANCE_MS
    assert figures["max_concurrent_requests"] == server.most_running == 8
    assert figures["request_throughput"] == pytest.approx(8 / figures["duration"])
    assert figures["output_throughput"] == pytest.approx(88 / figures["duration"])
    assert figures["total_token_throughput"] == pytest.approx(408 / figures["duration"])
    assert [len(itls) for itls in figures["itls"]] == [10] * 8
    assert statistics.median(figures["ttfts"]) == pytest.approx(figures["median_ttft_ms"] / 1e3)
    assert 0 < figures["client_cpu_seconds"] < figures["duration"]


def test_a_piece_of_output_may_hold_several_tokens(server, bench):
    server.answer = lambda index, body: Answer(ttft=0.02, gap=0.04, per_event=3)
    arguments = ["--num-prompts", 3, "--output-tokens", 10, "--json", "--save-detailed"]
    status, out, _ = bench("--url", server.url, *arguments)
    assert status == 0
    figures = json.loads(out)
    # 3 + 3 + 3 + 1 tokens: 3 gaps of 40 ms for the 9 tokens after the first.
    assert [len(itls) for itls in figures["itls"]] == [3] * 3
    assert figures["median_tpot_ms"] == pytest.approx(120 / 9, abs=TOLERANCE_MS / 9)
    assert figures["output_lens"] == [10] * 3


def test_without_usage_events_are_counted_and_that_is_said(server, bench):
    server.usage = False
    status, out, err = bench(
        "--url", server.url, "--num-prompts", 2, "--output-tokens", 5, "--json"
    )
    assert status == 0
    figures = json.loads(out)
    assert figures["total_output_tokens"] == 10
    assert figures["total_input_tokens"] == 2 * 512
    assert figures["tokens_counted_by"] == "events"
    assert "no usage" in err


def test_chat_sends_one_message_and_its_opening_is_no_token(server, bench):
    server.answer = lambda index, body: Answer(ttft=0.01, gap=0.02)
    arguments = ["--endpoint", "chat", "--num-prompts", 2, "--output-tokens", 4]
    status, out, _ = bench("--url", server.url, *arguments, "--json", "--save-detailed")
    assert status == 0
    figures = json.loads(out)
    assert figures["endpoint_type"] == "openai-chat"
    assert [len(itls) for itls in figures["itls"]] == [3, 3]
    for seen in server.seen:
        assert seen.path == "/v1/chat/completions"
        (message,) = seen.body["messages"]
        assert message["role"] == "user"
        assert len(message["content"].split()) == 512


def test_requests_carry_what_was_asked_for(server, bench):
    arguments = ["--extra-body", '{"priority": 3, "temperature": 0.5}', "--header", "X-Tenant=a=b"]
    arguments += ["--api-key", "secret", "--num-prompts", 1, "--output-tokens", 3]
    assert bench("--url", f"{server.url}/v1/", *arguments)[0] == 0
    (seen,) = server.seen
    assert seen.path == "/v1/completions"
    assert seen.headers["x-tenant"] == "a=b"
    assert seen.headers["authorization"] == "bearer secret"
    prompt = seen.body.pop("prompt")
    assert len(prompt) == 512
    assert all(1000 <= token < 32000 for token in prompt)
    assert seen.body == {
        "model": "fake",
        "max_tokens": 3,
        "temperature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "priority": 3,
    }


@pytest.mark.parametrize(
    ("refused", "form", "fields"),
    [
        ({"ids"}, "text", {"stream_options", "ignore_eos"}),
        ({"stream_options"}, "ids", {"ignore_eos"}),
        ({"ignore_eos"}, "ids", {"stream_options"}),
        ({"ids", "ignore_eos", "stream_options"}, "text", set()),
    ],
)
def test_the_fullest_form_that_the_server_takes_is_used(server, bench, refused, form, fields):
    def refuses(body):
        used = {"ids"} if isinstance(body["prompt"], list) else set()
        wrong = refused & (used | set(body))
        return f"unknown: {wrong}" if wrong else None

    server.refuses = refuses
    status, out, err = bench(
        "--url", server.url, "--num-prompts", 1, "--output-tokens", 1, "--json"
    )
    assert status == 0
    assert json.loads(out)["prompts"] == form
    (seen,) = server.seen
    assert {"stream_options", "ignore_eos"} & set(seen.body) == fields
    assert isinstance(seen.body["prompt"], list if form == "ids" else str)
    assert ("token ids are not taken" in err) is (form == "text")


def test_ids_that_are_read_as_something_else_become_text(server, bench):
    """Servers exist that join a list of numbers into a text."""
    server.answer = lambda index, body: Answer()
    original = server._events

    async def events(seen, answer):
        if isinstance(seen.body["prompt"], list):
            seen.body["prompt"] = " ".join("a b" for _ in seen.body["prompt"])
        async for data in original(seen, answer):
            yield data

    server._events = events
    status, out, _ = bench("--url", server.url, "--num-prompts", 1, "--output-tokens", 1, "--json")
    assert status == 0
    assert json.loads(out)["prompts"] == "text"


def test_the_vocabulary_is_the_servers_or_the_flags(server, bench):
    server.models = {"data": [{"id": "a"}, {"id": "b", "meta": {"n_vocab": 100}}]}
    arguments = ["--num-prompts", 1, "--output-tokens", 1]
    assert bench("--url", server.url, "--model", "b", *arguments)[0] == 0
    assert bench("--url", server.url, "--vocab-size", 40, *arguments)[0] == 0
    first, second = server.seen
    assert (first.body["model"], second.body["model"]) == ("b", "a")
    assert all(25 <= token < 100 for token in first.body["prompt"])
    assert all(10 <= token < 40 for token in second.body["prompt"])


def test_requests_are_sent_at_their_times(server, bench):
    arguments = ["--num-prompts", 12, "--request-rate", 20, "--output-tokens", 1, "--seed", 5]
    status, out, _ = bench("--url", server.url, *arguments, "--json", "--save-detailed")
    assert status == 0
    figures = json.loads(out)
    assert figures["request_rate"] == 20
    # 12 requests at 20 a second: the last is sent after 0.6 s.
    assert 0.6 <= figures["duration"] < 0.6 + 0.5
    sent = [seen.at for seen in server.seen]
    gaps = [at - sent[0] for at in sent]
    assert gaps == pytest.approx(figures["start_times"], abs=0.15)
    assert len({round(b - a, 3) for a, b in itertools.pairwise(gaps)}) > 3


def test_concurrency_is_bounded(server, bench):
    server.answer = lambda index, body: Answer(ttft=0.03)
    arguments = ["--num-prompts", 9, "--max-concurrency", 3, "--output-tokens", 1]
    status, out, _ = bench("--url", server.url, *arguments, "--json")
    assert status == 0
    figures = json.loads(out)
    assert server.most_running == figures["max_concurrent_requests"] == 3
    # Time spent waiting for a place is no latency, but is told.
    assert figures["median_ttft_ms"] < 60
    assert figures["max_send_delay_ms"] >= 59


def test_several_rates_are_several_runs_of_other_tokens(server, bench):
    arguments = ["--num-prompts", 4, "--request-rate", "40,80", "--output-tokens", 1]
    status, out, _ = bench("--url", server.url, *arguments, "--json")
    assert status == 0
    slow, fast = json.loads(out)
    assert (slow["request_rate"], fast["request_rate"]) == (40, 80)
    prompts = [tuple(seen.body["prompt"]) for seen in server.seen]
    assert len(set(prompts)) == 8
    assert [len(prompt) for prompt in prompts] == [512] * 8


def test_equal_seeds_send_equal_requests(server, bench):
    arguments = ["--num-prompts", 5, "--range-ratio", 0.5, "--shared-prefix", 16]
    arguments += ["--output-tokens", 8, "--max-concurrency", 1]
    for seed in (3, 3, 4):
        assert bench("--url", server.url, *arguments, "--seed", seed)[0] == 0
    bodies = [seen.body for seen in server.seen]
    assert bodies[:5] == bodies[5:10]
    assert bodies[:5] != bodies[10:]


def test_warm_ups_come_first_and_share_no_tokens(server, bench):
    status, out, _ = bench(
        "--url", server.url, "--num-prompts", 3, "--output-tokens", 1, "--json", warm_ups=2
    )
    assert status == 0
    assert json.loads(out)["completed"] == 3
    assert len(server.seen) == 5
    beginnings = {tuple(seen.body["prompt"][:8]) for seen in server.seen}
    assert len(beginnings) == 5


def test_a_trace_is_replayed_at_its_times(server, bench, tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 1000, "input_length": 600, "output_length": 30, "hash_ids": [7, 8]},
        {"timestamp": 1200, "input_length": 1024, "output_length": 1, "hash_ids": [7, 9]},
        {"timestamp": 3000, "input_length": 512, "output_length": 12, "hash_ids": [9]},
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["--mooncake", trace, "--length-scale", 0.1, "--speed", 10]
    began = time.perf_counter()
    status, out, _ = bench("--url", server.url, *arguments, "--json", "--save-detailed")
    assert status == 0
    figures = json.loads(out)
    assert time.perf_counter() - began >= 0.2
    assert figures["arrivals"] == "trace"
    assert figures["start_times"] == pytest.approx([0, 0.02, 0.2], abs=0.1)
    # Blocks of 51 tokens: 88 of 512 are 9 of 51.
    assert figures["input_lens"] == [51 + 9, 102, 51]
    assert figures["output_lens"] == [3, 1, 1]
    by_length = {len(seen.body["prompt"]): seen.body["prompt"] for seen in server.seen}
    first, second, third = by_length[60], by_length[102], by_length[51]
    assert first[:51] == second[:51]
    assert second[51:] == third
    assert first[51:] != second[51:60]


def test_goodput_counts_requests_that_keep_every_bound(server, bench):
    def answer(index, body):
        return Answer(ttft=0.2 if index == 0 else 0.01, gap=0.1 if index == 1 else 0.01)

    server.answer = answer
    arguments = ["--num-prompts", 5, "--output-tokens", 4, "--max-concurrency", 1]
    status, out, _ = bench(
        "--url", server.url, *arguments, "--json", "--goodput", "ttft:150", "tpot:70", "e2el:5000"
    )
    assert status == 0
    figures = json.loads(out)
    assert figures["goodput"] == {"ttft": 150, "tpot": 70, "e2el": 5000}
    assert figures["request_goodput"] == pytest.approx(3 / figures["duration"])


def test_conversations_are_sent_as_they_are(server, bench, tmp_path):
    path = tmp_path / "conversations.jsonl"
    said = [{"role": "user", "content": "Hé, what?"}, {"role": "assistant", "content": "x" * 20}]
    path.write_text(json.dumps({"messages": said}) + "\n")
    status, out, err = bench("--url", server.url, "--sharegpt", path, "--num-prompts", 3, "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["prompts"] == "recorded"
    assert [seen.body["prompt"] for seen in server.seen] == ["Hé, what?"] * 3
    assert [seen.body["max_tokens"] for seen in server.seen] == [5] * 3
