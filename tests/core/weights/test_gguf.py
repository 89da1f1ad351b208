"""GGUF files that the `gguf` package writes, read back; splits and converters' conventions."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest

from polysilicon.errors import ModelError
from polysilicon.weights.encodings import Dense, GroupAffine, GroupFloat
from polysilicon.weights.files import TensorInfo
from polysilicon.weights.gguf import GGUFFile


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def write(
    path: Path,
    tensors: dict[str, tuple[np.ndarray, str]],
    *,
    architecture: str = "qwen2",
    numbers: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Quantise and write with the `gguf` package."""
    writer = gguf.GGUFWriter(path, architecture, **options)
    for name, value in (numbers or {}).items():
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_uint32(name, value)
    for name, (values, type_name) in tensors.items():
        kind = gguf.GGMLQuantizationType[type_name]
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_what_the_writer_writes_is_read_back(tmp_path: Path, version: int, alignment: int) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_custom_alignment(alignment)
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -5)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -30000)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -2_000_000_000)
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float32("f32", 0.1)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_bool("no", False)
    writer.add_string("text", "grüße 😀 \0 end")
    writer.add_array("words", ["a", "", "ß", "😀" * 100])
    writer.add_array("integers", [3, -1, 2**31 - 1])
    writer.add_array("reals", [0.5, -1.25])
    writer.add_array("flags", [True, False, True])
    tensors = {
        "f32": (normal(3, 5), "F32"),
        "f16": (normal(7), "F16"),
        "bf16": (normal(2, 3, 4), "BF16"),
        "q8": (normal(3, 64), "Q8_0"),
        "q4": (normal(2, 5, 32), "Q4_0"),
    }
    for name, (values, type_name) in tensors.items():
        kind = gguf.GGMLQuantizationType[type_name]
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with path.open("r+b") as stream:
        stream.seek(4)
        stream.write(struct.pack("<I", version))

    with GGUFFile(path) as file:
        assert file.format == "gguf"
        assert file.path == path
        metadata = dict(file.metadata)
        integers, reals, flags = (metadata.pop(key) for key in ("integers", "reals", "flags"))
        assert metadata == {
            "general.architecture": "qwen2",
            "general.alignment": alignment,
            "u8": 200,
            "i8": -5,
            "u16": 60000,
            "i16": -30000,
            "u32": 4_000_000_000,
            "i32": -2_000_000_000,
            "u64": 2**64 - 1,
            "i64": -(2**63),
            "f32": float(np.float32(0.1)),
            "f64": 0.1,
            "yes": True,
            "no": False,
            "text": "grüße 😀 \0 end",
            "words": ("a", "", "ß", "😀" * 100),
        }
        assert metadata["yes"] is True
        assert isinstance(integers, np.ndarray)
        assert integers.dtype == np.int32
        np.testing.assert_array_equal(integers, [3, -1, 2**31 - 1])
        np.testing.assert_array_equal(reals, np.array([0.5, -1.25], np.float32))
        np.testing.assert_array_equal(flags, np.array([True, False, True]))
        assert file.tensors["q4"] == TensorInfo(
            name="q4", type="Q4_0", shape=(2, 5, 32), nbytes=2 * 5 * 18
        )
        assert list(file.tensors) == list(tensors)
        for name, (values, type_name) in tensors.items():
            kind = gguf.GGMLQuantizationType[type_name]
            expected = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
            weight = file.weight(name)
            assert weight.shape == values.shape
            assert weight.nbytes == file.tensors[name].nbytes
            np.testing.assert_array_equal(weight.dequantize(), expected)
        bf16 = file.weight("bf16")
        assert isinstance(bf16, Dense)
        assert bf16.array.dtype == ml_dtypes.bfloat16
        assert not bf16.array.flags.writeable


