"""Prompts, lengths and traces of the load generator."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polysilicon.bench.workloads import (
    Ids,
    SyntheticPrompt,
    Text,
    mooncake_trace,
    random_prompts,
    salted,
    sharegpt_prompts,
    warm_up_prompts,
)
from polysilicon.errors import ConfigError

TRACE = Path(__file__).parents[2] / "fixtures" / "mooncake-conversation-head.jsonl"
IDS = Ids(low=1000, high=32000)


def made(**changes):
    fixed = {"count": 50, "prompt_tokens": 40, "output_tokens": 10, "range_ratio": 0.0}
    fixed |= {"shared_prefix": 0, "num_prefixes": 1, "seed": 0}
    return random_prompts(**fixed | changes)


def ids(items):
    return [IDS.render(item.prompt.units()) for item in items]


def test_fixed_lengths_are_exact_and_prompts_differ():
    items = made()
    assert {item.prompt_tokens for item in items} == {40}
    assert {item.output_tokens for item in items} == {10}
    prompts = ids(items)
    assert [len(prompt) for prompt in prompts] == [40] * 50
    assert len({tuple(prompt[:4]) for prompt in prompts}) == 50


def test_lengths_spread_over_their_whole_range_and_not_beyond():
    items = made(count=2000, range_ratio=0.5)
    prompts = {item.prompt_tokens for item in items}
    outputs = {item.output_tokens for item in items}
    assert prompts == set(range(20, 61))
    assert outputs == set(range(5, 16))


def test_prompts_share_one_of_the_prefixes_and_nothing_more():
    items = made(shared_prefix=16, num_prefixes=3)
    groups = defaultdict(list)
    for prompt in ids(items):
        groups[tuple(prompt[:16])].append(tuple(prompt[16:20]))
    assert len(groups) == 3
    assert sum(len(set(ends)) for ends in groups.values()) == 50


@pytest.mark.parametrize("changes", [{}, {"range_ratio": 0.9, "shared_prefix": 2}])
def test_equal_seeds_make_equal_workloads(changes):
    assert ids(made(seed=7, **changes)) == ids(made(seed=7, **changes))
    assert ids(made(seed=7, **changes)) != ids(made(seed=8, **changes))
    longer = made(seed=7, count=60, **changes)
    assert len({item.prompt.segments for item in longer}) == 60


def test_salt_changes_every_token_and_keeps_what_is_shared():
    items = made(shared_prefix=16)
    other = salted(items, 1)
    assert [item.prompt_tokens for item in other] == [40] * 50
    assert not set(map(tuple, ids(items))) & set(map(tuple, ids(other)))
    assert len({tuple(prompt[:16]) for prompt in ids(other)}) == 1
    assert ids(salted(items, 0)) == ids(items)


def test_warm_ups_have_the_lengths_and_no_beginning_of_the_workload():
    items = made(range_ratio=0.5, shared_prefix=4, count=3)
    warm = warm_up_prompts(items, 7, seed=0)
    assert [item.prompt_tokens for item in warm] == [
        items[index % 3].prompt_tokens for index in range(7)
    ]
    beginnings = [tuple(prompt[:4]) for prompt in (*ids(items), *ids(warm))]
    assert len(set(beginnings)) == 1 + 7


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**40), st.integers(1, 300), st.integers(1, 300))
def test_a_shorter_segment_is_the_beginning_of_a_longer_one(stream, one, other):
    """So that a trace's last block, partly filled, is the beginning of the whole block."""
    short, long = sorted((one, other))
    units = [
        SyntheticPrompt(seed=3, segments=(((3, stream), length),)).units()
        for length in (short, long)
    ]
    assert np.array_equal(units[0], units[1][:short])


def test_words_stand_for_units_one_each():
    units = made(count=1)[0].prompt.units()
    words = Text().render(units).split(" ")
    assert len(words) == 40
    assert all(word.isalpha() for word in words)
    assert Text().render(units[:10]).split(" ") == words[:10]


