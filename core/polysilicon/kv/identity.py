"""Names of cached pages: a hash chained over everything that decides what a page holds.

A namespace's root hashes the model, the KV dtype and layout, the adapter and the tenant's salt;
each block's name hashes its parent's name and its own tokens. Equal names therefore mean equal
contents, on any device, host, disk or remote tier, and two namespaces have no name in common.

Blocks are 16 tokens long whatever a device's page size, so that devices with different page sizes
share names. A page size that is no multiple of 16 (tests use such) is named in blocks of gcd(page
size, 16) tokens, so that a page always holds whole blocks; a partly filled page ends with one
shorter block.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from math import gcd

import numpy as np
import numpy.typing as npt

BLOCK_TOKENS = 16
IDENTITY_BYTES = 32
TOKEN_BYTES = 4

Tokens = Sequence[int] | npt.NDArray[np.int32]


def token_bytes(tokens: Tokens) -> bytes:
    """`tokens` as little-endian int32, four bytes each: the form that is hashed and compared."""
    return np.asarray(tokens, dtype="<i4").tobytes()


def block_tokens(page_size: int) -> int:
    """Tokens in one named block of a device whose pages hold `page_size` tokens."""
    return gcd(page_size, BLOCK_TOKENS)


def root_identity(
    *, model: str, kv_dtype: str, layout: int, adapter: str | None, salt: str | None
) -> bytes:
    """The 32-byte name of the namespace in which pages may be shared.

    `model` is the fingerprint of the weights, `layout` the version of the canonical page bytes.
    `adapter` and `salt` are None where there is none, which differs from the empty string. Each
    field goes in with its length, so that no two sets of fields read the same.
    """
    digest = blake2b(digest_size=IDENTITY_BYTES, person=b"polysilicon.root")
    for field in (model, kv_dtype, str(layout), adapter, salt):
        if field is None:
            digest.update(b"\0")
            continue
        # A salt comes from a JSON request, which can carry lone surrogates.
        encoded = field.encode("utf-8", "surrogatepass")
        digest.update(b"\1" + len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def block_names(parent: bytes, tokens: bytes, block: int) -> tuple[bytes, ...]:
    """The names, chained from `parent`, of the blocks of `block` tokens in `tokens` (bytes)."""
    names = []
    size = block * TOKEN_BYTES
    for start in range(0, len(tokens), size):
        digest = blake2b(digest_size=IDENTITY_BYTES, person=b"polysilicon.page")
        digest.update(len(parent).to_bytes(8, "little") + parent)
        digest.update(tokens[start : start + size])
        parent = digest.digest()
        names.append(parent)
    return tuple(names)


def page_identity(parent: bytes, tokens: Tokens, *, block: int = BLOCK_TOKENS) -> bytes:
    """The 32-byte name of a page of `tokens`: that of its last block.

    `parent` names the page, or the root, before it; `block` is the device's
    `block_tokens(page_size)`.
    """
    data = token_bytes(tokens)
    assert data, "a page without tokens has no name"
    return block_names(parent, data, block)[-1]
