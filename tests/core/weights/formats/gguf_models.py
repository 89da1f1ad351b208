"""A small Llama written as GGUF in any of its types: random bytes under sensible scales."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from polysilicon.testing.tiny_models import VOCABULARY
from polysilicon.weights.gguf_blocks import TENSOR_TYPES

from ..gguf_builder import GGUFBuilder
from ..gguf_values import TYPES, dequantized

Bytes = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]

HIDDEN, HEADS, KEY_HEADS, DIM = 256, 4, 2, 64
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

NORMS = {
    "output_norm": "norm",
    "blk.0.attn_norm": "layers.0.input_layernorm",
    "blk.0.ffn_norm": "layers.0.post_attention_layernorm",
}
"""By name in GGUF: name in the twin."""

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": VOCABULARY, "hidden_size": HIDDEN,
    "intermediate_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "max_position_embeddings": 512, "hidden_act": "silu",
}  # fmt: skip
"""The twin's."""

KEYS = [
    GGUFBuilder.string("general.architecture", "llama"),
    GGUFBuilder.strings("tokenizer.ggml.tokens", [f"token{id}" for id in range(VOCABULARY)]),
    GGUFBuilder.number("llama.context_length", 512),
    GGUFBuilder.number("llama.embedding_length", HIDDEN),
    GGUFBuilder.number("llama.feed_forward_length", HIDDEN),
    GGUFBuilder.number("llama.block_count", 1),
    GGUFBuilder.number("llama.attention.head_count", HEADS),
    GGUFBuilder.number("llama.attention.head_count_kv", KEY_HEADS),
    GGUFBuilder.number("llama.attention.layer_norm_rms_epsilon", 1e-5, "f"),
    GGUFBuilder.number("llama.rope.freq_base", 1e4, "f"),
]
ALIGNMENT = 32
NUMBERS = {kind.name: number for number, kind in TENSOR_TYPES.items()}

DENSE = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}

HALVES: dict[str, dict[int, float]] = {
    "Q4_0": {0: 1}, "Q4_1": {0: 1, 2: -7.5}, "Q5_0": {0: 1}, "Q5_1": {0: 1, 2: -15.5},
    "Q8_0": {0: 1}, "Q2_K": {80: 1, 82: 1.5}, "Q3_K": {108: 1}, "Q4_K": {0: 1, 2: 7.5},
    "Q5_K": {0: 1, 2: 15.5}, "Q6_K": {208: 1}, "Q1_0": {0: 1}, "Q2_0": {0: 1}, "IQ4_NL": {0: 1},
    "IQ4_XS": {0: 1}, "IQ1_S": {0: 1}, "IQ2_XXS": {0: 1}, "IQ2_XS": {0: 1}, "IQ2_S": {0: 1},
    "IQ3_XXS": {0: 1}, "IQ3_S": {0: 1}, "TQ1_0": {52: 1}, "TQ2_0": {64: 1},
}  # fmt: skip
"""Where a block's f16 numbers stand, and how many times the scale they are: a minimum is so many
that the mean of random codes comes to zero."""

KINDS = (*DENSE, *HALVES, "IQ1_M", "MXFP4", "NVFP4")


def set_scales(raw: Bytes, kind: str, exponent: int, rng: np.random.Generator) -> None:
    """Give the blocks `[N, B, size]` scales from 2^exponent to twice that, of either sign where the
    type has signs."""
    blocks = raw.shape[:2]
    scales = rng.uniform(1, 2, blocks) * rng.choice([-1, 1], blocks) * 2.0**exponent
    for start, factor in HALVES.get(kind, {}).items():
        halves = (scales * factor).astype(np.float16)
        raw[..., start : start + 2] = halves[..., None].view(np.uint8)
    if kind == "MXFP4":
        raw[..., 0] = 127 + exponent + rng.integers(0, 2, blocks)
    elif kind == "NVFP4":
        raw[..., :4] = (7 + exponent) * 8 + rng.integers(0, 8, (*blocks, 4))
    elif kind == "IQ1_M":
        # The f16 lies in the tops of four words, four bits in each.
        halves = scales.astype(np.float16).view(np.uint16)
        for word in range(4):
            top = raw[..., 49 + 2 * word]
            raw[..., 49 + 2 * word] = (top & 15) | (halves >> 4 * word & 15) << 4


def random_matrix(
    rng: np.random.Generator, rows: int, columns: int, kind: str, size: float
) -> Bytes:
    """Stored bytes `[N, bytes]` of values of about this size, as near as powers of two come."""
    if kind in DENSE:
        values = rng.standard_normal((rows, columns)) * size
        return values.astype(DENSE[kind]).view(np.uint8)
    blocks = columns // TYPES[kind].elements
    raw = rng.integers(0, 256, (rows, blocks, TYPES[kind].size), np.uint8)
    set_scales(raw, kind, 0, rng)
    spread = float(dequantized(raw.reshape(rows, -1), kind).std())
    # No less than the least normal numbers of the scales' types.
    least = -6 if kind == "NVFP4" else -14
    set_scales(raw, kind, max(least, round(np.log2(size / spread))), rng)
    return raw.reshape(rows, -1)


def half_split(values: Float32, heads: int) -> Float32:
    """Rows as Hugging Face has them, from llama.cpp's interleaved rotary pairs."""
    if not heads:
        return values
    pairs = values.reshape(heads, len(values) // heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(values.shape)


def write(folder: Path, kind: str, rng: np.random.Generator) -> Path:
    """The GGUF file in a type, and the dense twin in `twin` beside it."""
    entries: list[bytes] = []
    data = bytearray()
    twin: dict[str, Float32] = {}

    def add(name: str, stored: npt.NDArray[Any], type: str, shape: tuple[int, ...]) -> None:
        data.extend(bytes(-len(data) % ALIGNMENT))
        entries.append(GGUFBuilder.tensor(name, shape[::-1], NUMBERS[type], len(data)))
        data.extend(stored.tobytes())

    def add_matrix(
        name: str, rows: int, twin_name: str, *, heads: int = 0, scale: float = 1
    ) -> None:
        raw = random_matrix(rng, rows, HIDDEN, kind, scale * HIDDEN**-0.5)
        add(f"{name}.weight", raw, kind, (rows, HIDDEN))
        # As converters write it beside quantised matrices.
        has_factor = heads > 0 and kind not in DENSE
        factor = np.array([0.75 if has_factor else 1], np.float32)
        if has_factor:
            add(f"{name}.scale", factor, "F32", (1,))
        twin[f"{twin_name}.weight"] = half_split(dequantized(raw, kind), heads) * factor

    add_matrix("token_embd", VOCABULARY, "model.embed_tokens")
    add_matrix("output", VOCABULARY, "lm_head", scale=4)
    for name, (module, rows, heads) in MATRICES.items():
        add_matrix(f"blk.0.{name}", rows, f"model.layers.0.{module}", heads=heads)
    for name, module in NORMS.items():
        values = rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32)
        add(f"{name}.weight", values, "F32", values.shape)
        twin[f"model.{module}.weight"] = values
    (folder / "twin").mkdir(parents=True)
    (folder / "twin" / "config.json").write_text(json.dumps(CONFIG))
    # Written as they lie in memory, whatever their strides are.
    whole = {name: np.ascontiguousarray(values) for name, values in twin.items()}
    save_file(whole, folder / "twin" / "model.safetensors")
    path = folder / "model.gguf"
    path.write_bytes(GGUFBuilder.file(KEYS, entries, bytes(data), alignment=ALIGNMENT))
    return path
