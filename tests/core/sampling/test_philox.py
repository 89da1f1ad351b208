"""Random numbers against the published vectors and an implementation in plain integers."""

from __future__ import annotations

import importlib.resources
import json
import math
from fractions import Fraction

import numpy as np
import pytest

from polysilicon.sampling.philox import (
    GUMBEL_RANGE,
    gumbel,
    philox4x32,
    to_gumbel,
    to_uniform,
    uniforms,
)

VECTORS = json.loads(
    (importlib.resources.files("polysilicon.testing") / "philox_vectors.json").read_text()
)["vectors"]


def philox_in_integers(counter: list[int], key: list[int]) -> list[int]:
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        x, y = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (y >> 32) ^ b ^ k, y % 2**32, (x >> 32) ^ d ^ m, x % 2**32
        k, m = (k + 0x9E3779B9) % 2**32, (m + 0xBB67AE85) % 2**32
    return [a, b, c, d]


def round_to_float32(value: Fraction) -> Fraction:
    """The nearest number of 24 significant bits, the even one among two."""
    exponent = math.floor(math.log2(value)) - 23
    step = Fraction(2) ** exponent
    return round(value / step) * step


def uniform_in_fractions(word: int) -> Fraction:
    if word == 0:
        return Fraction(1, 2**33)
    total = round_to_float32(round_to_float32(Fraction(word)) + Fraction(1, 2))
    return min(total / 2**32, 1 - Fraction(1, 2**24))


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000",
         "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
         "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
         "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)  # fmt: skip
def test_published_vectors(counter: str, key: str, expected: str) -> None:
    words = [
        np.array([int(word, 16) for word in text.split()], np.uint32) for text in (counter, key)
    ]
    assert [f"{int(word):08x}" for word in philox4x32(*words)] == expected.split()
    assert philox_in_integers(words[0].tolist(), words[1].tolist()) == [
        int(word, 16) for word in expected.split()
    ]


def test_blocks_equal_plain_integers_and_broadcast() -> None:
    random = np.random.default_rng(3)
    counter = random.integers(0, 2**32, (5, 7, 4), dtype=np.uint32)
    key = random.integers(0, 2**32, (7, 2), dtype=np.uint32)
    given = counter.copy(), key.copy()
    words = philox4x32(counter, key)
    assert words.shape == (5, 7, 4)
    assert words.dtype == np.uint32
    for i in range(5):
        for j in range(7):
            assert words[i, j].tolist() == philox_in_integers(
                counter[i, j].tolist(), key[j].tolist()
            )
    np.testing.assert_array_equal(counter, given[0])
    np.testing.assert_array_equal(key, given[1])
    assert philox4x32(np.zeros((0, 4), np.uint32), np.zeros(2, np.uint32)).shape == (0, 4)
    many_keys = philox4x32(counter[0, 0], key)
    assert many_keys[3].tolist() == philox_in_integers(counter[0, 0].tolist(), key[3].tolist())


@pytest.mark.parametrize("vector", VECTORS)
def test_stored_vectors(vector: dict[str, int | str]) -> None:
    seed, choice, position, token = (
        int(vector[name]) for name in ("seed", "choice", "position", "id")
    )
    block = philox_in_integers([token // 4, choice, position, 0], [seed % 2**32, seed // 2**32])
    word = block[token % 4]
    assert word == vector["bits"]
    assert Fraction(float.fromhex(str(vector["uniform"]))) == uniform_in_fractions(word)
    uniform = uniforms(seed, choice, position, token + 1)[token]
    assert float(uniform).hex() == vector["uniform"]
    exact = -math.log(-math.log1p(-float(uniform)))
    noise = float(gumbel(seed, choice, position, token + 1)[token])
    assert noise == pytest.approx(exact, rel=1e-6, abs=1e-6)


def test_stored_vectors_reach_every_kind_of_rounding() -> None:
    words = [vector["bits"] for vector in VECTORS]
    assert any(word < 2**13 for word in words)
    assert any(2**23 <= word < 2**24 and word % 2 for word in words)
    assert any(2**23 <= word < 2**24 and not word % 2 for word in words)
    assert any(word >= 2**31 and word % 512 == 128 for word in words)
    assert any(word >= 2**31 and word % 512 == 384 for word in words)
    assert any(word >= 2**32 - 128 for word in words)


@pytest.mark.parametrize("distance", [0, 1, 2])
@pytest.mark.parametrize("word", [0, 2**22, 2**23, 2**24, 2**31, 2**32 - 384, 2**32 - 128, 2**32])
@pytest.mark.parametrize("sign", [1, -1])
def test_uniform_of_boundary_words(word: int, distance: int, sign: int) -> None:
    word = (word + sign * distance) % 2**32
    uniform = to_uniform(np.array([word], np.uint32))
    assert uniform.dtype == np.float32
    assert Fraction(float(uniform[0])) == uniform_in_fractions(word)
    assert 0 < uniform[0] < 1


def test_gumbel_stays_in_its_range() -> None:
    ends = to_gumbel(to_uniform(np.array([0, 2**32 - 1], np.uint32)))
    assert GUMBEL_RANGE[0] < ends[1] < GUMBEL_RANGE[0] + 0.02
    assert GUMBEL_RANGE[1] - 0.02 < ends[0] < GUMBEL_RANGE[1]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 31, 65535, 65536, 65539])
def test_a_draw_does_not_depend_on_how_many_are_drawn(count: int) -> None:
    every = gumbel(9, 1, 2, 70000)
    some = gumbel(9, 1, 2, count)
    assert some.shape == (count,)
    np.testing.assert_array_equal(some, every[:count])
