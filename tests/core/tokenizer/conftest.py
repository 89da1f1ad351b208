"""The two real tokenizers, built once a session, and small ones that need no model file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polysilicon.tokenizer import Tokenizer
from polysilicon.tokenizer_vocabulary import BYTE_OF_STAND_IN
from polysilicon.weights.gguf import GGUFFile


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2_path: Path) -> dict[str, Any]:
    return dict(GGUFFile(smollm2_path).metadata)


@pytest.fixture(scope="session")
def smollm2(smollm2_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(smollm2_metadata)


@pytest.fixture(scope="session")
def gemma3(gemma3_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(GGUFFile(gemma3_path).metadata)


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    """A GPT-2 vocabulary of all bytes and a few merges; control and user-defined tokens at the end.

    Keys of `changes` are without `tokenizer.ggml.`; a value of None removes the key.
    """
    merges = ["h e", "l l", "he ll", "hell o", "Ġ hello", "a a", "aa aa"]
    tokens = [*BYTE_OF_STAND_IN, *(merge.replace(" ", "") for merge in merges)]
    added = {"<|im_start|>": 3, "<|im_end|>": 3, "<|im": 4, "<br>": 4, "<|pad|>": 5}
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [*tokens, *added],
        "token_type": [*[1] * len(tokens), *added.values()],
        "merges": merges,
        "bos_token_id": len(tokens),
        "eos_token_id": len(tokens) + 1,
    }
    return _changed(metadata, changes)


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """A Llama 2 vocabulary of byte tokens and a few pieces, with scores. Changes as above."""
    pieces = {
        "▁": -1,
        "a": -2,
        "b": -3,
        "c": -4,
        "ab": -5,
        "▁a": -6,
        "bc": -7,
        "▁ab": -8,
        "a▁b": -9,
    }
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    metadata = {
        "model": "llama",
        "tokens": [*tokens, "<br>", "<|end|>"],
        "token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces), 4, 3],
        "scores": [*[0.0] * 259, *map(float, pieces.values()), 0.0, 0.0],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return _changed(metadata, changes)


def _changed(metadata: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    metadata.update(changes)
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}


@pytest.fixture(scope="session")
def byte_level() -> Callable[..., dict[str, Any]]:
    return byte_level_metadata


@pytest.fixture(scope="session")
def sentencepiece() -> Callable[..., dict[str, Any]]:
    return sentencepiece_metadata
