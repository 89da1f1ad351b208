"""What a tokenizer knows of its tokens: texts, bytes, which are special, which end an answer."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, Protocol

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

END_OF_TURN_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eom_id|>",
        "<end_of_utterance>",
        "<|fim_pad|>",
        "<|fim_repo|>",
        "<|repo_name|>",
        "<|file_sep|>",
        "<reponame>",
        "<｜end▁of▁sentence｜>",
    }
)
"""Texts that only chat and document markers have: they end generation and count as special even
where a converter typed them as user-defined."""

END_TEXTS_IF_SPECIAL = frozenset(
    {"</s>", "<eos>", "[EOS]", "<|end|>", "<EOT>", "_<EOT>", "[EOT]", "<turn|>"}
)
"""Texts that end generation only where the vocabulary marks them special: several also occur as
ordinary tokens (HTML's `</s>` in Gemma's vocabulary)."""


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte (Radford et al. 2019, byte-level BPE)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in alphabet]
    alphabet.update({byte: chr(256 + index) for index, byte in enumerate(others)})
    return alphabet


BYTE_OF_STAND_IN: Mapping[str, int] = MappingProxyType(
    {stand_in: byte for byte, stand_in in _byte_alphabet().items()}
)


def byte_of_token_text(text: str) -> int | None:
    """The byte that a byte-fallback token `<0xNN>` stands for, or None for any other text."""
    match = _BYTE_TOKEN.fullmatch(text)
    return int(match.group(1), 16) if match else None


def end_of_generation_ids(
    texts: Iterable[tuple[int, str]], special_ids: frozenset[int]
) -> frozenset[int]:
    """Ids among (id, text) pairs of special and added tokens whose text ends an answer."""
    return frozenset(
        token_id
        for token_id, text in texts
        if text in END_OF_TURN_TEXTS or (token_id in special_ids and text in END_TEXTS_IF_SPECIAL)
    )


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The tokens of one model, indexed by id."""

    texts: Sequence[str]
    """As the model file spells them: byte stand-ins and `▁` are still in place; gaps are empty."""
    style: Literal["byte-level", "sentencepiece"]
    verbatim_ids: frozenset[int]
    """Special and added tokens: their text stands for itself, without stand-ins."""
    special_ids: frozenset[int]
    """Control tokens: hidden in decoded text and found in a prompt only when asked for."""
    byte_values: Mapping[int, int] = field(default_factory=dict)
    """Byte-fallback tokens: id to the byte."""
    strip_leading_space: bool = False
    """The encoder puts a space before the text, so decoding takes one away."""

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token; empty for an id that has no token."""
        if not 0 <= token_id < len(self.texts):
            return b""
        text = self.texts[token_id]
        if token_id in self.verbatim_ids:
            return text.encode()
        byte = self.byte_values.get(token_id)
        if byte is not None:
            return bytes((byte,))
        if self.style == "sentencepiece":
            return text.replace("▁", " ").encode()
        try:
            return bytes([BYTE_OF_STAND_IN[character] for character in text])
        except KeyError:
            return text.encode()


class TextEncoder(Protocol):
    """Turns text into ids, without the tokens that a model wants at its start and end."""

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        """Ids of `text`, which has no lone surrogates; control tokens only if `parse_special`."""
        ...


@dataclass(frozen=True, kw_only=True)
class TokenizerParts:
    """All that a model file or directory says about its tokenizer."""

    vocabulary: Vocabulary
    encoder: TextEncoder
    bos_id: int | None
    eos_id: int | None
    eos_ids: frozenset[int]
    prefix_ids: tuple[int, ...]
    """Tokens put before every text that is encoded with `add_special`."""
    suffix_ids: tuple[int, ...]
    chat_templates: Mapping[str, str]
    """Jinja sources by name; the one to use unless another is asked for is `default`."""
