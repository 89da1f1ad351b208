"""What is known of a model from its config.json or its GGUF header alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from polysilicon.errors import ConfigError, DownloadError, ModelError
from polysilicon.models.loading import load_model
from polysilicon.models.quantizing import quantize_loaded
from polysilicon.models.registry import architectures, find_hf
from polysilicon.plan.model import SCHEMES, open_model, quantized
from polysilicon.plan.placed import placed
from polysilicon.reference.device import ReferenceDevice
from polysilicon.testing.tiny_models import tiny_gemma, tiny_llama
from polysilicon.weights.checkpoint import open_checkpoint
from polysilicon.weights.encodings import Dense
from polysilicon.weights.fields import Fields

WriteConfig = Callable[..., Path]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # As the hub shows of the published weights.
        ("llama-2-7b", 6_738_415_616),
        ("llama-3-70b", 70_553_706_496),
        ("mistral-7b", 7_241_732_096),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen3-0.6b", 596_049_920),
        ("gemma-2-2b", 2_614_341_888),
        ("gemma-3-1b", 999_885_952),
        ("mixtral-8x7b", 46_702_792_704),
        ("gpt-oss-20b", 20_914_757_184),
        ("phi-3-mini", 3_821_079_552),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("deepseek-v2-lite", 15_706_484_224),
    ],
)
def test_parameters_of_published_models(
    name: str, parameters: int, write_config: WriteConfig
) -> None:
    assert open_model(str(write_config(name))).parameters == parameters


@pytest.mark.parametrize(
    ("key", "dtype", "size"),
    [
        ("torch_dtype", "float16", 2),
        ("dtype", "bfloat16", 2),
        ("torch_dtype", "float32", 4),
    ],
)
def test_dtypes(key: str, dtype: str, size: int, write_config: WriteConfig) -> None:
    changes: dict[str, object] = {"torch_dtype": None, key: dtype}
    model = open_model(str(write_config("qwen2.5-0.5b", **changes)))
    assert model.nbytes == size * model.parameters
    assert not model.notes


def test_a_dtype_that_is_not_said(write_config: WriteConfig) -> None:
    model = open_model(str(write_config("qwen2.5-0.5b", torch_dtype=None)))
    assert model.nbytes == 2 * model.parameters
    assert "no dtype" in model.notes[0]


def layer_bits(folder: Path) -> tuple[float, set[str]]:
    """Bits of an element of the layers' matrices, and their encodings."""
    model = open_model(str(folder))
    layers = [t for t in model.tensors if t.is_matrix and t.key.startswith("layers.")]
    others = [t for t in model.tensors if t not in layers]
    assert all(t.encoding == "dense:f16" and t.nbytes == 2 * t.parameters for t in others)
    bits = 8 * sum(t.nbytes for t in layers) / sum(t.parameters for t in layers)
    return bits, {t.encoding for t in layers}


@pytest.mark.parametrize(
    ("settings", "bits", "encoding"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128, "affine:4/128"),
        ({"quant_method": "gptq", "bits": 3, "group_size": -1}, 3, "affine:3/row"),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, 4 + 20 / 64, "affine:4/64"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8, "float:f8_e4m3"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5, "float:f4_e2m1/16"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5, "float:codebook/64"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8, "affine:8/row"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}},
            },
            4 + 20 / 32,
            "affine:4/32",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            8,
            "float:f8_e4m3/row",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
            4.5,
            "float:f4_e2m1/16",
        ),
    ],
)
def test_quantised_checkpoints(
    settings: dict[str, object], bits: float, encoding: str, write_config: WriteConfig
) -> None:
    folder = write_config("llama-2-7b", quantization_config=settings)
    assert layer_bits(folder) == (pytest.approx(bits, rel=1e-6), {encoding})
    assert "as not quantised" in open_model(str(folder)).notes[0]


def test_mlx(write_config: WriteConfig) -> None:
    folder = write_config("llama-2-7b", quantization={"bits": 4, "group_size": 64})
    assert layer_bits(folder) == (pytest.approx(4.5, rel=1e-6), {"affine:4/64"})


def test_the_published_size_of_gpt_oss(write_config: WriteConfig) -> None:
    """Only its experts are quantised: 13,761,264,768 bytes of the hub's files, headers included."""
    model = open_model(str(write_config("gpt-oss-20b")))
    assert model.nbytes == pytest.approx(13_761_264_768, rel=1e-4)


