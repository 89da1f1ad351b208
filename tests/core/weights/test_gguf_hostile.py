"""Malformed GGUF files: one clear ModelError each, in bounded time and memory."""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polysilicon.errors import ModelError
from polysilicon.weights.gguf import GGUFFile

HUGE = 1 << 60
F32, Q4_0, STRING, ARRAY = 0, 2, 8, 9


def refusal(path: Path, content: bytes) -> str:
    """Open the bytes as a file; return the message of the ModelError that must come of it."""
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError) as caught:
            GGUFFile(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    message = str(caught.value)
    assert path.name in message
    assert len(message) < 600
    return message


def valid(build: Any) -> bytes:
    """A small file with every kind of value and three tensors."""
    return build.file(
        [
            build.string("general.architecture", "llama"),
            build.number("general.alignment", 32),
            build.number("llama.attention.head_count", 2),
            build.number("flag", 1, "?"),
            build.string("empty", ""),
            build.strings("words", ["a", "bc", ""]),
            build.numbers("scores", 6, np.arange(3, dtype=np.float32)),
        ],
        [
            build.tensor("blk.0.attn_q.weight", [32, 4], Q4_0, 0),
            build.tensor("output_norm.weight", [8], F32, 96),
            build.tensor("x", [2, 2, 2], F32, 128),
        ],
        bytes(range(160)),
    )


def test_the_valid_file_is_read(tmp_path: Path, build: Any) -> None:
    (tmp_path / "a.gguf").write_bytes(valid(build))
    with GGUFFile(tmp_path / "a.gguf") as file:
        assert file.metadata["empty"] == ""
        assert file.metadata["words"] == ("a", "bc", "")
        assert {name: file.weight(name).shape for name in file.tensors} == {
            "blk.0.attn_q.weight": (4, 32),
            "output_norm.weight": (8,),
            "x": (2, 2, 2),
        }


def test_cut_anywhere(tmp_path: Path, build: Any) -> None:
    content = valid(build)
    path = tmp_path / "cut.gguf"
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            GGUFFile(path)


Files = dict[str, tuple[Callable[[Any], bytes], str]]
HOSTILE: Files = {
    "no magic": (lambda b: b.file(magic=b"GGML"), "not a GGUF file"),
    "zeros": (lambda b: bytes(64), "not a GGUF file"),
    "three bytes": (lambda b: b"GGU", "not a GGUF file"),
    "version 1": (lambda b: b.file(version=1), "version 1"),
    "version 4": (lambda b: b.file(version=4), "version 4"),
    "version 0": (lambda b: b.file(version=0), "version 0"),
    "big-endian": (lambda b: b.file(version=3 << 24), "big-endian"),
    "key count": (lambda b: b.file(key_count=HUGE), f"{HUGE} metadata entries"),
    "tensor count": (lambda b: b.file(tensor_count=HUGE), f"{HUGE} tensors"),
    "counts of ones": (lambda b: b.file(key_count=2**64 - 1), "metadata entries"),
    "string length": (
        lambda b: b.file([b.key("k", STRING, struct.pack("<Q", HUGE) + b"abc")]),
        "past the end",
    ),
    "key length": (lambda b: b.file([struct.pack("<Q", HUGE) + bytes(32)]), "name of"),
    "key of 65536 bytes": (lambda b: b.file([b.number("k" * 65536, 1)]), "name of 65536"),
    "array count": (
        lambda b: b.file([b.key("k", ARRAY, b.array(4, HUGE, bytes(64)))]),
        "are announced",
    ),
    "string array count": (
        lambda b: b.file([b.key("k", ARRAY, b.array(STRING, HUGE, bytes(64)))]),
        "strings, more than",
    ),
    "string in an array past the end": (
        lambda b: b.file([b.key("k", ARRAY, b.array(STRING, 2, b.text("a") + bytes([255] * 8)))]),
        "past the end",
    ),
    "nested arrays": (
        lambda b: b.file([b.key("k", ARRAY, b.array(ARRAY, 1, b.array(4, 1, bytes(4))))]),
        "array of arrays",
    ),
    "deeply nested arrays": (
        lambda b: b.file([b.key("k", ARRAY, b.array(ARRAY, 1, b"") * 10000)]),
        "array of arrays",
    ),
    "value type": (lambda b: b.file([b.key("k", 13, bytes(16))]), "type 13"),
    "element type": (lambda b: b.file([b.key("k", ARRAY, b.array(99, 1, bytes(16)))]), "type 99"),
    "key not UTF-8": (lambda b: b.file([b.key(b"\xff\xfe", 4, bytes(4))]), "UTF-8"),
    "value not UTF-8": (lambda b: b.file([b.string("k", b"\xc3")]), "'k'.*UTF-8"),
    "key twice": (lambda b: b.file([b.number("k", 1), b.number("k", 2)]), "'k', the key.*twice"),
    "key escaped": (lambda b: b.file([b.key("\x1b[2J" * 99, 13, b"")]), r"'\\x1b\[2J.*\.\.\."),
    "alignment 0": (lambda b: b.file([b.number("general.alignment", 0)]), "0 is not a power"),
    "alignment 24": (lambda b: b.file([b.number("general.alignment", 24)]), "24 is not a power"),
    "alignment 4": (lambda b: b.file([b.number("general.alignment", 4)]), "4 is not a power"),
    "alignment 2^31": (
        lambda b: b.file([b.number("general.alignment", 1 << 31)]),
        "2147483648 is not a power",
    ),
    "alignment as u64": (lambda b: b.file([b.number("general.alignment", 32, "Q")]), "32 bits"),
    "alignment as text": (lambda b: b.file([b.string("general.alignment", "32")]), "32 bits"),
    "alignment as float": (lambda b: b.file([b.number("general.alignment", 32, "f")]), "32 bits"),
    "tensor twice": (
        lambda b: b.file([], [b.tensor("t", [4], F32, 0), b.tensor("t", [4], F32, 32)], bytes(64)),
        "tensor appears twice",
    ),
    "tensor name not UTF-8": (
        lambda b: b.file([], [b.tensor(b"\x80", [4], F32, 0)], bytes(64)),
        "UTF-8",
    ),
    "no dimensions": (lambda b: b.file([], [b.tensor("t", [], F32, 0)], bytes(64)), "0 dimensions"),
    "5 dimensions": (lambda b: b.file([], [b.tensor("t", [1] * 5, F32, 0)], bytes(64)), "5 dim"),
    "2^32 - 1 dimensions": (
        lambda b: b.file([], [b.text("t") + b"\xff" * 64], bytes(64)),
        "4294967295 dimensions",
    ),
    "zero dimension": (
        lambda b: b.file([], [b.tensor("t", [4, 0], F32, 0)], bytes(64)),
        "dimensions is zero",
    ),
    "dimensions overflow": (
        lambda b: b.file([], [b.tensor("t", [1 << 62, 4], F32, 0)], bytes(64)),
        "outside the file",
    ),
    "dimensions wrap to a small size": (
        lambda b: b.file([], [b.tensor("t", [1 << 32, 1 << 32, 4], F32, 0)], bytes(64)),
        "outside the file",
    ),
    "row of half a block": (
        lambda b: b.file([], [b.tensor("t", [48, 2], Q4_0, 0)], bytes(64)),
        "no multiple of Q4_0's 32",
    ),
    "offset outside": (
        lambda b: b.file([], [b.tensor("t", [4], F32, 1 << 40)], bytes(64)),
        "outside the file",
    ),
    "offset of 2^64 - 32": (
        lambda b: b.file([], [b.tensor("t", [4], F32, 2**64 - 32)], bytes(64)),
        "outside the file",
    ),
    "offset misaligned": (
        lambda b: b.file([], [b.tensor("t", [4], F32, 4)], bytes(64)),
        "no multiple of the alignment",
    ),
    "tensor longer than the file": (
        lambda b: b.file([], [b.tensor("t", [17], F32, 0)], bytes(64)),
        "outside the file",
    ),
    "tensors overlap": (
        lambda b: b.file([], [b.tensor("t", [12], F32, 0), b.tensor("u", [4], F32, 32)], bytes(64)),
        "'u', its bytes overlap",
    ),
    "tensors in one place": (
        lambda b: b.file([], [b.tensor("t", [4], F32, 0), b.tensor("u", [4], F32, 0)], bytes(64)),
        "overlap",
    ),
    "removed type": (lambda b: b.file([], [b.tensor("t", [32], 4, 0)], bytes(64)), "Q4_2.*removed"),
    "another removed type": (
        lambda b: b.file([], [b.tensor("t", [32], 31, 0)], bytes(64)),
        "Q4_0_4_4.*removed",
    ),
    "unknown type": (lambda b: b.file([], [b.tensor("t", [32], 4096, 0)], bytes(64)), "type 4096"),
    "split count of text": (lambda b: b.file([b.string("split.count", "1")]), "split.count"),
    "split count of an array": (
        lambda b: b.file([b.numbers("split.count", 4, np.array([1, 1], np.uint32))]),
        "split.count",
    ),
    "part of a split": (lambda b: b.file([b.number("split.count", 2, "H")]), "one of 2 parts"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file(tmp_path: Path, build: Any, name: str) -> None:
    content, expected = HOSTILE[name]
    message = refusal(tmp_path / "bad.gguf", content(build))
    with pytest.raises(ModelError, match=expected):
        raise ModelError(message)
    assert "\x1b" not in message


def test_strings_are_counted_over_the_whole_file(tmp_path: Path, build: Any) -> None:
    count = (1 << 21) - 10
    strings = build.array(STRING, count, bytes(8 * count))
    path = tmp_path / "many.gguf"
    path.write_bytes(build.file([build.key(f"k{index}", ARRAY, strings) for index in range(3)]))
    with pytest.raises(ModelError, match="'k2', the strings of the file exceed"):
        GGUFFile(path)


def test_too_many_entries(tmp_path: Path, build: Any) -> None:
    path = tmp_path / "many.gguf"
    path.write_bytes(build.file(data=bytes(13 << 17), key_count=1 << 17))
    with pytest.raises(ModelError, match=r"131072 metadata entries; at most 65536"):
        GGUFFile(path)
    path.write_bytes(build.file(data=bytes(32 << 19), tensor_count=1 << 19))
    with pytest.raises(ModelError, match=r"524288 tensors; at most 65536"):
        GGUFFile(path)


@pytest.mark.parametrize("value", [b"", b"\0" * 4])
def test_metadata_of_a_wrong_type_is_refused_where_it_matters(
    tmp_path: Path, build: Any, value: bytes
) -> None:
    path = tmp_path / "a.gguf"
    keys = [
        build.key("general.architecture", ARRAY, build.array(4, len(value) // 4, value)),
        build.number("llama.attention.head_count", 2),
    ]
    path.write_bytes(build.file(keys, [build.tensor("output_norm.weight", [4], F32, 0)], bytes(16)))
    with GGUFFile(path) as file:
        np.testing.assert_array_equal(file.weight("output_norm.weight").dequantize(), np.zeros(4))


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    os.mkfifo(tmp_path / "pipe.gguf")
    for path, expected in {
        tmp_path / "empty.gguf": "empty",
        tmp_path / "pipe.gguf": "not a regular file",
        tmp_path: "not a regular file",
        tmp_path / "absent.gguf": "does not exist",
        tmp_path / "empty.gguf" / "below.gguf": "cannot be opened",
        tmp_path / ("n" * 300 + ".gguf"): "cannot be opened",
        tmp_path / ("n" * 300 + "-00001-of-00002.gguf"): "missing",
        tmp_path / "nul\0.gguf": "no valid path",
    }.items():
        with pytest.raises(ModelError, match=expected):
            GGUFFile(path)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read all")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    (tmp_path / "a.gguf").chmod(0)
    with pytest.raises(ModelError, match="permissions"):
        GGUFFile(tmp_path / "a.gguf")
