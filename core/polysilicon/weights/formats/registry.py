"""The formats that are known, and which one a checkpoint is in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polysilicon.errors import ModelError
from polysilicon.suggest import nearest
from polysilicon.weights.files import shown
from polysilicon.weights.formats import awq, compressed_tensors_config, gptq, modelopt, torchao
from polysilicon.weights.formats.awq import AWQFormat
from polysilicon.weights.formats.bitsandbytes import BitsAndBytesFormat
from polysilicon.weights.formats.compressed_tensors import CompressedTensorsFormat
from polysilicon.weights.formats.dense import DenseFormat, code_tensor
from polysilicon.weights.formats.format import CheckpointFormat
from polysilicon.weights.formats.fp8 import FP8Format
from polysilicon.weights.formats.gptq import GPTQFormat
from polysilicon.weights.formats.hqq import HQQFormat
from polysilicon.weights.formats.mlx import MLXFormat
from polysilicon.weights.formats.modelopt import ModelOptFormat
from polysilicon.weights.formats.mxfp4 import MXFP4Format
from polysilicon.weights.formats.settings import stated_settings
from polysilicon.weights.formats.torchao import TorchAOFormat
from polysilicon.weights.safetensors import SafetensorsDirectory

AUTO = "auto"
FORMATS: tuple[CheckpointFormat, ...] = (
    DenseFormat(),
    GPTQFormat("gptq", stored_less=1),
    GPTQFormat("gptq_v2", stored_less=0),
    AWQFormat(),
    MLXFormat(),
    BitsAndBytesFormat(),
    HQQFormat(),
    TorchAOFormat(),
    CompressedTensorsFormat(),
    FP8Format("fp8"),
    FP8Format("fbgemm_fp8"),
    ModelOptFormat(),
    MXFP4Format(),
)
"""Those of the core."""

REFUSED: Mapping[str, str] = {
    f"{name}:{layout}": why
    for name, layouts in {
        "gptq": gptq.REFUSED_LAYOUTS,
        "awq": awq.REFUSED_LAYOUTS,
        "torchao": torchao.REFUSED_LAYOUTS,
        "compressed-tensors": compressed_tensors_config.REFUSED_LAYOUTS,
        "modelopt": modelopt.REFUSED_ALGORITHMS,
    }.items()
    for layout, why in layouts.items()
}
"""What is known and not read, by type, with the reason."""


def choose_format(
    files: SafetensorsDirectory,
    *,
    quantization: str = AUTO,
    added: Sequence[CheckpointFormat] = (),
) -> CheckpointFormat:
    """The format named, or with `auto` the one that recognises the files.

    added: formats of plugins. Raises ModelError for a name that is not known, and where none or
    several recognise the files.
    """
    known = {format.name: format for format in (*FORMATS, *added)}
    if quantization != AUTO:
        if quantization not in known:
            raise ModelError(
                f"--quantization {shown(quantization)} is not known"
                f"{nearest(quantization, known)}. Use {AUTO}, {', '.join(known)}."
            )
        return known[quantization]
    found = [format for format in known.values() if format.recognizes(files)]
    if len(found) > 1:
        names = " and ".join(format.name for format in found)
        raise ModelError(
            f"{files.path} looks like {names}. Say which it is: --quantization {found[0].name}."
        )
    if not found:
        raise _unknown(files, list(known))
    return found[0]


def _unknown(files: SafetensorsDirectory, known: list[str]) -> ModelError:
    mend = (
        "Use the unquantised checkpoint (F32, F16 or BF16), a GGUF file, or one of "
        f"{', '.join(known)}; --quantization NAME says which it is."
    )
    settings = stated_settings(files)
    if settings is not None:
        method = shown(settings.method or "unnamed method")
        return ModelError(
            f"{files.path} is quantised with {method}, which is not supported as it is stored. "
            f"{mend}"
        )
    codes = code_tensor(files)
    assert codes is not None, "dense checkpoints are recognised"
    return ModelError(
        f"{files.path} stores tensor {shown(codes.name)} as {codes.type}: it is quantised by a "
        f"method that its config.json does not name, which is not supported. {mend}"
    )
