"""Attention whose context is shared among several work-groups."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from polysilicon.backend import Rope
from polysilicon.testing.attention import AttentionBench, AttentionCase, Extension
from polysilicon.testing.kit import Kit


@pytest.fixture
def kit(device):
    """Contexts of 32 tokens and more are shared."""
    runtime = device.runtime
    before = runtime.tuning
    runtime.tuning = dataclasses.replace(before, split_context=32, attention_groups=64)
    yield Kit(device, np.random.default_rng(np.random.SeedSequence()))
    runtime.tuning = before


@pytest.mark.parametrize("kv_dtype", ["f32", "int8", "fp8_e4m3"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"sinks": True}, {"window": 70}, {"softcap": 3.0, "sinks": True, "window": 40}],
    ids=lambda fields: "+".join(fields) or "plain",
)
def test_shared_contexts(kit, fields, kv_dtype):
    """Decodes of long and short contexts beside each other, and a chunk of a prompt."""
    rope = Rope(dim=64, frequencies=tuple(10000.0 ** (-np.arange(0, 64, 2) / 64)))
    case = AttentionCase(heads=6, key_heads=2, rope=rope, kv_dtype=kv_dtype, **fields)
    bench = AttentionBench(kit, case, pages=40)
    contexts = [bench.context(210), bench.context(20), bench.context(140)]
    bench.step(
        [
            Extension(context=context, tokens=bench.random_tokens(count))
            for context, count in zip(contexts, (200, 1, 131), strict=True)
        ]
    )
    for counts in ((1, 1, 1), (1, 5, 1), (1, 1, 2)):
        bench.step(
            [
                Extension(context=context, tokens=bench.random_tokens(count))
                for context, count in zip(contexts, counts, strict=True)
            ]
        )
