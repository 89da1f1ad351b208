from __future__ import annotations

import hashlib
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polysilicon.kv import GroupSpec, KVManager, page_identity, root_identity
from polysilicon.kv.identity import block_names, block_tokens, token_bytes

Fields = tuple[str, str, int, str | None, str | None]


def root(fields: Fields) -> bytes:
    model, kv_dtype, layout, adapter, salt = fields
    return root_identity(model=model, kv_dtype=kv_dtype, layout=layout, adapter=adapter, salt=salt)


def test_every_field_and_every_border_between_fields_counts() -> None:
    words: list[str | None] = [None, "", "a", "aa", "b", "\0", "\1", "\ud800"]
    texts = ["", "a", "aa", "b", "1", "\0"]
    names = {
        root((model, dtype, layout, adapter, salt))
        for model, dtype, layout in product(texts, texts, (1, 11))
        for adapter, salt in product(words, words)
    }
    assert len(names) == len(texts) ** 2 * 2 * len(words) ** 2
    assert {len(name) for name in names} == {32}


FIELDS = st.tuples(
    st.text(max_size=3),
    st.text(max_size=3),
    st.integers(0, 20),
    st.none() | st.text(max_size=3),
    st.none() | st.text(max_size=3),
)


@given(FIELDS, FIELDS)
def test_equal_roots_mean_equal_fields(left: Fields, right: Fields) -> None:
    assert (root(left) == root(right)) == (left == right)


def test_a_name_is_the_documented_hash() -> None:
    digest = hashlib.blake2b(digest_size=32, person=b"polysilicon.page")
    digest.update((4).to_bytes(8, "little") + b"root" + np.array([7, 8], "<i4").tobytes())
    assert page_identity(b"root", [7, 8]) == digest.digest()


def test_a_page_is_named_in_blocks_of_sixteen() -> None:
    tokens = list(range(32))
    first = page_identity(b"root", tokens[:16])
    second = page_identity(first, tokens[16:])
    assert page_identity(b"root", tokens) == second
    assert block_names(b"root", token_bytes(tokens), 16) == (first, second)
    assert page_identity(b"other", tokens[:16]) != first


@pytest.mark.parametrize(("page_size", "block"), [(1, 1), (3, 1), (4, 4), (16, 16), (48, 16)])
def test_blocks_fill_a_page(page_size: int, block: int) -> None:
    assert block_tokens(page_size) == block


def chain(page_size: int, tokens: list[int]) -> list[bytes]:
    """The block names along the path that a manager caches for `tokens`."""
    kv = KVManager(
        groups=[GroupSpec(name="full", pages=50, window=None)],
        page_size=page_size,
        max_sequences=1,
        max_length=200,
    )
    sequence = kv.open(tokens, b"root")
    assert sequence is not None
    assert kv.grow(sequence, len(tokens))
    kv.close(sequence, tokens, len(tokens))
    names: list[bytes] = []
    node = kv.tree.roots[b"root"]
    while node.children:
        (node,) = node.children.values()
        names += kv.tree.names(node)
    kv.check_integrity()
    return names


def test_names_do_not_depend_on_the_page_size_of_the_device() -> None:
    tokens = [token * 77 % 1000 for token in range(100)]
    small, large = chain(16, tokens), chain(32, tokens)
    assert len(small) == 7
    assert small == large == list(block_names(b"root", token_bytes(tokens), 16))


def test_neither_adapter_nor_salt_sees_the_pages_of_another() -> None:
    kv = KVManager(
        groups=[GroupSpec(name="full", pages=200, window=None)],
        page_size=4,
        max_sequences=1,
        max_length=40,
    )
    tokens = list(range(18))
    roots = [
        root(("model", "f16", 1, adapter, salt))
        for adapter, salt in product((None, "", "x", "y"), repeat=2)
    ]
    for name in roots:
        sequence = kv.open(tokens, name)
        assert sequence is not None
        assert sequence.num_cached_tokens == 0
        assert sequence.copies == []
        assert kv.grow(sequence, 18)
        kv.close(sequence, tokens, 18)
        kv.check_integrity()
    for name in roots:
        sequence = kv.open(tokens, name)
        assert sequence is not None
        assert sequence.num_cached_tokens == 17
        kv.close(sequence, tokens, 17)
        kv.check_integrity()
