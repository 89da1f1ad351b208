"""Reading a checkpoint's tensors and placing them on a device, as a family asks for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from polysilicon.backend import Device, Handle
from polysilicon.models.names import Source
from polysilicon.models.quantizing import quantize_loaded
from polysilicon.models.transcoding import narrow, transcode, transcode_vector
from polysilicon.progress import Advance
from polysilicon.weights.checkpoint import Checkpoint
from polysilicon.weights.encodings import Dense, Float32, Weight
from polysilicon.weights.stacks import stack_weights


class Placing:
    """The `Weights` of one load: reads, transcodes, places and counts.

    sources: of every parameter, by key. quantize: a key of `QUANTIZE_SCHEMES`, or None.
    nbytes: placed so far.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: Device,
        sources: Mapping[str, Source],
        progress: Advance | None,
        *,
        quantize: str | None = None,
    ) -> None:
        self.nbytes = 0
        self._quantize = quantize
        self._quantized: Counter[tuple[str, str]] = Counter()
        self._checkpoint = checkpoint
        self._device = device
        self._sources = sources
        self._progress = progress
        self._unread = {
            name: checkpoint.tensors[name].nbytes
            for source in sources.values()
            for name in source.tensors
        }
        self._done, self._total = 0, sum(self._unread.values())
        self._transcoded: Counter[tuple[str, str]] = Counter()
        self._report([])

    def matrix(self, *keys: str) -> Handle:
        return self._place(self._rounded(self._read(keys), keys), keys)

    def stack(self, *keys: str) -> Handle:
        weights = [
            weight if len(weight.shape) == 3 else stack_weights([weight])
            for weight in self._read(keys)
        ]
        return self._place(self._rounded(weights, keys), keys)

    def vector(self, *keys: str, offset: float = 0.0) -> Handle:
        parts = []
        for weight in self._read(keys):
            values = weight.dequantize()
            if offset:
                values = values + np.float32(offset)
            parts.append(transcode_vector(values, self._device.capabilities))
        return self._put(parts, keys)

    def expert_bias(self, *keys: str) -> Handle:
        values = np.concatenate([weight.dequantize() for weight in self._read(keys)], axis=-1)
        return self._put([transcode_vector(values, self._device.capabilities)], keys)

    def computed(self, compute: Callable[..., Sequence[Float32]], *keys: str) -> Handle:
        weights = self._read(keys)
        wide = any(weight.encoding == "dense:f32" for weight in weights)
        values = compute(*(weight.dequantize() for weight in weights))
        return self._place([Dense(array=v) if wide else narrow(v) for v in values], keys)

    def notes(self) -> list[str]:
        quantized = [
            f"{count} matrices of {source} are quantised to {target} (--quantize {self._quantize})."
            if source != target
            else f"{count} matrices stay {source}, as --quantize {self._quantize} leaves them."
            for (source, target), count in sorted(self._quantized.items())
        ]
        transcoded = [
            f"{count} matrices of {source} are held as {target}, as the device does not run "
            f"{source}."
            for (source, target), count in sorted(self._transcoded.items())
        ]
        return quantized + transcoded

    def _read(self, keys: Sequence[str]) -> list[Weight]:
        """The parameters of keys. A tensor that holds several of them is decoded once."""
        fused: dict[str, Weight] = {}
        weights = []
        for key in keys:
            source = self._sources[key]
            parts = []
            for name in source.tensors:
                weight = fused.get(name) or as_expected(self._checkpoint.weight(name), source)
                if source.rows is not None:
                    fused[name] = weight
                parts.append(source.take(weight))
            weights.append(parts[0] if len(parts) == 1 else stack_weights(parts))
        return weights

    def _rounded(self, weights: list[Weight], keys: Sequence[str]) -> list[Weight]:
        """The matrices of keys as `--quantize` wants them."""
        if self._quantize is None:
            return weights
        source, rounded = str(self._checkpoint.path), []
        for weight, key in zip(weights, keys, strict=True):
            rounded.append(quantize_loaded(weight, key, self._quantize, source))
            self._quantized[weight.encoding, rounded[-1].encoding] += 1
        return rounded

    def _place(self, weights: Sequence[Weight], keys: Sequence[str]) -> Handle:
        parts = []
        for weight in weights:
            part = transcode(weight, self._device.capabilities)
            if part is not weight:
                self._transcoded[weight.encoding, part.encoding] += 1
            parts.append(part)
        return self._put(parts, keys)

    def _put(self, parts: Sequence[Weight], keys: Sequence[str]) -> Handle:
        handle = self._device.put(parts)
        self.nbytes += handle.nbytes
        self._report([name for key in keys for name in self._sources[key].tensors])
        return handle

    def _report(self, tensors: Sequence[str]) -> None:
        self._done += sum(self._unread.pop(name, 0) for name in tensors)
        if self._progress is not None:
            self._progress(self._done, self._total)


def as_expected(weight: Weight, source: Source) -> Weight:
    """A tensor with its outputs first, and with the first axis where it is stored without."""
    if not isinstance(weight, Dense):
        return weight
    array = weight.array
    if source.inputs_first:
        array = np.ascontiguousarray(array.swapaxes(-1, -2))
    return Dense(array=array.reshape(source.shape))
