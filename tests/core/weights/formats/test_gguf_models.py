"""A small Llama in every type of GGUF on the reference device, against its dense twin."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from polysilicon.backend import Device

from . import gguf_models
from .answers import logits


@pytest.mark.parametrize("kind", gguf_models.KINDS)
def test_the_model_answers_as_its_dense_twin(tmp_path: Path, reference: Device, kind: str) -> None:
    path = gguf_models.write(tmp_path, kind, np.random.default_rng())
    expected = logits(tmp_path / "twin", reference)
    assert np.ptp(expected) > 1
    np.testing.assert_array_equal(logits(path, reference), expected)
