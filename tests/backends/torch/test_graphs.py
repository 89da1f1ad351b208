"""Captured steps: buckets, padding, static buffers. What stands in for a card's graphs runs the
captured work again at every replay, on what then stands in the buffers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polysilicon.backend import Batch, Dense, DeviceError, ModelOutputs, Ops
from polysilicon.request import Request
from polysilicon.testing.attention import AttentionBench, AttentionCase, Extension
from polysilicon.testing.batches import Chunk, make_batch
from polysilicon.testing.engine_bench import EngineBench, greedy, random_prompt
from polysilicon.testing.kit import Kit, as_forward, assert_close
from polysilicon.testing.sampling import sampling
from polysilicon.testing.tiny_models import tiny_gemma
from polysilicon_torch.batches import Buckets, StepBuffer, bucket, power_of_two
from polysilicon_torch.device import TorchDevice
from polysilicon_torch.graphs import MOST_QUERIES
from polysilicon_torch.options import Options
from polysilicon_torch.runtime import HostRuntime
from polysilicon_torch.torch_kernels import TorchKernels


class ReplayedGraphs:
    """See `polysilicon_torch.runtime.Graphs`. Replays fill the very tensors of the capture, after
    they were spoilt, so that nothing old can be read."""

    nbytes = 0

    def __init__(self) -> None:
        self.captures = 0
        self.replays = 0

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        outputs = run()
        self.captures += 1
        tensors = (outputs.logits, *outputs.hidden)

        def replay() -> None:
            self.replays += 1
            again = run()
            for tensor, new in zip(tensors, (again.logits, *again.hidden), strict=True):
                tensor.fill_(torch.nan)
                tensor.copy_(new)

        return replay, outputs


@pytest.fixture
def graphs() -> ReplayedGraphs:
    return ReplayedGraphs()


@pytest.fixture
def device(graphs: ReplayedGraphs) -> Iterator[TorchDevice]:
    runtime = HostRuntime()
    runtime.graphs = graphs
    device = TorchDevice(runtime, TorchKernels(torch.float32), Options(activations=torch.float32))
    yield device
    device.close()


@pytest.fixture
def kit(device: TorchDevice) -> Kit:
    return Kit(device, np.random.default_rng())


def table_forward(kit: Kit) -> tuple[Any, np.ndarray]:
    """Logits are rows of a random table."""
    table, values = kit.dense(kit.normal(50, 50))
    return as_forward(lambda ops, batch: ops.embed(table, batch.tokens)), values


def test_capabilities_tell(device: TorchDevice) -> None:
    assert device.capabilities.capture
    plain = TorchDevice(HostRuntime(), TorchKernels(torch.float32), Options())
    assert not plain.capabilities.capture
    assert device.memory().used["graphs"] == 0


@pytest.mark.parametrize(("size", "padded"), [(0, 1), (1, 1), (3, 4), (9, 16), (17, 24), (65, 72)])
def test_buckets_of_sizes(size: int, padded: int) -> None:
    assert bucket(size) == padded


def test_buckets_are_few_and_never_too_small() -> None:
    buckets = [bucket(size) for size in range(1, 5000)]
    assert all(padded >= size for size, padded in enumerate(buckets, 1))
    assert all(padded <= size * 9 / 8 for size, padded in enumerate(buckets, 1) if size > 64)
    assert sorted(buckets) == buckets
    assert len(set(buckets)) < 90
    assert [power_of_two(size) for size in (0, 1, 2, 3, 4, 5)] == [1, 1, 2, 4, 4, 8]


def test_padding() -> None:
    """Padded tokens belong to no sequence and go to page 0; nothing of an earlier step is left."""
    runtime = HostRuntime()
    tree = np.tri(3, dtype=np.bool_)
    batch = make_batch(
        [
            Chunk(tokens=[7, 8, 9], start=18, pages=([3, 4], [5, 6]), tree=tree, adapter=2),
            Chunk(tokens=[5], start=2, pages=([9], [8])),
        ],
        (16, 16),
        logit_rows=[2, 3, 0],
        slots=[4, 1],
    )
    longer = make_batch(
        [Chunk(tokens=range(30, 33), pages=([7], [7]), tree=tree, adapter=1), Chunk(
            tokens=[40], pages=([1], [1]), adapter=3), Chunk(tokens=[], pages=([2], [2]))],
        (16, 16),
        slots=[9, 8, 7],
    )  # fmt: skip
    buckets = Buckets.of(batch)
    assert (buckets.tokens, buckets.sequences, buckets.rows) == (4, 2, 4)
    assert (buckets.max_query, buckets.max_context, buckets.pages) == (4, 256, (16, 16))
    roomy = Buckets(
        tokens=8, sequences=4, rows=8, max_query=4, max_context=256, pages=(16, 16), tree=4
    )
    step = StepBuffer(runtime, roomy)
    step.fill(longer)
    step.fill(batch)
    placed = step.batch
    assert placed.tokens.tolist() == [7, 8, 9, 5, 0, 0, 0, 0]
    assert placed.token_source.tolist() == [-1] * 8
    assert placed.positions.tolist() == [18, 19, 20, 2, 0, 0, 0, 0]
    assert placed.query_start.tolist() == [0, 3, 4, 4, 4]
    assert placed.context_len.tolist() == [21, 3, 0, 0]
    assert placed.logit_rows.tolist() == [2, 3, 0, 0, 0, 0, 0, 0]
    assert placed.sequence_slot.tolist() == [4, 1, 0, 0]
    assert placed.adapter_slot.tolist() == [2, 0, 0, 0]
    assert placed.token_sequence.tolist() == [0, 0, 0, 1, -1, -1, -1, -1]
    assert placed.slots[0].tolist() == [66, 67, 68, 146, 0, 0, 0, 0]
    assert placed.slots[1].tolist() == [98, 99, 100, 130, 0, 0, 0, 0]
    assert placed.page_tables[1].tolist() == [[5, 6, *[0] * 14], [8, *[0] * 15], *[[0] * 16] * 2]
    assert placed.tree_mask is not None
    assert placed.tree_mask.dtype == torch.bool
    assert placed.tree_mask.int().tolist() == [
        [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0], *[[0] * 4] * 4
    ]  # fmt: skip


def test_captured_when_met_again(kit: Kit, graphs: ReplayedGraphs) -> None:
    forward, values = table_forward(kit)
    program = kit.device.compile(forward)
    counts = []
    for sizes in ([5, 6], [5, 6], [7], [8], [3], [3]):
        tokens = kit.rng.integers(0, 50, len(sizes))
        chunks = [Chunk(tokens=[int(token)], start=size) for token, size in
                  zip(tokens, sizes, strict=True)]  # fmt: skip
        outputs = program(make_batch(chunks), None).result()
        assert_close(outputs.logits, values[tokens], 1e-6)
        counts.append((graphs.captures, graphs.replays))
    assert counts == [(0, 0), (1, 1), (1, 1), (2, 2), (2, 3), (2, 4)]


def test_different_steps_of_one_graph(kit: Kit, graphs: ReplayedGraphs) -> None:
    """Fewer rows than the bucket, in another order, and outputs read after later replays."""
    forward, values = table_forward(kit)
    program = kit.device.compile(forward)
    pending, expected = [], []
    for count in (8, 8, 5, 7, 8, 6):
        tokens = kit.rng.integers(0, 50, count)
        rows = kit.rng.permutation(count)[:5]
        batch = make_batch([Chunk(tokens=[int(token)]) for token in tokens], logit_rows=rows)
        pending.append(program(batch, None))
        expected.append(values[tokens[rows]])
    assert (graphs.captures, graphs.replays) == (1, 5)
    for outputs, wanted in zip(pending, expected, strict=True):
        assert_close(outputs.result().logits, wanted, 1e-6)


def test_hidden_states_of_a_graph(kit: Kit, graphs: ReplayedGraphs) -> None:
    table, values = kit.dense(kit.normal(50, 50))

    def forward(ops: Ops, batch: Batch) -> ModelOutputs:
        x = ops.embed(table, batch.tokens)
        return ModelOutputs(logits=ops.select(x, batch.logit_rows), hidden=[ops.scale(x, 2.0), x])

    program = kit.device.compile(forward, hidden=[0])
    batches = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    pending = [program(make_batch([Chunk(tokens=[t]) for t in b]), None) for b in batches]
    assert graphs.replays == 2
    for outputs, tokens in zip(pending, batches, strict=True):
        assert list(outputs.result().hidden) == [0]
        assert_close(outputs.result().hidden[0], 2 * values[tokens], 1e-6)


def test_tokens_of_the_step_before_reach_a_graph(kit: Kit, graphs: ReplayedGraphs) -> None:
    successors = kit.rng.permutation(50)
    logits = kit.normal(50, 50)
    logits[np.arange(50), successors] = 16
    table, _ = kit.dense(logits)
    program = kit.device.compile(as_forward(lambda ops, batch: ops.embed(table, batch.tokens)))
    tokens = np.array([3, 11, 20])
    previous = kit.device.sample(program(kit.rows(tokens), None), sampling(3))
    for _ in range(4):
        rows = kit.rng.permutation(3)
        batch = make_batch([Chunk(tokens=[0], sources=[int(row)]) for row in rows])
        tokens = successors[tokens][rows]
        previous = kit.device.sample(program(batch, previous), sampling(3))
    assert graphs.replays == 3
    assert np.array_equal(previous.result().tokens, successors[tokens])


def test_long_chunks_run_eagerly(kit: Kit, graphs: ReplayedGraphs) -> None:
    forward, _ = table_forward(kit)
    program = kit.device.compile(forward)
    for _ in range(3):
        program(kit.rows(range(MOST_QUERIES + 1)), None)
    assert not graphs.captures
    for _ in range(3):
        program(kit.rows(range(MOST_QUERIES)), None)
    assert graphs.captures == 1


def test_option_turns_graphs_off(graphs: ReplayedGraphs) -> None:
    runtime = HostRuntime()
    runtime.graphs = graphs
    options = Options.parse("test", {"activations": "f32", "graphs": "0"})
    device = TorchDevice(runtime, TorchKernels(torch.float32), options)
    kit = Kit(device, np.random.default_rng())
    forward, _ = table_forward(kit)
    program = device.compile(forward)
    for _ in range(3):
        program(kit.rows([1]), None)
    assert not graphs.captures
    assert not device.capabilities.capture
    device.close()


def test_a_closed_pool_is_refused_before_its_graph_runs(kit: Kit, graphs: ReplayedGraphs) -> None:
    bench = AttentionBench(kit, AttentionCase())
    program = kit.device.compile(as_forward(bench.forward))
    context = bench.context(40)

    def step() -> None:
        batch = bench.batch([Extension(context=context, tokens=bench.random_tokens(1))])
        program(batch, None)

    for _ in range(3):
        step()
    replays = graphs.replays
    assert replays == 2
    bench.pool.close()
    with pytest.raises(DeviceError, match="closed"):
        step()
    assert graphs.replays == replays


def test_engine(kit: Kit, graphs: ReplayedGraphs, tmp_path: Path) -> None:
    """Three requests of different lengths, one step ahead, in a model with a sliding window."""
    bench = EngineBench(kit.device, tiny_gemma(), tmp_path)
    requests = [
        Request(id=str(count), prompt=random_prompt(kit.rng, 4 * count), params=greedy(count))
        for count in (6, 12, 15)
    ]
    bench.serve(requests)
    bench.check_power()
    assert graphs.replays >= 8


def test_weights_outlive_nothing(kit: Kit, graphs: ReplayedGraphs) -> None:
    """A closed device has let go of its weights, and its programs of what they captured."""
    handle = kit.device.put([Dense(array=np.eye(8, dtype=np.float32))])
    program = kit.device.compile(as_forward(lambda ops, batch: ops.embed(handle, batch.tokens)))
    for _ in range(2):
        program(kit.rows([1]), None)
    assert graphs.captures == 1
    kit.device.close()
    assert program.graphs is None
    assert handle.nbytes == 0
    with pytest.raises(DeviceError, match="closed"):
        handle.products  # noqa: B018
