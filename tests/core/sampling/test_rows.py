"""What the host computes for each row: every field of a `SamplingBatch`, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polysilicon.batch import SamplingBatch, SparseRows
from polysilicon.errors import RequestError
from polysilicon.request import SamplingParams
from polysilicon.sampling.rows import (
    SampleRow,
    SequenceSampler,
    build_sampling_batch,
    validate,
)
from polysilicon.sampling.sampler import sample_on_host

VOCAB = 70
EOS = frozenset({2, 9})


def sampler(prompt: Any = (1, 2, 3), *, seed: int = 0, choice: int = 0, **fields: Any) -> Any:
    params = SamplingParams(**fields)
    validate(params, VOCAB)
    return SequenceSampler(
        params, seed=seed, choice=choice, prompt=prompt, eos_ids=EOS, vocab_size=VOCAB
    )


def row(of: SequenceSampler | None, **fields: Any) -> SampleRow:
    position = 3 + (0 if of is None else of.num_output)
    fields = {"position": position, "num_output": position - 3} | fields
    return SampleRow(sampler=of, **fields)


def build(*rows: SampleRow) -> SamplingBatch:
    return build_sampling_batch(rows, VOCAB)


def entries(lists: SparseRows | None, index: int = 0) -> dict[int, float]:
    if lists is None:
        return {}
    ids, values = lists.row(index)
    assert len(set(ids.tolist())) == len(ids)
    return dict(zip(ids.tolist(), values.tolist(), strict=True))


def test_every_scalar_field_lands_in_its_array() -> None:
    fields = {
        "temperature": 0.7,
        "top_k": 11,
        "top_p": 0.8,
        "min_p": 0.1,
        "typical_p": 0.6,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.4,
    }
    full = sampler(seed=2**64 - 3, choice=5, **fields)
    batch = build(row(full, position=1000), row(None, position=7, target=4), row(sampler()))
    expected: dict[str, tuple[type, list[float]]] = {
        "draw": (np.bool_, [True, False, True]),
        "temperature": (np.float32, [0.7, 0, 1]),
        "top_k": (np.int32, [11, 0, 0]),
        "top_p": (np.float32, [0.8, 1, 1]),
        "min_p": (np.float32, [0.1, 0, 0]),
        "typical_p": (np.float32, [0.6, 1, 1]),
        "repetition": (np.float32, [1.2, 1, 1]),
        "presence": (np.float32, [0.3, 0, 0]),
        "frequency": (np.float32, [-0.4, 0, 0]),
        "seed": (np.uint64, [2**64 - 3, 0, 0]),
        "choice": (np.uint32, [5, 0, 0]),
        "position": (np.uint32, [1000, 7, 3]),
        "targets": (np.int32, [-1, 4, -1]),
    }
    for name, (dtype, values) in expected.items():
        array = getattr(batch, name)
        assert array.dtype == dtype
        assert array.flags.c_contiguous
        assert array.flags.writeable
        np.testing.assert_array_equal(array, np.array(values, dtype))


def test_arrays_that_no_row_needs_are_left_out() -> None:
    batch = build(row(sampler()), row(sampler(temperature=0, top_p=0.5)), row(None))
    assert batch.bias is batch.counts is batch.mask is batch.targets is None
    assert not batch.logprobs
    assert batch.top_logprobs == 0


def test_no_rows() -> None:
    batch = build()
    assert batch.draw.shape == batch.position.shape == (0,)
    tokens = sample_on_host(np.zeros((0, VOCAB), np.float32), batch).tokens
    assert tokens.shape == (0,)


def test_log_probabilities_asked_for() -> None:
    assert build(row(sampler(), logprobs=0)).logprobs
    assert build(row(sampler(), logprobs=0)).top_logprobs == 0
    scored = build(row(None, target=0, logprobs=5), row(sampler()))
    assert not scored.logprobs
    assert scored.top_logprobs == 5
    assert scored.targets is not None
    assert scored.targets.tolist() == [0, -1]
    both = build(row(sampler(), logprobs=2), row(None, logprobs=5))
    assert both.logprobs
    assert both.top_logprobs == 5
    assert both.targets is None
    assert build_sampling_batch([row(sampler(), logprobs=20)], 8).top_logprobs == 8


def test_logit_bias() -> None:
    batch = build(
        row(sampler(logit_bias={5: 1.5, 69: -2.0})), row(sampler()), row(sampler(logit_bias={0: 9}))
    )
    assert batch.bias is not None
    assert batch.bias.start.tolist() == [0, 2, 2, 3]
    assert batch.bias.values.dtype == np.float32
    assert [entries(batch.bias, index) for index in range(3)] == [{5: 1.5, 69: -2.0}, {}, {0: 9}]


@pytest.mark.filterwarnings("error")
def test_logit_bias_beyond_float32_stays_finite() -> None:
    bias = entries(build(row(sampler(logit_bias={1: 1e300, 2: -1e300}))).bias)
    largest = float(np.finfo(np.float32).max)
    assert bias == {1: largest, 2: -largest}


def test_min_tokens_forbids_the_ends_until_then() -> None:
    one = sampler(min_tokens=2, stop_token_ids=(7,), logit_bias={7: 3.0, 8: 1.0})
    forbidden = {2: -np.inf, 9: -np.inf, 7: -np.inf, 8: 1.0}
    for num_output, expected in ((0, forbidden), (1, forbidden), (2, {7: 3.0, 8: 1.0})):
        assert entries(build(row(one, num_output=num_output)).bias) == expected
    assert not one.needs_last_token


def test_min_tokens_leaves_an_ignored_end_alone() -> None:
    one = sampler(min_tokens=1, ignore_eos=True, stop_token_ids=(7,))
    assert entries(build(row(one)).bias) == {7: -np.inf}


def test_an_end_outside_the_vocabulary_is_not_biased() -> None:
    one = SequenceSampler(
        SamplingParams(min_tokens=1),
        seed=0,
        choice=0,
        prompt=(1,),
        eos_ids=frozenset({3, 5}),
        vocab_size=5,
    )
    assert entries(build_sampling_batch([row(one)], 5).bias) == {3: -np.inf}


def test_ends() -> None:
    one = sampler(min_tokens=2, stop_token_ids=(7,))
    assert [one.ends(token, 2) for token in (2, 9, 7, 3)] == [True, True, True, False]
    assert [one.ends(token, 1) for token in (2, 9, 7, 3)] == [False] * 4
    other = sampler(ignore_eos=True, stop_token_ids=(9,))
    assert [other.ends(token, 0) for token in (2, 9)] == [False, True]


def test_bad_words_of_several_lengths() -> None:
    words = ((40,), (5, 6), (5, 5, 7), (3, 4, 5, 8), (6, 5, 5, 7), (5, 6))
    one = sampler((1, 3, 4), bad_words=words)
    assert one.needs_last_token
    seen = []
    for token in (5, 5, 6, 5, 5, 7):
        seen.append(set(entries(build(row(one)).bias)))
        one.append(token)
    assert seen == [{40}, {40, 6, 8}, {40, 6, 7}, {40}, {40, 6}, {40, 6, 7}]
    assert set(entries(build(row(one)).bias)) == {40}
    assert all(value == -np.inf for value in entries(build(row(one)).bias).values())


def test_a_bad_word_that_begins_in_the_prompt() -> None:
    one = sampler((8, 1, 2), bad_words=((1, 2, 3), (8, 1, 2, 4), (0, 8, 1, 2, 5)))
    assert set(entries(build(row(one)).bias)) == {3, 4}


def test_bad_words_override_a_bias_and_join_the_ends() -> None:
    one = sampler((5,), bad_words=((5, 6), (4,)), logit_bias={6: 2.0, 4: 1.0, 3: 1.0}, min_tokens=1)
    expected = {6: -np.inf, 4: -np.inf, 3: 1.0, 2: -np.inf, 9: -np.inf}
    assert entries(build(row(one)).bias) == expected
    one.append(1)
    assert entries(build(row(one)).bias) == {6: 2.0, 4: -np.inf, 3: 1.0}


def test_single_bad_words_need_no_last_token() -> None:
    assert not sampler(bad_words=((4,), (5,))).needs_last_token
    assert not sampler(logit_bias={1: 1.0}, allowed_token_ids=(1,), min_tokens=3).needs_last_token


def test_repetition_counts_prompt_and_output() -> None:
    one = sampler((3, 1, 3, 2), repetition_penalty=1.3)
    assert one.needs_last_token
    assert entries(build(row(one)).counts) == {1: 0, 2: 0, 3: 0}
    for token in (3, 50, 3, 50, 50):
        one.append(token)
    batch = build(row(sampler()), row(one))
    assert batch.counts is not None
    assert batch.counts.values.dtype == np.int32
    assert entries(batch.counts, 0) == {}
    assert entries(batch.counts, 1) == {1: 0, 2: 0, 3: 2, 50: 3}


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_other_penalties_count_the_output_only(name: str) -> None:
    one = sampler((3, 1), **{name: 0.5})
    assert one.needs_last_token
    assert build(row(one)).counts is None
    for token in (3, 3, 8):
        one.append(token)
    assert entries(build(row(one)).counts) == {3: 2, 8: 1}


@settings(max_examples=50, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 999), min_size=1, max_size=30),
    output=st.lists(st.integers(0, 999), max_size=200),
)
def test_counts_grow_with_the_output(prompt: list[int], output: list[int]) -> None:
    one = SequenceSampler(
        SamplingParams(repetition_penalty=2),
        seed=0,
        choice=0,
        prompt=np.array(prompt),
        eos_ids=EOS,
        vocab_size=1000,
    )
    for token in output:
        one.append(token)
    counts = entries(build_sampling_batch([row(one)], 1000).counts)
    assert counts == {token: output.count(token) for token in {*prompt, *output}}


def test_a_batch_does_not_change_with_later_tokens() -> None:
    one = sampler(repetition_penalty=1.3)
    batch = build(row(one))
    for token in range(60):
        one.append(token)
    assert entries(batch.counts) == {1: 0, 2: 0, 3: 0}


def test_penalties_wait_for_their_last_token() -> None:
    one = sampler(repetition_penalty=1.3)
    with pytest.raises(AssertionError):
        build(row(one, num_output=1))


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 70])
def test_allowed_token_ids(vocab_size: int) -> None:
    allowed = sorted({0, vocab_size // 2, vocab_size - 1})
    one = SequenceSampler(
        SamplingParams(allowed_token_ids=tuple(allowed)),
        seed=0,
        choice=0,
        prompt=(0,),
        eos_ids=EOS,
        vocab_size=vocab_size,
    )
    free = SequenceSampler(
        SamplingParams(), seed=0, choice=0, prompt=(0,), eos_ids=EOS, vocab_size=vocab_size
    )
    batch = build_sampling_batch([row(one), row(free), row(None)], vocab_size)
    assert batch.mask is not None
    assert batch.mask.dtype == np.uint32
    assert batch.mask.shape == (3, (vocab_size + 31) // 32)
    for token in range(vocab_size):
        bits = batch.mask[:, token // 32] >> np.uint32(token % 32) & np.uint32(1)
        assert bits.tolist() == [token in allowed, 1, 1]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {70: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("stop_token_ids", (3, 70)),
        ("bad_words", ((3,), (1, 2, 71))),
        ("bad_words", ((70, 1),)),
        ("allowed_token_ids", (0, 2**40)),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(field: str, value: Any) -> None:
    params = SamplingParams(**{field: value})
    with pytest.raises(RequestError, match=rf"^{field} names token -?\d+, .*between 0 and 69$"):
        validate(params, VOCAB)
    validate(params, 2**41) if field != "logit_bias" or -1 not in value else None


def test_the_whole_vocabulary_is_accepted() -> None:
    validate(
        SamplingParams(
            logit_bias={0: 1.0, 69: 1.0},
            stop_token_ids=(0, 69),
            bad_words=((0, 69),),
            allowed_token_ids=(0, 69),
        ),
        VOCAB,
    )


def test_generation_with_everything_keeps_its_promises() -> None:
    """A whole loop through the sampler: 40 tokens from random logits under all host-side rules."""
    random = np.random.default_rng(11)
    one = sampler(
        (1, 2, 3),
        seed=4,
        max_tokens=40,
        min_tokens=30,
        stop_token_ids=(7,),
        bad_words=((60,), (10, 11), (12, 13, 14)),
        allowed_token_ids=tuple(range(62)),
        repetition_penalty=1.1,
        top_k=30,
    )
    output: list[int] = []
    for _ in range(40):
        logits = random.normal(size=(1, VOCAB)).astype(np.float32)
        logits[0, [2, 7, 10, 11, 12, 13, 14, 60, 65]] += 4
        logits[0, [2, 7]] += 2
        token = int(sample_on_host(logits, build(row(one))).tokens[0])
        output.append(token)
        one.append(token)
    assert not {2, 7, 9} & set(output[:30])
    assert {2, 7} & set(output[30:])
    assert max(output) < 62
    assert 60 not in output
    text = ",".join(map(str, ["", *output, ""]))
    assert ",10,11," not in text
    assert ",12,13,14," not in text
    assert ",10," in text
    assert ",11," in text
