"""The operations that model definitions are written in; each docstring is the specification.

Symbols: T tokens, S sequences, L logit rows, D width of a hidden state, H query heads, Hk key and
value heads, Dh head width, V vocabulary. Values are the device's own, opaque to the model: it may
keep them in float32 or in its compute dtype, but accumulates every product, norm and softmax in
float32 and keeps the residual stream (what `add` and the residual of norms return) in float32.
A forward never branches on values or shapes; T, S, L and P are symbolic.

`polysilicon.reference` is the executable form of this text.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from polysilicon.batch import Batch

if TYPE_CHECKING:
    from polysilicon.backend import AdapterPool, Handle, KVPool

Value = Any
"""A device's tensor, or its symbol while a forward is traced."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding (arXiv 2104.09864), frequency scaling already applied.

    dim: leading elements of a head that rotate. frequencies: `dim / 2` angles a position, in
    radians. scale: factor on sine and cosine (YaRN's and LongRoPE's attention factor).
    interleaved: pairs are (0, 1), (2, 3), ... instead of (0, dim / 2), (1, dim / 2 + 1), ...
    """

    dim: int
    frequencies: tuple[float, ...]
    scale: float = 1.0
    interleaved: bool = False

    def __post_init__(self) -> None:
        assert len(self.frequencies) * 2 == self.dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class Normalization:
    """An RMS norm over each head, as `Ops.attention` applies it to queries or keys."""

    weight: Handle
    eps: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVScales:
    """Calibrated scales of one layer's fp8 KV: for each of the Hk heads of the pool's planes, what
    a code of 1 stands for, in its keys (k) and in its values (v). Each is a float32, finite and at
    least the least normal one, 2^-126."""

    k: tuple[float, ...]
    v: tuple[float, ...]

    def __post_init__(self) -> None:
        assert all(2.0**-126 <= scale < 2.0**128 for scale in self.k + self.v)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterRef:
    """Which linear of which adapter pool: adapters of the batch's sequences apply to it."""

    pool: AdapterPool
    target: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
    """How router logits choose experts.

    top_k: experts a token. scoring: `softmax` over all experts, then the top k; `softmax_top_k`,
    the top k of the logits, then a softmax over those; or `sigmoid` of each.
    correction: vector `[E]` added to the scores to choose by, not to weigh by (DeepSeek-V3).
    groups, top_groups: experts stand in `groups` equal groups; only the `top_groups` best, by the
    sum of their two highest scores (by the highest where there is no correction), may be chosen.
    renormalize: the chosen weights are divided by their sum. scale: factor on the weights.
    """

    top_k: int
    scoring: str = "softmax"
    correction: Handle | None = None
    groups: int = 1
    top_groups: int = 1
    renormalize: bool = True
    scale: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ModelOutputs:
    """What a forward returns. logits: `[L, V]`; hidden: the residual stream `[T, D]` after each
    layer, of which `Device.compile(hidden=...)` keeps some."""

    logits: Value
    hidden: Sequence[Value]


Forward = Callable[["Ops", Batch], ModelOutputs]


