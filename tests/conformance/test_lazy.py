"""The lazy device: late, padded, traced once; and each rule of the contract that it enforces.

That it gives right answers is the conformance kit's to say, which judges it beside the reference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from polysilicon.backend import (
    AdapterSpec,
    AdapterTarget,
    Batch,
    Dense,
    DeviceError,
    Handle,
    KVPool,
    KVSpec,
    ModelOutputs,
    Ops,
    Plane,
    SamplingBatch,
)
from polysilicon.plugins import load_plugins
from polysilicon.testing.batches import Chunk, make_batch
from polysilicon.testing.lazy import ContractError, LazyBackend
from polysilicon.testing.lazy_batches import pad_batch
from polysilicon.testing.lazy_device import LazyDevice
from polysilicon.testing.sampling import sampling

PAGE = 16
VOCABULARY = 8


@pytest.fixture
def device() -> Iterator[LazyDevice]:
    opened = LazyBackend().open(0, {})
    assert isinstance(opened, LazyDevice)
    yield opened
    opened.close()


def place(device: LazyDevice, array: Any) -> Handle:
    return device.put([Dense(array=np.asarray(array, np.float32))])


class Model:
    """Embeds its tokens, each as the row of an identity, and stores them in a pool."""

    def __init__(self, device: LazyDevice) -> None:
        self.table = place(device, np.eye(VOCABULARY))
        self.pool: KVPool = device.kv_pool(
            KVSpec(
                group=0,
                name="full",
                layers=(0,),
                window=None,
                planes=tuple(
                    Plane(name=name, heads=1, dim=VOCABULARY, dtype="f32") for name in "kv"
                ),
                page_size=PAGE,
            ),
            8,
        )
        self.traced = 0

    def forward(self, ops: Ops, batch: Batch) -> ModelOutputs:
        self.traced += 1
        x = ops.embed(self.table, batch.tokens)
        mixed = ops.attention(x, x, x, batch=batch, pool=self.pool, layer=0, heads=1, scale=1.0)
        logits = ops.scale(ops.select(x, batch.logit_rows), 3.0)
        return ModelOutputs(logits=logits, hidden=[mixed])


@pytest.fixture
def model(device: LazyDevice) -> Model:
    return Model(device)


def chunk(tokens: list[int], page: int = 1, start: int = 0, **changes: Any) -> Chunk:
    return Chunk(tokens=tokens, start=start, pages=((page,),), **changes)


def test_it_is_no_installed_backend() -> None:
    assert all(backend.name != "lazy" for backend in load_plugins().backends)


def test_options_and_indexes_are_refused() -> None:
    for index, options in ((1, {}), (0, {"deterministic": "1"})):
        with pytest.raises(ValueError, match="lazy"):
            LazyBackend().open(index, options)


LOOKS: dict[str, Callable[[Any, Ops, Batch], object]] = {
    "shape": lambda x, ops, batch: x.shape[0],
    "dtype": lambda x, ops, batch: x.dtype,
    "length": lambda x, ops, batch: len(batch.tokens),
    "truth": lambda x, ops, batch: 1 if x else 0,
    "iteration": lambda x, ops, batch: list(batch.context_len),
    "unpacking": lambda x, ops, batch: [*x],
    "membership": lambda x, ops, batch: 3 in batch.tokens,
    "item": lambda x, ops, batch: batch.positions[0],
    "group": lambda x, ops, batch: batch.slots[0],
    "value": lambda x, ops, batch: int(batch.tokens),
    "array": lambda x, ops, batch: np.asarray(x),
    "numpy": lambda x, ops, batch: np.sum(x),
    "addition": lambda x, ops, batch: x + x,
    "negation": lambda x, ops, batch: -x,
    "scaling": lambda x, ops, batch: np.float32(2) * x,
    "comparison": lambda x, ops, batch: batch.tokens == 0,
    "order": lambda x, ops, batch: batch.positions > 0,
    "constant": lambda x, ops, batch: ops.add(x, np.zeros((1, VOCABULARY), np.float32)),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_forward_cannot_look_into_values(device: LazyDevice, model: Model, look: str) -> None:
    def forward(ops: Ops, batch: Batch) -> ModelOutputs:
        x = ops.embed(model.table, batch.tokens)
        LOOKS[look](x, ops, batch)
        return ModelOutputs(logits=x, hidden=())

    with pytest.raises(ContractError, match=r"a forward|numpy array"):
        device.compile(forward)


def test_values_do_not_leave_their_forward(device: LazyDevice, model: Model) -> None:
    kept: list[Any] = []

    def first(ops: Ops, batch: Batch) -> ModelOutputs:
        kept.extend([ops, ops.embed(model.table, batch.tokens)])
        return ModelOutputs(logits=kept[1], hidden=())

    def second(ops: Ops, batch: Batch) -> ModelOutputs:
        return ModelOutputs(logits=ops.scale(kept[1], 2.0), hidden=())

    device.compile(first)
    with pytest.raises(ContractError, match="no value of this forward"):
        device.compile(second)
    with pytest.raises(ContractError, match="after the forward has returned"):
        kept[0].scale(kept[1], 2.0)
    with pytest.raises(ContractError, match="logits"):
        device.compile(lambda ops, batch: ModelOutputs(logits=np.zeros((1, 1)), hidden=()))


def test_a_forward_is_traced_once(device: LazyDevice, model: Model) -> None:
    program = device.compile(model.forward, hidden=[0])
    for count in (1, 7, 8, 9):
        tokens = [index % VOCABULARY for index in range(count)]
        outputs = program(make_batch([chunk(tokens)], (PAGE,)), None).result()
        assert np.array_equal(outputs.logits, 3 * np.eye(VOCABULARY, dtype=np.float32)[tokens])
        assert outputs.hidden[0].shape == (count, VOCABULARY)
    assert model.traced == 1


def test_ops_see_padded_arrays(device: LazyDevice, model: Model, monkeypatch: Any) -> None:
    """More tokens, sequences, rows and columns than the batch has, in page 0."""
    seen: list[Batch] = []
    attention = device.ops.attention

    def spy(*arguments: Any, batch: Batch, **named: Any) -> Any:
        seen.append(batch)
        return attention(*arguments, batch=batch, **named)

    monkeypatch.setattr(device.ops, "attention", spy)
    batch = make_batch([chunk([1, 2, 3]), chunk([4], page=2, start=5)], (PAGE,))
    device.compile(model.forward)(batch, None).result()
    [padded] = seen
    for name in ("tokens", "context_len", "logit_rows"):
        own, more = getattr(batch, name), getattr(padded, name)
        assert len(more) > len(own)
        assert np.array_equal(more[: len(own)], own)
    assert padded.page_tables[0].shape[1] > batch.page_tables[0].shape[1]
    assert padded.query_start[-1] == len(padded.tokens)
    assert not padded.page_tables[0][2:].any()
    assert not padded.slots[0][4:].any()


@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 9])
def test_padding_is_never_nothing(tokens: int) -> None:
    batch = make_batch([chunk(list(range(tokens)))], (PAGE,))
    padded = pad_batch(batch)
    assert len(padded.tokens) > tokens
    assert len(padded.tokens) % 8 == len(padded.context_len) % 4 == 0
    assert (np.diff(padded.query_start) >= 0).all()


def test_nothing_runs_before_it_is_asked_for(device: LazyDevice, model: Model) -> None:
    """And then only what comes before it."""
    program = device.compile(model.forward)
    first = program(make_batch([chunk([1])], (PAGE,)), None)
    tokens = device.sample(first, sampling(1))
    second = program(make_batch([chunk([0], start=1, sources=[0])], (PAGE,)), tokens)
    last = device.sample(second, sampling(1))
    assert len(device.queue) == 4
    assert tokens.result().tokens.tolist() == [1]
    assert len(device.queue) == 2
    assert last.result().tokens.tolist() == [1]
    assert not device.queue


@pytest.mark.parametrize(
    "name", ["tokens", "positions", "query_start", "page_tables", "logit_rows"]
)
def test_a_changed_batch_is_found(device: LazyDevice, model: Model, name: str) -> None:
    batch = make_batch([chunk([1, 2])], (PAGE,))
    pending = device.compile(model.forward)(batch, None)
    arrays = getattr(batch, name)
    (arrays[0] if isinstance(arrays, tuple) else arrays)[...] += 1
    with pytest.raises(ContractError, match=name):
        device.sample(pending, sampling(2)).result()


def test_a_batch_is_the_cores_again_after_its_result(device: LazyDevice, model: Model) -> None:
    batch = make_batch([chunk([1, 2])], (PAGE,))
    first = device.compile(model.forward)(batch, None)
    tokens = device.sample(first, sampling(2))
    tokens.result()
    batch.tokens[:] = 0
    assert first.result().logits.argmax(axis=1).tolist() == [1, 2]


def test_a_changed_sampling_batch_is_found(device: LazyDevice, model: Model) -> None:
    pending = device.compile(model.forward)(make_batch([chunk([1])], (PAGE,)), None)
    batch: SamplingBatch = sampling(1)
    tokens = device.sample(pending, batch)
    batch.seed[:] = 5
    with pytest.raises(ContractError, match="seed"):
        tokens.result()


def test_changed_pages_are_found(device: LazyDevice, model: Model) -> None:
    spec = model.pool.spec
    data = np.zeros((1, 1, spec.block_bytes), np.uint8)
    model.pool.read([1], data).result()
    pending = model.pool.write([1], data)
    data[...] = 0
    with pytest.raises(ContractError, match="data was changed"):
        pending.result()


BROKEN: dict[str, dict[str, Any]] = {
    "positions is int64": {"positions": np.array([0, 1])},
    "contiguous: False": {"positions": np.arange(4, dtype=np.int32)[::2]},
    "token_source has shape": {"token_source": np.full(3, -1, np.int32)},
    "query_start": {"query_start": np.array([0, 1], np.int32)},
    "context_len is less": {"context_len": np.array([1], np.int32)},
    "logit_rows": {"logit_rows": np.array([2], np.int32)},
    "do not hold the context": {"page_tables": (np.ones((1, 0), np.int32),)},
    "slots": {"slots": (np.array([16, 18], np.int32),)},
    "there is none": {"token_source": np.array([0, -1], np.int32)},
}


@pytest.mark.parametrize("words", BROKEN)
def test_a_batch_that_does_not_fit_together(device: LazyDevice, model: Model, words: str) -> None:
    batch = dataclasses.replace(make_batch([chunk([1, 2])], (PAGE,)), **BROKEN[words])
    with pytest.raises(ContractError, match=words):
        device.compile(model.forward)(batch, None)


def test_a_page_is_not_given_to_another_sequence_too_early(
    device: LazyDevice, model: Model
) -> None:
    """Not while a step that reads or writes it is in flight; to share it for reading is no harm."""
    program = device.compile(model.forward)
    reads = make_batch([chunk([1], start=3)], (PAGE,), slots=[4])
    own = make_batch([chunk([1], start=4)], (PAGE,), slots=[4])
    other = make_batch([chunk([2, 3])], (PAGE,), slots=[5])
    shared = Chunk(tokens=[1], start=16, pages=((1, 2),))
    pending = program(reads, None)
    program(own, None)
    program(make_batch([shared], (PAGE,), slots=[6]), None)
    with pytest.raises(ContractError, match="page 1 of KV group 'full'"):
        program(other, None)
    pending.result()
    with pytest.raises(ContractError, match="slot 5"):
        program(other, None)
    device.run_all()
    program(other, None).result()


def test_previous_is_the_step_before(device: LazyDevice, model: Model) -> None:
    program = device.compile(model.forward)
    old = device.sample(program(make_batch([chunk([1])], (PAGE,)), None), sampling(1))
    device.sample(program(make_batch([chunk([2], page=2)], (PAGE,)), None), sampling(1))
    with pytest.raises(ContractError, match="previous"):
        program(make_batch([chunk([0], start=1, sources=[0])], (PAGE,)), old)


def test_sampling_takes_its_own_steps_only(device: LazyDevice, model: Model) -> None:
    other = LazyDevice()
    pending = other.compile(Model(other).forward)(make_batch([chunk([1])], (PAGE,)), None)
    with pytest.raises(ContractError, match="same device"):
        device.sample(pending, sampling(1))
    other.close()


def test_copies_name_every_slot_once(device: LazyDevice, model: Model) -> None:
    slots = np.arange(16, 20, dtype=np.int32)
    for source, target in ((slots, slots), (slots, slots[[0, 0, 1, 1]] + 32)):
        with pytest.raises(ContractError, match="twice"):
            model.pool.copy(source, target)
    with pytest.raises(ContractError, match="int32"):
        model.pool.copy(slots.astype(np.int64), slots.astype(np.int64) + 32)
    with pytest.raises(DeviceError, match="slots"):
        model.pool.copy(slots, slots + 1000)


def test_a_failed_call_tells_those_that_need_it(device: LazyDevice, model: Model) -> None:
    """Its own result and that of what was made of it raise; others go on."""
    program = device.compile(model.forward)
    bad = program(make_batch([chunk([VOCABULARY])], (PAGE,)), None)
    tokens = device.sample(bad, sampling(1))
    good = program(make_batch([chunk([3], page=2)], (PAGE,)), None)
    assert good.result().logits.argmax() == 3
    for pending in (bad, tokens):
        with pytest.raises(DeviceError, match="tokens must lie"):
            pending.result()


def test_nothing_works_after_the_end(device: LazyDevice, model: Model) -> None:
    program = device.compile(model.forward)
    batch = make_batch([chunk([1])], (PAGE,))
    pending = program(batch, None)
    adapters = device.adapter_pool(
        AdapterSpec(max_rank=1, targets={"only": AdapterTarget(inputs=1, outputs=(1,))}), 2
    )
    device.close()
    for use in (
        pending.result,
        lambda: program(batch, None),
        lambda: device.sample(pending, sampling(1)),
        lambda: device.compile(model.forward),
        lambda: place(device, [1.0]),
        lambda: model.pool.read([1], np.zeros((1, 1, model.pool.spec.block_bytes), np.uint8)),
        lambda: adapters.clear(1),
    ):
        with pytest.raises(DeviceError, match="closed"):
            use()


def test_a_pool_ends_after_what_was_submitted_before(device: LazyDevice, model: Model) -> None:
    program = device.compile(model.forward)
    batch = make_batch([chunk([5])], (PAGE,))
    pending = program(batch, None)
    model.pool.close()
    assert pending.result().logits.argmax() == 5
    with pytest.raises(DeviceError, match="closed"):
        program(batch, None).result()
