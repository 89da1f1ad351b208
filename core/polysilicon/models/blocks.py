"""What the layers of a model are made of: products with their biases and adapters, and norms."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from polysilicon.backend import AdapterPool, AdapterTarget, Handle
from polysilicon.batch import Batch
from polysilicon.models.architecture import Weights
from polysilicon.ops import AdapterRef, Ops, Value


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One forward: its ops and batch, and the adapters that its products apply."""

    ops: Ops
    batch: Batch
    adapters: AdapterPool | None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Linear:
    """A product of `inputs` columns, with one result for each part of its weight.

    target: the name that adapters have for it.
    """

    weight: Handle
    inputs: int
    bias: Handle | None = None
    target: str | None = None

    def __call__(self, step: Step, x: Value) -> tuple[Value, ...]:
        if step.adapters is None or self.target is None:
            return step.ops.linear(x, self.weight, bias=self.bias)
        adapters = AdapterRef(pool=step.adapters, target=self.target)
        return step.ops.linear(x, self.weight, bias=self.bias, adapters=adapters, batch=step.batch)

    def adapter_target(self) -> AdapterTarget:
        return AdapterTarget(inputs=self.inputs, outputs=tuple(self.weight.parts))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Norm:
    """An RMS norm, or with `centred` a layer norm, whose bias is optional."""

    weight: Handle
    eps: float
    centred: bool = False
    bias: Handle | None = None

    def __call__(self, ops: Ops, x: Value, residual: Value | None = None) -> tuple[Value, Value]:
        """The norm of `x + residual`, and that sum."""
        if self.centred:
            return ops.layer_norm(x, self.weight, self.bias, eps=self.eps, residual=residual)
        return ops.rms_norm(x, self.weight, eps=self.eps, residual=residual)


def place_linear(
    weights: Weights,
    keys: Sequence[str],
    *,
    inputs: int,
    biased: bool = False,
    target: str | None = None,
    parts: Sequence[int] | None = None,
) -> Linear:
    """The modules of keys such as `layers.3.q` as one product. parts: as in `Weights.matrix`."""
    return Linear(
        weight=weights.matrix(*(f"{key}.weight" for key in keys), parts=parts),
        bias=weights.vector(*(f"{key}.bias" for key in keys)) if biased else None,
        inputs=inputs,
        target=target,
    )
