"""Reading a checkpoint's tensors and placing them on a device, as a family asks for them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from polysilicon.backend import Device, Handle
from polysilicon.models.kv_scales import read_kv_scales
from polysilicon.models.names import Source
from polysilicon.models.quantizing import quantize_loaded
from polysilicon.models.stacking import stack_experts
from polysilicon.models.transcoding import narrow, transcode, transcode_vector
from polysilicon.progress import Advance
from polysilicon.weights.checkpoint import Checkpoint
from polysilicon.weights.encodings import Dense, Float32, GroupAffine, GroupFloat, Weight


class Placing:
    """The `Weights` of one load: reads, transcodes, places and counts.

    sources: of every parameter, by key. quantize: a key of `QUANTIZE_SCHEMES`, or None. kv_dtype:
    of the pools that the model will use, None where they are not known.
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
        kv_dtype: str | None = None,
    ) -> None:
        self.nbytes = 0
        self._kv_dtype = kv_dtype
        self._calibrated = 0
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
        self._unlike: Counter[tuple[str, str]] = Counter()
        # Stacks whose inputs come in the order in which their matrices are stored.
        self._ordered: set[str] = set()
        self._report([])

    def matrix(self, *keys: str, parts: Sequence[int] | None = None) -> Handle:
        weights = self._rounded(self._read(keys), keys)
        if parts is not None:
            weights = [
                weight.take_rows(rows)
                for weight, count in zip(weights, parts, strict=True)
                for rows in np.split(np.arange(weight.shape[0]), count)
            ]
        return self._place(weights, keys)

    def stack(self, *keys: str, feeds: str | None = None) -> Handle:
        experts = self._matrices(keys)
        ordered = any(_input_order(weight) is not None for held in experts for weight in held)
        if ordered and feeds is not None:
            # An order of the inputs of an expert of `feeds` is one of the outputs of its own here.
            orders = [_input_order(weight) for weight in self._matrices([feeds])[0]]
            experts = [
                [
                    w if order is None else w.take_rows(order)
                    for w, order in zip(held, orders, strict=True)
                ]
                for held in experts
            ]
            self._ordered.add(feeds)
        weights = []
        for key in keys:
            # Let go of once it is a stack.
            held = experts.pop(0)
            if key in self._ordered:
                held = [_without_order(weight) for weight in held]
            weights.append(held[0] if len(held[0].shape) == 3 else self._stacked(held))
        return self._place(self._rounded(weights, keys), keys)

    def _stacked(self, weights: Sequence[Weight]) -> Weight:
        stack = stack_experts(weights)
        if stack.encoding != weights[0].encoding:
            self._unlike[weights[0].encoding, stack.encoding] += 1
        return stack

    def vector(self, *keys: str, offset: float = 0.0) -> Handle:
        parts = []
        for weight in self._read(keys):
            values = weight.dequantize()
            if offset:
                values = values + np.float32(offset)
            parts.append(transcode_vector(values, self._device.capabilities))
        return self._put(parts, keys)

    def vectors(self, key: str) -> Sequence[Handle]:
        (weight,) = self._read([key])
        return [
            self._put([transcode_vector(row, self._device.capabilities)], [key])
            for row in weight.dequantize()
        ]

    def expert_bias(self, *keys: str) -> Handle:
        values = np.concatenate([weight.dequantize() for weight in self._read(keys)], axis=-1)
        return self._put([transcode_vector(values, self._device.capabilities)], keys)

    def computed(self, compute: Callable[..., Sequence[Float32]], *keys: str) -> Handle:
        weights = self._read(keys)
        wide = any(weight.encoding == "dense:f32" for weight in weights)
        values = compute(*(weight.dequantize() for weight in weights))
        return self._place([Dense(array=v) if wide else narrow(v) for v in values], keys)

    def kv_scales(self, key: str, value: str, *, heads: int) -> Mapping[str, Any]:
        if self._kv_dtype != "fp8_e4m3":
            return {}
        modules = (self._sources[name].tensors[0].removesuffix(".weight") for name in (key, value))
        scales = read_kv_scales(self._checkpoint, *modules, heads=heads)
        if scales is None:
            return {}
        self._calibrated += 1
        return {"kv_scales": scales} if self._device.capabilities.kv_scales else {}

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
        unlike = [
            f"{count} stacks of experts of {source} are held as {target}, as experts differ in the "
            "order of their inputs (act-order) or in their encoding."
            for (source, target), count in sorted(self._unlike.items())
        ]
        return quantized + unlike + transcoded + self._calibration_notes()

    def _calibration_notes(self) -> list[str]:
        if not self._calibrated:
            return []
        if self._device.capabilities.kv_scales:
            return [f"KV of {self._calibrated} layers has the scales that the checkpoint brings."]
        return ["The device stores KV with its own scales, not with those that the checkpoint has."]

    def _read(self, keys: Sequence[str]) -> list[Weight]:
        """The parameters of keys."""
        return [
            parts[0] if len(parts) == 1 else self._stacked(parts) for parts in self._matrices(keys)
        ]

    def _matrices(self, keys: Sequence[str]) -> list[list[Weight]]:
        """The parameters of keys, those that are stored expert by expert as their matrices. A
        tensor that holds several of them is decoded once."""
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
            weights.append(parts)
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


def _input_order(weight: Weight) -> npt.NDArray[np.int32] | None:
    return weight.input_order if isinstance(weight, GroupAffine | GroupFloat) else None


def _without_order(weight: Weight) -> Weight:
    if isinstance(weight, GroupAffine | GroupFloat):
        return dataclasses.replace(weight, input_order=None)
    return weight


def as_expected(weight: Weight, source: Source) -> Weight:
    """A tensor with its outputs first, and with the first axis where it is stored without."""
    if not isinstance(weight, Dense):
        return weight
    array = weight.array
    if source.inputs_first:
        array = np.ascontiguousarray(array.swapaxes(-1, -2))
    return Dense(array=array.reshape(source.shape))
