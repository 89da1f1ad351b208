"""A compiled forward: run eagerly, or where steps are small replayed from captured graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from polysilicon.backend import Batch, Forward, PendingTokens
from polysilicon.device_checks import check_indexes
from polysilicon_torch.batches import Buckets, StepBuffer
from polysilicon_torch.errors import contract_errors
from polysilicon_torch.graphs import GraphCache, StepOutputs
from polysilicon_torch.ops import Resource, check_resources
from polysilicon_torch.pending import PendingStep, TorchPendingTokens

if TYPE_CHECKING:
    from polysilicon_torch.device import TorchDevice


class TorchProgram:
    """See `polysilicon.backend.Program`."""

    def __init__(self, device: TorchDevice, forward: Forward, hidden: Sequence[int]) -> None:
        self.hidden = tuple(hidden)
        self._device = device
        self._forward = forward
        self._resources: set[Resource] = set()
        graphs = device.runtime.graphs if device.options.graphs else None
        self.graphs = None if graphs is None else GraphCache(device.runtime, graphs, self._run)

    def __call__(self, batch: Batch, previous: PendingTokens | None) -> PendingStep:
        device = self._device
        device.check_open()
        check_resources(self._resources)
        source = _source(device, batch, previous)
        buckets = Buckets.of(batch)
        with contract_errors(f"a step of {len(batch.tokens)} tokens"), device.runtime.active():
            graph = None if self.graphs is None else self.graphs.find(buckets)
            step = StepBuffer(device.runtime, buckets) if graph is None else graph.step
            step.fill(batch)
            if source is not None:
                device.kernels.gather_tokens(step.batch.tokens, step.batch.token_source, source)
            outputs = self._run(step) if graph is None else graph.replay()
            rows, tokens = len(batch.logit_rows), len(batch.tokens)
            logits = outputs.logits[:rows]
            hidden = tuple(states[:tokens] for states in outputs.hidden)
            if graph is not None:  # the next replay writes into the same tensors
                logits, hidden = logits.clone(), tuple(states.clone() for states in hidden)
            return PendingStep(device, self.hidden, logits, hidden)

    def forget(self) -> None:
        """Let go of what was captured: the device is closed."""
        self.graphs = None

    def _run(self, step: StepBuffer) -> StepOutputs:
        """The forward, eagerly or while it is captured."""
        ops: Any = self._device.ops
        ops.used = self._resources
        try:
            outputs = self._forward(ops, step.batch)  # type: ignore[arg-type]
        finally:
            ops.used = None
        return StepOutputs(
            logits=outputs.logits.float(),
            hidden=tuple(outputs.hidden[layer] for layer in self.hidden),
        )


def _source(
    device: TorchDevice, batch: Batch, previous: PendingTokens | None
) -> torch.Tensor | None:
    """The tokens of the step before, where the batch names rows of them."""
    rows = batch.token_source[batch.token_source >= 0]
    if not len(rows):
        return None
    if previous is None:
        raise ValueError("token_source names rows of a previous step, but there is none")
    if not isinstance(previous, TorchPendingTokens) or previous.device is not device:
        raise ValueError("`previous` is not what this device's sample returned")
    check_indexes("token_source", rows, len(previous.sampled.tokens))
    return previous.sampled.tokens
