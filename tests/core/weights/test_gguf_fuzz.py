"""Random damage to a small valid GGUF file ends in a ModelError or in success, soon."""

from __future__ import annotations

import contextlib
import faulthandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polysilicon.errors import ModelError
from polysilicon.weights.gguf import GGUFFile

WATCHDOG_SECONDS = 60
INTERESTING = [
    0,
    1,
    2,
    8,
    9,
    31,
    32,
    255,
    1 << 16,
    1 << 31,
    1 << 32,
    1 << 60,
    1 << 63,
    (1 << 64) - 1,
]


def valid(build: Any) -> bytes:
    return build.file(
        [
            build.string("general.architecture", "llama"),
            build.number("general.alignment", 32),
            build.number("llama.attention.head_count", 2),
            build.number("split.count", 1, "H"),
            build.strings("words", ["a", "bc", ""]),
            build.numbers("scores", 6, np.arange(3, dtype=np.float32)),
        ],
        [
            build.tensor("blk.0.attn_q.weight", [32, 4], 2, 0),
            build.tensor("output_norm.weight", [8], 0, 96),
            build.tensor("x", [256, 1], 12, 128),
            build.tensor("y.weight", [256, 1], 29, 288),
            build.tensor("z.weight", [64, 1], 40, 352),
            build.tensor("z.scale", [1], 0, 416),
        ],
        bytes(range(256)) + bytes(164),
    )


mutation = st.one_of(
    st.tuples(st.just("byte"), st.floats(0, 1), st.integers(0, 255)),
    st.tuples(st.just("word"), st.floats(0, 1), st.sampled_from(INTERESTING)),
    st.tuples(st.just("delete"), st.floats(0, 1), st.integers(1, 40)),
    st.tuples(st.just("repeat"), st.floats(0, 1), st.integers(1, 40)),
    st.tuples(st.just("cut"), st.floats(0, 1), st.just(0)),
)


def damaged(content: bytes, mutations: list[tuple[str, float, int]]) -> bytes:
    result = bytearray(content)
    for kind, where, value in mutations:
        at = int(where * len(result))
        if kind == "byte":
            result[at : at + 1] = bytes([value])
        elif kind == "word":
            result[at : at + 8] = value.to_bytes(8, "little")
        elif kind == "delete":
            del result[at : at + value]
        elif kind == "repeat":
            result[at:at] = result[at : at + value]
        else:
            del result[at:]
    return bytes(result)


@pytest.fixture
def watchdog() -> Any:
    """End the process with a traceback when the parser hangs, even inside native code."""
    faulthandler.dump_traceback_later(WATCHDOG_SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(mutations=st.lists(mutation, min_size=1, max_size=4))
@pytest.mark.usefixtures("watchdog")
def test_damage_is_refused_or_harmless(
    tmp_path: Path, build: Any, mutations: list[tuple[str, float, int]]
) -> None:
    path = tmp_path / "fuzzed.gguf"
    path.unlink(missing_ok=True)
    path.write_bytes(damaged(valid(build), mutations))
    try:
        with GGUFFile(path) as file:
            for name in file.tensors:
                with contextlib.suppress(ModelError):
                    assert file.weight(name).shape == file.tensors[name].shape
            assert len(file.fingerprint()) == 64
    except ModelError as error:
        message = str(error)
    else:
        message = path.name
    assert path.name in message
