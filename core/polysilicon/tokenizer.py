"""Text to token ids and back, for models from GGUF files and from Hugging Face directories."""

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from polysilicon.tokenizer_directory import parts_from_directory
from polysilicon.tokenizer_gguf import parts_from_gguf
from polysilicon.tokenizer_vocabulary import TokenizerParts


class Tokenizer:
    """One model's tokenizer. Safe to share between threads; holds no state of a text."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._parts = parts
        self._vocabulary = parts.vocabulary

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """The tokenizer that a GGUF file's metadata describes (`tokenizer.*` keys).

        Arrays of strings are sequences of str; arrays of numbers are numpy arrays or sequences.
        Raises ModelError when keys are missing, contradict one another, or name an algorithm or a
        pre-tokenizer that is not supported.
        """
        return cls(parts_from_gguf(metadata))

    @classmethod
    def from_directory(cls, path: Path) -> "Tokenizer":
        """The tokenizer of a directory as Hugging Face writes it (`tokenizer.json`, its configs).

        Raises ModelError when `tokenizer.json` is missing, malformed or of an unsupported kind.
        """
        return cls(parts_from_directory(path))

    @property
    def vocab_size(self) -> int:
        """One more than the greatest id. A model's logits may be wider (padded)."""
        return len(self._vocabulary.texts)

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, where the model has one."""
        return self._parts.bos_id

    @property
    def eos_id(self) -> int | None:
        """The token that the model file names as the end of a text."""
        return self._parts.eos_id

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every token that ends an answer: end of text, of turn, of message."""
        return self._parts.eos_ids

    @property
    def special_ids(self) -> frozenset[int]:
        """Control tokens: hidden in decoded text, parsed only with `parse_special`."""
        return self._vocabulary.special_ids

    @property
    def add_bos(self) -> bool:
        """Whether `encode(add_special=True)` begins with `bos_id`."""
        return self.bos_id is not None and self.bos_id in self._parts.prefix_ids

    @property
    def add_eos(self) -> bool:
        """Whether `encode(add_special=True)` ends with `eos_id`."""
        return self.eos_id is not None and self.eos_id in self._parts.suffix_ids

    @property
    def chat_template(self) -> str | None:
        """The model's own chat template (Jinja source), if it has one."""
        return self.chat_templates.get("default")

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """All templates by name: `default` and, in some models, others such as `tool_use`."""
        return self._parts.chat_templates

    @property
    def strip_leading_space(self) -> bool:
        """Whether decoding from the start of a text drops one leading space."""
        return self._vocabulary.strip_leading_space

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of `text`.

        `add_special` puts the tokens that the model wants at the start and end of a text;
        `parse_special` reads control tokens written out in `text` (`<|im_end|>`) as such, which is
        for rendered templates and never for text from a user. Lone surrogates count as U+FFFD.
        """
        ids = self._parts.encoder.encode(
            _without_lone_surrogates(text), parse_special=parse_special
        )
        if add_special:
            return [*self._parts.prefix_ids, *ids, *self._parts.suffix_ids]
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD, unknown ids nothing."""
        special = self.special_ids if skip_special else frozenset()
        data = b"".join(self.token_bytes(token) for token in ids if token not in special)
        if self.strip_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token, which may be part of a character.

        A special token gives its text's bytes, an id without a token none.
        """
        return self._vocabulary.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """One token for people to read: its bytes, with U+FFFD for what is not UTF-8."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_id(self, text: str) -> int | None:
        """The id of the special or added token that is written `text`, or None."""
        return self._verbatim_ids.get(text)

    @cached_property
    def _verbatim_ids(self) -> dict[str, int]:
        texts = self._vocabulary.texts
        return {texts[token_id]: token_id for token_id in self._vocabulary.verbatim_ids}


def _without_lone_surrogates(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
