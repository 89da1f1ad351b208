"""StableLM: layer norms with biases, and a quarter of each head rotates. StableLM 2 12B has layer
norms over the heads of queries and keys too, and attention beside the feed-forward block."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from polysilicon.backend import Handle, KVPool
from polysilicon.models import gguf_config, hf_config
from polysilicon.models.architecture import Weights
from polysilicon.models.attention import attention_shapes
from polysilicon.models.blocks import Linear, Norm, Step, place_linear
from polysilicon.models.config import ModelConfig
from polysilicon.models.decoder import DecoderModel, build_decoder, decoder_shapes
from polysilicon.models.llama import GGUF_NAMES, HF_NAMES, LLAMA
from polysilicon.ops import Value
from polysilicon.weights.checkpoint import Checkpoint
from polysilicon.weights.encodings import Float32
from polysilicon.weights.fields import Fields

# transformers' StableLmConfig, where a file leaves something out.
_DEFAULTS = {
    "hidden_act": "silu",
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "num_key_value_heads": 32,
    "partial_rotary_factor": 0.25,
}

_ATTENTION = "model.layers.{layer}.self_attn"
# Of the norm of each head there is a tensor, numbered as experts are elsewhere.
_HF_NAMES = HF_NAMES.with_modules(
    {
        "layers.q_head_norm": f"{_ATTENTION}.q_layernorm.norms.{{expert}}",
        "layers.k_head_norm": f"{_ATTENTION}.k_layernorm.norms.{{expert}}",
    }
)
_GGUF_NAMES = GGUF_NAMES.with_modules(
    {
        "layers.q_head_norm": "blk.{layer}.attn_q_norm",
        "layers.k_head_norm": "blk.{layer}.attn_k_norm",
    }
)

Joints = Mapping[int, Sequence[Handle]]
"""By number of heads, for each head what puts its columns into place, `[heads * width, width]`."""


class HeadNormedAttention:
    """One layer's attention with layer norms over the heads of queries and keys, each of weights of
    its own.

    Norms take whole rows, so the heads come out of the projection as parts of it. They are joined
    by a sum of products with columns of the identity, since there is no op that joins columns: as
    much work as one more product with `o`. Adapters apply to `o` alone.
    """

    def __init__(self, config: ModelConfig, weights: Weights, index: int, joints: Joints) -> None:
        at = f"layers.{index}"
        self._config, self._index, self._joints = config, index, joints
        self._counts = (config.heads, config.kv_heads)
        self._qkv = place_linear(
            weights,
            [f"{at}.{part}" for part in "qkv"],
            inputs=config.hidden_size,
            biased=config.qkv_bias,
            parts=(*self._counts, 1),
        )
        self._norms = [
            [
                Norm(weight=weight, eps=config.norm_eps, centred=True)
                for weight in weights.vectors(f"{at}.{part}_head_norm.weight")
            ]
            for part in "qk"
        ]
        key, value = (f"{at}.{part}.weight" for part in "kv")
        self._kv_scales = weights.kv_scales(key, value, heads=config.kv_heads)
        inputs = config.heads * config.head_dim
        self._o = place_linear(weights, [f"{at}.o"], inputs=inputs, target=f"{at}.o")

    def linears(self) -> Sequence[Linear]:
        return (self._o,)

    def __call__(self, step: Step, x: Value, pool: KVPool) -> Value:
        config, ops = self._config, step.ops
        *heads, v = self._qkv(step, x)
        queries, keys = heads[: config.heads], heads[config.heads :]
        q, k = (
            self._normed(step, parts, norms)
            for parts, norms in zip((queries, keys), self._norms, strict=True)
        )
        x = ops.attention(
            q,
            k,
            v,
            batch=step.batch,
            pool=pool,
            layer=self._index,
            heads=config.heads,
            scale=config.attention_scale,
            rope=config.ropes[self._index],
            **self._kv_scales,
        )
        (x,) = self._o(step, x)
        return x

    def _normed(self, step: Step, heads: Sequence[Value], norms: Sequence[Norm]) -> Value:
        """Heads `[T, width]`, each normed, beside each other."""
        joined: Value | None = None
        for head, norm, joint in zip(heads, norms, self._joints[len(heads)], strict=True):
            normed, _ = norm(step.ops, head)
            (placed,) = step.ops.linear(normed, joint)
            joined = placed if joined is None else step.ops.add(joined, placed)
        return joined


def _head_normed_shapes(config: ModelConfig, index: int) -> dict[str, tuple[int, ...]]:
    shapes = attention_shapes(config, index)
    if config.head_norms:
        for part, count in zip("qk", (config.heads, config.kv_heads), strict=True):
            shapes[f"layers.{index}.{part}_head_norm.weight"] = (count, config.head_dim)
    return shapes


def _joint(heads: int, head: int, width: int) -> Sequence[Float32]:
    return [np.eye(heads * width, width, -head * width, np.float32)]


def _build(config: ModelConfig, weights: Weights) -> DecoderModel:
    if not config.head_norms:
        return build_decoder(config, weights)
    joints = {
        count: [
            weights.computed(functools.partial(_joint, count, head, config.head_dim))
            for head in range(count)
        ]
        for count in {config.heads, config.kv_heads}
    }
    attention = functools.partial(HeadNormedAttention, joints=joints)
    return build_decoder(config, weights, attention=attention)


def _read_hf(fields: Fields, max_length: int | None) -> ModelConfig:
    fields = fields.with_defaults(_DEFAULTS)
    epsilon = fields.number("layer_norm_eps", high=1.0)
    config = hf_config.read_decoder(
        fields.with_overrides({"rms_norm_eps": epsilon}), "stablelm", max_length
    )
    return dataclasses.replace(
        config,
        layer_norms=True,
        qkv_bias=fields.flag("use_qkv_bias", default=False),
        head_norms=fields.flag("qk_layernorm", default=False),
        parallel_residual=fields.flag("use_parallel_residual", default=False),
    )


def _read_gguf(fields: Fields, checkpoint: Checkpoint, max_length: int | None) -> ModelConfig:
    config = gguf_config.read_decoder(
        fields,
        checkpoint,
        "stablelm",
        max_length,
        activation="silu",
        norm_eps="layer_norm_epsilon",
    )
    # As in llama.cpp, what the tensors say counts.
    return dataclasses.replace(
        config,
        layer_norms=True,
        head_norms="blk.0.attn_q_norm.weight" in checkpoint.tensors,
        parallel_residual="blk.0.ffn_norm.weight" not in checkpoint.tensors,
    )


STABLELM = dataclasses.replace(
    LLAMA,
    name="stablelm",
    hf_names=("StableLmForCausalLM",),
    hf_types=("stablelm",),
    gguf_names=("stablelm",),
    read_hf=_read_hf,
    read_gguf=_read_gguf,
    hf_tensors=(_HF_NAMES,),
    gguf_tensors=_GGUF_NAMES,
    shapes=functools.partial(decoder_shapes, attention=_head_normed_shapes),
    build=_build,
)

ARCHITECTURES = (STABLELM,)
