"""A tokenizer and a chat template for the tiny models, so that whole servers run on them."""

from __future__ import annotations

import json
from pathlib import Path

from polysilicon.testing.tiny_models import EOS, VOCABULARY

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<unk>", "<|im_end|>")
"""The first ids; `EOS` is `<|im_end|>`."""


def write_text_side(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json beside a tiny model's checkpoint.

    Each id after the special ones is a byte: line feed, printable ASCII, then others as far as the
    vocabulary reaches. There are no merges, so that every sequence of ids is some text's.
    """
    assert _SPECIAL[EOS] == "<|im_end|>"
    printable = [10, *range(32, 127)]
    order = [*printable, *(byte for byte in range(256) if byte not in printable)]
    written = _byte_characters()
    vocabulary = {text: index for index, text in enumerate(_SPECIAL)}
    for index, byte in enumerate(order[: VOCABULARY - len(_SPECIAL)], len(_SPECIAL)):
        vocabulary[written[byte]] = index
    byte_level = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False,
    }  # fmt: skip
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": index, "content": text, "special": True, "normalized": False,
                "lstrip": False, "rstrip": False, "single_word": False,
            }
            for index, text in enumerate(_SPECIAL)
        ],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": "<unk>"},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": _SPECIAL[EOS]}))


def _byte_characters() -> dict[int, str]:
    """How byte-level BPE writes each byte: itself where it is printable, else from U+0100 on."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in kept)
    return {byte: chr(byte) for byte in kept} | {
        byte: chr(256 + index) for index, byte in enumerate(others)
    }