def test_a_file_without_tensors_has_metadata(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.gguf"
    write(path, {})
    with GGUFFile(path) as file:
        assert dict(file.tensors) == {}
        assert file.metadata["general.architecture"] == "qwen2"


def test_weights_outlive_the_file(tmp_path: Path) -> None:
    values = normal(4, 64)
    write(tmp_path / "a.gguf", {"x": (values, "F32")}, numbers={"list": [1, 2, 3]})
    file = GGUFFile(tmp_path / "a.gguf")
    weight, metadata = file.weight("x"), file.metadata
    file.close()
    (tmp_path / "a.gguf").unlink()
    np.testing.assert_array_equal(weight.dequantize(), values)
    np.testing.assert_array_equal(metadata["list"], [1, 2, 3])
    with pytest.raises(ValueError, match="closed"):
        file.weight("x")
    with pytest.raises(ValueError, match="closed"):
        file.fingerprint()


def test_unknown_tensor(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", {"x": (normal(4), "F32")})
    with GGUFFile(tmp_path / "a.gguf") as file, pytest.raises(ModelError, match="no tensor 'y'"):
        file.weight("y")


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter makes of the rows of q and k in Hugging Face's order."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


LLAMA = {
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
}


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q4_1", "Q8_0"])
def test_llama_queries_and_keys_come_in_hugging_face_order(tmp_path: Path, kind: str) -> None:
    query, key, value = normal(4 * 6, 64), normal(2 * 6, 64), normal(12, 64)
    query_bias, key_bias = normal(24), normal(12)
    write(
        tmp_path / "a.gguf",
        {
            "blk.3.attn_q.weight": (permuted(query, 4), kind),
            "blk.3.attn_k.weight": (permuted(key, 2), kind),
            "blk.3.attn_v.weight": (value, kind),
            "blk.3.attn_q.bias": (permuted(query_bias, 4), "F32"),
            "blk.3.attn_k.bias": (permuted(key_bias, 2), "F32"),
        },
        architecture="llama",
        numbers=LLAMA,
    )

    def rounded(values: np.ndarray) -> np.ndarray:
        type_ = gguf.GGMLQuantizationType[kind]
        return gguf.quants.dequantize(gguf.quants.quantize(values, type_), type_)

    with GGUFFile(tmp_path / "a.gguf") as file:
        for name, expected in {
            "blk.3.attn_q.weight": rounded(query),
            "blk.3.attn_k.weight": rounded(key),
            "blk.3.attn_v.weight": rounded(value),
            "blk.3.attn_q.bias": query_bias,
            "blk.3.attn_k.bias": key_bias,
        }.items():
            weight = file.weight(name)
            np.testing.assert_array_equal(weight.dequantize(), expected)
            assert weight.nbytes == file.tensors[name].nbytes


def test_other_architectures_rows_stay(tmp_path: Path) -> None:
    rows = normal(24, 8)
    write(tmp_path / "a.gguf", {"blk.0.attn_q.weight": (rows, "F32")}, numbers=LLAMA)
    with GGUFFile(tmp_path / "a.gguf") as file:
        np.testing.assert_array_equal(file.weight("blk.0.attn_q.weight").dequantize(), rows)


def test_head_counts_by_layer_and_one_count_for_both(tmp_path: Path) -> None:
    rows = [normal(8, 4, seed=seed) for seed in range(2)]
    write(
        tmp_path / "a.gguf",
        {
            f"blk.{layer}.attn_k.weight": (permuted(rows[layer], 2 + 2 * layer), "F32")
            for layer in (0, 1)
        },
        architecture="llama",
        numbers={"llama.attention.head_count": [2, 4]},
    )
    with GGUFFile(tmp_path / "a.gguf") as file:
        for layer in (0, 1):
            weight = file.weight(f"blk.{layer}.attn_k.weight")
            np.testing.assert_array_equal(weight.dequantize(), rows[layer])


@pytest.mark.parametrize("heads", [None, 0, 5, [4], ["a", "b", "c", "d"]])
def test_head_counts_that_do_not_fit_are_refused(tmp_path: Path, heads: Any) -> None:
    numbers = {} if heads is None else {"llama.attention.head_count": heads}
    write(
        tmp_path / "a.gguf",
        {"blk.3.attn_q.weight": (normal(24, 8), "F32")},
        architecture="llama",
        numbers=numbers,
    )
    with GGUFFile(tmp_path / "a.gguf") as file, pytest.raises(ModelError, match="heads"):
        file.weight("blk.3.attn_q.weight")


NORMS = ["output_norm", "blk.0.attn_norm", "blk.0.attn_q_norm", "blk.1.post_ffw_norm"]


@pytest.mark.parametrize("architecture", ["gemma", "gemma2", "gemma3"])
@pytest.mark.parametrize("kind", ["F32", "F16"])
def test_gemma_norms_lose_the_one_that_the_converter_added(
    tmp_path: Path, architecture: str, kind: str
) -> None:
    # Multiples of 1/64 survive the addition and its undoing exactly.
    values = np.arange(-16, 16, dtype=np.float32) / 64
    tensors = {f"{name}.weight": (values + 1, kind) for name in NORMS}
    tensors["blk.0.attn_norm.bias"] = (values, "F32")
    tensors["blk.0.ffn_up.weight"] = (values.reshape(1, -1), "F32")
    write(tmp_path / "a.gguf", tensors, architecture=architecture)
    with GGUFFile(tmp_path / "a.gguf") as file:
        for name in tensors:
            weight = file.weight(name)
            np.testing.assert_array_equal(weight.dequantize().reshape(-1), values)
            if "norm.weight" in name:
                assert weight.encoding == "dense:f32"


@pytest.mark.parametrize("architecture", ["gemma3n", "llama", "qwen3"])
def test_other_architectures_norms_stay(tmp_path: Path, architecture: str) -> None:
    write(
        tmp_path / "a.gguf", {"output_norm.weight": (normal(8), "F32")}, architecture=architecture
    )
    with GGUFFile(tmp_path / "a.gguf") as file:
        np.testing.assert_array_equal(file.weight("output_norm.weight").dequantize(), normal(8))


REFUSED = ["F64", "I8", "I16", "I32", "I64", "Q8_K"]


@pytest.mark.parametrize("kind", REFUSED)
def test_types_without_an_encoding_are_refused_when_asked_for(tmp_path: Path, kind: str) -> None:
    type_ = gguf.GGMLQuantizationType[kind]
    elements, size = gguf.GGML_QUANT_SIZES[type_]
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "qwen2")
    raw = np.zeros((2, 2 * size), np.uint8)
    writer.add_tensor("x", raw, raw_dtype=type_)
    writer.add_tensor("y", normal(3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile(tmp_path / "a.gguf") as file:
        assert file.tensors["x"].shape == (2, 2 * elements)
        np.testing.assert_array_equal(file.weight("y").dequantize(), normal(3))
        with pytest.raises(ModelError, match=f"as {kind}, which is not supported.*Q4_K"):
            file.weight("x")


def write_nvfp4(path: Path, factors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A matrix and a stack of 3, with `factors` beside them; returns their values without."""
    kind = gguf.GGMLQuantizationType.NVFP4
    generator = np.random.default_rng(5)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.attention.head_count", 2)
    values = {}
    for name, rows in {"blk.0.attn_q.weight": (8,), "blk.0.ffn_up_exps.weight": (3, 8)}.items():
        raw = generator.integers(0, 0x70, (*rows, 36), np.uint8)
        values[name] = gguf.quants.dequantize(raw, kind)
        writer.add_tensor(name, raw, raw_dtype=kind)
    for name, array in factors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    values["blk.0.attn_q.weight"] = (
        values["blk.0.attn_q.weight"].reshape(2, 2, 2, 64).swapaxes(1, 2).reshape(8, 64)
    )
    return values


@pytest.mark.parametrize("experts", [[0.25, 2.0, -0.5], [4.0]])
def test_factors_beside_weights_go_into_them(tmp_path: Path, experts: list[float]) -> None:
    path = tmp_path / "a.gguf"
    factors = {
        "blk.0.attn_q.scale": np.array([0.375], np.float32),
        "blk.0.ffn_up_exps.scale": np.array(experts, np.float32),
        "blk.0.attn_q.input_scale": np.array([7], np.float32),
    }
    values = write_nvfp4(path, factors)
    with GGUFFile(path) as file:
        for name, expected in values.items():
            factor = factors[name.replace("weight", "scale")]
            weight = file.weight(name)
            assert isinstance(weight, GroupFloat)
            np.testing.assert_array_equal(
                weight.dequantize(),
                expected * factor.reshape(-1, *[1] * (expected.ndim - 1)),
            )


@pytest.mark.parametrize(
    "factor",
    [np.ones(2, np.float32), np.ones(1, np.float16), np.array([np.nan], np.float32)],
    ids=["two", "f16", "nan"],
)
def test_factors_that_cannot_be_are_refused(tmp_path: Path, factor: np.ndarray) -> None:
    path = tmp_path / "a.gguf"
    write_nvfp4(path, {"blk.0.attn_q.scale": factor})
    with GGUFFile(path) as file, pytest.raises(ModelError, match=r"'blk\.0\.attn_q\.scale'"):
        file.weight("blk.0.attn_q.weight")


def test_a_factor_that_makes_scales_too_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    write_nvfp4(path, {"blk.0.attn_q.scale": np.array([3e38], np.float32)})
    with GGUFFile(path) as file, pytest.raises(ModelError, match=r"attn_q\.weight' has scales"):
        file.weight("blk.0.attn_q.weight")


@pytest.mark.parametrize("factor", [2.0, 0.5])
@pytest.mark.parametrize("kind", ["F16", "Q4_1", "Q8_0"])
def test_a_factor_beside_any_type(tmp_path: Path, kind: str, factor: float) -> None:
    tensors = {"blk.1.ffn_up.weight": (normal(3, 64), kind)}
    write(tmp_path / "plain.gguf", tensors)
    tensors["blk.1.ffn_up.scale"] = (np.array([factor], np.float32), "F32")
    write(tmp_path / "a.gguf", tensors)
    with GGUFFile(tmp_path / "plain.gguf") as plain, GGUFFile(tmp_path / "a.gguf") as file:
        np.testing.assert_array_equal(
            file.weight("blk.1.ffn_up.weight").dequantize(),
            plain.weight("blk.1.ffn_up.weight").dequantize() * np.float32(factor),
        )


NAN, INFINITY = b"\0\x7e", b"\0\x7c"


@pytest.mark.parametrize(
    ("kind", "start", "number"),
    [("Q4_0", 0, NAN), ("Q4_1", 2, INFINITY), ("Q6_K", 208, NAN), ("Q4_K", 2, NAN),
     ("IQ4_NL", 0, INFINITY), ("IQ2_S", 0, NAN), ("IQ1_S", 0, NAN), ("MXFP4", 0, b"\xff"),
     ("MXFP4", 0, b"\xfe")],
)  # fmt: skip
def test_scales_that_are_no_numbers_or_too_large_are_refused(
    tmp_path: Path, kind: str, start: int, number: bytes
) -> None:
    type_ = gguf.GGMLQuantizationType[kind]
    raw = np.zeros((2, 2 * gguf.GGML_QUANT_SIZES[type_][1]), np.uint8)
    raw[1, start : start + len(number)] = np.frombuffer(number, np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "qwen2")
    writer.add_tensor("x", raw, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile(tmp_path / "a.gguf") as file, pytest.raises(ModelError, match="'x' has scales"):
        file.weight("x")


@pytest.fixture
def split_paths(tmp_path: Path) -> list[Path]:
    """Three parts, two tensors each."""
    tensors = {f"t{index}": (normal(3, 32, seed=index), "Q8_0") for index in range(6)}
    write(tmp_path / "m.gguf", tensors, split_max_tensors=2, numbers={"answer": 42})
    paths = sorted(tmp_path.iterdir())
    assert [path.name for path in paths] == [f"m-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    return paths


def test_any_part_opens_the_whole_set(split_paths: list[Path]) -> None:
    fingerprints = set()
    for path in split_paths:
        with GGUFFile(path) as file:
            assert file.path == path
            assert file.metadata["answer"] == 42
            assert list(file.tensors) == [f"t{index}" for index in range(6)]
            for index in range(6):
                weight = file.weight(f"t{index}")
                assert isinstance(weight, GroupAffine)
                np.testing.assert_allclose(
                    weight.dequantize(), normal(3, 32, seed=index), atol=0.02
                )
            fingerprints.add(file.fingerprint())
    assert len(fingerprints) == 1


def test_missing_parts_are_named(split_paths: list[Path]) -> None:
    split_paths[1].unlink()
    with pytest.raises(ModelError, match=r"1 are missing: m-00002-of-00003\.gguf\. Download"):
        GGUFFile(split_paths[2])


def test_a_part_given_alone_under_another_name_is_refused(split_paths: list[Path]) -> None:
    other = split_paths[1].with_name("other.gguf")
    split_paths[1].rename(other)
    with pytest.raises(ModelError, match="one of 3 parts"):
        GGUFFile(other)


def test_parts_in_the_wrong_place_are_refused(split_paths: list[Path]) -> None:
    shutil.copy(split_paths[0], split_paths[1])
    with pytest.raises(ModelError, match="does not agree"):
        GGUFFile(split_paths[0])


def test_parts_of_two_models_are_refused(split_paths: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    tensors = {f"t{index}": (normal(4), "F32") for index in (0, 1, 2, 0 + 3, 4)}
    write(other / "m.gguf", tensors, split_max_tensors=2)
    shutil.copy(other / "m-00003-of-00003.gguf", split_paths[2])
    with pytest.raises(ModelError, match=r"announces 6 tensors.*hold 5"):
        GGUFFile(split_paths[0])
    write(
        other / "n.gguf",
        {f"t{index}": (normal(4), "F32") for index in (8, 9, 7, 6, 0)},
        split_max_tensors=2,
    )
    shutil.copy(other / "n-00003-of-00003.gguf", split_paths[2])
    with pytest.raises(ModelError, match="both hold tensor 't0'"):
        GGUFFile(split_paths[0])


@pytest.mark.parametrize(
    "name", ["m-00004-of-00003.gguf", "m-00000-of-00003.gguf", "m-00001-of-00000.gguf"]
)
def test_impossible_part_numbers_are_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path / "a.gguf", {})
    (tmp_path / "a.gguf").rename(tmp_path / name)
    with pytest.raises(ModelError, match="cannot be"):
        GGUFFile(tmp_path / name)


def test_one_of_one_is_a_whole_file(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", {"x": (normal(4), "F32")})
    (tmp_path / "a.gguf").rename(tmp_path / "a-00001-of-00001.gguf")
    with GGUFFile(tmp_path / "a-00001-of-00001.gguf") as file:
        assert list(file.tensors) == ["x"]


def test_fingerprint_tells_models_apart_and_copies_not(tmp_path: Path) -> None:
    def fingerprint(name: str, values: np.ndarray, **options: Any) -> str:
        write(tmp_path / name, {"x": (values, "F32")}, **options)
        with GGUFFile(tmp_path / name) as file:
            return file.fingerprint()

    values = normal(40, 100)
    changed = values.copy()
    changed[20] += 1
    first = fingerprint("a.gguf", values)
    assert len(first) == 64
    assert fingerprint("b.gguf", values) == first
    assert fingerprint("c.gguf", changed) != first
    assert fingerprint("d.gguf", values, numbers={"n": 1}) != first
    assert fingerprint("e.gguf", values.T) != first


def test_real_llama_file(smollm2_path: Path) -> None:
    with GGUFFile(smollm2_path) as file:
        assert file.metadata["general.architecture"] == "llama"
        tokens = file.metadata["tokenizer.ggml.tokens"]
        assert isinstance(tokens, tuple)
        assert (len(tokens), tokens[1]) == (49152, "<|im_start|>")
        assert file.tensors["token_embd.weight"].shape == (49152, 576)
        query = file.weight("blk.0.attn_q.weight").dequantize()
        part, entry = file._entries["blk.0.attn_q.weight"]
        raw = part.data(entry.start, entry.info.nbytes).reshape(576, -1)
        stored = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q4_1)
        np.testing.assert_array_equal(permuted(query, 9), stored)


def test_real_gemma_file(gemma3_path: Path) -> None:
    with GGUFFile(gemma3_path) as file:
        tokens, scores = (file.metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores"))
        assert isinstance(tokens, tuple)
        assert isinstance(scores, np.ndarray)
        assert len(tokens) == len(scores) == 262144
        assert tokens[:3] == ("<pad>", "<eos>", "<bos>")
        part, entry = file._entries["blk.5.attn_q_norm.weight"]
        stored = part.data(entry.start, entry.info.nbytes).view(np.float32)
        values = file.weight("blk.5.attn_q_norm.weight").dequantize()
        np.testing.assert_array_equal(values, stored - 1)
