"""Tiny random models of two families: written as checkpoints, and computed in float64 beside.

Their weights are spread so that logits differ by several units, what comes depends on tokens far
back, and a model that loops over one token is no danger. Every value is exact in bfloat16.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from polysilicon.backend import KV_DTYPES, AdapterWeights, Rope
from polysilicon.testing import oracles

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

VOCABULARY = 211
EOS = 3
HIDDEN, INNER, HEADS, KEY_HEADS, DIM = 64, 96, 4, 2, 32
EPS = 1e-5
_SIZES: dict[str, object] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "head_dim": DIM,
    "rms_norm_eps": EPS,
    "max_position_embeddings": 512,
    "eos_token_id": EOS,
}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TinyModel:
    """One model. config: its config.json. tensors: by Hugging Face's names. windows, bases: of each
    layer, its sliding window or None, and the base of its rotary embedding."""

    name: str
    config: Mapping[str, object]
    tensors: Mapping[str, Float32]
    windows: tuple[int | None, ...]
    bases: tuple[float, ...]
    gemma: bool

    def write(self, folder: Path) -> None:
        """Write the checkpoint's directory."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(dict(self.tensors), folder / "model.safetensors")

    def adapter(self, rng: np.random.Generator, rank: int = 4) -> AdapterWeights:
        """A random adapter on some of the linears, which changes most of the model's choices."""

        def pair(inputs: int, outputs: int) -> tuple[Float32, Float32]:
            down = rng.standard_normal((rank, inputs), np.float32) / np.float32(inputs**0.5)
            return down, rng.standard_normal((outputs, rank), np.float32)

        query, key = HEADS * DIM, KEY_HEADS * DIM
        weights: dict[str, Any] = {}
        for layer in range(len(self.windows)):
            weights[f"layers.{layer}.qkv"] = [
                pair(HIDDEN, query),
                None if layer else pair(HIDDEN, key),
                pair(HIDDEN, key),
            ]
            weights[f"layers.{layer}.down"] = [pair(INNER, HIDDEN)]
        return weights

    def logits(
        self, tokens: Sequence[int], *, kv_dtype: str, adapter: AdapterWeights | None = None
    ) -> Float64:
        """Logits `[T, V]` of a whole sequence, in one go and without any cache: keys and values are
        rounded to the dtype as they would be stored."""
        head = self._values["model.embed_tokens.weight" if self.gemma else "lm_head.weight"]
        return self.states(tokens, kv_dtype=kv_dtype, adapter=adapter) @ head.T

    def states(
        self, tokens: Sequence[int], *, kv_dtype: str, adapter: AdapterWeights | None = None
    ) -> Float64:
        """The hidden states behind the last norm, `[T, D]`, from which `logits` come."""
        tensors = self._values
        x = tensors["model.embed_tokens.weight"][list(tokens)]
        if self.gemma:
            x = x * HIDDEN**0.5
        after_attention = "post_attention_layernorm"
        before_ffn = "pre_feedforward_layernorm" if self.gemma else after_attention
        for layer in range(len(self.windows)):
            part = _Layer(self, layer, adapter or {})
            attended = part.attention(part.norm(x, "input_layernorm"), kv_dtype)
            if self.gemma:
                attended = part.norm(attended, after_attention)
            x = x + attended
            inner = part.feed_forward(part.norm(x, before_ffn))
            if self.gemma:
                inner = part.norm(inner, "post_feedforward_layernorm")
            x = x + inner
        return self._norm(x, "model.norm.weight")

    @functools.cached_property
    def _values(self) -> Mapping[str, Float64]:
        return {name: array.astype(np.float64) for name, array in self.tensors.items()}

    def _norm(self, x: Float64, name: str) -> Float64:
        return oracles.rms_norm(x, self._values[name] + self.gemma, EPS)


