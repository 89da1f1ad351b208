"""The contract between the core and a backend plugin.

A plugin registers a `Backend`; the core opens a `Device` of it, places weights, allocates KV and
adapter pools, compiles a model's forward into a `Program` and then calls the program and `sample`
once a step. Everything a backend needs is importable from here.

Rules of the step loop
- Calls on one device take effect in the order of submission; none of them waits for another.
- Step n + 1 is submitted before step n's tokens reach the host: `Batch.token_source` names the row
  of `previous` whose sampled token is the input.
- A page freed in a step is written again only by calls submitted after every earlier call ended.
- The arrays of a batch belong to the device until the `.result()` of the call they were passed to,
  or of a later call on the same device, has returned.
- Two errors: `OutOfMemory` (the core retries with less) and `DeviceLost` (fatal: the engine is
  restarted). A device never calls back into the core.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pluggy

from polysilicon.batch import Batch, SampledTokens, SamplingBatch, SparseRows
from polysilicon.ops import (
    AdapterRef,
    Forward,
    KVScales,
    ModelOutputs,
    Normalization,
    Ops,
    Rope,
    Routing,
)
from polysilicon.sampling.sampler import sample_on_host
from polysilicon.weights.encodings import (
    Dense,
    GroupAffine,
    GroupFloat,
    SuperScaled,
    Weight,
    pack_codes,
    scale_values,
    unpack_codes,
)

__all__ = [
    "CONTRACT_VERSION",
    "KV_DTYPES",
    "KV_LARGEST_CODE",
    "PROJECT",
    "AdapterPool",
    "AdapterRef",
    "AdapterSpec",
    "AdapterTarget",
    "AdapterWeights",
    "Backend",
    "Batch",
    "Capabilities",
    "Dense",
    "Device",
    "DeviceError",
    "DeviceInfo",
    "DeviceLost",
    "Forward",
    "GroupAffine",
    "GroupFloat",
    "Handle",
    "KVPool",
    "KVScales",
    "KVSpec",
    "MemoryInfo",
    "ModelOutputs",
    "Normalization",
    "Ops",
    "OutOfMemory",
    "Outputs",
    "Pending",
    "PendingOutputs",
    "PendingTokens",
    "Plane",
    "Program",
    "Rope",
    "Routing",
    "SampledTokens",
    "SamplingBatch",
    "Shard",
    "SparseRows",
    "SuperScaled",
    "Unavailable",
    "Weight",
    "hookimpl",
    "kv_planes",
    "pack_codes",
    "sample_on_host",
    "scale_values",
    "unpack_codes",
]

PROJECT = "polysilicon"
"""The pluggy project name and the entry-point group of plugins."""

hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's implementations of `polysilicon.hookspecs`."""

CONTRACT_VERSION = (1, 1)
"""(major, minor). A backend built for another major or a later minor version is refused."""

KV_DTYPES: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "int8": np.dtype(np.int8),
    "fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
}
"""KV dtypes by name. Every backend stores f16, so that any two have one in common.

`int8` and `fp8_e4m3` are quantised with a scale for each token and head, in a plane of its own
(`kv_planes`). For `int8` a vector x is first turned: y = H x, where H is the Walsh-Hadamard
transform over consecutive blocks of the largest power of two that divides the head's dim, divided
by the root of that power. H is its own inverse and keeps products of queries and keys; it spreads
the few large dimensions that keys have, which alone would set the scale (QuaRot, arXiv 2404.00456:
the error of log-probabilities falls to a third). For `fp8_e4m3` (e4m3fn of OCP's specification of
8-bit floating point) y = x: its codes are finer where values are small. Then, in float32,
scale = max |y| / m with the largest code m (`KV_LARGEST_CODE`) and code = y / scale, rounded to
nearest even, which is read back as code * scale, turned by H for `int8`. Where that scale is below
the least normal float32, 2^-126, it and the codes are 0; where y holds an infinity or a NaN, it is
NaN and they are 0. Scales are f32, for 6 % of a head of 64: in float16 they would lose precision
below 6e-5, where a head's values stay below 0.008. A checkpoint may bring scales of its own for
`fp8_e4m3`, which then take the place of these (`kv_scales` of `Ops.attention`).
"""

