"""The tokenizer of a GGUF file as the files that Hugging Face's tools read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as LibraryTokenizer

from polysilicon.errors import ModelError
from polysilicon.tokenizer import Tokenizer
from polysilicon.tokenizer_gguf import byte_level_library
from polysilicon.tokenizer_sentencepiece import SPACE
from polysilicon.weights.gguf import GGUFFile

_CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 3, 4, 5, 6
_UNKNOWN = 2

# Words, digits, code, scripts with and without spaces, emoji with joiners.
_SAMPLE = (
    "The quick brown fox doesn't jump over 12,345.67 lazy dogs -- (it's 5%!)\n\n\tdef f(x):\n"
    "        return x**2  # caf\u00e9 na\u00efve stra\u00dfe\n"
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440 \u4f60\u597d\u4e16\u754c "
    "\u3053\u3093\u306b\u3061\u306f \u0645\u0631\u062d\u0628\u0627 "
    "\U0001f469\u200d\U0001f4bb \u2264 \u03c0   end"
)


def write_tokenizer(checkpoint: GGUFFile, directory: Path) -> list[str]:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json; notes on what could
    not be carried."""
    metadata = checkpoint.metadata
    try:
        own = Tokenizer.from_gguf(metadata)
    except ModelError as error:
        return [f"no tokenizer was written: {error}"]
    library = byte_level_library(metadata) or _sentencepiece_library(checkpoint, own)
    if metadata.get("tokenizer.ggml.model") == "gpt2":
        library.decoder = decoders.ByteLevel()
    texts = metadata["tokenizer.ggml.tokens"]
    assert isinstance(texts, tuple)
    types = _types(checkpoint, len(texts))
    library.add_special_tokens(
        [
            AddedToken(texts[token], normalized=False, special=True)
            for token in sorted(own.special_ids)
            if texts[token]
        ]
    )
    others = np.flatnonzero(types == _USER_DEFINED).tolist()
    library.add_tokens(
        [
            AddedToken(texts[token], normalized=False)
            for token in others
            if texts[token] and token not in own.special_ids
        ]
    )
    if own.add_bos and own.bos_id is not None:
        begin = texts[own.bos_id]
        library.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A",
            pair=f"{begin} $A {begin} $B",
            special_tokens=[(begin, own.bos_id)],
        )
    (directory / "tokenizer.json").write_text(library.to_str(pretty=True), encoding="utf-8")
    _write(directory / "tokenizer_config.json", _config(checkpoint, own, texts))
    if own.eos_ids:
        generation: dict[str, Any] = {"eos_token_id": sorted(own.eos_ids)}
        if own.bos_id is not None:
            generation["bos_token_id"] = own.bos_id
        _write(directory / "generation_config.json", generation)
    return _compare(own, directory)


def _types(checkpoint: GGUFFile, count: int) -> np.ndarray[Any, Any]:
    types = checkpoint.metadata.get("tokenizer.ggml.token_type")
    return np.ones(count, np.int32) if types is None else np.asarray(types)


def _config(checkpoint: GGUFFile, own: Tokenizer, texts: tuple[str, ...]) -> dict[str, Any]:
    metadata = checkpoint.metadata
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": own.add_bos,
        "add_eos_token": own.add_eos,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if type(token) is int and 0 <= token < len(texts):
            config[f"{name}_token"] = texts[token]
    if own.chat_template is not None:
        config["chat_template"] = own.chat_template
    return config


def _sentencepiece_library(checkpoint: GGUFFile, own: Tokenizer) -> LibraryTokenizer:
    """Byte-fallback BPE: a merge for every way to make a piece of two others, the pieces of the
    best scores first."""
    metadata = checkpoint.metadata
    texts = metadata["tokenizer.ggml.tokens"]
    assert isinstance(texts, tuple)
    scores = np.asarray(metadata["tokenizer.ggml.scores"])
    types = _types(checkpoint, len(texts))
    vocabulary = {text: token for token, text in enumerate(texts)}
    plain = ~np.isin(types, (_UNKNOWN, _CONTROL, _BYTE))
    pieces = {text for text, kept in zip(texts, plain.tolist(), strict=True) if kept}
    merges = []
    for token in np.argsort(-scores, kind="stable").tolist():
        text = texts[token]
        if text not in pieces or types[token] == _USER_DEFINED:
            continue
        halves = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        found = [pair for pair in halves if pair[0] in pieces and pair[1] in pieces]
        merges += sorted(found, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    library = LibraryTokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges,
            byte_fallback=True,
            fuse_unk=True,
            unk_token=texts[unknown] if type(unknown) is int else None,
        )
    )
    begin = [normalizers.Prepend(SPACE)] if own.strip_leading_space else []
    library.normalizer = normalizers.Sequence([*begin, normalizers.Replace(" ", SPACE)])
    end = [decoders.Strip(content=" ", left=1)] if own.strip_leading_space else []
    library.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *end]
    )
    return library


def _compare(own: Tokenizer, directory: Path) -> list[str]:
    """Hold the tokenizer that was written against the GGUF file's."""
    written = Tokenizer.from_directory(directory)
    same = all(
        written.encode(text, add_special=True, parse_special=True)
        == own.encode(text, add_special=True, parse_special=True)
        for text in (_SAMPLE, own.chat_template or "")
    )
    if same:
        return []
    return ["tokenizer.json cuts some texts otherwise than the GGUF file's tokenizer does."]


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
