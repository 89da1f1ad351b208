"""The matrix of formats and backends, from the readers' own words."""

from __future__ import annotations

from polysilicon.format_matrix import Format, Support, formats
from polysilicon.reference.device import ReferenceDevice


def by_type() -> dict[tuple[str, str], Format]:
    found = {(format.container, format.type): format for format in formats()}
    assert len(found) == len(formats())
    return found


def test_what_is_read_has_an_encoding_and_what_is_not_a_reason() -> None:
    device = ReferenceDevice()
    for format in formats():
        assert bool(format.encoding) != bool(format.reason), format
        expected = Support.NATIVE if format.encoding else Support.REFUSED
        assert format.support(device.capabilities) is expected
    device.close()


def test_some_rows() -> None:
    found = by_type()
    for row, encoding in {
        ("gguf", "Q4_0"): "affine:4/32",
        ("safetensors", "BF16"): "dense:bf16",
        ("safetensors", "gptq:4"): "affine:4/128",
        ("safetensors", "mlx:nvfp4"): "float:f4_e2m1/16",
        ("safetensors", "bitsandbytes:nf4"): "float:codebook/64",
    }.items():
        assert found[row].encoding == encoding
    assert "one kind of GPU" in found["safetensors", "gptq:marlin"].reason
    assert "act-order: gate and up projections are held in 8 bits" in (
        found["safetensors", "gptq:4"].note
    )
    assert "16 bits" in found["safetensors", "compressed-tensors:int8"].note
    assert not found["safetensors", "compressed-tensors:fp8"].note
    assert found["gguf", "Q4_0_4_4"].reason