KV_LARGEST_CODE: dict[str, float] = {"int8": 127.0, "fp8_e4m3": 448.0}
"""The quantised KV dtypes, and the code of the largest value of a vector."""


class DeviceError(Exception):
    """Base of what a device may raise while it runs."""


class OutOfMemory(DeviceError):
    """An allocation did not fit. Nothing changed; the core may retry with less."""


class DeviceLost(DeviceError):
    """The device cannot go on. Fatal for the engine; the message is the cause."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """One device a probe found. memory: bytes in total; details: what `backends` prints beside.
    stand_in: it computes on the host's processor in place of the hardware that the backend is for:
    `--backend auto` passes it over."""

    name: str
    memory: int
    details: Mapping[str, str] = dataclasses.field(default_factory=dict)
    stand_in: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unavailable:
    """Why a backend cannot run here, in words that name the fix."""

    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a device declares of itself; tests and the core ask this and never a backend's name.

    compute: precision of products, `f32`, `f16`, `bf16` or `int8`: the conformance kit's bound.
        Accumulation and the residual stream are float32 in every case.
    kv_dtypes: names in `KV_DTYPES`, the default first; `f16` is always among them.
    page_sizes: KV page sizes in tokens, the preferred one first; each a multiple of 16, or below.
    encodings: patterns (fnmatch) over `Weight.encoding` that `put` takes as they are.
    adapters: the most adapter slots of one pool, 0 when LoRA is not supported.
    max_adapter_rank: the largest LoRA rank.
    deterministic: whether results are bitwise independent of batching under `deterministic=1`.
    tree_attention: whether `Batch.tree_mask` is served.
    capture: whether programs are captured (graphs, tapes) rather than run operation by operation.
    kv_scales: whether `Ops.attention` takes `kv_scales`; since version 1.1 of the contract.
    """

    compute: str
    kv_dtypes: tuple[str, ...]
    page_sizes: tuple[int, ...]
    encodings: tuple[str, ...]
    adapters: int = 0
    max_adapter_rank: int = 0
    deterministic: bool = False
    tree_attention: bool = False
    capture: bool = False
    kv_scales: bool = False

    def takes(self, encoding: str) -> bool:
        """Whether a weight of this encoding is placed without being transcoded."""
        return any(fnmatch.fnmatchcase(encoding, pattern) for pattern in self.encodings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """The part of a weight that rank `rank` of `ranks` holds: equal slices of `rows` (outputs of
    every fused part) or of `columns` (inputs). A vector has rows only."""

    axis: str
    rank: int
    ranks: int


class Handle(Protocol):
    """Weights placed on a device. parts: outputs (rows) of each fused part; nbytes: there.

    They are freed once nothing refers to the handle any more, or with the device.
    """

    @property
    def parts(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plane:
    """One array of a KV page: `heads` vectors of `dim` elements of `dtype` for every token."""

    name: str
    heads: int
    dim: int
    dtype: str


def kv_planes(*, heads: int, key_dim: int, value_dim: int, dtype: str) -> tuple[Plane, ...]:
    """The planes of ordinary attention: `k` and `v`, then for a quantised dtype their scales,
    `k_scale` and `v_scale`, of dim 1. dtype: a key of `KV_DTYPES`."""
    dims = {"k": key_dim, "v": value_dim}
    planes = [Plane(name=name, heads=heads, dim=dim, dtype=dtype) for name, dim in dims.items()]
    if dtype in KV_LARGEST_CODE:
        planes += [Plane(name=f"{name}_scale", heads=heads, dim=1, dtype="f32") for name in dims]
    return tuple(planes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVSpec:
    """A KV group: the layers that share a retention rule.

    group: index of the group in `Batch.page_tables` and `Batch.slots`.
    layers: indices of the model's layers, as `Ops.attention` names them.
    window: tokens that a query sees, its own included; None for full attention.
    planes: as `kv_planes` makes them for ordinary attention.
    page_size: tokens a page.
    """

    group: int
    name: str
    layers: tuple[int, ...]
    window: int | None
    planes: tuple[Plane, ...]
    page_size: int

    @property
    def block(self) -> int:
        """Tokens of one canonical block: 16, or a whole page of fewer."""
        return min(16, self.page_size)

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes over all layers and planes."""
        per_layer = sum(
            plane.heads * plane.dim * KV_DTYPES[plane.dtype].itemsize for plane in self.planes
        )
        return per_layer * len(self.layers)

    @property
    def page_bytes(self) -> int:
        return self.token_bytes * self.page_size

    @property
    def block_bytes(self) -> int:
        """Bytes of one canonical block, header included."""
        return BLOCK_HEADER.size + self.token_bytes * self.block

    def block_header(self) -> bytes:
        """The header that stands before every canonical block of this spec.

        `PSKV`, u16 version, u16 tokens, u32 layers, u32 planes, then a u32 checksum (FNV-1a) over
        the planes' names, heads, dims and dtypes, all little-endian.
        """
        checksum = 0x811C9DC5
        for byte in repr([(p.name, p.heads, p.dim, p.dtype) for p in self.planes]).encode():
            checksum = (checksum ^ byte) * 0x01000193 & 0xFFFFFFFF
        return BLOCK_HEADER.pack(
            b"PSKV", 1, self.block, len(self.layers), len(self.planes), checksum
        )


BLOCK_HEADER = struct.Struct("<4sHHIII")


class Pending(Protocol):
    """Work that was submitted; `result()` waits for it and raises what it raised."""

    def result(self) -> None: ...


class KVPool(ABC):
    """The pages of one KV group on a device. Slot = page * page_size + offset.

    Closing a pool twice does nothing; using a closed one raises `DeviceError`.
    """

    spec: KVSpec
    pages: int

    @abstractmethod
    def copy(self, source: npt.NDArray[np.int32], target: npt.NDArray[np.int32]) -> None:
        """Copy slots, all layers and planes: int32 `[n]` each, no slot on both sides. Submitted in
        order with the device's other calls; the arrays may be reused at once."""

    @abstractmethod
    def read(self, pages: Sequence[int], into: npt.NDArray[np.uint8]) -> Pending:
        """Read whole pages as canonical bytes into uint8 `[len(pages), blocks, block_bytes]`.

        A page is its 16-token blocks in order; a block is `spec.block_header()`, then
        `[layer][plane][head][slot][dim]`, little-endian, in each plane's dtype: the scales of
        quantised planes stand behind their values.
        """

    @abstractmethod
    def write(self, pages: Sequence[int], data: npt.NDArray[np.uint8]) -> Pending:
        """Undo `read`, with bytes that any backend wrote. Raises ValueError at once when a header
        is not this spec's."""

    @abstractmethod
    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterTarget:
    """One linear that adapters may change: its inputs, and the outputs of each of its parts."""

    inputs: int
    outputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterSpec:
    """Shape of an adapter pool. targets: by the names that `AdapterRef.target` uses."""

    max_rank: int
    targets: Mapping[str, AdapterTarget]


AdapterWeights = Mapping[
    str, Sequence[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None]
]
"""By target, for each part None or (A float32 `[r, inputs]`, B float32 `[outputs, r]`), r at most
the pool's max_rank; the adapter's scaling is folded into B."""


class AdapterPool(ABC):
    """LoRA weights of up to `slots` adapters. Slot 0 is none and never written. Closing it twice
    does nothing; using it when closed raises `DeviceError`."""

    spec: AdapterSpec
    slots: int

    @abstractmethod
    def write(self, slot: int, weights: AdapterWeights) -> None:
        """Fill a slot; targets that are missing are left unchanged by this adapter. Takes effect
        for programs submitted afterwards."""

    @abstractmethod
    def clear(self, slot: int) -> None:
        """Empty a slot: it behaves like slot 0."""

    @abstractmethod
    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryInfo:
    """Bytes. used: by purpose (weights, kv, adapters, workspace, graphs)."""

    total: int
    free: int
    used: Mapping[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Outputs:
    """logits: float32 `[L, V]`; hidden: by layer, the residual stream behind it, `[T, D]`."""

    logits: npt.NDArray[np.float32]
    hidden: Mapping[int, npt.NDArray[np.float32]]


class PendingOutputs(Protocol):
    """A step's outputs, perhaps still being computed."""

    def result(self) -> Outputs:
        """Wait and copy to the host. The step loop passes the object to `Device.sample` instead."""


class PendingTokens(Protocol):
    """A step's sampled tokens, perhaps still being computed."""

    def result(self) -> SampledTokens: ...


class Program(Protocol):
    """A compiled forward. Submits one step and returns without waiting for it.

    `previous` is what `sample` gave for the step before, where `batch.token_source` names its rows.
    """

    def __call__(self, batch: Batch, previous: PendingTokens | None) -> PendingOutputs: ...


class Device(ABC):
    """One opened accelerator: one rank."""

    capabilities: Capabilities
    ops: Ops

    @abstractmethod
    def put(self, parts: Sequence[Weight], shard: Shard | None = None) -> Handle:
        """Place weights, repacked as the device likes; the arrays given are not kept.

        Either matrices `[N_i, K]`, fused into one product with several outputs; or vectors `[N_i]`,
        concatenated (norm weights, biases, sinks); or stacks `[E, N_i, K]` of E experts. Parts may
        differ in encoding, each one of `capabilities.encodings`. A matrix may serve `embed` and
        `linear` both. Raises OutOfMemory.
        """

    @abstractmethod
    def kv_pool(self, spec: KVSpec, pages: int) -> KVPool:
        """Allocate `pages` pages, page 0 included, which only padding touches.

        Raises OutOfMemory.
        """

    @abstractmethod
    def adapter_pool(self, spec: AdapterSpec, slots: int) -> AdapterPool:
        """Allocate adapter slots, slot 0 included. Raises OutOfMemory."""

    @abstractmethod
    def compile(self, forward: Forward, *, hidden: Sequence[int] = ()) -> Program:
        """Turn a model's forward into a program. hidden: layers whose states `Outputs` returns."""

    @abstractmethod
    def sample(self, pending: PendingOutputs, batch: SamplingBatch) -> PendingTokens:
        """Sample from a step's logits as `SamplingBatch` specifies, without waiting for them."""

    @abstractmethod
    def memory(self) -> MemoryInfo: ...

    def tune(self, report: Callable[[str], None]) -> str | None:
        """Measure what the device's kernels leave open, such as block sizes, and keep the best
        choices for this card, where a later `open` finds them. Needs the card for itself for some
        minutes, and nothing placed on the device. `report` takes a line on each choice. Returns
        where they are kept; None, the default, where a device has nothing to tune. Raises
        DeviceError."""
        return None

    def ceilings(self, nbytes: int) -> Mapping[str, float]:
        """What the hardware does at most, measured in about a second, for the planner: `bandwidth`,
        bytes a second that are read out of a working set of `nbytes`, caches included; and by dtype
        of products (`f32`, `f16`, `bf16`, `int8`, `fp8`, `fp4`), as far as the hardware has them,
        operations a second, a multiplication and an addition being two. Empty, the default, where a
        device measures nothing. Raises DeviceError."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Release everything; pools, handles and programs of the device are closed with it, and
        using one of them, or the device, raises `DeviceError`. Closing it twice does nothing."""


@runtime_checkable
class Backend(Protocol):
    """What a plugin registers. Importing its module loads no vendor library; `probe` may.

    name: the `--backend` value. contract: the `CONTRACT_VERSION` it was built for. priority: third
    parties with a higher one come first under `--backend auto`.
    """

    name: str
    contract: tuple[int, int]
    priority: int

    def probe(self) -> Sequence[DeviceInfo] | Unavailable:
        """The devices that can run here, or why there are none, in words that name the fix."""

    def open(self, index: int, options: Mapping[str, str]) -> Device:
        """Open device `index` of `probe`'s list. Raises ValueError for an unknown option."""
