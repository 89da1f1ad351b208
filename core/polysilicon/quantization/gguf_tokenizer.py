"""The tokenizer of a model directory as GGUF's `tokenizer.*` keys."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from polysilicon.errors import ModelError
from polysilicon.tokenizer import Tokenizer
from polysilicon.tokenizer_pretokenizers import PRE_TOKENIZERS
from polysilicon.tokenizer_vocabulary import byte_of_token_text
from polysilicon.weights.gguf_header import MetadataValue

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_WORDS_OF_GPT2 = PRE_TOKENIZERS["gpt-2"].patterns[0]
_MEND = "Write a directory instead, such as --to compressed-tensors, or start from a GGUF file."


def tokenizer_metadata(directory: Path, vocab_size: int) -> dict[str, MetadataValue]:
    """`tokenizer.*` keys for the tokenizer.json of a directory.

    Raises ModelError where there is none, and for one that GGUF has no name for.
    """
    own = Tokenizer.from_directory(directory)
    document = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    model = document["model"]
    if model.get("type", "BPE") != "BPE" or not isinstance(model.get("merges"), list):
        raise ModelError(
            f"{directory}: a tokenizer of type {model.get('type')!r} is not carried "
            f"into GGUF. {_MEND}"
        )
    texts = [f"[PAD{token}]" for token in range(vocab_size)]
    types = np.full(vocab_size, _UNUSED, np.int32)
    known = {**model["vocab"], **{t["content"]: t["id"] for t in document.get("added_tokens", [])}}
    for text, token in known.items():
        if token >= vocab_size:
            raise ModelError(
                f"{directory}: token {token} of tokenizer.json is outside the "
                f"{vocab_size} of config.json. Take the files of one model."
            )
        texts[token], types[token] = text, _NORMAL
    for entry in document.get("added_tokens", []):
        types[entry["id"]] = _CONTROL if entry.get("special") else _USER_DEFINED
    types[sorted(own.special_ids)] = _CONTROL
    metadata: dict[str, MetadataValue] = {"tokenizer.ggml.tokens": tuple(texts)}
    merges = [_pair(merge) for merge in model["merges"]]
    if model.get("byte_fallback"):
        metadata |= _sentencepiece(texts, types, merges, own)
    else:
        metadata |= {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": _family(directory, document),
            "tokenizer.ggml.merges": tuple(f"{left} {right}" for left, right in merges),
        }
    metadata["tokenizer.ggml.token_type"] = types
    for name, token_id in (("bos", own.bos_id), ("eos", own.eos_id)):
        if token_id is not None:
            metadata[f"tokenizer.ggml.{name}_token_id"] = token_id
    metadata["tokenizer.ggml.add_bos_token"] = own.add_bos
    metadata["tokenizer.ggml.add_eos_token"] = own.add_eos
    if own.chat_template is not None:
        metadata["tokenizer.chat_template"] = own.chat_template
    return metadata


def _pair(merge: Any) -> tuple[str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _sentencepiece(
    texts: list[str],
    types: np.ndarray[Any, Any],
    merges: list[tuple[str, str]],
    own: Tokenizer,
) -> dict[str, MetadataValue]:
    """Scores by which merging takes the pieces in the order of the merges."""
    ids = {text: token for token, text in enumerate(texts)}
    scores = np.full(len(texts), -float(len(merges) + 1), np.float32)
    for rank, (left, right) in reversed(list(enumerate(merges))):
        scores[ids[left + right]] = -float(rank)
    for token, text in enumerate(texts):
        if types[token] == _NORMAL and byte_of_token_text(text) is not None:
            types[token] = _BYTE
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.add_space_prefix": own.strip_leading_space,
    }


def _family(directory: Path, document: Mapping[str, Any]) -> str:
    """The name that GGUF has for how words are cut."""
    patterns = tuple(_patterns(document.get("pre_tokenizer")))
    whole = bool(document["model"].get("ignore_merges"))
    for name, family in PRE_TOKENIZERS.items():
        if family.patterns == patterns and family.ignore_merges == whole:
            return name
    raise ModelError(
        f"{directory}: tokenizer.json cuts words in a way that GGUF has no known name for. {_MEND}"
    )


def _patterns(part: Any) -> Iterator[str]:
    """The expressions by which a pre-tokenizer cuts, one after the other."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "Sequence":
        for inner in part["pretokenizers"]:
            yield from _patterns(inner)
    elif kind == "Split":
        yield part["pattern"].get("Regex", "")
    elif kind == "Digits":
        yield r"\p{N}" if part.get("individual_digits") else r"\p{N}+"
    elif kind == "ByteLevel" and part.get("use_regex", True):
        yield _WORDS_OF_GPT2
    elif kind not in ("ByteLevel", None):
        yield f"({kind})"
