"""The decoder-only transformer that all families share; blocks differ by `ModelConfig`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from polysilicon.backend import AdapterPool, AdapterTarget, Handle, KVPool
from polysilicon.batch import Batch
from polysilicon.models.architecture import Weights
from polysilicon.models.attention import SelfAttention, attention_shapes
from polysilicon.models.blocks import Linear, Norm, Step
from polysilicon.models.config import ModelConfig
from polysilicon.models.feed_forward import (
    FeedForward,
    feed_forward_shapes,
    place_feed_forward,
)
from polysilicon.models.model import Model
from polysilicon.ops import ModelOutputs, Ops, Value

Shapes = Mapping[str, tuple[int, ...]]


class Attention(Protocol):
    """One layer's attention, from the normed hidden states to what is added to them."""

    def linears(self) -> Sequence[Linear]: ...

    def __call__(self, step: Step, x: Value, pool: KVPool) -> Value: ...


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """One layer: its blocks, and norms of what goes into them and of what comes out of them."""

    attention_norm: Norm | None
    attention: Attention
    post_attention_norm: Norm | None
    ffn_norm: Norm | None
    feed_forward: FeedForward
    post_ffn_norm: Norm | None


class DecoderModel(Model):
    """Layers of attention and feed-forward blocks around a residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: Handle,
        head: Handle,
        final_norm: Norm,
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
        return {
            linear.target: linear.adapter_target()
            for layer in self._layers
            for linear in (*layer.attention.linears(), *layer.feed_forward.linears())
            if linear.target is not None
        }

    def bind(self, pools: Sequence[KVPool], adapters: AdapterPool | None = None) -> None:
        by_layer = {layer: pool for pool in pools for layer in pool.spec.layers}
        assert sorted(by_layer) == list(range(self.config.layers))
        self._pools = tuple(by_layer[layer] for layer in range(self.config.layers))
        self._adapters = adapters

    def forward(self, ops: Ops, batch: Batch) -> ModelOutputs:
        hidden = self._layer_states(ops, batch)
        # Only the rows whose logits are wanted go through the last norm and the head.
        x, _ = self._final_norm(ops, ops.select(hidden[-1], batch.logit_rows))
        return ModelOutputs(logits=self._logits(ops, x), hidden=hidden)

    def forward_hidden(self, ops: Ops, batch: Batch) -> ModelOutputs:
        hidden = self._layer_states(ops, batch)
        x, _ = self._final_norm(ops, hidden[-1])
        logits = self._logits(ops, ops.select(x, batch.logit_rows))
        return ModelOutputs(logits=logits, hidden=[*hidden, x])

    def _layer_states(self, ops: Ops, batch: Batch) -> list[Value]:
        """The residual stream after each layer."""
        config, layers = self.config, self._layers
        step = Step(ops=ops, batch=batch, adapters=self._adapters)
        residual = ops.embed(self._embedding, batch.tokens)
        if config.embedding_scale is not None:
            residual = ops.scale(residual, config.embedding_scale)
        x = residual
        if layers[0].attention_norm is not None:
            x, residual = layers[0].attention_norm(ops, residual)
        hidden = []
        for index, layer in enumerate(layers):
            normed = x
            x = layer.attention(step, x, self._pools[index])
            x = self._scaled(ops, x, layer.post_attention_norm)
            if config.parallel_residual:
                x = ops.add(x, layer.feed_forward(step, normed))
            else:
                x, residual = _joined(ops, x, residual, layer.ffn_norm)
                x = layer.feed_forward(step, x)
            x = self._scaled(ops, x, layer.post_ffn_norm)
            last = index + 1 == len(layers)
            x, residual = _joined(
                ops, x, residual, None if last else layers[index + 1].attention_norm
            )
            hidden.append(residual)
        return hidden

    def _scaled(self, ops: Ops, x: Value, norm: Norm | None) -> Value:
        """What a block adds to the residual stream, from what comes out of it."""
        if norm is not None:
            x, _ = norm(ops, x)
        if self.config.residual_scale is not None:
            x = ops.scale(x, self.config.residual_scale)
        return x

    def _logits(self, ops: Ops, x: Value) -> Value:
        (logits,) = ops.linear(x, self._head)
        if self.config.logit_scale is not None:
            logits = ops.scale(logits, self.config.logit_scale)
        if self.config.final_softcap is not None:
            logits = ops.softcap(logits, self.config.final_softcap)
        return logits


def _joined(ops: Ops, x: Value, residual: Value, norm: Norm | None) -> tuple[Value, Value]:
    """`x + residual` as the next block takes it, normed where there is a norm, and as it is."""
    if norm is not None:
        return norm(ops, x, residual)
    total = ops.add(x, residual)
    return total, total


def decoder_shapes(
    config: ModelConfig, attention: Callable[[ModelConfig, int], Shapes] = attention_shapes
) -> dict[str, tuple[int, ...]]:
    """The tensors that a `DecoderModel` of this config is built from. attention: those of one
    layer's."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (config.vocab_size, hidden)}
    if not config.tied_head:
        shapes["head.weight"] = (config.vocab_size, hidden)
    norms = ["final_norm"]
    for layer in range(config.layers):
        shapes |= attention(config, layer)
        shapes |= feed_forward_shapes(config, layer)
        norms += [f"layers.{layer}.{name}" for name in _layer_norms(config)]
    for norm in norms:
        shapes[f"{norm}.weight"] = (hidden,)
        if config.layer_norms:
            shapes[f"{norm}.bias"] = (hidden,)
    return shapes


def _layer_norms(config: ModelConfig) -> list[str]:
    return [
        *(("attention_norm",) if config.pre_norms else ()),
        *(("ffn_norm",) if config.pre_norms and not config.parallel_residual else ()),
        *(("post_attention_norm", "post_ffn_norm") if config.post_norms else ()),
    ]


def build_decoder(
    config: ModelConfig,
    weights: Weights,
    attention: Callable[[ModelConfig, Weights, int], Attention] = SelfAttention,
) -> DecoderModel:
    """Place all weights of a `DecoderModel`. attention: places one layer's."""

    def norm(key: str) -> Norm:
        return Norm(
            weight=weights.vector(f"{key}.weight", offset=1.0 if config.unit_offset_norms else 0.0),
            bias=weights.vector(f"{key}.bias") if config.layer_norms else None,
            centred=config.layer_norms,
            eps=config.norm_eps,
        )

    embedding = weights.matrix("embedding.weight")
    layers = []
    for index in range(config.layers):
        norms = {name: norm(f"layers.{index}.{name}") for name in _layer_norms(config)}
        layers.append(
            Layer(
                attention_norm=norms.get("attention_norm"),
                attention=attention(config, weights, index),
                post_attention_norm=norms.get("post_attention_norm"),
                ffn_norm=norms.get("ffn_norm"),
                feed_forward=place_feed_forward(config, weights, index),
                post_ffn_norm=norms.get("post_ffn_norm"),
            )
        )
    return DecoderModel(
        config,
        embedding=embedding,
        head=embedding if config.tied_head else weights.matrix("head.weight"),
        final_norm=norm("final_norm"),
        layers=layers,
    )