def test_a_quantisation_that_is_not_known(write_config: WriteConfig) -> None:
    folder = write_config("llama-2-7b", quantization_config={"quant_method": "higgs\x1b"})
    model = open_model(str(folder))
    assert model.nbytes == 2 * model.parameters
    assert "'higgs\\x1b' is not known" in model.notes[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "gptq", "bits": 64, "group_size": 128},
        {"quant_method": "gptq", "bits": -4},
        {"quant_method": "gptq", "bits": "4"},
        {"quant_method": "gptq", "bits": 4.5},
        {"quant_method": 7, "bits": 4},
        {"quant_method": "gptq", "bits": 4, "group_size": 1 << 60},
        {"quant_method": "bitsandbytes", "load_in_4bit": "yes"},
    ],
)
def test_settings_that_lie(settings: dict[str, object], write_config: WriteConfig) -> None:
    with pytest.raises(ModelError, match=r"config\.json, quantization_config, has"):
        open_model(str(write_config("llama-2-7b", quantization_config=settings)))


@pytest.mark.parametrize("tiny", [tiny_llama, tiny_gemma], ids=lambda tiny: tiny.__name__)
def test_loading_takes_as_many_bytes(tiny: Callable[..., object], tmp_path: Path) -> None:
    """The tiny models are stored in float32, as which the reference device holds all weights."""
    model = tiny()
    model.write(tmp_path)  # type: ignore[attr-defined]
    planned = open_model(str(tmp_path))
    device = ReferenceDevice()
    with open_checkpoint(tmp_path) as checkpoint:
        loaded = load_model(checkpoint, device)
    assert planned.nbytes == loaded.nbytes
    device.close()


@pytest.mark.parametrize("scheme", SCHEMES[1:])
@pytest.mark.parametrize("hidden", [256, 208])
def test_quantising_is_counted_as_it_is_done(
    scheme: str, hidden: int, write_config: WriteConfig
) -> None:
    """Element by element, by the functions that loading calls; 208 is no multiple of groups."""
    folder = write_config(
        "qwen2.5-0.5b", hidden_size=hidden, intermediate_size=96, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32, num_hidden_layers=2, vocab_size=70,
    )  # fmt: skip
    model = quantized(open_model(str(folder)), scheme)
    assert quantized(open_model(str(folder)), "none") == open_model(str(folder))
    for tensor in model.tensors:
        dense = Dense(array=np.ones(tensor.shape, ml_dtypes.bfloat16))
        weight = quantize_loaded(dense, tensor.key, scheme, "x") if tensor.is_matrix else dense
        assert (tensor.nbytes, tensor.encoding) == (weight.nbytes, weight.encoding)


def test_what_is_quantised_already_is_not_again(
    write_config: WriteConfig, smollm2_path: Path
) -> None:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    folder = write_config("llama-2-7b", quantization_config=settings)
    for path, coded in ((folder, "affine:4/128"), (smollm2_path, "affine:4/32, affine:8/32")):
        with pytest.raises(ConfigError, match=rf"quantised already \({coded}\)"):
            quantized(open_model(str(path)), "w8")


def test_an_unknown_scheme(write_config: WriteConfig) -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'w4'.*none, w4, w8, fp8"):
        quantized(open_model(str(write_config("llama-2-7b"))), "w44")


@pytest.mark.parametrize("path", ["smollm2_path", "gemma3_path"])
def test_gguf_headers(path: str, request: pytest.FixtureRequest) -> None:
    """Real bytes of real tensors."""
    file: Path = request.getfixturevalue(path)
    model = open_model(str(file))
    with open_checkpoint(file) as checkpoint:
        assert model.nbytes == sum(info.nbytes for info in checkpoint.tensors.values())
    assert model.nbytes < file.stat().st_size
    assert {tensor.encoding for tensor in model.tensors} >= {"dense:f32"}
    assert "affine:4/32" in {tensor.encoding for tensor in model.tensors}
    assert not model.notes


def test_the_config_file_itself(write_config: WriteConfig) -> None:
    folder = write_config("llama-2-7b")
    assert open_model(str(folder / "config.json")).parameters == 6_738_415_616


def test_the_hub_gives_no_more_than_the_config(
    write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = []

    def download(repo: str, file: str) -> str:
        fetched.append((repo, file))
        return str(write_config("llama-2-7b") / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url: None)
    model = open_model("hf:owner/llama")
    assert fetched == [("owner/llama", "config.json")]
    assert model.parameters == 6_738_415_616
    assert model.name == "hf:owner/llama"


def test_the_hub_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(url: str) -> None:
        raise OSError("no route")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", unreachable)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", pytest.fail)
    with pytest.raises(DownloadError, match="no route"):
        open_model("hf:owner/llama")


