"""A small Llama in GGUF types that no K-quant is, on every backend, against its dense twin."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from polysilicon.testing.engine_bench import COMPUTE_BOUNDS, random_prompt

from .devices import BACKENDS, OpenDevice, logits

Float32 = npt.NDArray[np.float32]

VOCABULARY, HIDDEN, HEADS, KEY_HEADS, DIM = 211, 256, 4, 2, 64
MATRICES = {
    "attn_q": ("self_attn.q_proj", HEADS * DIM, HEADS),
    "attn_k": ("self_attn.k_proj", KEY_HEADS * DIM, KEY_HEADS),
    "attn_v": ("self_attn.v_proj", KEY_HEADS * DIM, 0),
    "attn_output": ("self_attn.o_proj", HIDDEN, 0),
    "ffn_gate": ("mlp.gate_proj", HIDDEN, 0),
    "ffn_up": ("mlp.up_proj", HIDDEN, 0),
    "ffn_down": ("mlp.down_proj", HIDDEN, 0),
}
"""By name in GGUF: name in the twin, outputs, and heads where rotary pairs are interleaved."""

# Where the f16 scale of a block stands; 0 to 15 bits in the tops of four words for IQ1_M.
SCALES = {
    "IQ4_NL": 0, "IQ4_XS": 0, "IQ1_S": 0, "IQ1_M": None, "IQ2_XXS": 0, "IQ2_XS": 0, "IQ2_S": 0,
    "IQ3_XXS": 0, "IQ3_S": 0, "TQ1_0": 52, "TQ2_0": 64, "MXFP4": None, "NVFP4": None,
}  # fmt: skip


def set_scale(raw: npt.NDArray[np.uint8], kind: str, exponent: int) -> None:
    """Give every block `[N, B, size]` the scale 2^exponent."""
    start = SCALES[kind]
    half = int(np.float16(2.0**exponent).view(np.uint16))
    if start is not None:
        raw[..., start] = half & 255
        raw[..., start + 1] = half >> 8
    elif kind == "MXFP4":
        raw[..., 0] = 127 + exponent
    elif kind == "NVFP4":
        raw[..., :4] = (7 + exponent) << 3
    else:
        for word in range(4):
            top = raw[..., 49 + 2 * word]
            raw[..., 49 + 2 * word] = (top & 15) | (half >> 4 * word & 15) << 4


def random_matrix(
    rng: np.random.Generator, rows: int, columns: int, kind: str
) -> tuple[npt.NDArray[np.uint8], Float32]:
    """Stored bytes `[N, bytes]`, and the values that the package makes of them, about 1 / sqrt(K)
    in size."""
    type_ = gguf.GGMLQuantizationType[kind]
    elements, size = gguf.GGML_QUANT_SIZES[type_]
    raw = rng.integers(0, 256, (rows, columns // elements, size), np.uint8)
    set_scale(raw, kind, 0)
    spread = float(gguf.quants.dequantize(raw.reshape(rows, -1), type_).std())
    exponent = round(np.log2(columns**-0.5 / spread))
    # The least normal numbers of the scales' types.
    set_scale(raw, kind, max(-6 if kind == "NVFP4" else -14, exponent))
    stored = raw.reshape(rows, -1)
    return stored, gguf.quants.dequantize(stored, type_)


def half_split(values: Float32, heads: int) -> Float32:
    """Rows as Hugging Face has them, from llama.cpp's interleaved rotary pairs."""
    if not heads:
        return values
    pairs = values.reshape(heads, len(values) // heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(values.shape)


def write(folder: Path, kind: str) -> Path:
    """The GGUF file, and the dense twin in `twin` beside it."""
    rng = np.random.default_rng(7)
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list([f"token{index}" for index in range(VOCABULARY)])
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    twin: dict[str, Float32] = {}

    def add(name: str, rows: int, twin_name: str, heads: int = 0) -> None:
        raw, values = random_matrix(rng, rows, HIDDEN, kind)
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=gguf.GGMLQuantizationType[kind])
        factor = np.float32(0.75 if heads else 1)
        if heads:
            writer.add_tensor(f"{name}.scale", np.array([factor], np.float32))
        twin[f"{twin_name}.weight"] = half_split(values, heads) * factor

    add("token_embd", VOCABULARY, "model.embed_tokens")
    add("output", VOCABULARY, "lm_head")
    for name, (module, rows, heads) in MATRICES.items():
        add(f"blk.0.{name}", rows, f"model.layers.0.{module}", heads)
    for name, module in {
        "output_norm": "norm",
        "blk.0.attn_norm": "layers.0.input_layernorm",
        "blk.0.ffn_norm": "layers.0.post_attention_layernorm",
    }.items():
        values = rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32)
        writer.add_tensor(f"{name}.weight", values)
        twin[f"model.{module}.weight"] = values
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (folder / "twin").mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": VOCABULARY, "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "max_position_embeddings": 512, "hidden_act": "silu",
    }  # fmt: skip
    (folder / "twin" / "config.json").write_text(json.dumps(config))
    save_file(
        {name: values.copy() for name, values in twin.items()},
        folder / "twin" / "model.safetensors",
    )
    return path


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_model_answers_as_its_dense_twin(
    tmp_path: Path, device: OpenDevice, backend: str, kind: str
) -> None:
    opened = device(backend)
    path = write(tmp_path, kind)
    tokens = random_prompt(np.random.default_rng(3), 24)
    expected = logits(tmp_path / "twin", device("reference"), tokens)
    got = logits(path, opened, tokens)
    assert np.ptp(expected) > 1
    bound = 0.0 if backend == "reference" else COMPUTE_BOUNDS[opened.capabilities.compute]
    np.testing.assert_allclose(got, expected, rtol=0, atol=bound)
