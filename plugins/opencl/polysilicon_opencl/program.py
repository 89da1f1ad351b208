"""Programs: a forward is run anew for each step, and enqueues its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from polysilicon.backend import Batch, Forward, Outputs, PendingTokens
from polysilicon.device_checks import check_indexes

from polysilicon_opencl.batches import Step
from polysilicon_opencl.sampling import DeviceTokens, HostTokens
from polysilicon_opencl.values import Value

if TYPE_CHECKING:
    from polysilicon_opencl.device import OpenCLDevice


class OpenCLProgram:
    """A forward and the layers whose states it gives back."""

    def __init__(self, device: OpenCLDevice, forward: Forward, hidden: Sequence[int]) -> None:
        self._device = device
        self._forward = forward
        self._hidden = tuple(hidden)

    def __call__(self, batch: Batch, previous: PendingTokens | None) -> PendingStep:
        device = self._device
        device.runtime.check_open()
        ops = device.ops
        ops.step = self._begin(batch, previous)
        try:
            outputs = self._forward(ops, ops.step.batch)
            logits = ops.contiguous(outputs.logits)
            hidden = {layer: ops.contiguous(outputs.hidden[layer]) for layer in self._hidden}
        finally:
            ops.step = None
        device.runtime.flush()
        return PendingStep(device, logits, hidden)

    def _begin(self, batch: Batch, previous: PendingTokens | None) -> Step:
        """Upload the batch, with the tokens that the step before sampled."""
        runtime = self._device.runtime
        taken = batch.token_source >= 0
        if not taken.any():
            return Step(runtime, batch, batch.tokens)
        if not isinstance(previous, HostTokens | DeviceTokens):
            raise ValueError(
                "token_source names rows of a previous step, but `previous` is not what this "
                "device's sample returned"
            )
        check_indexes("token_source", batch.token_source[taken], previous.rows)
        if isinstance(previous, HostTokens):
            tokens = batch.tokens.copy()
            tokens[taken] = previous.result().tokens[batch.token_source[taken]]
            return Step(runtime, batch, tokens)
        step = Step(runtime, batch, batch.tokens)
        runtime.launch(
            runtime.kernel("rows", "fill_tokens"), 1, 1, step.buffer, step.tokens_at,
            step.sources_at, step.tokens, previous.buffer,
        )  # fmt: skip
        return step


class PendingStep:
    """A step's outputs on the device."""

    def __init__(self, device: OpenCLDevice, logits: Value, hidden: dict[int, Value]) -> None:
        self.device = device
        self.logits = logits
        self._hidden = hidden
        self._outputs: Outputs | None = None

    def result(self) -> Outputs:
        if self._outputs is None:
            self._outputs = Outputs(
                logits=self._read(self.logits),
                hidden={layer: self._read(value) for layer, value in self._hidden.items()},
            )
        return self._outputs

    def _read(self, value: Value) -> npt.NDArray[np.float32]:
        array = np.empty((value.rows, value.columns), np.float32)
        runtime = self.device.runtime
        runtime.wait(runtime.start_download(value.buffer, array))
        return array
