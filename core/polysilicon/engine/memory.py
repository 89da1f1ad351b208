"""How the engine shares out what its device has free once the weights are placed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from polysilicon.backend import KVSpec
from polysilicon.config import Config
from polysilicon.errors import ConfigError
from polysilicon.models.model import Model
from polysilicon.plan.bill import (
    Bill,
    adapter_bytes,
    prompt_logits_bytes,
    workspace_bytes,
)
from polysilicon.plan.kv import plan_pages
from polysilicon.plan.units import size

KV_SHARE = 0.4
"""Share of a device's free memory that KV takes when no budget is given."""

LEAST_KV_SHARE = 0.1
"""Share that it takes then even where steps may take nearly all, which most steps do not."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryShares:
    """pages: of each KV group. bill: what everything takes. notes: what the user should know."""

    pages: tuple[int, ...]
    bill: Bill
    notes: tuple[str, ...]


def share_memory(
    config: Config,
    model: Model,
    specs: Sequence[KVSpec],
    *,
    free: int,
    max_adapters: int,
    max_adapter_rank: int,
) -> MemoryShares:
    """Pages for KV, by `--kv-pages`, `--kv-memory`, or a share of what is `free`, with room left
    for adapters and for what steps take beside.

    Raises ConfigError naming the mend where what is asked for does not fit, or not one page does.
    """
    workspace = workspace_bytes(
        model.config, step_tokens=config.step_tokens, max_sequences=config.max_sequences
    )
    linears = [
        (target.inputs, outputs)
        for target in (model.adapter_targets().values() if max_adapters else ())
        for outputs in target.outputs
    ]
    adapters = adapter_bytes(linears, adapters=max_adapters, rank=max_adapter_rank)
    left = free - workspace - adapters
    if config.kv_pages is not None:
        pages = (config.kv_pages,) * len(specs)
    else:
        pages = plan_pages(
            specs,
            budget=config.kv_memory or int(min(free * KV_SHARE, max(left, free * LEAST_KV_SHARE))),
            max_sequences=config.max_sequences,
            max_length=model.config.max_length,
            step_tokens=config.step_tokens,
        )
    bill = Bill(
        weights=model.nbytes,
        kv={spec.name: count * spec.page_bytes for spec, count in zip(specs, pages, strict=True)},
        adapters=adapters,
        workspace=workspace,
        prompt_logits=prompt_logits_bytes(model.config, step_tokens=config.step_tokens),
    )
    kv = bill.kv_total
    if kv > left and (config.kv_memory or config.kv_pages):
        beside = f"steps take about {size(workspace)}"
        if adapters:
            beside += f" and adapters {size(adapters)}"
        mend = f"leave --kv-memory at {size(left)} or less" if left > 0 else "free some memory"
        raise ConfigError(
            f"the KV cache does not fit: it takes {size(kv)} of {size(free)} that are free, and "
            f"{beside}: {mend}, or lower --kv-pages, --max-sequences, --max-length or --step-tokens"
        )
    notes = [f"memory: {bill}; {size(free - kv)} are free beside weights and KV"]
    wanted = config.kv_memory
    if config.kv_pages is None and wanted and kv + sum(s.page_bytes for s in specs) <= wanted:
        notes.append(
            f"the KV cache takes {size(kv)} of --kv-memory {size(wanted)}: --max-sequences "
            f"{config.max_sequences:,} of {model.config.max_length:,} tokens need no more"
        )
    return MemoryShares(pages=pages, bill=bill, notes=tuple(notes))
