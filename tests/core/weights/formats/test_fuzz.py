"""Damaged checkpoints of every format: refused with one clear error, or read."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polysilicon.errors import ModelError
from polysilicon.weights.checkpoint import open_checkpoint

from .cases import CASES
from .checkpoints import Case, write


@functools.cache
def files_of(case: Case) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        made = write(Path(folder) / "model", case, np.random.default_rng())
        return {path.name: path.read_bytes() for path in made.folder.iterdir()}


def header_end(content: bytes) -> int:
    return 8 + int.from_bytes(content[:8], "little")


@pytest.mark.parametrize("case", CASES, ids=str)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_damage_is_refused_or_harmless(case: Case, data: st.DataObject) -> None:
    files = files_of(case)
    name = data.draw(st.sampled_from(sorted(files)))
    content = files[name]
    # What a file says of itself breaks more than what its tensors hold.
    end = header_end(content) if name.endswith(".safetensors") else len(content)
    at = data.draw(st.integers(0, data.draw(st.sampled_from([end, len(content)])) - 1))
    removed = data.draw(st.integers(0, 4))
    new = data.draw(st.one_of(st.binary(max_size=4), st.sampled_from([b"-1", b"null", b"9" * 20])))
    with tempfile.TemporaryDirectory() as folder:
        for other, kept in files.items():
            (Path(folder) / other).write_bytes(kept)
        damaged = content[:at] + new + content[at + removed :]
        (Path(folder) / name).write_bytes(damaged)
        message = ""
        try:
            with open_checkpoint(Path(folder)) as checkpoint:
                for tensor in checkpoint.tensors:
                    weight = checkpoint.weight(tensor)
                    assert weight.shape == checkpoint.tensors[tensor].shape
        except ModelError as error:
            message = str(error)
        assert len(message) < 1000
