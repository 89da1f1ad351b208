"""A model's parameters, the same from every checkpoint format, and the KV groups they imply."""

from __future__ import annotations

import dataclasses

from polysilicon.backend import KVSpec, kv_planes
from polysilicon.ops import Rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What a decoder-only transformer is, apart from its weights.

    architecture: name of the `Architecture` that read it.
    max_position: tokens of context that the model was trained for, its rope scaling included.
    max_length: tokens of context that it is loaded for; `ropes` were chosen for it.
    activation: `kind` of `Ops.gated_act`.
    tied_head: the output projection is the embedding table.
    qkv_bias, o_bias, mlp_bias: which projections have biases.
    qk_norm: RMS norms over each head of queries and keys.
    post_norms: attention and feed-forward outputs are normed before they are added (Gemma).
    unit_offset_norms: norms scale by `1 + weight` (Gemma).
    windows: per layer, tokens that a query sees, its own included; None for full attention.
    ropes: per layer, its rotary embedding; None for none.
    attention_scale: factor on `q . k`. attention_softcap, final_softcap: caps on attention scores
    and on logits, or None. embedding_scale: factor on embeddings, or None.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    max_position: int
    max_length: int
    tied_head: bool
    attention_scale: float
    windows: tuple[int | None, ...]
    ropes: tuple[Rope | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    unit_offset_norms: bool = False
    attention_softcap: float | None = None
    final_softcap: float | None = None
    embedding_scale: float | None = None

    def __post_init__(self) -> None:
        assert len(self.windows) == self.layers
        assert len(self.ropes) == self.layers
        assert self.heads % self.kv_heads == 0


def kv_groups(config: ModelConfig, page_size: int, kv_dtype: str) -> tuple[KVSpec, ...]:
    """The model's KV groups: full attention first, if any layer has it, then the widest window.

    page_size in tokens; kv_dtype a key of `KV_DTYPES`.
    """
    windows = sorted({window for window in config.windows if window is not None}, reverse=True)
    rules: list[int | None] = [*([None] if None in config.windows else []), *windows]
    planes = kv_planes(
        heads=config.kv_heads, key_dim=config.head_dim, value_dim=config.head_dim, dtype=kv_dtype
    )
    return tuple(
        KVSpec(
            group=group,
            name="full" if rule is None else f"sliding-{rule}",
            layers=tuple(layer for layer, window in enumerate(config.windows) if window == rule),
            window=rule,
            planes=planes,
            page_size=page_size,
        )
        for group, rule in enumerate(rules)
    )
