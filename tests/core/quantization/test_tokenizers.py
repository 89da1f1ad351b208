"""Tokenizers of real GGUF files, written for Hugging Face's tools and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polysilicon.errors import ModelError
from polysilicon.quantization.gguf_tokenizer import tokenizer_metadata
from polysilicon.quantization.hf_tokenizer import write_tokenizer
from polysilicon.tokenizer import Tokenizer
from polysilicon.weights.gguf import GGUFFile

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_texts_are_cut_as_the_gguf_file_cuts_them(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(f"{name}_path")
    checkpoint = GGUFFile(path)
    own = Tokenizer.from_gguf(checkpoint.metadata)
    assert write_tokenizer(checkpoint, tmp_path) == []
    written = Tokenizer.from_directory(tmp_path)
    again = Tokenizer.from_gguf(tokenizer_metadata(tmp_path, own.vocab_size))
    (fixture,) = FIXTURES.glob(f"tokenize-{path.stem.split('-')[0]}*.json")
    texts = [case["text"] for case in _cases(json.loads(fixture.read_text(encoding="utf-8")))]
    assert len(texts) > 10
    for text in texts:
        for parse in (True, False):
            expected = own.encode(text, add_special=True, parse_special=parse)
            assert written.encode(text, add_special=True, parse_special=parse) == expected
            assert again.encode(text, add_special=True, parse_special=parse) == expected
        assert written.decode(expected) == own.decode(expected)
    assert written.eos_ids == own.eos_ids
    assert written.chat_template == own.chat_template
    assert (again.bos_id, again.add_bos) == (own.bos_id, own.add_bos)


def _cases(document: Any) -> list[dict[str, Any]]:
    return document if isinstance(document, list) else document["cases"]


def test_words_cut_in_an_unknown_way_are_refused(smollm2_path: Path, tmp_path: Path) -> None:
    write_tokenizer(GGUFFile(smollm2_path), tmp_path)
    document = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    document["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": "x+"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(ModelError, match="GGUF has no known name for"):
        tokenizer_metadata(tmp_path, 49152)
    with pytest.raises(ModelError, match="outside the 1000"):
        tokenizer_metadata(tmp_path, 1000)
