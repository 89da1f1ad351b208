"""The tokenizer that a GGUF file's metadata describes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from polysilicon.errors import ModelError
from polysilicon.tokenizer_pretokenizers import PRE_TOKENIZERS, PreTokenizer
from polysilicon.tokenizer_sentencepiece import SPACE, SentencePieceMerger
from polysilicon.tokenizer_special import FragmentEncoder, SpecialTokenSplitter
from polysilicon.tokenizer_vocabulary import (
    END_OF_TURN_TEXTS,
    TokenizerParts,
    Vocabulary,
    byte_of_token_text,
    end_of_generation_ids,
)

_MEND = "convert the model again, or take another copy of the file"
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
_MOST_TEMPLATES = 32


def parts_from_gguf(metadata: Mapping[str, Any]) -> TokenizerParts:
    """Read `tokenizer.*` keys. Raises ModelError for anything missing, malformed or unsupported."""
    algorithm = metadata.get("tokenizer.ggml.model")
    if not isinstance(algorithm, str) or algorithm not in ("gpt2", "llama"):
        found = "is missing" if algorithm is None else f"is {_shown(algorithm)}"
        raise ModelError(
            f"tokenizer.ggml.model {found}; supported are 'gpt2' (byte-level BPE) and 'llama' "
            "(SentencePiece BPE): use a model with one of these tokenizers"
        )
    texts = _strings(metadata, "tokenizer.ggml.tokens")
    if not texts:
        raise ModelError(f"tokenizer.ggml.tokens is empty: {_MEND}")
    types = _token_types(metadata, texts, byte_fallback=algorithm == "llama")
    by_type = {kind: np.flatnonzero(types == kind).tolist() for kind in range(1, 7)}
    special_ids = frozenset(by_type[_CONTROL]) | frozenset(by_type[_UNKNOWN])
    control = {texts[i]: i for i in sorted(special_ids) if texts[i]}
    always = {texts[i]: i for i in by_type[_USER_DEFINED] if texts[i]}
    splitter = SpecialTokenSplitter(always=always, control=control)
    verbatim_ids = special_ids | frozenset(by_type[_USER_DEFINED])

    if algorithm == "llama":
        byte_values = _byte_values(texts, by_type[_BYTE])
        add_space = _flag(metadata, "tokenizer.ggml.add_space_prefix", default=True)
        vocabulary = Vocabulary(
            texts=texts,
            style="sentencepiece",
            verbatim_ids=verbatim_ids,
            special_ids=special_ids,
            byte_values=byte_values,
            strip_leading_space=add_space,
        )
        merger = _sentencepiece_merger(
            metadata, texts, special_ids, byte_values, frozenset(by_type[_UNUSED])
        )
        collapse = _flag(metadata, "tokenizer.ggml.remove_extra_whitespaces", default=False)

        def encode_fragment(text: str, at_start: bool) -> list[int]:
            if collapse:
                text = " ".join(filter(None, text.split(" ")))
            if add_space and at_start:
                text = " " + text
            return merger.encode(text.replace(" ", SPACE))

        default_add_bos, default_bos, default_eos = True, 1, 2
    else:
        family = _pre_tokenizer(metadata)
        vocabulary = Vocabulary(
            texts=texts, style="byte-level", verbatim_ids=verbatim_ids, special_ids=special_ids
        )
        library = _byte_level_tokenizer(texts, _merges(metadata), family)

        def encode_fragment(text: str, at_start: bool) -> list[int]:
            ids: list[int] = library.encode(text, add_special_tokens=False).ids
            return ids

        default_add_bos, default_bos, default_eos = family.add_bos, None, None

    bos_id = _token_id(metadata, "bos", len(texts), default_bos)
    eos_id = _token_id(metadata, "eos", len(texts), default_eos)
    named_ends = (eos_id, *(_token_id(metadata, name, len(texts), None) for name in ("eot", "eom")))
    eos_ids = end_of_generation_ids(((i, texts[i]) for i in verbatim_ids), special_ids)
    eos_ids |= {end for end in named_ends if end is not None}
    return TokenizerParts(
        vocabulary=vocabulary,
        encoder=FragmentEncoder(splitter, encode_fragment),
        bos_id=bos_id,
        eos_id=eos_id,
        eos_ids=eos_ids,
        prefix_ids=_added(metadata, "bos", bos_id, default_add_bos),
        suffix_ids=_added(metadata, "eos", eos_id, False),
        chat_templates=_chat_templates(metadata),
    )


def byte_level_library(metadata: Mapping[str, Any]) -> LibraryTokenizer | None:
    """The byte-level BPE of metadata as the `tokenizers` library has it, without added tokens; None
    for another algorithm. Raises ModelError as `parts_from_gguf` does."""
    if metadata.get("tokenizer.ggml.model") != "gpt2":
        return None
    texts = _strings(metadata, "tokenizer.ggml.tokens")
    return _byte_level_tokenizer(texts, _merges(metadata), _pre_tokenizer(metadata))


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:80] + "..."


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if value is None:
        raise ModelError(f"{key} is missing: {_MEND}")
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise ModelError(f"{key} is not an array of strings: {_MEND}")
    strings = list(value)
    if not all(type(text) is str for text in strings):
        raise ModelError(f"{key} is not an array of strings: {_MEND}")
    try:
        "".join(strings).encode()
    except UnicodeEncodeError as error:
        raise ModelError(f"{key} holds text that is not UTF-8: {_MEND}") from error
    return strings


def _numbers(metadata: Mapping[str, Any], key: str, length: int, dtype: type) -> Any:
    """The array at `key` as numpy, of `length` entries; None where the key is absent."""
    value = metadata.get(key)
    if value is None:
        return None
    try:
        numbers = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise ModelError(f"{key} is not an array of numbers: {_MEND}") from error
    if numbers.ndim != 1 or numbers.dtype.kind not in "iuf":
        raise ModelError(f"{key} is not an array of numbers: {_MEND}")
    if len(numbers) != length:
        raise ModelError(
            f"{key} has {len(numbers)} entries for {length} tokens, not one for each: {_MEND}"
        )
    return numbers.astype(dtype)


def _flag(metadata: Mapping[str, Any], key: str, *, default: bool) -> bool:
    value = metadata.get(key)
    if value is None:
        return default
    if not isinstance(value, bool | np.bool_):
        raise ModelError(f"{key} is {_shown(value)}, not true or false: {_MEND}")
    return bool(value)


def _token_id(
    metadata: Mapping[str, Any], name: str, vocab_size: int, default: int | None
) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return default if default is not None and default < vocab_size else None
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ModelError(f"{key} is {_shown(value)}, not a token id: {_MEND}")
    if not 0 <= value < vocab_size:
        raise ModelError(f"{key} is {value}, but the vocabulary has {vocab_size} tokens: {_MEND}")
    return int(value)


def _added(
    metadata: Mapping[str, Any], name: str, token_id: int | None, default: bool
) -> tuple[int, ...]:
    key = f"tokenizer.ggml.add_{name}_token"
    if not _flag(metadata, key, default=default):
        return ()
    if token_id is None:
        if key not in metadata:
            return ()
        raise ModelError(f"{key} is true, but tokenizer.ggml.{name}_token_id is missing: {_MEND}")
    return (token_id,)


def _token_types(metadata: Mapping[str, Any], texts: list[str], *, byte_fallback: bool) -> Any:
    """int32[tokens] of GGUF token types, with markers of an answer's end made control tokens."""
    types = _numbers(metadata, "tokenizer.ggml.token_type", len(texts), np.int32)
    if types is None:
        types = np.ones(len(texts), np.int32)
        if byte_fallback:
            types[[i for i, text in enumerate(texts) if byte_of_token_text(text) is not None]] = 6
    for i in np.flatnonzero(types == _USER_DEFINED).tolist():
        if texts[i] in END_OF_TURN_TEXTS:
            types[i] = _CONTROL
    return types


