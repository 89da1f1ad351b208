"""Steps as the engine submits them: one ahead of what the host has read."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from polysilicon.backend import Batch, ModelOutputs, Ops, PendingOutputs, PendingTokens
from polysilicon.testing.attention import AttentionBench, AttentionCase, Extension
from polysilicon.testing.batches import Chunk, make_batch
from polysilicon.testing.kit import FLOAT32_BOUND, Float64, Kit, as_forward, assert_close
from polysilicon.testing.sampling import drawing, sampling

VOCABULARY = 50


def table_program(kit: Kit, table: Any) -> Any:
    """Logits are the row of the input token: the next token is a known function of it."""
    return kit.device.compile(as_forward(lambda ops, batch: ops.embed(table, batch.tokens)))


def chain_table(kit: Kit) -> tuple[Any, npt.NDArray[np.int64]]:
    """A table whose greedy successor of every token is clear in any dtype, and the successors."""
    successors = kit.rng.permutation(VOCABULARY)
    logits = kit.normal(VOCABULARY, VOCABULARY)
    logits[np.arange(VOCABULARY), successors] = 16
    return kit.dense(logits)[0], successors


def arrays_of(batch: Batch) -> list[npt.NDArray[Any]]:
    arrays: list[npt.NDArray[Any]] = []
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        arrays += value if isinstance(value, tuple) else [] if value is None else [value]
    return arrays


def test_tokens_from_the_step_before(kit: Kit) -> None:
    """Five steps are submitted before the first token is read; rows change places on the way."""
    table, successors = chain_table(kit)
    program = table_program(kit, table)
    tokens = kit.rng.integers(0, VOCABULARY, 6)
    expected, pending = [], []
    batch = make_batch([Chunk(tokens=[int(token)]) for token in tokens])
    previous: PendingTokens | None = None
    for _ in range(5):
        previous = kit.device.sample(program(batch, previous), sampling(6))
        tokens = successors[tokens]
        expected.append(tokens)
        pending.append(previous)
        sources = kit.rng.permutation(6)
        tokens = tokens[sources]
        batch = make_batch([Chunk(tokens=[0], sources=[int(row)]) for row in sources])
    for result, wanted in zip(pending, expected, strict=True):
        assert np.array_equal(result.result().tokens, wanted)


def test_host_and_device_tokens_in_one_step(kit: Kit) -> None:
    """New prompts beside running sequences, and one row continued twice."""
    table, successors = chain_table(kit)
    program = table_program(kit, table)
    first = make_batch([Chunk(tokens=[3, 11]), Chunk(tokens=[20])], logit_rows=[1, 2])
    sampled = kit.device.sample(program(first, None), sampling(2))
    second = make_batch(
        [
            Chunk(tokens=[0], sources=[1]),
            Chunk(tokens=[7, 8, 9]),
            Chunk(tokens=[0], sources=[0]),
            Chunk(tokens=[4, 0], sources=[-1, 0]),
        ],
        logit_rows=[0, 3, 4, 6],
    )
    tokens = kit.device.sample(program(second, sampled), sampling(4)).result().tokens
    after_11, after_20 = successors[[11, 20]]
    assert np.array_equal(tokens, successors[[after_20, 9, after_11, after_11]])
    assert np.array_equal(sampled.result().tokens, [after_11, after_20])


def test_drawn_tokens_feed_the_next_step(kit: Kit) -> None:
    """The token that is fed on is the very one that is reported."""
    table, values = kit.dense(kit.normal(VOCABULARY, VOCABULARY, scale=0.5))
    program = table_program(kit, table)
    batch = make_batch([Chunk(tokens=[token]) for token in range(9)])
    sampled = kit.device.sample(program(batch, None), drawing(kit, 9))
    following = make_batch([Chunk(tokens=[0], sources=[row]) for row in range(9)])
    outputs = program(following, sampled)
    assert_close(outputs.result().logits, values[sampled.result().tokens], kit.bound)


def test_attention_one_step_ahead(kit: Kit) -> None:
    """Decodes whose inputs no host has seen write and read their own KV."""
    bench = AttentionBench(kit, AttentionCase(), vocabulary=VOCABULARY)
    matrix, matrix_values = kit.dense(kit.normal(VOCABULARY, 4 * 64, scale=0.3))

    def computation(ops: Ops, batch: Batch) -> Any:
        return ops.linear(bench.forward(ops, batch), matrix)[0]

    program = kit.device.compile(as_forward(computation))
    contexts = [bench.context(40) for _ in range(3)]
    prompts = [bench.random_tokens(count) for count in (17, 1, 30)]
    outputs: list[PendingOutputs] = []
    sampled: list[PendingTokens] = []
    ends = np.cumsum([len(prompt) for prompt in prompts]) - 1
    batch = bench.batch([Extension(context=c, tokens=p)
                         for c, p in zip(contexts, prompts, strict=True)])  # fmt: skip
    batch = dataclasses.replace(batch, logit_rows=ends.astype(np.int32))
    for step in range(5):
        outputs.append(program(batch, sampled[-1] if sampled else None))
        sampled.append(kit.device.sample(outputs[-1], drawing(kit, 3)))
        batch = make_batch(
            [Chunk(tokens=[0], sources=[row], start=len(prompts[row]) + step, pages=(c.pages,))
             for row, c in enumerate(contexts)],
            (bench.page_size,),
        )  # fmt: skip
    inputs = [list(prompt) for prompt in prompts]
    for output, tokens in zip(outputs, sampled, strict=True):
        expected = []
        for context, new in zip(contexts, inputs, strict=True):
            expected.append(bench.extend(Extension(context=context, tokens=new))[-1])
        assert_close(output.result().logits, np.stack(expected) @ matrix_values.T, 2 * bench.bound)
        inputs = [[int(token)] for token in tokens.result().tokens]


def test_given_arrays_are_not_changed(kit: Kit) -> None:
    """None of a batch's arrays, a tree mask and unread tokens included, is written by a step."""
    bench = AttentionBench(kit, AttentionCase(window=9), vocabulary=4 * 64)
    program = kit.device.compile(as_forward(bench.forward))
    contexts = [bench.context(30) for _ in range(2)]
    previous = None
    for count in (13, 1, 4):
        tree = np.tri(count, dtype=np.bool_) if kit.capabilities.tree_attention else None
        batch = bench.batch([Extension(context=c, tokens=bench.random_tokens(count), tree=tree)
                             for c in contexts])  # fmt: skip
        if count == 1:
            batch.token_source[1] = 0
        copies = [array.copy() for array in arrays_of(batch)]
        outputs = program(batch, previous)
        previous = kit.device.sample(outputs, drawing(kit, 2 * count))
        previous.result()
        outputs.result()
        for array, copy in zip(arrays_of(batch), copies, strict=True):
            assert np.array_equal(array, copy)
        for context in contexts:
            context.tokens += [0] * count


