"""Tokenizers from Hugging Face directories."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as LibraryTokenizer

from polysilicon.errors import ModelError
from polysilicon.tokenizer import Tokenizer


def write_byte_level(path: Path, metadata: dict[str, Any], **config: Any) -> LibraryTokenizer:
    """A directory like SmolLM2's, from the GGUF metadata of the same tokenizer."""
    tokens = metadata["tokenizer.ggml.tokens"]
    library = LibraryTokenizer(
        models.BPE(
            vocab={text: token_id for token_id, text in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]],
        )
    )
    gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(
                [pre_tokenizers.Digits(individual_digits=True)]
                if metadata["tokenizer.ggml.pre"] == "smollm"
                else []
            ),
            pre_tokenizers.Split(Regex(gpt2), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    special = [text for text, kind in zip(tokens, types, strict=True) if kind == 3]
    added = [text for text, kind in zip(tokens, types, strict=True) if kind == 4]
    library.add_special_tokens(special)
    library.add_tokens([AddedToken(text, normalized=False) for text in added])
    library.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return library


def write_sentencepiece(path: Path, **config: Any) -> LibraryTokenizer:
    """A directory like Llama 2's: BPE with byte fallback, spaces as `▁`, one space in front."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, "▁", "a", "b", "ab", "▁ab"]
    library = LibraryTokenizer(
        models.BPE(
            vocab={text: token_id for token_id, text in enumerate(tokens)},
            merges=[("a", "b"), ("▁", "ab")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return library


TEXTS = [
    "",
    "hello hello",
    "I'll  go\n\n 12345  日本語 é",
    "<|im_start|>user<|im_end|>",
    "a<br>b",
    "\ud800",
]


def test_the_same_as_from_gguf(tmp_path: Path, byte_level: Callable[..., dict[str, Any]]) -> None:
    # A user-defined token inside a control token is found by llama.cpp alone.
    types = byte_level()["tokenizer.ggml.token_type"]
    types[byte_level()["tokenizer.ggml.tokens"].index("<|im")] = 1
    metadata = byte_level(token_type=types)
    write_byte_level(
        tmp_path,
        metadata,
        bos_token="<|im_start|>",
        eos_token={"content": "<|im_end|>", "special": True},
    )
    ours, gguf = Tokenizer.from_directory(tmp_path), Tokenizer.from_gguf(metadata)
    for text in TEXTS:
        for parse_special in (False, True):
            ids = ours.encode(text, add_special=False, parse_special=parse_special)
            assert ids == gguf.encode(text, add_special=False, parse_special=parse_special)
            for skip_special in (False, True):
                decoded = ours.decode(ids, skip_special=skip_special)
                assert decoded == gguf.decode(ids, skip_special=skip_special)
    assert (ours.bos_id, ours.eos_id, ours.eos_ids) == (gguf.bos_id, gguf.eos_id, gguf.eos_ids)
    assert ours.special_ids == gguf.special_ids
    assert ours.vocab_size == gguf.vocab_size
    assert [ours.token_bytes(i) for i in range(300)] == [gguf.token_bytes(i) for i in range(300)]


def test_a_real_tokenizer_both_ways(
    tmp_path: Path, smollm2: Tokenizer, smollm2_metadata: dict[str, Any]
) -> None:
    write_byte_level(tmp_path, smollm2_metadata, eos_token="<|im_end|>")
    ours = Tokenizer.from_directory(tmp_path)
    for text in [*TEXTS, "def f(x):\n    return x ** 2  # \U0001f600 naïve\r\n"]:
        for parse_special in (False, True):
            ids = ours.encode(text, add_special=True, parse_special=parse_special)
            assert ids == smollm2.encode(text, add_special=True, parse_special=parse_special)
    assert ours.eos_ids == smollm2.eos_ids


def test_sentencepiece_style(tmp_path: Path) -> None:
    library = write_sentencepiece(tmp_path, bos_token="<s>", eos_token="</s>", add_eos_token=True)
    tokenizer = Tokenizer.from_directory(tmp_path)
    for text in ("ab ab", "é ab", "a", " ab"):
        ids = tokenizer.encode(text, add_special=True, parse_special=True)
        assert ids == [*library.encode(text).ids, 2]
        assert tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.token_bytes(3 + 0xC3) == b"\xc3"
    assert tokenizer.add_bos
    assert tokenizer.add_eos
    assert tokenizer.encode("</s>", add_special=False, parse_special=True)[-1] == 2
    assert 2 not in tokenizer.encode("</s>", add_special=False, parse_special=False)


def test_the_config_rules_over_the_post_processor(tmp_path: Path) -> None:
    write_sentencepiece(tmp_path, bos_token="<s>", add_bos_token=False)
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert not tokenizer.add_bos
    assert tokenizer.encode("", add_special=True, parse_special=False) == []


def test_half_of_a_surrogate_pair_is_no_token(tmp_path: Path) -> None:
    write_sentencepiece(tmp_path, eos_token="\ud800", additional_special_tokens=["\udfff"])
    assert Tokenizer.from_directory(tmp_path).eos_ids == {2}  # as without a word of it


def test_ends_of_generation_config(tmp_path: Path) -> None:
    write_sentencepiece(tmp_path, eos_token="</s>")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 260]}')
    assert Tokenizer.from_directory(tmp_path).eos_ids == {2, 260}
    for bad in ('{"eos_token_id": 10000}', '{"eos_token_id": "x"}', '{"eos_token_id": [true]}'):
        (tmp_path / "generation_config.json").write_text(bad)
        with pytest.raises(ModelError, match="eos_token_id"):
            Tokenizer.from_directory(tmp_path)


def test_chat_templates(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "x"}, {"name": "tool_use", "template": "y"}]
    write_sentencepiece(tmp_path, chat_template=templates)
    assert Tokenizer.from_directory(tmp_path).chat_templates == {"default": "x", "tool_use": "y"}
    (tmp_path / "chat_template.jinja").write_text("z")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("r")
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.chat_template == "z"
    assert tokenizer.chat_templates["rag"] == "r"
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [1]}')
    with pytest.raises(ModelError, match="chat_template is a list"):
        Tokenizer.from_directory(tmp_path)


def test_no_tokenizer_json(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json; write one"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"only tokenizer\.model.*save_pretrained"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"model": 3}'])
def test_malformed_tokenizer_json(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("content", ["[]", "{", "[" * 100_000])
def test_malformed_config(tmp_path: Path, content: str) -> None:
    write_sentencepiece(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        Tokenizer.from_directory(tmp_path)


def test_unsupported_kind(tmp_path: Path) -> None:
    library = LibraryTokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    library.decoder = decoders.WordPiece()
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match="supported are byte-level BPE and SentencePiece"):
        Tokenizer.from_directory(tmp_path)