def _ids_by_text(texts: list[str]) -> dict[str, int]:
    ids = dict(zip(texts, range(len(texts)), strict=True))
    ids.pop("", None)
    if len(ids) + texts.count("") != len(texts):
        repeated = next(text for i, text in enumerate(texts) if text and ids[text] != i)
        raise ModelError(f"tokenizer.ggml.tokens holds {_shown(repeated)} twice: {_MEND}")
    return ids


def _byte_values(texts: list[str], byte_token_ids: list[int]) -> dict[int, int]:
    values: dict[int, int] = {}
    for token_id in byte_token_ids:
        byte = byte_of_token_text(texts[token_id])
        if byte is None:
            raise ModelError(
                f"token {token_id} is typed as a byte but reads {_shown(texts[token_id])} and not "
                f"<0xNN>: {_MEND}"
            )
        values[token_id] = byte
    return values


def _sentencepiece_merger(
    metadata: Mapping[str, Any],
    texts: list[str],
    special_ids: frozenset[int],
    byte_values: Mapping[int, int],
    unused_ids: frozenset[int],
) -> SentencePieceMerger:
    scores = _numbers(metadata, "tokenizer.ggml.scores", len(texts), np.float32)
    if scores is None:
        raise ModelError(f"tokenizer.ggml.scores is missing: {_MEND}")
    if not np.isfinite(scores).all():
        raise ModelError(f"tokenizer.ggml.scores holds a value that is not finite: {_MEND}")
    pieces = _ids_by_text(texts)
    # Merging never makes a control or byte token: text that spells one out stays text.
    for token_id in (*special_ids, *byte_values):
        pieces.pop(texts[token_id], None)
    return SentencePieceMerger(
        pieces=pieces,
        scores=scores.tolist(),
        byte_ids={byte: token_id for token_id, byte in byte_values.items()},
        unknown_id=_token_id(metadata, "unknown", len(texts), 0),
        unused_ids=unused_ids,
    )


