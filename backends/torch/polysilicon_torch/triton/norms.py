"""RMS and layer norms over rows, with the residual added on the way."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from polysilicon_torch.specialisation import Specialisation
from polysilicon_torch.target import Target
from polysilicon_torch.tuning import Tuning

WIDTHS = (576, 2048, 4096, 8192)
"""Hidden sizes that are compiled ahead of time: SmolLM2 and, in the same block, Gemma 3 270M;
Llama 3 of 1B, 8B and 70B."""


@triton.jit
def norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    normal: tl.tensor,
    hidden: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row a program. residual, bias: or None. hidden: where h goes, or None. CENTRED: a layer
    norm."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    h = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        h += tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0)
    if hidden is not None:
        tl.store(hidden + row * width + columns, h, mask=inside)
    if CENTRED:
        h = tl.where(inside, h - tl.sum(h, 0) / width, 0.0)
    y = h * tl.rsqrt(tl.sum(h * h, 0) / width + eps)
    y *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        y += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normal + row * width + columns, y.to(normal.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    *,
    dtype: torch.dtype,
    tuning: Tuning,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Kernels.rms_norm`: x `[T, D]` of A or float32, residual float32 `[T, D]`, both with stride 1
    along the last axis, weight `[D]`; the norm contiguous in `dtype`, and h in float32, which is x
    itself where that is float32 and there is no residual."""
    return _norm(x, weight, None, eps, residual, centred=False, dtype=dtype, tuning=tuning)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    *,
    dtype: torch.dtype,
    tuning: Tuning,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Kernels.layer_norm`; tensors as of `rms_norm`, bias `[D]`."""
    return _norm(x, weight, bias, eps, residual, centred=True, dtype=dtype, tuning=tuning)


def _norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    *,
    centred: bool,
    dtype: torch.dtype,
    tuning: Tuning,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = x.shape
    assert x.stride(1) == 1 or width == 1
    normal = torch.empty(x.shape, dtype=dtype, device=x.device)
    keeps_x = residual is None and x.dtype == torch.float32
    hidden = x if keeps_x else torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if rows:
        norm_kernel[(rows,)](
            x,
            residual,
            weight,
            bias,
            normal,
            None if keeps_x else hidden,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            width,
            eps,
            CENTRED=centred,
            BLOCK=triton.next_power_of_2(width),
            **tuning.pick("norm", width=width),
        )
    return normal, hidden


def specialisations(target: Target, tuning: Tuning) -> Iterator[Specialisation]:
    """Norms in bfloat16: with and without a residual, and of the residual stream itself."""
    forms = (("bf16", True, False), ("bf16", False, False), ("fp32", False, False))
    for width in WIDTHS:
        for dtype, has_residual, centred in (*forms, ("bf16", True, True)):
            tensors: dict[str, str | None] = {
                "x": f"*{dtype}",
                "residual": "*fp32" if has_residual else None,
                "weight": "*fp32",
                "bias": "*fp32" if centred else None,
                "normal": "*bf16",
                "hidden": "*fp32" if has_residual or dtype != "fp32" else None,
            }
            present = {name: type_ for name, type_ in tensors.items() if type_ is not None}
            strides = ("x_stride", "residual_stride", "width")
            yield Specialisation.of(
                f"{'layer' if centred else 'rms'}_norm width={width} x={dtype}"
                + (" residual" if has_residual else ""),
                norm_kernel,
                present | dict.fromkeys(strides, "i32") | {"eps": "fp32"},
                dict.fromkeys(tensors.keys() - present.keys())
                | {"CENTRED": centred, "BLOCK": triton.next_power_of_2(width)},
                tuning.pick("norm", width=width),
                divisible=frozenset(strides),
                decode=True,
            )
