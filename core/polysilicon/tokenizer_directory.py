"""The tokenizer of a model directory as Hugging Face writes it."""

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer as LibraryTokenizer

from polysilicon.errors import ModelError
from polysilicon.tokenizer_vocabulary import (
    TokenizerParts,
    Vocabulary,
    byte_of_token_text,
    end_of_generation_ids,
)

_MOST_BYTES = 256 << 20
_MOST_TEMPLATES = 32
_MOST_TOKENS = 1 << 24
_Result = TypeVar("_Result")


def parts_from_directory(path: Path) -> TokenizerParts:
    """Read `tokenizer.json` and the configs beside it.

    Raises ModelError for what is missing, malformed or of an unsupported kind.
    """
    file = path / "tokenizer.json"
    library = _guarded(lambda: LibraryTokenizer.from_str(_read(file)), f"{file} is not usable")
    library.no_truncation()
    library.no_padding()
    config = _json_object(path / "tokenizer_config.json")
    special_map = {**_json_object(path / "special_tokens_map.json"), **config}
    vocabulary = _vocabulary(library, file, _named_specials(special_map))
    special_ids = vocabulary.special_ids

    bos_id = _named_id(library, special_map, "bos_token")
    eos_id = _named_id(library, special_map, "eos_token")
    texts = vocabulary.texts
    eos_ids = end_of_generation_ids(((i, texts[i]) for i in vocabulary.verbatim_ids), special_ids)
    eos_ids |= _generation_eos_ids(path / "generation_config.json", len(texts))
    if eos_id is not None:
        eos_ids |= {eos_id}
    prefix_ids, suffix_ids = _template_ids(library, file)
    prefix_ids = _asked_for(config, "add_bos_token", bos_id, prefix_ids, at_start=True)
    suffix_ids = _asked_for(config, "add_eos_token", eos_id, suffix_ids, at_start=False)
    return TokenizerParts(
        vocabulary=vocabulary,
        encoder=_LibraryEncoder(library),
        bos_id=bos_id,
        eos_id=eos_id,
        eos_ids=eos_ids,
        prefix_ids=prefix_ids,
        suffix_ids=suffix_ids,
        chat_templates=_chat_templates(path, config),
    )


class _LibraryEncoder:
    """Encodes with the `tokenizers` library, which finds added tokens itself."""

    def __init__(self, library: LibraryTokenizer) -> None:
        self._library = library
        # Whether special tokens are parsed is a setting of the whole library object.
        self._lock = threading.Lock()

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        """Ids of `text`; special tokens only with `parse_special`, other added tokens always."""
        with self._lock:
            self._library.encode_special_tokens = not parse_special
            ids: list[int] = _guarded(
                lambda: self._library.encode(text, add_special_tokens=False).ids,
                "the model's tokenizer.json cannot encode this text",
            )
        return ids


