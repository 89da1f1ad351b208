"""Safetensors directories: what the `safetensors` package writes, and malformed ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from polysilicon.errors import ModelError
from polysilicon.weights.checkpoint import open_checkpoint
from polysilicon.weights.encodings import Dense
from polysilicon.weights.files import TensorInfo
from polysilicon.weights.safetensors import SafetensorsDirectory

DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def random(dtype: Any, *shape: int) -> np.ndarray:
    return np.random.default_rng(list(shape)).normal(size=shape).astype(dtype)


def write_config(path: Path, **entries: Any) -> None:
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **entries}))


def write_index(path: Path, places: Any) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def raw_file(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file of any header: an object to write as JSON, or bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: Any, shape: Any, offsets: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_a_single_file_is_read(tmp_path: Path) -> None:
    tensors = {name: random(dtype, 3, 5) for name, dtype in DTYPES.items()}
    tensors["vector"] = random(np.float32, 7)
    tensors["experts"] = random(np.float16, 2, 3, 4)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    write_config(tmp_path, hidden_size=5)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
    with SafetensorsDirectory(tmp_path) as directory:
        assert directory.format == "safetensors"
        assert directory.path == tmp_path
        assert directory.config == {"model_type": "llama", "hidden_size": 5}
        assert directory.generation_config == {"temperature": 0.5}
        assert directory.tensors["BF16"] == TensorInfo(
            name="BF16", type="BF16", shape=(3, 5), nbytes=30
        )
        assert directory.tensors.keys() == tensors.keys()
        for name, array in tensors.items():
            weight = directory.weight(name)
            assert isinstance(weight, Dense)
            assert weight.array.dtype == array.dtype
            assert not weight.array.flags.writeable
            np.testing.assert_array_equal(weight.array, array)


def sharded(path: Path) -> dict[str, np.ndarray]:
    tensors = {f"t{index}": random(ml_dtypes.bfloat16, 4, index + 1) for index in range(6)}
    places = {}
    for shard in range(3):
        name = f"model-0000{shard + 1}-of-00003.safetensors"
        part = {key: value for key, value in tensors.items() if int(key[1:]) % 3 == shard}
        save_file(part, path / name)
        places |= dict.fromkeys(part, name)
    write_index(path, places)
    write_config(path)
    return tensors


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    tensors = sharded(tmp_path)
    with SafetensorsDirectory(tmp_path) as directory:
        assert directory.generation_config == {}
        assert directory.tensors.keys() == tensors.keys()
        for name, array in tensors.items():
            np.testing.assert_array_equal(
                directory.weight(name).dequantize(), array.astype(np.float32)
            )


def test_weights_outlive_the_directory(tmp_path: Path) -> None:
    tensors = sharded(tmp_path)
    directory = SafetensorsDirectory(tmp_path)
    weight = directory.weight("t4")
    directory.close()
    for path in tmp_path.iterdir():
        path.unlink()
    np.testing.assert_array_equal(weight.dequantize(), tensors["t4"].astype(np.float32))
    with pytest.raises(ValueError, match="closed"):
        directory.weight("t4")
    with pytest.raises(ValueError, match="closed"):
        directory.fingerprint()


def test_unaligned_tensors_come_aligned(tmp_path: Path) -> None:
    values = random(np.float32, 3, 4)
    header = json.dumps({"x": entry("F32", [3, 4], [0, 48])}).encode()
    for padding in range(8):
        content = raw_file(header + b" " * padding, values.tobytes())
        (tmp_path / "model.safetensors").write_bytes(content)
        write_config(tmp_path)
        with SafetensorsDirectory(tmp_path) as directory:
            weight = directory.weight("x")
            assert isinstance(weight, Dense)
            assert weight.array.flags.aligned
            np.testing.assert_array_equal(weight.array, values)


def test_buffers_of_other_types_are_no_weights(tmp_path: Path) -> None:
    tensors = {
        "model.position_ids": np.arange(4),
        "model.mask": np.ones((2, 2), bool),
        "model.empty": np.zeros((0, 3), np.float32),
        "x.weight": random(np.float32, 2),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    write_config(tmp_path)
    with SafetensorsDirectory(tmp_path) as directory:
        assert directory.weight("x.weight").shape == (2,)
        for name, expected in {
            "model.position_ids": "I64",
            "model.mask": "BOOL",
            "model.empty": r"\[0, 3\]",
            "absent": "no tensor 'absent'",
        }.items():
            with pytest.raises(ModelError, match=expected):
                directory.weight(name)


def test_fingerprint_tells_models_apart_and_copies_not(tmp_path: Path) -> None:
    def fingerprint(name: str, values: np.ndarray, **config: Any) -> str:
        path = tmp_path / name
        path.mkdir()
        save_file({"x": values}, path / "model.safetensors")
        write_config(path, **config)
        with SafetensorsDirectory(path) as directory:
            return directory.fingerprint()

    values = random(np.float32, 40, 100)
    changed = values.copy()
    changed[20] += 1
    first = fingerprint("a", values)
    assert len(first) == 64
    assert fingerprint("b", values) == first
    assert fingerprint("c", changed) != first
    assert fingerprint("d", values, rope_theta=2) != first
    assert fingerprint("e", values.T.copy()) != first


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"quantization_config": {"quant_method": "aqlm", "nbits_per_codebook": 16}}, "aqlm"),
        ({"quantization_config": {"quant_method": "VPTQ"}}, "vptq"),
        ({"quantization_config": {"bits": 4}}, "unnamed method"),
        ({"quantization_config": 3}, "unnamed method"),
        ({"quantization_config": {"quant_method": ["gptq"]}}, "unnamed method"),
        ({"text_config": {"quantization_config": {"quant_method": "spqr"}}}, "spqr"),
    ],
)
def test_methods_that_no_format_reads_are_refused_by_name(
    tmp_path: Path, config: dict[str, Any], method: str
) -> None:
    save_file({"x": random(np.float32, 2)}, tmp_path / "model.safetensors")
    write_config(tmp_path, **config)
    with pytest.raises(ModelError, match=f"quantised with '{method}'.*unquantised"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("a.weight", ml_dtypes.float8_e4m3fn, "F8_E4M3"),
        ("a.qweight", np.int32, "I32"),
        ("a.weight_packed", np.uint8, "U8"),
    ],
)
def test_codes_that_the_config_does_not_name_are_refused(
    tmp_path: Path, name: str, dtype: Any, expected: str
) -> None:
    type_name = {"float8_e4m3fn": "F8_E4M3", "int32": "I32", "uint8": "U8"}[np.dtype(dtype).name]
    size = 4 * np.dtype(dtype).itemsize
    content = raw_file({name: entry(type_name, [4], [0, size])}, bytes(size))
    (tmp_path / "model.safetensors").write_bytes(content)
    write_config(tmp_path)
    for quantization in ("auto", "dense"):
        with pytest.raises(ModelError, match=f"'{name}' as {expected}.*quantised"):
            open_checkpoint(tmp_path, quantization=quantization)


def test_stored_tensors_come_in_their_own_dtype(tmp_path: Path) -> None:
    """Every type of the format that NumPy or ml_dtypes has, and F4 as pairs."""
    dtypes: dict[str, Any] = {
        "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
        "C64": np.complex64, "BOOL": np.uint8, "I64": np.int64, "I32": np.int32, "I16": np.int16,
        "I8": np.int8, "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8,
        "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu, "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
        "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    }  # fmt: skip
    header, data = {}, b""
    for name, dtype in dtypes.items():
        part = np.arange(6).astype(dtype).tobytes()
        header[name] = entry(name, [2, 3], [len(data), len(data) + len(part)])
        data += part
    header["F4"] = entry("F4", [2, 4], [len(data), len(data) + 4])
    header["F4 odd"] = entry("F4", [4, 1], [len(data) + 4, len(data) + 6])
    header["F6"] = entry("F6_E2M3", [4], [len(data) + 6, len(data) + 9])
    (tmp_path / "model.safetensors").write_bytes(raw_file(header, data + bytes(range(9))))
    write_config(tmp_path)
    with SafetensorsDirectory(tmp_path) as directory:
        for name, dtype in dtypes.items():
            array = directory.array(name)
            assert array.dtype == dtype
            assert not array.flags.writeable
            assert array.shape == (2, 3)
            assert array.tobytes() == np.arange(6).astype(dtype).tobytes()
        np.testing.assert_array_equal(directory.array("F4"), [[0, 1], [2, 3]])
        for name in ("F4 odd", "F6"):
            with pytest.raises(ModelError, match=f"'{name}' as F.*not supported"):
                directory.array(name)
    with pytest.raises(ValueError, match="closed"):
        directory.array("F32")


def test_sidecars_and_metadata(tmp_path: Path) -> None:
    def fingerprint() -> str:
        with SafetensorsDirectory(tmp_path) as directory:
            return directory.fingerprint()

    content = {"__metadata__": {"format": "pt", "wrong": 3}, "x": entry("F32", [1], [0, 4])}
    (tmp_path / "model.safetensors").write_bytes(raw_file(content, bytes(4)))
    write_config(tmp_path)
    without = fingerprint()
    (tmp_path / "quantize_config.json").write_text('{"bits": 4}')
    with SafetensorsDirectory(tmp_path) as directory:
        assert directory.sidecars == {"quantize_config.json": {"bits": 4}}
        assert directory.metadata == {"format": "pt"}
    assert fingerprint() != without
    (tmp_path / "quantize_config.json").write_text("[")
    with pytest.raises(ModelError, match=r"quantize_config\.json is no valid JSON"):
        SafetensorsDirectory(tmp_path)


F32 = entry("F32", [2], [0, 8])
HEADERS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "seven bytes": (bytes(7), "announced"),
    "length past the end": (raw_file(b"{}")[:-1], "announced"),
    "length of 2^63": ((1 << 63).to_bytes(8, "little") + b"{}", "announced"),
    "no JSON": (raw_file(b"{"), "no valid JSON"),
    "empty header": (raw_file(b""), "no valid JSON"),
    "not UTF-8": (raw_file(b'{"\xff": 1}'), "no valid JSON"),
    "array": (raw_file([]), "no JSON object"),
    "number": (raw_file(1), "no JSON object"),
    "deep": (raw_file(b"[" * 100_000), "nested too deeply"),
    "deep objects": (raw_file(b'{"a":' * 100_000), "nested too deeply"),
    "long number": (raw_file(b'{"a": ' + b"9" * 5000 + b"}"), "no valid JSON"),
    "key twice": (raw_file(b'{"x": {}, "x": {}}'), "twice"),
    "entry of text": (raw_file({"x": "F32"}), "'x' is described by no object"),
    "no dtype": (raw_file({"x": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)), "lacks"),
    "dtype of a number": (raw_file({"x": entry(32, [2], [0, 8])}, bytes(8)), "lacks"),
    "unknown dtype": (raw_file({"x": entry("Q4", [2], [0, 8])}, bytes(8)), "'Q4'.*not known"),
    "shape of text": (raw_file({"x": entry("F32", "2", [0, 8])}, bytes(8)), "lacks"),
    "negative shape": (raw_file({"x": entry("F32", [-1, -2], [0, 8])}, bytes(8)), "lacks"),
    "shape of booleans": (raw_file({"x": entry("F32", [True], [0, 4])}, bytes(8)), "lacks"),
    "shape of floats": (raw_file({"x": entry("F32", [2.0], [0, 8])}, bytes(8)), "lacks"),
    "shape of many": (raw_file({"x": entry("F32", [1] * 999, [0, 4])}, bytes(8)), "999 dim"),
    "shape too small": (raw_file({"x": entry("F32", [1], [0, 8])}, bytes(8)), "8 bytes, which"),
    "shape too large": (raw_file({"x": entry("F32", [1 << 62], [0, 8])}, bytes(8)), "8 bytes"),
    "one offset": (raw_file({"x": entry("F32", [2], [0])}, bytes(8)), "outside the file"),
    "offsets reversed": (raw_file({"x": entry("F32", [2], [8, 0])}, bytes(8)), "outside"),
    "negative offsets": (raw_file({"x": entry("F32", [2], [-8, 0])}, bytes(8)), "lacks"),
    "offsets outside": (raw_file({"x": entry("F32", [2], [1, 9])}, bytes(8)), "outside"),
    "huge offsets": (raw_file({"x": entry("F32", [2], [10**30, 10**30 + 8])}), "outside"),
    "overlap": (raw_file({"x": F32, "y": entry("F32", [2], [4, 12])}, bytes(12)), "overlap"),
    "one place": (raw_file({"x": F32, "y": F32}, bytes(8)), "overlap"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_malformed_file(tmp_path: Path, name: str) -> None:
    content, expected = HEADERS[name]
    (tmp_path / "model.safetensors").write_bytes(content)
    write_config(tmp_path)
    with pytest.raises(ModelError, match=expected) as caught:
        SafetensorsDirectory(tmp_path)
    assert "model.safetensors" in str(caught.value)
    assert len(str(caught.value)) < 600


def test_headers_are_of_bounded_size(tmp_path: Path) -> None:
    size = (1 << 25) + 1
    with (tmp_path / "model.safetensors").open("wb") as stream:
        stream.write(size.to_bytes(8, "little"))
        stream.truncate(size + 8)
    write_config(tmp_path)
    with pytest.raises(ModelError, match="at most 33554432"):
        SafetensorsDirectory(tmp_path)
    with (tmp_path / "config.json").open("wb") as stream:
        stream.truncate(size)
    with pytest.raises(ModelError, match=r"config\.json has .* at most 33554432"):
        SafetensorsDirectory(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 100_000, '"x"', "\ufeff{}"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_malformed_config(tmp_path: Path, name: str, content: str) -> None:
    save_file({"x": random(np.float32, 2)}, tmp_path / "model.safetensors")
    write_config(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=name):
        SafetensorsDirectory(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "/etc/secret.safetensors",
        "below/part.safetensors",
        "..\\secret.safetensors",
        "C:secret.safetensors",
        "nul\0.safetensors",
        "\ud800.safetensors",
        "line\n.safetensors",
        "..",
        "",
        "weights.bin",
        7,
        None,
    ],
)
def test_an_index_names_only_files_beside_it(tmp_path: Path, name: Any) -> None:
    write_index(tmp_path, {"x": name})
    write_config(tmp_path)
    with pytest.raises(ModelError, match="in its own directory"):
        SafetensorsDirectory(tmp_path)


@pytest.mark.parametrize("places", [None, {}, [], "x"])
def test_an_index_without_a_map_is_refused(tmp_path: Path, places: Any) -> None:
    write_index(tmp_path, places)
    write_config(tmp_path)
    with pytest.raises(ModelError, match="no weight_map"):
        SafetensorsDirectory(tmp_path)


def test_missing_shards_and_tensors_are_named(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file({"other": random(np.float32, 2)}, tmp_path / "model-00003-of-00003.safetensors")
    with pytest.raises(ModelError, match=r"'model-00003-of-00003\.safetensors' holds tensor 't2'"):
        SafetensorsDirectory(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks 1 of the 3.*'model-00002-of-00003\.safetensors'"):
        SafetensorsDirectory(tmp_path)


def test_a_single_file_goes_before_an_index(tmp_path: Path) -> None:
    save_file({"x": random(np.float32, 2)}, tmp_path / "model.safetensors")
    write_index(tmp_path, {"y": "absent.safetensors"})
    write_config(tmp_path)
    with SafetensorsDirectory(tmp_path) as directory:
        assert list(directory.tensors) == ["x"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], "holds no weights"),
        (["pytorch_model.bin"], "pickled.*convert"),
        (["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"], "pickled"),
        (["consolidated.00.pth"], "pickled"),
        (["consolidated.safetensors"], "'consolidated.safetensors', but neither"),
        (["adapter_config.json", "adapter_model.safetensors"], "adapter, not a model"),
    ],
)
def test_directories_without_weights(tmp_path: Path, names: list[str], expected: str) -> None:
    write_config(tmp_path)
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ModelError, match=expected):
        SafetensorsDirectory(tmp_path)


def test_paths_that_are_no_directories(tmp_path: Path) -> None:
    save_file({"x": random(np.float32, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        SafetensorsDirectory(tmp_path)
    for path in (tmp_path / "absent", tmp_path / "model.safetensors", tmp_path / ("n" * 300)):
        with pytest.raises(ModelError, match="not a directory"):
            SafetensorsDirectory(path)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(at=st.floats(0, 1, exclude_max=True), new=st.binary(max_size=3), removed=st.integers(0, 5))
def test_damage_is_refused_or_harmless(tmp_path: Path, at: float, new: bytes, removed: int) -> None:
    tensors = {"x": entry("F32", [2, 2], [0, 16]), "y": entry("BF16", [3], [16, 22])}
    content = raw_file(tensors, bytes(range(22)))
    place = int(at * len(content))
    write_config(tmp_path)
    path = tmp_path / "model.safetensors"
    path.unlink(missing_ok=True)
    path.write_bytes(content[:place] + new + content[place + removed :])
    try:
        with SafetensorsDirectory(tmp_path) as directory:
            for name, info in directory.tensors.items():
                if info.type in DTYPES and 0 not in info.shape:
                    assert directory.weight(name).shape == info.shape
    except ModelError as error:
        message = str(error)
    else:
        message = path.name
    assert path.name in message