@pytest.mark.parametrize("scale", [1.0, 0.1, 0.01, 0.0001])
def test_a_trace_keeps_its_lengths_and_what_its_prompts_share(scale):
    lines = [json.loads(line) for line in TRACE.read_text().splitlines()][:120]
    items = mooncake_trace(TRACE, count=120, length_scale=scale, speed=2.0, seed=1)
    block = max(1, round(512 * scale))
    prompts = ids(items)
    for line, item, prompt in zip(lines, items, prompts, strict=True):
        assert len(prompt) == item.prompt_tokens
        full, rest = divmod(line["input_length"] - 1, 512)
        assert item.prompt_tokens == full * block + -(-(rest + 1) * block // 512)
        assert item.output_tokens == max(1, round(line["output_length"] * scale))
        assert item.at == (line["timestamp"] - lines[0]["timestamp"]) / 2000
    by_hash: dict[int, list[int]] = {}
    for line, prompt in zip(lines, prompts, strict=True):
        for index, name in enumerate(line["hash_ids"]):
            tokens = prompt[index * block : (index + 1) * block]
            known = by_hash.setdefault(name, tokens)
            shared = min(len(known), len(tokens))
            assert known[:shared] == tokens[:shared]
            if len(tokens) > len(known):
                by_hash[name] = tokens
    if block >= 5:
        full_blocks = {tuple(tokens) for tokens in by_hash.values()}
        assert len(full_blocks) == len(by_hash)


def test_a_whole_trace_is_taken_unless_a_count_is_given():
    assert len(mooncake_trace(TRACE, count=None, length_scale=1, speed=1, seed=0)) == 400
    assert len(mooncake_trace(TRACE, count=500, length_scale=1, speed=1, seed=0)) == 400


GOOD = {"timestamp": 5, "input_length": 513, "output_length": 2, "hash_ids": [1, 2]}


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "{}",
        json.dumps(GOOD | {"timestamp": "x"}),
        json.dumps(GOOD | {"timestamp": -1}),
        json.dumps(GOOD | {"input_length": 0, "hash_ids": []}),
        json.dumps(GOOD | {"input_length": 10**30}),
        json.dumps(GOOD | {"output_length": 1.5}),
        json.dumps(GOOD | {"hash_ids": [1]}),
        json.dumps(GOOD | {"hash_ids": [1, -2]}),
        json.dumps(GOOD | {"hash_ids": [1, "a"]}),
        '{"timestamp": NaN}',
        "[" * 100_000,
    ],
    ids=lambda line: line[:40],
)
def test_lines_that_are_no_trace_are_named(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n\n{line}\n")
    with pytest.raises(ConfigError, match=r"trace\.jsonl:3"):
        mooncake_trace(path, count=None, length_scale=1, speed=1, seed=0)


def test_an_empty_trace_is_refused(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n")
    with pytest.raises(ConfigError, match="no requests"):
        mooncake_trace(path, count=None, length_scale=1, speed=1, seed=0)


CONVERSATIONS = [
    {"id": "a", "conversations": [
        {"from": "human", "value": "first"}, {"from": "gpt", "value": "x" * 40},
        {"from": "human", "value": "more"},
    ]},
    {"conversations": [
        {"from": "system", "value": "be kind"}, {"from": "human", "value": "second"},
        {"from": "gpt", "value": "x" * 8},
    ]},
    {"messages": [
        {"role": "user", "content": "third"}, {"role": "assistant", "content": ""},
    ]},
    {"conversations": [{"from": "gpt", "value": "starts"}, {"from": "human", "value": "wrongly"}]},
    {"conversations": [{"from": "human", "value": "unanswered"}]},
    {"conversations": [{"from": "human", "value": " "}, {"from": "gpt", "value": "x"}]},
    {"conversations": [{"from": "human", "value": 3}, {"from": "gpt", "value": "x"}]},
    {"conversations": "text"},
    {},
    "text",
    None,
]  # fmt: skip
WANTED = {"first": 10, "second": 2, "third": 1}


@pytest.mark.parametrize("form", ["list", "lines"])
def test_conversations_give_prompts_and_estimated_lengths(tmp_path, form):
    path = tmp_path / "conversations.json"
    if form == "list":
        path.write_text(json.dumps(CONVERSATIONS))
    else:
        path.write_text("\n".join(map(json.dumps, CONVERSATIONS)))
    items = sharegpt_prompts(path, count=6, output_tokens=None, seed=0)
    assert {item.prompt: item.output_tokens for item in items} == WANTED
    # Repeated when there are fewer, each as often.
    assert sorted(item.prompt for item in items) == sorted([*WANTED, *WANTED])
    fixed = sharegpt_prompts(path, count=3, output_tokens=9, seed=0)
    assert [item.output_tokens for item in fixed] == [9, 9, 9]
    orders = {
        tuple(i.prompt for i in sharegpt_prompts(path, count=3, output_tokens=1, seed=seed))
        for seed in range(40)
    }
    assert orders == set(itertools.permutations(WANTED))


@pytest.mark.parametrize("text", ["", "[]", "{}", "[{}]", "[1", "nonsense", "\xff", '[{"a": 1}'])
def test_files_without_conversations_are_refused(tmp_path, text):
    path = tmp_path / "conversations.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"conversations\.json"):
        sharegpt_prompts(path, count=3, output_tokens=None, seed=0)
