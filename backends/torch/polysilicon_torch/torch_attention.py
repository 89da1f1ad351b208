"""Paged attention in plain torch operations, one sequence at a time, in float32."""

from __future__ import annotations

import torch

from polysilicon_torch.batches import DeviceBatch
from polysilicon_torch.kernels import AttentionSettings, DeviceRope, HeadNorm
from polysilicon_torch.planes import KVPlanes

_QUERY_BLOCK = 256
"""Queries scored at once: bounds the score matrix of a long prefill."""

_LEAST_NORMAL = torch.finfo(torch.float32).tiny


def attention(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    batch: DeviceBatch,
    planes: KVPlanes,
    layer: int,
    settings: AttentionSettings,
) -> torch.Tensor:
    """See `Kernels.attention`; float32 `[T, H * Dv]`, zeros for padding."""
    queries = _prepared(q, settings.heads, batch, settings.rope, settings.q_norm)
    key_heads = planes.k.shape[2]
    if k is not None and v is not None:
        keys = _prepared(k, key_heads, batch, settings.rope, settings.k_norm)
        values = v.float().unflatten(-1, (key_heads, -1))
        slots = batch.slots[planes.group]
        _store(planes, "k", layer, slots, keys, settings.key_scales)
        _store(planes, "v", layer, slots, values, settings.value_scales)
    starts, contexts = batch.query_start.tolist(), batch.context_len.tolist()
    output = queries.new_zeros((len(queries), settings.heads, planes.v.shape[-1]))
    for sequence, context in enumerate(contexts):
        begin, end = starts[sequence : sequence + 2]
        if begin == end:
            continue
        pages = batch.page_tables[planes.group][sequence]
        before = context - (end - begin)
        low = 0
        if planes.window is not None:
            least = int(batch.positions[begin:end].min())
            low = min(before, max(0, least - planes.window + 1))
        keys, values = (_load(planes, name, layer, pages, low, context) for name in ("k", "v"))
        for first in range(begin, end, _QUERY_BLOCK):
            rows = slice(first, min(first + _QUERY_BLOCK, end))
            visible = _visible(batch, planes.window, rows, (begin, end), (low, context), settings)
            output[rows] = _attend(queries[rows], keys, values, visible, settings)
    return output.flatten(1)


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps)` over the last axis."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)


def rotate(x: torch.Tensor, positions: torch.Tensor, rope: DeviceRope) -> torch.Tensor:
    """`Ops.rope` of float32 `[T, heads, Dh]`."""
    angles = positions[:, None, None].double() * rope.frequencies.double()
    cosine, sine = ((f(angles) * rope.scale).float() for f in (torch.cos, torch.sin))
    rotated, rest = x[..., : rope.dim], x[..., rope.dim :]
    if rope.interleaved:
        a, b = rotated.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        a, b = rotated.chunk(2, dim=-1)
    turned = torch.stack((a * cosine - b * sine, b * cosine + a * sine), dim=-1)
    turned = turned.flatten(-2) if rope.interleaved else turned.transpose(-1, -2).flatten(-2)
    return torch.cat((turned, rest), dim=-1)


def turn(x: torch.Tensor) -> torch.Tensor:
    """The Walsh-Hadamard transform of `KV_DTYPES` over the last axis; its own inverse."""
    dim = x.shape[-1]
    block = dim & -dim
    turned, size = x.reshape(-1, block), 1
    while size < block:
        first, second = turned.reshape(-1, block // (2 * size), 2, size).unbind(2)
        turned = torch.stack((first + second, first - second), dim=2).reshape(-1, block)
        size *= 2
    return (turned * block**-0.5).reshape(x.shape)


def _prepared(
    x: torch.Tensor, heads: int, batch: DeviceBatch, rope: DeviceRope | None, norm: HeadNorm | None
) -> torch.Tensor:
    """Norm and rotation of queries or keys: float32 `[T, heads, Dh]`."""
    x = x.float().unflatten(-1, (heads, -1))
    if norm is not None:
        x = rms(x, norm.eps) * norm.weight
    return x if rope is None else rotate(x, batch.positions, rope)


def _store(
    planes: KVPlanes,
    name: str,
    layer: int,
    slots: torch.Tensor,
    rows: torch.Tensor,
    calibrated: torch.Tensor | None,
) -> None:
    """Write float32 `[T, heads, dim]` at slots `[T]`; calibrated: the scales of fp8, or None."""
    plane = getattr(planes, name)[layer]
    page, offset = slots.div(planes.page_size, rounding_mode="floor"), slots % planes.page_size
    scales = getattr(planes, f"{name}_scale")
    if scales is None:
        plane[page, :, offset] = rows.to(plane.dtype)
        return
    rows, largest = (turn(rows), 127) if plane.dtype == torch.int8 else (rows, 448)
    scale = rows.abs().amax(dim=-1) / largest
    scale = torch.where(scale < _LEAST_NORMAL, 0.0, scale)
    own = scale if calibrated is None else calibrated
    scale = torch.where(scale.isfinite(), own, torch.nan)
    codes = torch.where((scale > 0)[..., None], rows / scale[..., None], 0.0)
    codes = codes.round() if plane.dtype == torch.int8 else codes.clamp(-largest, largest)
    plane.view(torch.uint8)[page, :, offset] = codes.to(plane.dtype).view(torch.uint8)
    scales[layer][page, :, offset] = scale


def _load(
    planes: KVPlanes, name: str, layer: int, pages: torch.Tensor, low: int, high: int
) -> torch.Tensor:
    """What context tokens `low` to `high` of a sequence stored: float32 `[heads, n, dim]`."""
    size = planes.page_size
    first = low // size
    own = pages[first : -(-high // size)]
    wanted = slice(low - first * size, high - first * size)

    def rows(plane: torch.Tensor) -> torch.Tensor:
        """`[heads, n, ...]` of `[pages, heads, page_size, ...]`."""
        return plane[own].transpose(0, 1).flatten(1, 2)[:, wanted]

    plane = getattr(planes, name)[layer]
    values = rows(plane.view(torch.uint8)).view(plane.dtype).float()
    scales = getattr(planes, f"{name}_scale")
    if scales is None:
        return values
    values = values * rows(scales[layer])[..., None]
    return turn(values) if plane.dtype == torch.int8 else values


def _visible(
    batch: DeviceBatch,
    window: int | None,
    rows: slice,
    own: tuple[int, int],
    span: tuple[int, int],
    settings: AttentionSettings,
) -> torch.Tensor:
    """What each of the query rows sees of the context `span`: bool `[rows, span]`. own: the
    sequence's tokens in the step, the last of its context."""
    (begin, end), (low, high) = own, span
    before = high - (end - begin)
    positions = batch.positions
    queries, step = positions[rows, None], torch.arange(end - begin)
    if batch.tree_mask is not None:
        among_own = batch.tree_mask[rows, : end - begin]
    elif settings.causal:
        among_own = step <= torch.arange(rows.start - begin, rows.stop - begin)[:, None]
    else:
        among_own = torch.ones((len(queries), end - begin), dtype=torch.bool)
    earlier = torch.ones((len(queries), before - low), dtype=torch.bool)
    visible = torch.cat((earlier, among_own), dim=1)
    if window is not None:
        key_positions = torch.cat((torch.arange(low, before), positions[begin:end]))
        visible &= key_positions > queries - window
    return visible


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    settings: AttentionSettings,
) -> torch.Tensor:
    """Queries `[n, H, Dh]`, keys `[Hk, C, Dh]`, values `[Hk, C, Dv]`, visible `[n, C]`: `[n, H,
    Dv]`."""
    count, heads, _ = q.shape
    key_heads = len(keys)
    grouped = q.transpose(0, 1).unflatten(0, (key_heads, -1)).flatten(1, 2)
    scores = (grouped @ keys.transpose(1, 2) * settings.scale).reshape(heads, count, -1)
    if settings.softcap is not None:
        scores = torch.tanh(scores / settings.softcap) * settings.softcap
    scores = scores.masked_fill(~visible, -torch.inf)
    largest = scores.amax(dim=-1, keepdim=True)
    if settings.sinks is not None:
        largest = largest.maximum(settings.sinks[:, None, None])
    largest = largest.masked_fill(largest == -torch.inf, 0)
    weights = torch.exp(scores - largest)
    total = weights.sum(dim=-1, keepdim=True)
    if settings.sinks is not None:
        total = total + torch.exp(settings.sinks[:, None, None] - largest)
    mixed = weights.reshape(key_heads, -1, weights.shape[-1]) @ values
    mixed = mixed.reshape(heads, count, -1) / total.masked_fill(total == 0, 1)
    return mixed.transpose(0, 1)
