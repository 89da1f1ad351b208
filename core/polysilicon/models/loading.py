"""From an open checkpoint to a model on a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from polysilicon.backend import Device, Handle
from polysilicon.errors import ConfigError, ModelError
from polysilicon.models.architecture import Architecture, TensorNames
from polysilicon.models.config import ModelConfig
from polysilicon.models.fields import Fields
from polysilicon.models.hf_config import MAX_POSITIONS
from polysilicon.models.model import Model
from polysilicon.models.registry import architectures, find_gguf, find_hf
from polysilicon.models.transcoding import transcode, transcode_vector
from polysilicon.progress import Advance
from polysilicon.weights.checkpoint import Checkpoint
from polysilicon.weights.encodings import Weight
from polysilicon.weights.files import shown
from polysilicon.weights.gguf import GGUFFile
from polysilicon.weights.safetensors import SafetensorsDirectory


def load_model(
    checkpoint: Checkpoint,
    device: Device,
    *,
    max_length: int | None = None,
    progress: Advance | None = None,
    added: Sequence[Architecture] = (),
) -> Model:
    """Read a checkpoint's parameters, place its weights on a device and build the model.

    max_length: tokens of context to load for, which settles rotary scalings that depend on it; None
    for as many as the model was trained for.
    progress: called with the bytes of the checkpoint that are placed and those there are in all.
    added: architectures of plugins.

    Weights in an encoding that the device does not take are transcoded, and `Model.notes` says so.
    Each tensor is let go of once it is placed. Raises ModelError for a checkpoint that is malformed
    or of an unknown architecture (before anything is placed), ConfigError for max_length, and
    what `Device.put` raises.
    """
    family, config, names = read_config(checkpoint, max_length=max_length, added=added)
    shapes = family.shapes(config)
    tensors = {key: names.of(key) for key in shapes}
    _check(checkpoint, family, config, names, shapes)
    placing = _Placing(checkpoint, device, tensors, progress)
    model = family.build(config, placing)
    model.notes = (*_context_notes(config), *placing.notes())
    model.nbytes = placing.nbytes
    return model


def read_config(
    checkpoint: Checkpoint,
    *,
    max_length: int | None = None,
    added: Sequence[Architecture] = (),
) -> tuple[Architecture, ModelConfig, TensorNames]:
    """A checkpoint's family, parameters and names of tensors, without its weights.

    Raises ModelError and ConfigError, as `load_model` does.
    """
    if max_length is not None and not 1 <= max_length <= MAX_POSITIONS:
        raise ConfigError(f"max_length is {max_length}. Use a number from 1 to {MAX_POSITIONS}.")
    families = architectures(added)
    if isinstance(checkpoint, GGUFFile):
        fields = Fields(checkpoint.metadata, str(checkpoint.path))
        family = find_gguf(fields, families)
        return family, family.read_gguf(fields, checkpoint, max_length), family.gguf_tensors
    assert isinstance(checkpoint, SafetensorsDirectory)
    fields = Fields(checkpoint.config, str(checkpoint.path / "config.json"))
    family = find_hf(fields, families)
    spellings = family.hf_tensors
    found = [names for names in spellings if names.of("embedding.weight") in checkpoint.tensors]
    return family, family.read_hf(fields, max_length), (found or spellings)[0]


def _check(
    checkpoint: Checkpoint,
    family: Architecture,
    config: ModelConfig,
    names: TensorNames,
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Hold the checkpoint's tensors against those that the config calls for.

    Tensors that the family does not know are left alone. One that it knows and this config denies,
    such as a bias, would change the result if it were meant to be used.
    """
    for key, shape in shapes.items():
        name = names.of(key)
        if name not in checkpoint.tensors:
            raise ModelError(
                f"{checkpoint.path} lacks tensor {shown(name)}, expected with shape {shape}. "
                "Use the complete checkpoint of this model."
            )
        found = checkpoint.tensors[name].shape
        if found != shape:
            raise ModelError(
                f"{checkpoint.path}: tensor {shown(name)} has shape {found}, expected {shape}. "
                "The parameters and the weights are not of one model: download both again."
            )
    wanted = {names.of(key) for key in shapes}
    modules = [module.removeprefix("layers.") for module in names.modules if "layers." in module]
    for layer in range(config.layers):
        for module in modules:
            for kind in ("weight", "bias"):
                name = names.of(f"layers.{layer}.{module}.{kind}")
                if name in checkpoint.tensors and name not in wanted:
                    raise ModelError(
                        f"{checkpoint.path} has tensor {shown(name)}, for which {family.name} with "
                        "these parameters has no use. The parameters and the weights are not of "
                        "one model, or it is a variant that is not supported."
                    )


def _context_notes(config: ModelConfig) -> list[str]:
    if config.max_length <= config.max_position:
        return []
    return [
        f"The model is loaded for {config.max_length} tokens of context, but was trained for "
        f"{config.max_position}."
    ]


class _Placing:
    """The `Weights` of one load: reads, transcodes, places and counts."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: Device,
        tensors: Mapping[str, str],
        progress: Advance | None,
    ) -> None:
        self.nbytes = 0
        self._checkpoint = checkpoint
        self._device = device
        self._tensors = tensors
        self._progress = progress
        self._done = 0
        self._total = sum(checkpoint.tensors[name].nbytes for name in tensors.values())
        self._transcoded: Counter[tuple[str, str]] = Counter()
        self._report(0)

    def matrix(self, *keys: str) -> Handle:
        parts = []
        for key in keys:
            weight = self._checkpoint.weight(self._tensors[key])
            part = transcode(weight, self._device.capabilities)
            if part is not weight:
                self._transcoded[weight.encoding, part.encoding] += 1
            parts.append(part)
        return self._put(parts, keys)

    def vector(self, *keys: str, offset: float = 0.0) -> Handle:
        parts = []
        for key in keys:
            values = self._checkpoint.weight(self._tensors[key]).dequantize()
            if offset:
                values = values + np.float32(offset)
            parts.append(transcode_vector(values, self._device.capabilities))
        return self._put(parts, keys)

    def notes(self) -> list[str]:
        return [
            f"{count} matrices of {source} are held as {target}, as the device does not run "
            f"{source}."
            for (source, target), count in sorted(self._transcoded.items())
        ]

    def _put(self, parts: list[Weight], keys: Sequence[str]) -> Handle:
        handle = self._device.put(parts)
        self.nbytes += handle.nbytes
        self._report(sum(self._checkpoint.tensors[self._tensors[key]].nbytes for key in keys))
        return handle

    def _report(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)