def _guarded(call: Callable[[], _Result], failure: str) -> _Result:
    """The result of `call`; whatever the native library raises becomes a ModelError."""
    try:
        return call()
    except (ModelError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a Rust panic is no Exception
        raise ModelError(
            f"{failure}: {str(error)[:200]}; save the tokenizer again with a current "
            "`tokenizers` library, or use the model's GGUF file"
        ) from error


def _read(file: Path) -> str:
    try:
        size = file.stat().st_size
        if size > _MOST_BYTES:
            raise ModelError(
                f"{file} has {size} bytes, more than {_MOST_BYTES}: it is no tokenizer"
            )
        return file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        others = [
            name
            for name in ("tokenizer.model", "vocab.json", "tekken.json", "vocab.txt")
            if (file.parent / name).exists()
        ]
        beside = f" (only {', '.join(others)})" if others else ""
        raise ModelError(
            f"{file.parent} has no tokenizer.json{beside}; write one with transformers: "
            "AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY), or use the "
            "model's GGUF file"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} cannot be read as UTF-8 text: {error}") from error


def _json_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no such file."""
    if not file.exists():
        return {}
    try:
        value = json.loads(_read(file))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not JSON ({error}): download the file again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds no JSON object: download the file again")
    return value


def _token_text(value: object) -> str | None:
    """A token as configs write it: its text, or an object with `content`. Half of a surrogate pair,
    which JSON can escape, is in no token."""
    if isinstance(value, Mapping):
        value = value.get("content")
    if not isinstance(value, str) or any("\ud800" <= character <= "\udfff" for character in value):
        return None
    return value or None


def _named_specials(special_map: Mapping[str, Any]) -> list[str]:
    values: list[object] = [
        special_map.get(f"{name}_token")
        for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask")
    ]
    additional = special_map.get("additional_special_tokens")
    if isinstance(additional, list):
        values.extend(additional)
    return [text for value in values if (text := _token_text(value)) is not None]


def _named_id(library: LibraryTokenizer, special_map: Mapping[str, Any], key: str) -> int | None:
    text = _token_text(special_map.get(key))
    if text is None:
        return None
    token_id: int | None = library.token_to_id(text)
    return token_id


def _vocabulary(library: LibraryTokenizer, file: Path, special_texts: list[str]) -> Vocabulary:
    ids = _guarded(lambda: library.get_vocab(with_added_tokens=True), f"{file} is not usable")
    if not ids:
        raise ModelError(f"{file} has no tokens: download the file again")
    size = max(ids.values()) + 1
    if size > _MOST_TOKENS:
        raise ModelError(f"{file} has a token with id {size - 1}: download the file again")
    # A named special token is special even where its entry in tokenizer.json does not say so.
    library.add_special_tokens([text for text in special_texts if text in ids])
    texts = [""] * size
    for text, token_id in ids.items():
        texts[token_id] = text
    added = library.get_added_tokens_decoder()
    for token_id, token in added.items():
        texts[token_id] = token.content
    decoders = list(_flat(_state(library.decoder)))
    kinds = {decoder.get("type") for decoder in decoders}
    special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
    if "ByteLevel" in kinds:
        return Vocabulary(
            texts=texts,
            style="byte-level",
            verbatim_ids=frozenset(added),
            special_ids=special_ids,
        )
    if not kinds & {"Metaspace", "Replace", "ByteFallback"}:
        raise ModelError(
            f"{file} decodes by {', '.join(sorted(map(str, kinds))) or 'nothing'}; supported are "
            "byte-level BPE and SentencePiece tokenizers: use a model with one of these"
        )
    byte_values: dict[int, int] = {}
    if "ByteFallback" in kinds:
        for token_id, text in enumerate(texts):
            byte = byte_of_token_text(text)
            if byte is not None and token_id not in added:
                byte_values[token_id] = byte
    return Vocabulary(
        texts=texts,
        style="sentencepiece",
        verbatim_ids=frozenset(added),
        special_ids=special_ids,
        byte_values=byte_values,
        strip_leading_space=any(map(_strips_leading_space, decoders)),
    )


def _state(component: Any) -> Mapping[str, Any]:
    """The JSON description of a part of the library's tokenizer; empty where it has none."""
    if component is None:
        return {}
    state: Mapping[str, Any] = json.loads(component.__getstate__())
    return state


def _flat(decoder: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    if decoder.get("type") == "Sequence":
        for part in decoder["decoders"]:
            yield from _flat(part)
    elif decoder:
        yield decoder


def _strips_leading_space(decoder: Mapping[str, Any]) -> bool:
    if decoder["type"] == "Strip":
        return decoder.get("content") == " " and decoder.get("start", 0) > 0
    return decoder["type"] == "Metaspace" and decoder.get("prepend_scheme") != "never"


def _generation_eos_ids(file: Path, vocab_size: int) -> frozenset[int]:
    """`eos_token_id` of generation_config.json: one id or several."""
    value = _json_object(file).get("eos_token_id")
    values = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in values:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise ModelError(f"{file}: eos_token_id is {token_id!r}, not a token id: correct it")
        if not 0 <= token_id < vocab_size:
            raise ModelError(
                f"{file}: eos_token_id is {token_id}, but the vocabulary has {vocab_size} tokens: "
                "take the files of one model"
            )
    return frozenset(values)


def _template_ids(library: LibraryTokenizer, file: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the library's post-processor puts before and after a text."""
    failure = f"{file} is not usable"
    plain = _guarded(lambda: library.encode("a", add_special_tokens=False).ids, failure)
    whole = _guarded(lambda: library.encode("a", add_special_tokens=True).ids, failure)
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return tuple(whole[:start]), tuple(whole[start + len(plain) :])
    return (), ()


def _asked_for(
    config: Mapping[str, Any],
    key: str,
    token_id: int | None,
    added: tuple[int, ...],
    *,
    at_start: bool,
) -> tuple[int, ...]:
    """`added` with or without `token_id`, where the config says which."""
    wanted = config.get(key)
    if not isinstance(wanted, bool) or token_id is None or wanted == (token_id in added):
        return added
    if not wanted:
        return tuple(other for other in added if other != token_id)
    return (token_id, *added) if at_start else (*added, token_id)


def _chat_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    templates: dict[str, str] = {}
    value = config.get("chat_template")
    if isinstance(value, str):
        templates["default"] = value
    elif isinstance(value, list):
        for entry in value[:_MOST_TEMPLATES]:
            name = entry.get("name") if isinstance(entry, Mapping) else None
            source = entry.get("template") if isinstance(entry, Mapping) else None
            if not isinstance(name, str) or not isinstance(source, str):
                raise ModelError(
                    f"{path / 'tokenizer_config.json'}: chat_template is a list whose entries are "
                    "not all {name, template}: correct it or pass --chat-template FILE"
                )
            templates[name] = source
    # Newer versions of transformers write templates to files of their own, which win.
    if (path / "chat_template.jinja").exists():
        templates["default"] = _read(path / "chat_template.jinja")
    for file in sorted((path / "additional_chat_templates").glob("*.jinja"))[:_MOST_TEMPLATES]:
        templates[file.stem] = _read(file)
    return templates