def test_arrays_may_be_reused_after_the_result(kit: Kit) -> None:
    """What the device was given may be overwritten then, and what it gave back stays."""
    table, values = kit.dense(kit.normal(VOCABULARY, 32))
    program = table_program(kit, table)
    batch = kit.rows(range(5))
    results = []
    for start in (0, 20, 7):
        batch.tokens[:] = range(start, start + 5)
        results.append(program(batch, None).result().logits)
        batch.tokens[:] = 0
    for start, result in zip((0, 20, 7), results, strict=True):
        assert_close(result, values[start : start + 5], kit.bound)


def test_results_may_be_read_twice_and_in_any_order(kit: Kit) -> None:
    table, values = kit.dense(kit.normal(VOCABULARY, VOCABULARY))
    program = table_program(kit, table)
    outputs = [program(kit.rows([token]), None) for token in range(4)]
    sampled = [kit.device.sample(output, sampling(1)) for output in outputs]
    for index in (2, 0, 3, 1, 2):
        assert_close(outputs[index].result().logits, values[[index]], kit.bound)
        first, second = sampled[index].result(), sampled[index].result()
        assert np.array_equal(first.tokens, second.tokens)


def test_step_without_logits(kit: Kit) -> None:
    """A chunk of a prompt that goes on has no row to sample, and stores its KV."""
    bench = AttentionBench(kit, AttentionCase())
    program = kit.device.compile(as_forward(bench.forward))
    context = bench.context(20)
    extension = Extension(context=context, tokens=bench.random_tokens(18))
    batch = dataclasses.replace(bench.batch([extension]), logit_rows=np.empty(0, np.int32))
    assert program(batch, None).result().logits.shape == (0, 4 * 64)
    bench.extend(extension)
    bench.step([Extension(context=context, tokens=bench.random_tokens(1))])


