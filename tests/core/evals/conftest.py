"""Tiny models with tokenizers, one of them with BOS, and the command as users call it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from polysilicon.commands.application import run
from polysilicon.testing.tiny_models import TinyModel, tiny_llama
from polysilicon.testing.tiny_text import write_text_side

BOS = 1
"""`<|im_start|>`, in the model that begins every text with it."""


def write(model: TinyModel, folder: Path, *, bos: bool = False) -> Path:
    model.write(folder)
    write_text_side(folder)
    if bos:
        path = folder / "tokenizer.json"
        tokenizer = json.loads(path.read_text())
        special = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
        text = {"Sequence": {"id": "A", "type_id": 0}}
        ids = {"<|im_start|>": {"id": "<|im_start|>", "ids": [BOS], "tokens": ["<|im_start|>"]}}
        tokenizer["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [special, text],
            "pair": [special, text],
            "special_tokens": ids,
        }
        path.write_text(json.dumps(tokenizer))
        said = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return folder


def disturbed() -> TinyModel:
    """tiny_llama with noise of a fifth of its weights' deviation, like a coarse quantisation."""
    rng = np.random.default_rng(7)
    model = tiny_llama()
    return dataclasses.replace(
        model,
        tensors={
            name: (x + rng.normal(0, 0.2 * x.std(), x.shape)).astype(np.float32)
            if x.ndim == 2
            else x
            for name, x in model.tensors.items()
        },
    )


def widened(extra: int) -> TinyModel:
    """`disturbed` with a vocabulary that is padded, as some checkpoints are."""
    model = disturbed()
    rng = np.random.default_rng(8)
    tensors = dict(model.tensors)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = rng.normal(0, tensors[name].std(), (extra, tensors[name].shape[1]))
        tensors[name] = np.concatenate([tensors[name], rows.astype(np.float32)])
    config = {**model.config, "vocab_size": len(tensors["lm_head.weight"])}
    return dataclasses.replace(model, config=config, tensors=tensors)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tiny_llama(), tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def coarse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(disturbed(), tmp_path_factory.mktemp("coarse") / "model")


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(widened(13), tmp_path_factory.mktemp("wide") / "model")


@pytest.fixture(scope="session")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose logits are all no numbers."""
    model = tiny_llama()
    norm = {"model.norm.weight": np.full_like(model.tensors["model.norm.weight"], np.nan)}
    model = dataclasses.replace(model, tensors={**model.tensors, **norm})
    return write(model, tmp_path_factory.mktemp("broken") / "model")


@pytest.fixture(scope="session")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tiny_llama(), tmp_path_factory.mktemp("bos") / "model", bos=True)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 tokens of one character each."""
    letters = np.random.default_rng(11).choice(list("abcdefgh ,.\n"), 300)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("x" + "".join(letters[1:]))
    return path


def ids_of(text: str) -> list[int]:
    """As `write_text_side` numbers characters."""
    return [4 if character == "\n" else ord(character) - 32 + 5 for character in text]


@pytest.fixture(scope="session")
def made() -> SimpleNamespace:
    """How the models and texts above are made, for oracles."""
    return SimpleNamespace(
        bos=BOS, ids_of=ids_of, llama=tiny_llama(), disturbed=disturbed(), widened=widened(13)
    )


Called = Callable[..., tuple[int, str, str]]


@pytest.fixture
def evaluated(capsys: pytest.CaptureFixture[str]) -> Called:
    """`polysilicon eval` on the reference backend with KV in float32: status, stdout, stderr."""

    def call(*arguments: object, options: Sequence[str] = ("--kv-dtype", "f32")):
        status = run(["eval", *map(str, arguments), "--backend", "reference", *options])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call
