"""AWQ (arXiv 2306.00978): inputs that are large get finer steps, by scaling them down where they
are made and their columns up.

`W x = (W s) (x / s)`: the division goes into what makes x, a norm's weight or the rows of another
matrix, so that the model computes the same before anything is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polysilicon.quantization.source import ModelSource, Unit
from polysilicon.weights.encodings import Float32
from polysilicon.weights.rtn import Fit

_RATIOS = np.linspace(0, 1, 9)
_SEARCH_ROWS = 256

# Modules of a layer in which a norm feeds the linears named here and nothing else.
_KNOWN = {
    *("attention_norm", "q", "k", "v", "o", "q_norm", "k_norm", "sinks", "post_attention_norm"),
    *("q_a", "q_a_norm", "q_b", "kv_latent", "k_rope", "kv_norm", "kv_b", "k_b", "v_b"),
    *("ffn_norm", "gate", "up", "down", "post_ffn_norm"),
    *("router", "correction", "expert_gate", "expert_up", "expert_down"),
    *("shared_router", "shared_gate", "shared_up", "shared_down"),
}
# By the linears that read x: the module that makes it.
_MAKERS = {
    ("q", "k", "v"): "attention_norm",
    ("o",): "v",
    ("q", "kv_latent", "k_rope"): "attention_norm",
    ("q_a", "kv_latent", "k_rope"): "attention_norm",
    ("q_b",): "q_a_norm",
    ("kv_b",): "kv_norm",
    ("gate", "up"): "ffn_norm",
    ("down",): "up",
    ("expert_down",): "expert_up",
    ("shared_down",): "shared_up",
}
# What reads the norm before a mixture of experts.
_MIXTURE = ("router", "expert_gate", "expert_up", "shared_router", "shared_gate", "shared_up")


def find_scale(
    matrices: Sequence[tuple[Float32, Fit]], inputs: Float32, magnitude: Float32
) -> Float32:
    """The scale s, float32 `[K]`, whose rounded `W s` changes the outputs least.

    matrices: those that read the inputs, `[N, K]`, with how their grids are chosen; of large ones
    some rows are looked at. inputs: mean outer product of the inputs, `[K, K]`. magnitude: mean
    absolute inputs, `[K]`. Candidates are `magnitude^r`, and the same over `w^(1 - r)` with w the
    mean of a column's weights relative to its row's largest, for r from 0 to 1.
    """
    some = [(weight[:: -(-len(weight) // _SEARCH_ROWS)], fit) for weight, fit in matrices]
    largest = [np.abs(weight).max(axis=1, keepdims=True) for weight, _ in some]
    relative = np.concatenate(
        [np.abs(w) / np.maximum(peak, 1e-12) for (w, _), peak in zip(some, largest, strict=True)]
    ).mean(axis=0)
    diagonal = np.diagonal(inputs)
    best, found = np.inf, np.ones(len(magnitude), np.float32)
    for ratio in _RATIOS:
        for shrink in (np.float32(1), np.maximum(relative, 1e-4) ** (1 - ratio)):
            scale = np.maximum(np.maximum(magnitude, 1e-6) ** ratio / shrink, 1e-4)
            scale = (scale / np.sqrt(scale.max() * scale.min())).astype(np.float32)
            weights = diagonal / (scale * scale)
            weights = weights / max(weights.mean(), 1e-30) + np.float32(0.01)
            error = 0.0
            for weight, fit in some:
                scaled = weight * scale
                grid = fit(scaled, weights)
                change = grid.weight(grid.nearest(scaled)).dequantize() / scale - weight
                error += float(np.einsum("nk,nk->", change @ inputs, change))
            if error < best:
                best, found = error, scale
    return found


class Scaling:
    """The scales that were found, and where they go.

    columns, rows: by key of a matrix, and expert where one alone is meant, factors on its columns,
    and divisors of its rows. vectors: by key of a norm's weight or bias or of a matrix's bias,
    divisors of its elements.
    """

    def __init__(self, source: ModelSource) -> None:
        self.columns: dict[tuple[str, int | None], Float32] = {}
        self.rows: dict[tuple[str, int | None], Float32] = {}
        self.vectors: dict[str, Float32] = {}
        self._source = source
        layers = {key.split(".")[2] for key in source.shapes if key.startswith("layers.")}
        self.known = layers <= _KNOWN

    def takes(self, keys: Sequence[str]) -> bool:
        """Whether what makes the inputs of these linears can be divided by a scale."""
        return self._maker(keys) is not None

    def _maker(self, keys: Sequence[str]) -> str | None:
        if not self.known or not keys[0].startswith("layers."):
            return None
        _, layer, _, _ = keys[0].split(".")
        maker = _MAKERS.get(tuple(key.split(".")[2] for key in keys))
        if maker is None or f"layers.{layer}.{maker}.weight" not in self._source.shapes:
            return None
        config = self._source.config
        if maker == "v" and config.heads != config.kv_heads:
            # A value head serves several query heads, whose inputs to o would have one scale.
            return None
        if maker == "attention_norm" and config.parallel_residual:
            # The feed-forward block reads it, too.
            return None
        if maker.endswith("up") and config.activation == "swiglu_oai":
            return None
        if maker == "expert_up" and f"layers.{layer}.{maker}.bias" in self._source.shapes:
            return None
        return f"layers.{layer}.{maker}"

    def add(self, keys: Sequence[str], scale: Float32, expert: int | None = None) -> None:
        maker = self._maker(keys)
        assert maker is not None
        self.columns |= dict.fromkeys(((key, expert) for key in keys), scale)
        if maker.endswith("norm"):
            self.vectors[f"{maker}.weight"] = scale
        else:
            self.rows[f"{maker}.weight", expert] = scale
        if f"{maker}.bias" in self._source.shapes:
            self.vectors[f"{maker}.bias"] = scale

    def mixture_readers(self, keys: Sequence[str]) -> list[str]:
        """All that reads what goes into the mixture of the experts of `keys`; nothing where that
        cannot be scaled."""
        at, _, experts = keys[0].rpartition(".expert_")
        shapes = self._source.shapes
        if not (self.known and experts and f"{at}.ffn_norm.weight" in shapes):
            return []
        return [key for name in _MIXTURE if (key := f"{at}.{name}.weight") in shapes]

    def add_mixture(self, readers: Sequence[str], scale: Float32) -> None:
        """A scale for what goes into a mixture. readers: as `mixture_readers` gives them."""
        norm = f"{readers[0].rsplit('.', 2)[0]}.ffn_norm"
        self.columns |= dict.fromkeys(((key, None) for key in readers), scale)
        self.vectors[f"{norm}.weight"] = scale
        if f"{norm}.bias" in self._source.shapes:
            self.vectors[f"{norm}.bias"] = scale

    def columns_of(self, key: str, expert: int | None) -> Float32 | None:
        """The factors on the columns of a matrix, where some were found."""
        return self.columns.get((key, expert), self.columns.get((key, None)))

    def applied(self, unit: Unit, values: Float32, matrix: int = 0) -> Float32:
        """The values of a unit's matrix, scaled."""
        values = values.copy()
        for part in unit.parts:
            rows = slice(None) if part.rows is None else np.asarray(part.rows)
            expert = unit.expert(part, matrix)
            columns = self.columns_of(part.key, expert)
            if columns is not None:
                values[rows] *= columns
            if (part.key, expert) in self.rows:
                values[rows] /= self.rows[part.key, expert][:, None]
            if part.key in self.vectors:
                offset = np.float32(
                    part.key.endswith("norm.weight") and self._source.config.unit_offset_norms
                )
                values[rows] = (values[rows] + offset) / self.vectors[part.key] - offset
        return values