def layered(kit: Kit) -> tuple[Any, Float64, list[Float64]]:
    """A forward of three layers that each add a product of the residual stream."""
    x, x_values = kit.dense(kit.exact(VOCABULARY, 16))
    increments = [kit.dense(kit.exact(VOCABULARY, 16)) for _ in range(3)]

    def forward(ops: Ops, batch: Batch) -> ModelOutputs:
        state, hidden = ops.embed(x, batch.tokens), []
        for handle, _ in increments:
            state = ops.add(state, ops.embed(handle, batch.tokens))
            hidden.append(state)
        return ModelOutputs(logits=ops.select(state, batch.logit_rows), hidden=hidden)

    states = np.cumsum([x_values, *(values for _, values in increments)], axis=0)
    return forward, states[-1], list(states[1:])


@pytest.mark.parametrize("layers", [(), (1,), (0, 2), (2, 1, 0)])
def test_hidden_states(kit: Kit, layers: tuple[int, ...]) -> None:
    """Exactly the layers asked for, for all of the step's tokens and not only the logit rows."""
    forward, last, states = layered(kit)
    program = kit.device.compile(forward, hidden=layers)
    for count in (1, 7, 33):
        tokens = kit.rng.integers(0, VOCABULARY, count)
        batch = make_batch([Chunk(tokens=[int(t) for t in tokens])], logit_rows=[count - 1])
        outputs = program(batch, None).result()
        assert set(outputs.hidden) == set(layers)
        for layer in layers:
            assert_close(outputs.hidden[layer], states[layer][tokens], FLOAT32_BOUND)
        assert_close(outputs.logits, last[tokens[-1:]], FLOAT32_BOUND)


def test_programs_are_apart(kit: Kit) -> None:
    """Several programs of one device, called in turn, share pools and nothing else."""
    bench = AttentionBench(kit, AttentionCase())
    table, values = kit.dense(kit.normal(VOCABULARY, 8))
    other = table_program(kit, table)
    context = bench.context(20)
    for token in range(4):
        bench.step([Extension(context=context, tokens=bench.random_tokens(3))])
        assert_close(other(kit.rows([token]), None).result().logits, values[[token]], kit.bound)


def test_sequence_slots_and_gaps(kit: Kit) -> None:
    """Sequence slots in any order, and a sequence without tokens in the step."""
    bench = AttentionBench(kit, AttentionCase())
    program = kit.device.compile(as_forward(bench.forward))
    contexts = [bench.context(20) for _ in range(3)]
    bench.step([Extension(context=c, tokens=bench.random_tokens(9)) for c in contexts])
    extensions = [Extension(context=c, tokens=bench.random_tokens(n))
                  for c, n in zip(contexts, (2, 0, 1), strict=True)]  # fmt: skip
    batch = dataclasses.replace(
        bench.batch(extensions), sequence_slot=np.array([5, 0, 2], np.int32)
    )
    expected = np.concatenate([bench.extend(extension) for extension in extensions])
    assert_close(program(batch, None).result().logits, expected, bench.bound)
