"""What a GPU architecture is, as far as kernels and their tuning need to know: asked once, here."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

import torch

Float8 = Literal["ocp", "fnuz", "none"]


class UnsupportedTarget(ValueError):
    """A GPU whose architecture the kernels cannot be compiled for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """An architecture, and the card of it that was found.

    name: `sm_90`, `gfx942`, ... or `interpreter`. family: the architectures that share tuning.
    kind: whose compiler. shared_memory: bytes one block may use. registers: 32-bit ones a thread
    may use before it spills. fp8: the kind whose e4m3 the matrix units multiply: `ocp` (e4m3fn),
    `fnuz` (e4m3fnuz: bias 8, no -0, no infinities) or `none`. fp8_casts: whether the compiler
    takes e4m3fn values at all, if only to convert them. compute_units: what the card has, as its
    runtime counts them (streaming multiprocessors; compute units; work-group processors on RDNA).
    """

    name: str
    family: str
    kind: Literal["cuda", "hip"]
    warp_size: int
    shared_memory: int
    registers: int
    fp8: Float8
    fp8_casts: bool
    compute_units: int


def _cuda(
    capability: int, family: str, kilobytes: int, compute_units: int, fp8: Float8 = "ocp"
) -> Target:
    return Target(
        name=f"sm_{capability}",
        family=family,
        kind="cuda",
        warp_size=32,
        shared_memory=kilobytes * 1024,
        registers=255,
        fp8=fp8,
        fp8_casts=capability >= 89,
        compute_units=compute_units,
    )


def _hip(
    name: str, family: str, kilobytes: int, compute_units: int, fp8: Float8 = "none"
) -> Target:
    return Target(
        name=name,
        family=family,
        kind="hip",
        warp_size=64 if family == "cdna" else 32,
        shared_memory=kilobytes * 1024,
        registers=512 if family == "cdna" else 256,
        fp8=fp8,
        fp8_casts=True,
        compute_units=compute_units,
    )


# Shared memory per block: CUDA C++ programming guide, "Technical specifications per compute
# capability"; local data share per work-group: the CDNA and RDNA instruction set guides. Compute
# units: A100, RTX 3090, L40S, H100 SXM, B200, RTX 5090; one die of MI250, MI300X, MI355X,
# Radeon 7900 XTX, Radeon 9070 XT.
TARGETS = {
    target.name: target
    for target in (
        _cuda(80, "ampere", 163, 108, "none"),
        _cuda(86, "ampere", 99, 82, "none"),
        _cuda(89, "ada", 99, 142),
        _cuda(90, "hopper", 227, 132),
        _cuda(100, "blackwell", 227, 148),
        _cuda(120, "blackwell", 99, 170),
        _hip("gfx90a", "cdna", 64, 104),
        _hip("gfx942", "cdna", 64, 304, "fnuz"),
        _hip("gfx950", "cdna", 160, 256, "ocp"),
        _hip("gfx1100", "rdna", 64, 48),
        _hip("gfx1201", "rdna", 64, 32, "ocp"),
    )
}

INTERPRETER = Target(
    name="interpreter",
    family="interpreter",
    kind="cuda",
    warp_size=32,
    shared_memory=1 << 40,
    registers=1 << 20,
    fp8="none",
    fp8_casts=True,
    compute_units=1,
)
"""Triton's interpreter, which runs kernels on CPU tensors, one program after another."""


def detect(device: torch.device) -> Target:
    """The target of a torch device; INTERPRETER for the CPU. Raises UnsupportedTarget."""
    if device.type == "cpu":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        target = named(str(properties.gcnArchName).partition(":")[0])
    else:
        target = named(f"sm_{properties.major}{properties.minor}")
    return dataclasses.replace(target, compute_units=properties.multi_processor_count)


def named(name: str) -> Target:
    """The target of that name; of one that is not in TARGETS, the nearest older of its family's
    line. Raises UnsupportedTarget."""
    if name in TARGETS:
        return TARGETS[name]
    if match := re.fullmatch(r"sm_(\d{2,3})", name):
        return _nearest(name, int(match[1]), ("ampere", "ada", "hopper", "blackwell"), 10)
    if match := re.fullmatch(r"gfx([0-9a-f]{3,4})", name):
        family = "rdna" if len(match[1]) == 4 else "cdna"
        return _nearest(name, int(match[1], 16), (family,), 16)
    raise UnsupportedTarget(f"{name} is no GPU architecture: expected sm_90, gfx942, ...")


def _nearest(name: str, number: int, families: tuple[str, ...], base: int) -> Target:
    line = [target for target in TARGETS.values() if target.family in families]
    older = [target for target in line if int(target.name.lstrip("smgfx_"), base) <= number]
    if not older:
        raise UnsupportedTarget(
            f"{name} is older than {line[0].name}, the oldest GPU architecture of its line that the"
            " kernels support: use --backend cpu"
        )
    shared = min(target.shared_memory for target in older if target.family == older[-1].family)
    return dataclasses.replace(older[-1], name=name, shared_memory=shared)