def _pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    family = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if family is None:
        raise ModelError(
            f"tokenizer.ggml.pre is {_shown(name)}, which is not known; known are "
            f"{', '.join(sorted(PRE_TOKENIZERS))}: use a model with one of these"
        )
    return family


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for index, merge in enumerate(_strings(metadata, "tokenizer.ggml.merges")):
        left, space, right = merge.partition(" ")
        if not left or not space or not right or " " in right:
            raise ModelError(
                f"tokenizer.ggml.merges: entry {index} is {_shown(merge)}, not two pieces with one "
                f"space between them: {_MEND}"
            )
        merges.append((left, right))
    return merges


def _byte_level_tokenizer(
    texts: list[str], merges: list[tuple[str, str]], family: PreTokenizer
) -> LibraryTokenizer:
    vocabulary = _ids_by_text(texts)
    for index, (left, right) in enumerate(merges):
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise ModelError(
                f"tokenizer.ggml.merges: entry {index} ({_shown(left)}, {_shown(right)}) uses or "
                f"makes text that is no token: {_MEND}"
            )
    library = LibraryTokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=family.ignore_merges)
    )
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(
                pre_tokenizers.Split(Regex(pattern), behavior="isolated")
                for pattern in family.patterns
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return library


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    templates: dict[str, str] = {}
    if "tokenizer.chat_templates" in metadata:
        names = _strings(metadata, "tokenizer.chat_templates")
        if len(names) > _MOST_TEMPLATES:
            raise ModelError(
                f"tokenizer.chat_templates names {len(names)} templates, more than "
                f"{_MOST_TEMPLATES}: {_MEND}"
            )
        templates = {name: metadata.get(f"tokenizer.chat_template.{name}", "") for name in names}
    if "tokenizer.chat_template" in metadata:
        templates["default"] = metadata["tokenizer.chat_template"]
    for name, source in templates.items():
        if not isinstance(source, str):
            raise ModelError(f"the chat template {_shown(name)} is not a string: {_MEND}")
    return {name: source for name, source in templates.items() if source}
