"""Which reader opens what, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from polysilicon.errors import ModelError
from polysilicon.weights.checkpoint import (
    SafetensorsCheckpoint,
    open_checkpoint,
    open_files,
)
from polysilicon.weights.encodings import Dense
from polysilicon.weights.formats.format import LogicalTensor
from polysilicon.weights.safetensors import SafetensorsDirectory

VALUES = np.arange(4, dtype=np.float32)


def write_gguf(path: Path, build: Any, *, part: tuple[int, int] | None = None) -> None:
    keys = [build.string("general.architecture", "qwen2")]
    name = "x"
    if part is not None:
        keys += [build.number("split.no", part[0], "H"), build.number("split.count", part[1], "H")]
        name = f"x{part[0]}"
    path.write_bytes(build.file(keys, [build.tensor(name, [4], 0, 0)], VALUES.tobytes()))


def write_safetensors(path: Path) -> None:
    save_file({"x": VALUES}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))


@pytest.mark.parametrize("name", ["model.gguf", "model.GGUF", "blob"])
def test_a_gguf_file(tmp_path: Path, build: Any, name: str) -> None:
    write_gguf(tmp_path / name, build)
    with open_checkpoint(tmp_path / name) as checkpoint:
        assert checkpoint.format == "gguf"
        np.testing.assert_array_equal(checkpoint.weight("x").dequantize(), VALUES)


def test_a_directory_of_safetensors(tmp_path: Path) -> None:
    write_safetensors(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.format == "safetensors"
        assert checkpoint.path == tmp_path
        np.testing.assert_array_equal(checkpoint.weight("x").dequantize(), VALUES)


@pytest.mark.parametrize("name", ["model.gguf", "model.GGUF"])
def test_a_directory_of_one_gguf(tmp_path: Path, build: Any, name: str) -> None:
    write_gguf(tmp_path / name, build)
    (tmp_path / "README.md").touch()
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.format == "gguf"
        assert list(checkpoint.tensors) == ["x"]


def test_a_directory_of_one_split_set(tmp_path: Path, build: Any) -> None:
    for part in range(2):
        write_gguf(tmp_path / f"m-0000{part + 1}-of-00002.gguf", build, part=(part, 2))
    with open_checkpoint(tmp_path) as checkpoint:
        assert list(checkpoint.tensors) == ["x0", "x1"]
    (tmp_path / "m-00001-of-00002.gguf").unlink()
    with pytest.raises(ModelError, match=r"missing: m-00001-of-00002\.gguf"):
        open_checkpoint(tmp_path)


def test_safetensors_go_before_a_gguf_beside_them(tmp_path: Path, build: Any) -> None:
    write_gguf(tmp_path / "model.gguf", build)
    write_safetensors(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.format == "safetensors"
    with open_checkpoint(tmp_path / "model.gguf") as checkpoint:
        assert checkpoint.format == "gguf"


def test_several_ggufs_are_ambiguous(tmp_path: Path, build: Any) -> None:
    for name in ("a.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf"):
        write_gguf(tmp_path / name, build)
    with pytest.raises(
        ModelError, match=r"2 GGUF models: 'a\.gguf', 'b-00001-of-00002\.gguf'\. Name"
    ):
        open_checkpoint(tmp_path)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "pickles").mkdir()
    (tmp_path / "pickles" / "config.json").write_text("{}")
    (tmp_path / "pickles" / "pytorch_model.bin").touch()
    (tmp_path / "x.safetensors").write_bytes(b"x")
    (tmp_path / "x.bin").write_bytes(b"x")
    (tmp_path / "x.txt").write_bytes(b"some text")
    for name, expected in {
        "empty": "holds no model",
        "pickles": "pickled",
        "x.safetensors": "Give its directory",
        "x.bin": "pickle",
        "x.txt": "not a GGUF file",
        "absent": "does not exist",
        "absent.gguf": "does not exist",
        "nul\0": "no valid path",
        "n" * 300: "cannot be opened",
    }.items():
        with pytest.raises(ModelError, match=expected):
            open_checkpoint(tmp_path / name)


def test_a_gguf_file_takes_no_format_of_safetensors(tmp_path: Path, build: Any) -> None:
    write_gguf(tmp_path / "model.gguf", build)
    with pytest.raises(ModelError, match=r"is GGUF.*Leave --quantization 'gptq' out"):
        open_checkpoint(tmp_path / "model.gguf", quantization="gptq")


class Halves:
    """A format that takes over what is called `.half`, and has the values doubled."""

    name = "halves"
    encodings: Mapping[str, str] = {"halves": "dense:f32"}

    def recognizes(self, files: SafetensorsDirectory) -> bool:
        return any(name.endswith(".half") for name in files.tensors)

    def open(self, files: SafetensorsDirectory) -> Mapping[str, LogicalTensor]:
        if not self.recognizes(files):
            raise ModelError("nothing is halved. Choose another format.")
        tensors = {}
        for info in files.tensors.values():
            name = info.name.removesuffix(".half")
            tensors[name] = LogicalTensor(
                info=dataclasses.replace(info, name=name, type="halves"),
                read=lambda stored=info.name: Dense(array=files.array(stored) * 2),
            )
        return tensors


def test_the_format_is_found_named_and_refused(tmp_path: Path) -> None:
    added = (Halves(),)
    write_safetensors(tmp_path)
    with open_checkpoint(tmp_path, added=added) as checkpoint:
        assert isinstance(checkpoint, SafetensorsCheckpoint)
        assert checkpoint.quantization == "dense"
        plain = checkpoint.fingerprint()
    with pytest.raises(ModelError, match="nothing is halved"):
        open_checkpoint(tmp_path, quantization="halves", added=added)
    with pytest.raises(ModelError, match="'halfs' is not known: did you mean 'halves'"):
        open_checkpoint(tmp_path, quantization="halfs", added=added)
    save_file({"x.half": VALUES}, tmp_path / "model.safetensors")
    # Nothing but the format of a plugin says that these tensors are no plain ones.
    with pytest.raises(ModelError, match=r"looks like dense and halves.*--quantization dense"):
        open_checkpoint(tmp_path, added=added)
    with open_checkpoint(tmp_path, quantization="halves", added=added) as checkpoint:
        assert list(checkpoint.tensors) == ["x"]
        np.testing.assert_array_equal(checkpoint.weight("x").dequantize(), 2 * VALUES)
        with pytest.raises(ModelError, match="no tensor 'y'"):
            checkpoint.weight("y")
        doubled = checkpoint.fingerprint()
    with pytest.raises(ValueError, match="closed"):
        checkpoint.weight("x")
    with open_checkpoint(tmp_path, quantization="dense", added=added) as checkpoint:
        assert len({plain, doubled, checkpoint.fingerprint()}) == 3
    with open_files(tmp_path) as files:
        assert isinstance(files, SafetensorsDirectory)


def test_real_files_fingerprints_differ(smollm2_path: Path, gemma3_path: Path) -> None:
    prints = []
    for path in (smollm2_path, gemma3_path, smollm2_path):
        with open_checkpoint(path) as checkpoint:
            prints.append(checkpoint.fingerprint())
    assert prints[0] == prints[2] != prints[1]