class Ops(ABC):
    """Primitives that every backend supplies. An op added later comes with a default composed from
    these, so that it breaks no plugin."""

    @abstractmethod
    def embed(self, table: Handle, tokens: Value) -> Value:
        """Rows of a matrix `[V, D]` by token: int32 `[T]` to `[T, D]`."""

    @abstractmethod
    def linear(
        self,
        x: Value,
        weight: Handle,
        *,
        bias: Handle | None = None,
        adapters: AdapterRef | None = None,
        batch: Batch | None = None,
    ) -> tuple[Value, ...]:
        """`x W^T + bias`, for each part of the weight: `[T, K]` to one `[T, N_i]` a part.

        W means the dequantised values; accumulation in float32. bias: vector over all parts.
        adapters: adds `lora(x, ...)` by each token's sequence, before anything reads the result;
        needs `batch`, and x then has the batch's T rows.
        """

    @abstractmethod
    def rms_norm(
        self, x: Value, weight: Handle, *, eps: float, residual: Value | None = None
    ) -> tuple[Value, Value]:
        """`h = x + residual` (or x); returns `(h / sqrt(mean(h^2) + eps) * weight, h)` over the
        last axis (arXiv 1910.07467): `[T, D]` each. Statistics in float32; h is float32."""

    @abstractmethod
    def layer_norm(
        self,
        x: Value,
        weight: Handle,
        bias: Handle | None = None,
        *,
        eps: float,
        residual: Value | None = None,
    ) -> tuple[Value, Value]:
        """`h = x + residual` (or x); returns `((h - mean) / sqrt(var + eps) * weight + bias, h)`
        with the biased variance (arXiv 1607.06450): `[T, D]` each. Statistics in float32."""

    @abstractmethod
    def add(self, a: Value, b: Value) -> Value:
        """`a + b` of equal shapes, in float32."""

    @abstractmethod
    def scale(self, x: Value, factor: float) -> Value:
        """`x * factor`."""

    @abstractmethod
    def softcap(self, x: Value, cap: float) -> Value:
        """`cap * tanh(x / cap)` (Gemma 2, arXiv 2408.00118)."""

    @abstractmethod
    def rope(self, x: Value, positions: Value, rope: Rope, *, heads: int) -> Value:
        """Rotate each head of `[T, heads * Dh]` by its token's position; elements from `rope.dim`
        on stay. For a pair (a, b) at angle t = position * frequency: `(a cos t - b sin t, b cos t +
        a sin t) * scale`. Angles in float32 or better."""

    @abstractmethod
    def gated_act(self, gate: Value, up: Value, kind: str) -> Value:
        """`act(gate) * up`, `[T, F]` each. kind: `silu`; `gelu` (by erf); `gelu_tanh` (the tanh
        approximation, arXiv 1606.08415); `relu`; or `swiglu_oai` (gpt-oss): with gate at most 7 and
        up within 7 of 0, `(up + 1) * gate * sigmoid(1.702 * gate)`."""

    @abstractmethod
    def attention(
        self,
        q: Value,
        k: Value | None,
        v: Value | None,
        *,
        batch: Batch,
        pool: KVPool,
        layer: int,
        heads: int,
        scale: float,
        rope: Rope | None = None,
        q_norm: Normalization | None = None,
        k_norm: Normalization | None = None,
        softcap: float | None = None,
        sinks: Handle | None = None,
        causal: bool = True,
        kv_scales: KVScales | None = None,
    ) -> Value:
        """Paged attention, `[T, H * Dh]` to `[T, H * Dv]`.

        In this order: `q_norm` and `k_norm` (RMS norm over each head's Dh, one weight for all
        heads), `rope` on q and k by `batch.positions`, k and v stored in the pool's dtype at
        `batch.slots[group]` for `layer`, then for every token t of sequence s, head h and context
        index j: `softmax_j(softcap(scale * q . k_j)) v_j`, with key head `h // (H / Hk)`.

        q `[T, H * Dh]`; k `[T, Hk * Dh]` and v `[T, Hk * Dv]`, or both None to attend to what the
        pool holds (KV shared with an earlier layer). Context index j of a sequence lies in page
        `page_table[s, j // page_size]`. Its position is j before this step's tokens, and
        `batch.positions` for them. Visible: every j before the step's tokens; and of these, where
        the batch has a tree mask, those it names, else those up to t itself, or all of the
        sequence's without `causal`; and of both, with a window (`pool.spec.window`), only those
        whose position is above `positions[t] - window`. A token's own K and V are read back as
        stored. Softmax in float32.
        sinks: vector `[H]`; adds `exp(sink_h)` to the denominator (arXiv 2309.17453, gpt-oss).
        A token that sees nothing gets zeros, with sinks too.
        kv_scales: where the planes are `fp8_e4m3`, k and v are stored with these scales in place of
        `max |y| / 448` (`polysilicon.backend.KV_DTYPES`): every token's entry in the scale planes
        is its head's constant, so that pages are read as ever, and codes are `y / scale` in
        float32, those beyond 448 and -448 set to these, rounded to nearest even. A vector that
        holds an infinity or a NaN is stored as ever: its scale NaN, its codes 0. Ignored where the
        planes are of another dtype, and without k and v. Passed only to devices that declare
        `Capabilities.kv_scales`. Raises ValueError where they are not of the planes' heads.
        """

    @abstractmethod
    def moe(
        self,
        x: Value,
        router_logits: Value,
        gate_up: Handle,
        down: Handle,
        *,
        routing: Routing,
        activation: str,
        gate_up_bias: Handle | None = None,
        down_bias: Handle | None = None,
    ) -> Value:
        """Mixture of experts: `sum_e w_e (gated_act(gate_e x, up_e x) down_e)`, `[T, D]` to
        `[T, D]`.

        router_logits `[T, E]`; gate_up: stack of two parts `[E, F, D]`; down: `[E, D, F]`; biases:
        matrices `[E, 2 F]` and `[E, D]`, dense. Weights w from `routing` in float32; equal scores
        prefer the lower expert.
        """

    @abstractmethod
    def lora(
        self, x: Value, parts: tuple[Value, ...], adapters: AdapterRef, batch: Batch
    ) -> tuple[Value, ...]:
        """`part_i + (x A_i^T) B_i^T` by the adapter slot of each token's sequence (arXiv
        2106.09685); slot 0, cleared slots and targets an adapter lacks leave a part as it is."""

    @abstractmethod
    def select(self, x: Value, rows: Value) -> Value:
        """Rows of x: `[T, D]`, int32 `[L]` to `[L, D]`."""

    @abstractmethod
    def all_reduce(self, x: Value) -> Value:
        """Sum over the ranks of a tensor-parallel group; x itself where there is one rank."""

    @abstractmethod
    def all_gather(self, x: Value) -> Value:
        """Concatenate the last axis over the ranks, by rank; x itself where there is one rank."""
