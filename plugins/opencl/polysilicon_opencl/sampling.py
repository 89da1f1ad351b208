"""Sampling: on the device where its kernels serve a batch, else on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyopencl as cl
from polysilicon.backend import SampledTokens, SamplingBatch, sample_on_host

_PART = 4096
"""Ids of the vocabulary that a work-group looks at."""

_SETTINGS = 11
"""Words of a row's settings, as `kernels/sampling.cl` lists them."""

if TYPE_CHECKING:
    from polysilicon_opencl.program import PendingStep
    from polysilicon_opencl.runtime import Runtime
    from polysilicon_opencl.values import Block


class HostTokens:
    """Tokens that the host samples once they are asked for."""

    def __init__(self, pending: PendingStep, batch: SamplingBatch) -> None:
        self.rows = len(batch.draw)
        self._pending: PendingStep | None = pending
        self._batch = batch
        self._sampled: SampledTokens | None = None

    def result(self) -> SampledTokens:
        if self._sampled is None:
            assert self._pending is not None
            self._sampled = sample_on_host(self._pending.result().logits, self._batch)
            self._pending = None
        return self._sampled


class DeviceTokens:
    """Tokens on the device, on their way to the host."""

    def __init__(self, runtime: Runtime, block: Block, rows: int) -> None:
        self.rows = rows
        self._runtime = runtime
        self._block = block
        self._tokens: npt.NDArray[np.int32] = np.empty(rows, np.int32)
        self._event = runtime.start_download(block.buffer, self._tokens)

    @property
    def buffer(self) -> cl.Buffer:
        return self._block.buffer

    def result(self) -> SampledTokens:
        self._runtime.wait(self._event)
        return SampledTokens(tokens=self._tokens.copy())


def sample(pending: PendingStep, batch: SamplingBatch) -> HostTokens | DeviceTokens:
    rows, vocabulary = pending.logits.rows, pending.logits.columns
    if len(batch.draw) != rows:
        raise ValueError(f"a sampling batch of {len(batch.draw)} rows for {rows} rows of logits")
    if not 0 <= batch.top_logprobs <= vocabulary:
        raise ValueError(
            f"top_logprobs is at most the vocabulary's {vocabulary}, got {batch.top_logprobs}"
        )
    if rows and _on_device(batch):
        return _sample_on_device(pending, batch)
    return HostTokens(pending, batch)


def _on_device(batch: SamplingBatch) -> bool:
    """Whether the kernels serve a batch: no lists, masks or log-probabilities, nor typical_p."""
    asked = (batch.bias, batch.counts, batch.mask, batch.targets)
    return (
        all(part is None for part in asked)
        and not batch.logprobs
        and not batch.top_logprobs
        and bool((batch.typical_p >= 1).all())
    )


def _sample_on_device(pending: PendingStep, batch: SamplingBatch) -> DeviceTokens:
    device, logits = pending.device, pending.logits
    runtime, workspace = device.runtime, device.workspace
    rows, vocabulary = logits.rows, logits.columns
    parts = -(-vocabulary // _PART)
    values, ids = workspace.take(4 * rows * parts), workspace.take(4 * rows * parts)
    largest, tokens = workspace.take(4 * rows), workspace.take(4 * rows)
    runtime.launch(
        runtime.kernel("sampling", "part_largest", PART=_PART), parts, rows, logits.buffer,
        vocabulary, values.buffer, ids.buffer,
    )  # fmt: skip
    runtime.launch(
        runtime.kernel("sampling", "row_largest", PART=_PART, LANES=1), rows, 1, values.buffer,
        ids.buffer, parts, largest.buffer, tokens.buffer,
    )  # fmt: skip
    drawn = batch.draw & (batch.temperature > 0)
    if drawn.any():
        settings = runtime.upload(_settings(batch, vocabulary))
        if (drawn & ((batch.top_k > 0) | (batch.top_p < 1))).any():
            runtime.launch(
                runtime.kernel("sampling", "cut", PART=_PART), rows, 1, logits.buffer, vocabulary,
                largest.buffer, settings,
            )  # fmt: skip
        runtime.launch(
            runtime.kernel("sampling", "part_race", PART=_PART), parts, rows, logits.buffer,
            vocabulary, largest.buffer, settings, values.buffer, ids.buffer,
        )  # fmt: skip
        runtime.launch(
            runtime.kernel("sampling", "row_winner", PART=_PART, LANES=1), rows, 1,
            values.buffer, ids.buffer, parts, tokens.buffer,
        )  # fmt: skip
    return DeviceTokens(runtime, tokens, rows)


def _settings(batch: SamplingBatch, vocabulary: int) -> npt.NDArray[np.uint32]:
    """One row of words for each row of logits; floats as their bits."""
    words = np.empty((len(batch.draw), _SETTINGS), np.uint32)
    floats = words.view(np.float32)
    words[:, 0] = batch.draw
    floats[:, 1] = batch.temperature
    words[:, 2] = batch.top_k
    floats[:, 3] = batch.top_p
    floats[:, 4] = batch.min_p
    words[:, 5] = batch.seed & np.uint64(0xFFFFFFFF)
    words[:, 6] = batch.seed >> np.uint64(32)
    words[:, 7] = batch.choice
    words[:, 8] = batch.position
    floats[:, 9] = -np.inf
    words[:, 10] = vocabulary
    return words
