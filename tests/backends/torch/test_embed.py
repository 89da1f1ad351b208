"""Embedding kernels: rows of dense and of packed tables, and tokens of the step before."""

import numpy as np
import pytest
import torch

from polysilicon.testing import encoded
from polysilicon_torch.packing import place_matrices
from polysilicon_torch.placed import DenseMatrix, PackedMatrix
from polysilicon_torch.target import INTERPRETER
from polysilicon_torch.triton.embed import embed, gather_tokens
from polysilicon_torch.tuning import Tuning

TUNING = Tuning.of(INTERPRETER).over("embed", {"BLOCK": 64}).over("gather_tokens", {"BLOCK": 4})
TOKENS = [36, 0, 5, 5, 31]


def rows_of(weight, dtype=torch.float32):
    [(matrix, _)] = place_matrices(
        [weight], None, dtype=dtype, device=torch.device("cpu"), keep_codes=True
    )
    return matrix, embed(matrix, torch.tensor(TOKENS, dtype=torch.int32), tuning=TUNING).numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 64, 133])
def test_dense(dtype, width):
    values = torch.randn(37, width).to(dtype)
    result = embed(DenseMatrix(values=values), torch.tensor(TOKENS), tuning=TUNING)
    assert result.dtype == torch.float32
    assert torch.equal(result, values[TOKENS].float())


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("variant", encoded.AFFINE_VARIANTS)
def test_affine(bits, variant):
    """Every width of codes with scales of every kind; the last unit of words is not full."""
    table = encoded.affine(np.random.default_rng(), (37, 208), bits, 16, variant)
    matrix, rows = rows_of(table.weight)
    assert isinstance(matrix, PackedMatrix)
    np.testing.assert_allclose(rows, table.values[TOKENS], atol=2e-6, rtol=0)


@pytest.mark.parametrize("format", encoded.FLOAT_FORMATS)
@pytest.mark.parametrize("variant", encoded.FLOAT_VARIANTS)
def test_float(format, variant):
    table = encoded.group_float(np.random.default_rng(), (37, 160), format, 32, variant)
    matrix, rows = rows_of(table.weight)
    assert isinstance(matrix, PackedMatrix)
    np.testing.assert_allclose(rows, table.values[TOKENS], atol=2e-6, rtol=0)


def test_whole_rows_and_blocks():
    rng = np.random.default_rng()
    for table in (
        encoded.affine(rng, (37, 96), 4, 96),
        encoded.group_float(rng, (37, 100), "f8_e4m3", 0, block=(16, 32)),
    ):
        _, rows = rows_of(table.weight)
        np.testing.assert_allclose(rows, table.values[TOKENS], atol=2e-6, rtol=0)


def test_gather_tokens():
    tokens = torch.arange(10, 20, dtype=torch.int32)
    source = torch.tensor([-1, 2, 0, -1, -1, 1, 1, -1, 2, -1], dtype=torch.int32)
    gather_tokens(tokens, source, torch.tensor([70, 80, 90], dtype=torch.int32), tuning=TUNING)
    assert tokens.tolist() == [10, 90, 70, 13, 14, 80, 80, 17, 90, 19]
