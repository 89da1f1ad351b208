"""LoRA in Triton's interpreter, by the adapter of each sequence."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from polysilicon_torch.adapters import LoraTarget
from polysilicon_torch.target import INTERPRETER
from polysilicon_torch.triton.lora import lora
from polysilicon_torch.tuning import Tuning

BOUNDS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
TUNING = (
    Tuning.of(INTERPRETER)
    .over("lora_shrink", {"BLOCK_T": 16, "BLOCK_K": 32, "SPLITS": 3})
    .over("lora_expand", {"BLOCK_T": 16, "BLOCK_N": 16})
)


@pytest.fixture
def rng():
    return np.random.default_rng()


def batch_of(lengths, slots, *, padding=0, max_query=None):
    """Sequences of these lengths, then `padding` sequences without tokens."""
    starts = np.cumsum([0, *lengths, *[0] * padding]).astype(np.int32)
    return SimpleNamespace(
        query_start=torch.from_numpy(starts),
        adapter_slot=torch.tensor([*slots, *[0] * padding], dtype=torch.int32),
        max_query=max_query or max(lengths, default=1),
    )


def check(rng, lengths, slots, *, ranks, outputs=(24, 9), inputs=70, rank=8, dtype=torch.float32,
          out_dtype=None, tokens=None, padding=0, max_query=None):  # fmt: skip
    """ranks: for each slot from 1 on, those of its parts."""
    count = len(ranks) + 1
    down = np.zeros((count, len(outputs), rank, inputs), np.float32)
    up = np.zeros((count, sum(outputs), rank), np.float32)
    table = np.zeros((count, len(outputs)), np.int32)
    starts = np.cumsum([0, *outputs])
    for slot, parts in enumerate(ranks, 1):
        for part, own in enumerate(parts):
            table[slot, part] = own
            down[slot, part, :own] = rng.standard_normal((own, inputs)) / np.sqrt(inputs)
            up[slot, starts[part] : starts[part + 1], :own] = rng.standard_normal(
                (outputs[part], own)
            )
    tokens = tokens or sum(lengths)
    x = torch.from_numpy(rng.standard_normal((tokens, inputs), np.float32)).to(dtype)
    before = torch.from_numpy(rng.standard_normal((tokens, sum(outputs) + 3), np.float32))
    before = before.to(out_dtype or dtype)[:, 2:-1]
    after = before.clone()
    wide = torch.zeros((tokens, sum(outputs) + 3), dtype=before.dtype)
    after = wide[:, 2:-1]
    after.copy_(before)
    x[sum(lengths) :] = float("nan")
    down_, up_ = (torch.from_numpy(array).to(dtype) for array in (down, up))
    target = LoraTarget(down=down_, up=up_, ranks=torch.from_numpy(table), outputs=outputs)
    lora(
        x, after, target, batch_of(lengths, slots, padding=padding, max_query=max_query),
        tuning=TUNING,
    )  # fmt: skip
    expected = before.double().numpy().copy()
    changed = np.zeros(expected.shape, bool)
    starts_of_sequences = np.cumsum([0, *lengths])
    for sequence, slot in enumerate(slots):
        own = slice(starts_of_sequences[sequence], starts_of_sequences[sequence + 1])
        for part in range(len(outputs)):
            columns = slice(starts[part], starts[part + 1])
            if slot and table[slot, part]:
                a, b = down_[slot, part].double().numpy(), up_[slot, columns].double().numpy()
                expected[own, columns] += x[own].double().numpy() @ a.T @ b.T
                changed[own, columns] = True
    actual = after.double().numpy()
    np.testing.assert_array_equal(actual[~changed], before.double().numpy()[~changed])
    error = np.abs(actual - expected).max(initial=0)
    assert error <= BOUNDS[dtype] * np.abs(expected).max(initial=1), error


@pytest.mark.parametrize("dtype", BOUNDS)
def test_mixed_adapters(rng, dtype):
    """Decodes and prefills of several adapters and of none, ranks below the pool's."""
    check(rng, [1, 20, 1, 5], [2, 1, 0, 3], ranks=[(8, 3), (1, 8), (0, 5)], dtype=dtype)


def test_float32_results_of_narrow_inputs(rng):
    check(rng, [3, 2], [1, 1], ranks=[(4, 4)], dtype=torch.bfloat16, out_dtype=torch.float32)


@pytest.mark.parametrize("rank", [1, 5, 16, 33])
def test_ranks(rng, rank):
    check(rng, [2, 1], [1, 0], ranks=[(rank,)], outputs=(20,), rank=rank)


def test_decodes(rng):
    check(rng, [1] * 6, [1, 2, 0, 2, 1, 3], ranks=[(8, 8), (2, 0), (0, 0)], padding=2)


def test_padding_is_left_alone(rng):
    """Tokens past the last sequence, of which x holds nothing sensible, and queries below the
    bucket's length."""
    check(rng, [2, 17], [1, 2], ranks=[(8, 8), (4, 4)], tokens=32, padding=3, max_query=64)


def test_no_adapter(rng):
    check(rng, [4, 1], [0, 0], ranks=[(8, 8)])


def test_no_tokens(rng):
    check(rng, [0], [1], ranks=[(8, 8)], max_query=1)
