"""From an open checkpoint to a model on a device."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from polysilicon.backend import Device
from polysilicon.errors import ConfigError, ModelError
from polysilicon.models.architecture import Architecture
from polysilicon.models.config import ModelConfig
from polysilicon.models.hf_config import MAX_POSITIONS
from polysilicon.models.model import Model
from polysilicon.models.names import Shape, Source, TensorNames
from polysilicon.models.placing import Placing
from polysilicon.models.quantizing import check_dense
from polysilicon.models.registry import architectures, find_gguf, find_hf
from polysilicon.progress import Advance
from polysilicon.weights.checkpoint import Checkpoint, SafetensorsCheckpoint
from polysilicon.weights.fields import Fields
from polysilicon.weights.files import shown
from polysilicon.weights.gguf import GGUFFile
from polysilicon.weights.safetensors import SUPPORTED_TYPES


def load_model(
    checkpoint: Checkpoint,
    device: Device,
    *,
    max_length: int | None = None,
    quantize: str | None = None,
    kv_dtype: str | None = None,
    progress: Advance | None = None,
    added: Sequence[Architecture] = (),
) -> Model:
    """Read a checkpoint's parameters, place its weights on a device and build the model.

    max_length: tokens of context to load for, which settles rotary scalings that depend on it; None
    for as many as the model was trained for.
    quantize: a key of `QUANTIZE_SCHEMES`, by which a dense checkpoint's matrices are rounded first.
    kv_dtype: of the pools that the model is to use; `fp8_e4m3` takes the scales that the checkpoint
    was calibrated for, None takes none.
    progress: called with the bytes of the checkpoint that are placed and those there are in all.
    added: architectures of plugins.

    Weights in an encoding that the device does not take are transcoded, and `Model.notes` says so.
    Each tensor is let go of once it is placed. Raises ModelError for a checkpoint that is malformed
    or of an unknown architecture (before anything is placed), ConfigError for max_length and for
    `quantize` of a checkpoint that is quantised already, and what `Device.put` raises.
    """
    family, config, names = read_config(checkpoint, max_length=max_length, added=added)
    sources = find_sources(checkpoint, family, config, names)
    if quantize is not None:
        tensors = (name for source in sources.values() for name in source.tensors)
        types = (checkpoint.tensors[name].type for name in tensors)
        check_dense(types, quantize, str(checkpoint.path))
    placing = Placing(checkpoint, device, sources, progress, quantize=quantize, kv_dtype=kv_dtype)
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
    assert isinstance(checkpoint, SafetensorsCheckpoint)
    fields = Fields(checkpoint.config, str(checkpoint.path / "config.json"))
    family = find_hf(fields, families)
    config = family.read_hf(fields, max_length)
    names = max(
        family.hf_tensors,
        key=lambda names: len(names.of_layers(checkpoint.tensors, config.layers)),
    )
    return family, config, names


def find_sources(
    checkpoint: Checkpoint, family: Architecture, config: ModelConfig, names: TensorNames
) -> dict[str, Source]:
    """Where each parameter stands, by key, in the order of the family.

    Raises ModelError for a tensor that is missing or of another shape than the config calls for,
    and for one that the family knows and this config has no use for.
    """
    sources = _find(checkpoint, names, family.shapes(config))
    _check_unused(checkpoint, family, config, names, sources.values())
    return sources


def _find(
    checkpoint: Checkpoint, names: TensorNames, shapes: Mapping[str, Shape]
) -> dict[str, Source]:
    """Where each parameter stands, its tensors held against what the config calls for."""
    sources = {}
    for key in shapes:
        source = sources[key] = names.source(key, shapes)
        for name in source.tensors:
            found = checkpoint.tensors.get(name)
            if found is None:
                raise ModelError(
                    f"{checkpoint.path} lacks tensor {shown(name)}, expected with shape "
                    f"{source.shape}. Use the complete checkpoint of this model."
                )
            expected = source.stored_shapes(found.type not in SUPPORTED_TYPES)
            if found.shape not in expected:
                raise ModelError(
                    f"{checkpoint.path}: tensor {shown(name)} has shape {found.shape}, expected "
                    f"{expected[0]}. The parameters and the weights are not of one model: "
                    "download both again."
                )
    return sources


def _check_unused(
    checkpoint: Checkpoint,
    family: Architecture,
    config: ModelConfig,
    names: TensorNames,
    sources: Collection[Source],
) -> None:
    """Refuse tensors that the family knows and this config denies, such as a bias: they would
    change the result if they were meant to be used. Those that it does not know are left alone, and
    biases of zeros, which some tools give every linear."""
    wanted = {name for source in sources for name in source.tensors}
    for name in names.of_layers(checkpoint.tensors, config.layers):
        if name not in wanted and not _is_zero_bias(checkpoint, name):
            raise ModelError(
                f"{checkpoint.path} has tensor {shown(name)}, for which {family.name} with "
                "these parameters has no use. The parameters and the weights are not of "
                "one model, or it is a variant that is not supported."
            )


def _is_zero_bias(checkpoint: Checkpoint, name: str) -> bool:
    return name.endswith(".bias") and not checkpoint.weight(name).dequantize().any()


def _context_notes(config: ModelConfig) -> list[str]:
    if config.max_length <= config.max_position:
        return []
    return [
        f"The model is loaded for {config.max_length} tokens of context, but was trained for "
        f"{config.max_position}."
    ]
