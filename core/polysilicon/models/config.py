"""A model's parameters, the same from every checkpoint format, and the KV groups they imply."""

from __future__ import annotations

import dataclasses

from polysilicon.backend import KVSpec, kv_planes
from polysilicon.ops import Rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """The mixtures of experts of a model.

    layers: per layer, whether its feed-forward block is a mixture. count, size: experts of one, and
    the inner width of an expert. top_k, scoring, groups, top_groups, renormalize, scale: as in
    `Routing`. correction: routers have a vector of that name. router_bias, bias: routers and
    experts have biases.
    shared_size: inner width of the expert that every token goes to, 0 for none. shared_router: its
    output is weighted by the sigmoid of a logit of its own.
    """

    layers: tuple[bool, ...]
    count: int
    size: int
    top_k: int
    scoring: str = "softmax"
    groups: int = 1
    top_groups: int = 1
    renormalize: bool = True
    scale: float = 1.0
    correction: bool = False
    router_bias: bool = False
    bias: bool = False
    shared_size: int = 0
    shared_router: bool = False

    def __post_init__(self) -> None:
        assert self.top_k <= self.count
        assert self.count % self.groups == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention, as `LatentAttention` computes it.

    query_rank: width of the latent that queries are projected from, None where they come from the
    hidden state. rank: width of that of keys and values. nope_dim, rope_dim: elements of a head of
    queries and keys that do not rotate, and that do; value_dim: of values.
    norm_eps: of the norms of latents. interleaved: as in `Rope`.
    split: the checkpoint has a tensor for keys and one for values, each by head, where others have
    one for both.
    """

    query_rank: int | None
    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    norm_eps: float
    interleaved: bool = True
    split: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What a decoder-only transformer is, apart from its weights.

    architecture: name of the `Architecture` that read it.
    max_position: tokens of context that the model was trained for, its rope scaling included.
    max_length: tokens of context that it is loaded for; `ropes` were chosen for it.
    activation: `kind` of `Ops.gated_act`.
    tied_head: the output projection is the embedding table.
    qkv_bias, o_bias, mlp_bias: which projections have biases.
    qk_norm: RMS norms over each head of queries and keys. qk_projection_norm: over all heads
    together (OLMo 2).
    head_norms: layer norms over each head, each with weights of its own. layer_norms: norms are
    layer norms with a bias (StableLM). parallel_residual: attention and feed-forward block read the
    same norm, and both are added to the residual stream at once (StableLM 2 12B).
    pre_norms: what goes into attention and feed-forward blocks is normed. post_norms: what comes
    out of them is, before it is added (Gemma, OLMo 2).
    unit_offset_norms: norms scale by `1 + weight` (Gemma).
    windows: per layer, tokens that a query sees, its own included; None for full attention.
    ropes: per layer, its rotary embedding; None for none.
    sinks: attention has one a head (gpt-oss).
    attention_scale: factor on `q . k`. attention_softcap, final_softcap: caps on attention scores
    and on logits, or None. embedding_scale, residual_scale, logit_scale: factors on embeddings, on
    what a block adds to the residual stream, and on logits, or None.
    value_dim: width of a head of values, where it is not `head_dim`.
    experts: None where every layer is dense. latent: None for attention without latents.
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
    qk_projection_norm: bool = False
    head_norms: bool = False
    layer_norms: bool = False
    parallel_residual: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    unit_offset_norms: bool = False
    sinks: bool = False
    attention_softcap: float | None = None
    final_softcap: float | None = None
    embedding_scale: float | None = None
    residual_scale: float | None = None
    logit_scale: float | None = None
    value_dim: int | None = None
    experts: Experts | None = None
    latent: Latent | None = None

    def __post_init__(self) -> None:
        assert len(self.windows) == self.layers
        assert len(self.ropes) == self.layers
        assert self.heads % self.kv_heads == 0
        assert self.experts is None or len(self.experts.layers) == self.layers


def kv_groups(config: ModelConfig, page_size: int, kv_dtype: str) -> tuple[KVSpec, ...]:
    """The model's KV groups: full attention first, if any layer has it, then the widest window.

    page_size in tokens; kv_dtype a key of `KV_DTYPES`.
    """
    windows = sorted({window for window in config.windows if window is not None}, reverse=True)
    rules: list[int | None] = [*([None] if None in config.windows else []), *windows]
    planes = kv_planes(
        heads=config.kv_heads,
        key_dim=config.head_dim,
        value_dim=config.value_dim or config.head_dim,
        dtype=kv_dtype,
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