@pytest.mark.parametrize("spec", ["hf:owner/repo:a.gguf", "hf:owner", "hf:", "hf:a/b/c"])
def test_wrong_names_on_the_hub(spec: str) -> None:
    with pytest.raises(ModelError, match="hf:"):
        open_model(spec)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": -1},
        {"hidden_size": 1 << 40},
        {"num_hidden_layers": 1 << 30},
        {"vocab_size": "many"},
        {"num_key_value_heads": 5},
        {"max_position_embeddings": 0},
        {"architectures": ["NoSuchModel"]},
        {"architectures": "LlamaForCausalLM"},
    ],
)
def test_configs_that_lie(changes: dict[str, object], write_config: WriteConfig) -> None:
    with pytest.raises(ModelError):
        open_model(str(write_config("llama-2-7b", **changes)))


@pytest.mark.parametrize(
    ("text", "what"),
    [("", "empty"), ("{", "no valid JSON"), ("[1]", "no JSON object"), ("[" * 100_000, "nested")],
)
def test_files_that_are_no_config(text: str, what: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=what):
        open_model(str(tmp_path))


def test_the_widest_matrices_are_not_made(write_config: WriteConfig) -> None:
    """A config can ask for rows of a billion: quantising is counted without them."""
    folder = write_config(
        "qwen3-0.6b", num_attention_heads=1 << 16, num_key_value_heads=1 << 10, head_dim=1 << 14
    )
    model = quantized(open_model(str(folder)), "w4")
    wide = next(t for t in model.tensors if t.key == "layers.0.o.weight")
    assert wide.shape == (1024, 1 << 30)
    assert wide.nbytes == 1024 * (1 << 30) * 5 // 8


def test_no_directory_and_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        open_model(str(tmp_path))
    with pytest.raises(ModelError, match="neither an existing path"):
        open_model(str(tmp_path / "none"))
    (tmp_path / "a.json").write_text(json.dumps({"model_type": "?"}))
    with pytest.raises(ModelError):
        open_model(str(tmp_path / "a.json"))


@pytest.mark.parametrize("query_rank", [None, 48])
@pytest.mark.parametrize("scheme", ["none", "w8"])
def test_latent_attention_is_placed_as_it_is_counted(
    query_rank: int | None, scheme: str, write_config: WriteConfig
) -> None:
    """Held to a random checkpoint of that config on a device."""
    folder = write_config(
        "deepseek-v2-lite", hidden_size=64, intermediate_size=96, moe_intermediate_size=32,
        num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=2, kv_lora_rank=32,
        q_lora_rank=query_rank, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
        n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, vocab_size=70,
    )  # fmt: skip
    planned = open_model(str(folder))
    write_random_weights(folder)
    assert open_model(str(folder)).nbytes == planned.nbytes
    counted = placed(quantized(planned, scheme))
    assert counted.parameters == planned.parameters
    assert "merged" in counted.notes[-1]
    device = ReferenceDevice()
    with open_checkpoint(folder) as checkpoint:
        loaded = load_model(checkpoint, device, quantize=None if scheme == "none" else scheme)
    # The reference device holds every element in float32.
    assert 4 * sum(t.parameters for t in counted.tensors) == loaded.nbytes
    wide = {t.encoding for t in counted.tensors if t.key.endswith((".o.weight", ".k_rope.weight"))}
    assert wide == {"dense:bf16"}
    device.close()


def test_other_attention_is_placed_as_it_is_stored(write_config: WriteConfig) -> None:
    model = open_model(str(write_config("llama-2-7b")))
    assert placed(model) is model


def write_random_weights(folder: Path) -> None:
    """Weights in bfloat16 for the config.json of a folder."""
    values = json.loads((folder / "config.json").read_text())
    fields = Fields(values, "config.json")
    family = find_hf(fields, architectures())
    shapes = family.shapes(family.read_hf(fields, None))
    rng = np.random.default_rng()
    tensors: dict[str, npt.NDArray[Any]] = {}
    for key in shapes:
        source = family.hf_tensors[0].source(key, shapes)
        for name in source.tensors:
            tensors[name] = rng.standard_normal(source.shape).astype(ml_dtypes.bfloat16)
    save_file(tensors, folder / "model.safetensors")