@dataclasses.dataclass(frozen=True, eq=False)
class _Layer:
    """One layer's computation."""

    model: TinyModel
    index: int
    adapter: AdapterWeights

    def norm(self, x: Float64, name: str) -> Float64:
        return self.model._norm(x, f"model.layers.{self.index}.{name}.weight")

    def linear(self, x: Float64, name: str, target: str, part: int) -> Float64:
        result = x @ self.model._values[f"model.layers.{self.index}.{name}.weight"].T
        parts = self.adapter.get(f"layers.{self.index}.{target}")
        pair = None if parts is None else parts[part]
        if pair is not None:
            down, up = (matrix.astype(np.float64) for matrix in pair)
            result = result + x @ down.T @ up.T
        return result

    def attention(self, x: Float64, kv_dtype: str) -> Float64:
        positions = np.arange(len(x))
        frequencies = self.model.bases[self.index] ** (np.arange(0, DIM, 2) / -DIM)
        rope = Rope(dim=DIM, frequencies=tuple(map(float, frequencies)))
        q, k, v = (
            self.linear(x, f"self_attn.{name}_proj", "qkv", part).reshape(len(x), -1, DIM)
            for part, name in enumerate("qkv")
        )
        if self.model.gemma:
            q, k = self.norm(q, "self_attn.q_norm"), self.norm(k, "self_attn.k_norm")
        q, k = oracles.rotate(q, positions, rope), oracles.rotate(k, positions, rope)
        k, v = oracles.stored(k, kv_dtype), oracles.stored(v, kv_dtype)
        behind = positions[:, None] - positions
        visible = behind >= 0
        window = self.model.windows[self.index]
        if window is not None:
            visible &= behind < window
        k, v = (np.repeat(values, HEADS // KEY_HEADS, axis=1) for values in (k, v))
        q, k, v = (values.swapaxes(0, 1) for values in (q, k, v))
        scores = q @ k.swapaxes(1, 2) * DIM**-0.5
        weights = np.where(visible, np.exp(scores - scores.max(axis=-1, keepdims=True)), 0)
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = (weights @ v).swapaxes(0, 1).reshape(len(x), -1)
        return self.linear(mixed, "self_attn.o_proj", "o", 0)

    def feed_forward(self, x: Float64) -> Float64:
        gate = self.linear(x, "mlp.gate_proj", "gate_up", 0)
        up = self.linear(x, "mlp.up_proj", "gate_up", 1)
        inner = oracles.gated_act(gate, up, "gelu_tanh" if self.model.gemma else "silu")
        return self.linear(inner, "mlp.down_proj", "down", 0)


@functools.cache
def tiny_llama() -> TinyModel:
    """Two layers of full attention, grouped heads, a head of its own."""
    tensors = _matrices(np.random.default_rng(1), layers=2)
    rng = np.random.default_rng(2)
    tensors["model.embed_tokens.weight"] = _spread(rng, VOCABULARY, HIDDEN, scale=1.0)
    tensors["lm_head.weight"] = _spread(rng, VOCABULARY, HIDDEN, scale=4 * HIDDEN**-0.5)
    for name in ("input_layernorm", "post_attention_layernorm"):
        for layer in range(2):
            tensors[f"model.layers.{layer}.{name}.weight"] = _around(rng, HIDDEN, 1.0)
    tensors["model.norm.weight"] = _around(rng, HIDDEN, 1.0)
    return TinyModel(
        name="llama",
        config={
            **_SIZES,
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": 2,
            "hidden_act": "silu",
            "rope_theta": 1e4,
        },
        tensors=tensors,
        windows=(None, None),
        bases=(1e4, 1e4),
        gemma=False,
    )


@functools.cache
def tiny_gemma() -> TinyModel:
    """Three layers, of which the first and the last have a sliding window of 16 tokens; norms over
    heads and after blocks, a tied head."""
    tensors = _matrices(np.random.default_rng(3), layers=3)
    rng = np.random.default_rng(4)
    # Scaled by sqrt(HIDDEN) the embeddings are small beside what the layers add, so that the tied
    # head does not give the last token back.
    tensors["model.embed_tokens.weight"] = _spread(rng, VOCABULARY, HIDDEN, scale=HIDDEN**-0.5)
    for layer in range(3):
        for name, size, middle in (
            ("input_layernorm", HIDDEN, 0.0),
            ("post_attention_layernorm", HIDDEN, 4.0),
            ("pre_feedforward_layernorm", HIDDEN, 0.0),
            ("post_feedforward_layernorm", HIDDEN, 3.0),
            ("self_attn.q_norm", DIM, 0.5),
            ("self_attn.k_norm", DIM, 0.5),
        ):
            tensors[f"model.layers.{layer}.{name}.weight"] = _around(rng, size, middle)
    tensors["model.norm.weight"] = _around(rng, HIDDEN, 3.0)
    return TinyModel(
        name="gemma",
        config={
            **_SIZES,
            "architectures": ["Gemma3ForCausalLM"],
            "num_hidden_layers": 3,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": DIM,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
        },
        tensors=tensors,
        windows=(16, None, 16),
        bases=(1e4, 1e6, 1e4),
        gemma=True,
    )


def _matrices(rng: np.random.Generator, layers: int) -> dict[str, Float32]:
    query, key = HEADS * DIM, KEY_HEADS * DIM
    shapes = {
        "self_attn.q_proj": (query, HIDDEN),
        "self_attn.k_proj": (key, HIDDEN),
        "self_attn.v_proj": (key, HIDDEN),
        "self_attn.o_proj": (HIDDEN, query),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    return {
        f"model.layers.{layer}.{name}.weight": _spread(rng, *shape, scale=1.6 * shape[1] ** -0.5)
        for layer in range(layers)
        for name, shape in shapes.items()
    }


def _spread(rng: np.random.Generator, rows: int, columns: int, *, scale: float) -> Float32:
    values = rng.standard_normal((rows, columns), np.float32) * np.float32(scale)
    return values.astype(KV_DTYPES["bf16"]).astype(np.float32)


def _around(rng: np.random.Generator, size: int, middle: float) -> Float32:
    """Multiples of 1/32, so that adding 1 keeps them exact in bfloat16."""
    return (middle + rng.integers(-12, 13, size) / 32).astype(np.float32)
