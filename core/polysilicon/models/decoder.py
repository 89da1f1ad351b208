"""The decoder-only transformer that the Llama and Gemma families share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from polysilicon.backend import AdapterPool, AdapterTarget, Handle, KVPool
from polysilicon.batch import Batch
from polysilicon.models.architecture import Weights
from polysilicon.models.config import ModelConfig
from polysilicon.models.model import Model
from polysilicon.ops import AdapterRef, ModelOutputs, Normalization, Ops, Value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer's weights. post_attention_norm and post_ffn_norm: Gemma's norms of a block's
    output."""

    attention_norm: Handle
    qkv: Handle
    qkv_bias: Handle | None
    q_norm: Normalization | None
    k_norm: Normalization | None
    o: Handle
    o_bias: Handle | None
    post_attention_norm: Handle | None
    ffn_norm: Handle
    gate_up: Handle
    gate_up_bias: Handle | None
    down: Handle
    down_bias: Handle | None
    post_ffn_norm: Handle | None


class DecoderModel(Model):
    """Pre-norm transformer with gated feed-forward blocks, as `ModelConfig` describes it."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: Handle,
        head: Handle,
        final_norm: Handle,
        layers: Sequence[Layer],
    ) -> None:
        self.config = config
        self._embedding = embedding
        self._head = head
        self._final_norm = final_norm
        self._layers = tuple(layers)
        self._pools: tuple[KVPool, ...] = ()
        self._adapters: AdapterPool | None = None

    def adapter_targets(self) -> Mapping[str, AdapterTarget]:
        config = self.config
        query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size
        targets = {
            "qkv": AdapterTarget(inputs=hidden, outputs=(query, key, key)),
            "o": AdapterTarget(inputs=query, outputs=(hidden,)),
            "gate_up": AdapterTarget(inputs=hidden, outputs=(inner, inner)),
            "down": AdapterTarget(inputs=inner, outputs=(hidden,)),
        }
        return {
            f"layers.{layer}.{name}": target
            for layer in range(config.layers)
            for name, target in targets.items()
        }

    def bind(self, pools: Sequence[KVPool], adapters: AdapterPool | None = None) -> None:
        by_layer = {layer: pool for pool in pools for layer in pool.spec.layers}
        assert sorted(by_layer) == list(range(self.config.layers))
        self._pools = tuple(by_layer[layer] for layer in range(self.config.layers))
        self._adapters = adapters

    def forward(self, ops: Ops, batch: Batch) -> ModelOutputs:
        hidden = self._layer_states(ops, batch)
        # Only the rows whose logits are wanted go through the last norm and the head.
        x, _ = self._norm(ops, ops.select(hidden[-1], batch.logit_rows), self._final_norm)
        return ModelOutputs(logits=self._logits(ops, x), hidden=hidden)

    def forward_hidden(self, ops: Ops, batch: Batch) -> ModelOutputs:
        hidden = self._layer_states(ops, batch)
        x, _ = self._norm(ops, hidden[-1], self._final_norm)
        logits = self._logits(ops, ops.select(x, batch.logit_rows))
        return ModelOutputs(logits=logits, hidden=[*hidden, x])

    def _layer_states(self, ops: Ops, batch: Batch) -> list[Value]:
        """The residual stream after each layer."""
        config, layers = self.config, self._layers
        residual = ops.embed(self._embedding, batch.tokens)
        if config.embedding_scale is not None:
            residual = ops.scale(residual, config.embedding_scale)
        x, residual = self._norm(ops, residual, layers[0].attention_norm)
        hidden = []
        for index, layer in enumerate(layers):
            x = self._attention(ops, batch, index, layer, x)
            if layer.post_attention_norm is not None:
                x, _ = self._norm(ops, x, layer.post_attention_norm)
            x, residual = self._norm(ops, x, layer.ffn_norm, residual)
            x = self._feed_forward(ops, batch, index, layer, x)
            if layer.post_ffn_norm is not None:
                x, _ = self._norm(ops, x, layer.post_ffn_norm)
            if index + 1 < len(layers):
                x, residual = self._norm(ops, x, layers[index + 1].attention_norm, residual)
            else:
                residual = ops.add(x, residual)
            hidden.append(residual)
        return hidden

    def _logits(self, ops: Ops, x: Value) -> Value:
        (logits,) = ops.linear(x, self._head)
        if self.config.final_softcap is not None:
            logits = ops.softcap(logits, self.config.final_softcap)
        return logits

    def _attention(self, ops: Ops, batch: Batch, index: int, layer: Layer, x: Value) -> Value:
        config = self.config
        q, k, v = self._linear(ops, batch, x, layer.qkv, layer.qkv_bias, f"layers.{index}.qkv")
        x = ops.attention(
            q,
            k,
            v,
            batch=batch,
            pool=self._pools[index],
            layer=index,
            heads=config.heads,
            scale=config.attention_scale,
            rope=config.ropes[index],
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            softcap=config.attention_softcap,
        )
        (x,) = self._linear(ops, batch, x, layer.o, layer.o_bias, f"layers.{index}.o")
        return x

    def _feed_forward(self, ops: Ops, batch: Batch, index: int, layer: Layer, x: Value) -> Value:
        target = f"layers.{index}.gate_up"
        gate, up = self._linear(ops, batch, x, layer.gate_up, layer.gate_up_bias, target)
        x = ops.gated_act(gate, up, self.config.activation)
        (x,) = self._linear(ops, batch, x, layer.down, layer.down_bias, f"layers.{index}.down")
        return x

    def _linear(
        self, ops: Ops, batch: Batch, x: Value, weight: Handle, bias: Handle | None, target: str
    ) -> tuple[Value, ...]:
        if self._adapters is None:
            return ops.linear(x, weight, bias=bias)
        adapters = AdapterRef(pool=self._adapters, target=target)
        return ops.linear(x, weight, bias=bias, adapters=adapters, batch=batch)

    def _norm(
        self, ops: Ops, x: Value, weight: Handle, residual: Value | None = None
    ) -> tuple[Value, Value]:
        return ops.rms_norm(x, weight, eps=self.config.norm_eps, residual=residual)


def decoder_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors that a `DecoderModel` of this config is built from."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.weight": (config.vocab_size, hidden),
        "final_norm.weight": (hidden,),
    }
    if not config.tied_head:
        shapes["head.weight"] = (config.vocab_size, hidden)
    matrices = {
        "q": (query, hidden, config.qkv_bias),
        "k": (key, hidden, config.qkv_bias),
        "v": (key, hidden, config.qkv_bias),
        "o": (hidden, query, config.o_bias),
        "gate": (inner, hidden, config.mlp_bias),
        "up": (inner, hidden, config.mlp_bias),
        "down": (hidden, inner, config.mlp_bias),
    }
    norms = {"attention_norm": hidden, "ffn_norm": hidden}
    if config.post_norms:
        norms |= {"post_attention_norm": hidden, "post_ffn_norm": hidden}
    if config.qk_norm:
        norms |= {"q_norm": config.head_dim, "k_norm": config.head_dim}
    for layer in range(config.layers):
        for name, size in norms.items():
            shapes[f"layers.{layer}.{name}.weight"] = (size,)
        for name, (rows, columns, biased) in matrices.items():
            shapes[f"layers.{layer}.{name}.weight"] = (rows, columns)
            if biased:
                shapes[f"layers.{layer}.{name}.bias"] = (rows,)
    return shapes


def build_decoder(config: ModelConfig, weights: Weights) -> DecoderModel:
    """Place all weights of a `DecoderModel`: q, k, v fused, and gate and up."""
    offset = 1.0 if config.unit_offset_norms else 0.0

    def norm(key: str) -> Handle:
        return weights.vector(f"{key}.weight", offset=offset)

    def bias(wanted: bool, *keys: str) -> Handle | None:
        return weights.vector(*(f"{key}.bias" for key in keys)) if wanted else None

    embedding = weights.matrix("embedding.weight")
    layers = []
    for index in range(config.layers):
        at = f"layers.{index}"
        qkv, gate_up = [f"{at}.{part}" for part in "qkv"], [f"{at}.gate", f"{at}.up"]
        head_norms = [
            Normalization(weight=norm(f"{at}.{name}"), eps=config.norm_eps)
            for name in (("q_norm", "k_norm") if config.qk_norm else ())
        ]
        layers.append(
            Layer(
                attention_norm=norm(f"{at}.attention_norm"),
                qkv=weights.matrix(*(f"{key}.weight" for key in qkv)),
                qkv_bias=bias(config.qkv_bias, *qkv),
                q_norm=head_norms[0] if config.qk_norm else None,
                k_norm=head_norms[1] if config.qk_norm else None,
                o=weights.matrix(f"{at}.o.weight"),
                o_bias=bias(config.o_bias, f"{at}.o"),
                post_attention_norm=norm(f"{at}.post_attention_norm")
                if config.post_norms
                else None,
                ffn_norm=norm(f"{at}.ffn_norm"),
                gate_up=weights.matrix(*(f"{key}.weight" for key in gate_up)),
                gate_up_bias=bias(config.mlp_bias, *gate_up),
                down=weights.matrix(f"{at}.down.weight"),
                down_bias=bias(config.mlp_bias, f"{at}.down"),
                post_ffn_norm=norm(f"{at}.post_ffn_norm") if config.post_norms else None,
            )
        )
    return DecoderModel(
        config,
        embedding=embedding,
        head=embedding if config.tied_head else weights.matrix("head.weight"),
        final_norm=norm("final_norm"),
        layers=layers,
    )
