"""FP8 checkpoints: a weight of 8-bit floats in place of each linear's, with scales beside it.

`fp8` is what Hugging Face writes, and DeepSeek: `weight_scale_inv`, a factor (in spite of its name)
of each block of 128 x 128 weights; or `weight_scale`, one of the whole matrix, as vLLM and AutoFP8
have it. `fbgemm_fp8` has `weight_scale`, one of each output. An element is `scale * decode(code)`.
"""

from __future__ import annotations

from collections.abc import Mapping

from polysilicon.errors import ModelError
from polysilicon.weights.files import TensorInfo
from polysilicon.weights.formats.checks import refuse
from polysilicon.weights.formats.dense import as_stored
from polysilicon.weights.formats.floats import FP8_FORMATS, fp8_reader
from polysilicon.weights.formats.format import LogicalTensor
from polysilicon.weights.formats.settings import Settings, expect_method, stated_settings
from polysilicon.weights.safetensors import SafetensorsDirectory

_SCALES = ("weight_scale_inv", "weight_scale")
# Of activations: static scales, and the most that dynamic ones may be.
_STATIC, _BOUND = ("input_scale", "activation_scale"), "input_scale_ub"
_PARTS = ("weight", *_SCALES, *_STATIC, _BOUND)


class FP8Format:
    """name: `fp8` or `fbgemm_fp8`, which is also the config's `quant_method`."""

    def __init__(self, name: str) -> None:
        self.name = name
        span = "128x128" if name == "fp8" else "row"
        self.encodings: Mapping[str, str] = {
            f"{name}:{format.removeprefix('f8_')}": f"float:{format}/{span}"
            for format in FP8_FORMATS.values()
        }

    def recognizes(self, files: SafetensorsDirectory) -> bool:
        settings = stated_settings(files)
        return settings is not None and settings.method == self.name

    def open(self, files: SafetensorsDirectory) -> Mapping[str, LogicalTensor]:
        settings = expect_method(files, self.name, frozenset({self.name}))
        block = None if settings is None else _block(settings)
        names = _modules(files)
        if not names:
            raise ModelError(
                f"{files.path} has no tensor NAME.weight of FP8, which {self.name} stores. "
                "Leave --quantization out, so that the format is found from the files."
            )
        parts = {f"{name}.{part}" for name in names for part in _PARTS}
        tensors = as_stored(files, (name for name in files.tensors if name not in parts))
        for name in names:
            tensors[f"{name}.weight"] = self._module(files, name, block)
        return tensors

    def _module(
        self, files: SafetensorsDirectory, name: str, block: tuple[int, int] | None
    ) -> LogicalTensor:
        def first(suffixes: tuple[str, ...]) -> str:
            """The one that is stored; the first where none is."""
            found = [f"{name}.{end}" for end in suffixes if f"{name}.{end}" in files.tensors]
            if len(found) > 1:
                raise refuse(files, found[1], f"is there beside {found[0]}, which means the same")
            return found[0] if found else f"{name}.{suffixes[0]}"

        read = fp8_reader(
            files, f"{name}.weight", first(_SCALES), block=block, static=first(_STATIC)
        )
        weight = files.tensors[f"{name}.weight"]
        stored_parts = (f"{name}.{part}" for part in _PARTS)
        info = TensorInfo(
            name=weight.name,
            type=f"{self.name}:{FP8_FORMATS[weight.type].removeprefix('f8_')}",
            shape=weight.shape,
            nbytes=sum(
                files.tensors[part].nbytes for part in stored_parts if part in files.tensors
            ),
        )
        return LogicalTensor(info=info, read=read)


def _block(settings: Settings) -> tuple[int, int] | None:
    """The blocks that share a scale, None where the config says nothing of them."""
    if not settings.fields.has("weight_block_size"):
        return None
    sizes = settings.fields.integers("weight_block_size", high=1 << 20)
    if len(sizes) != 2 or 0 in sizes:
        raise settings.fields.refuse("weight_block_size", "a list of 2 integers from 1 on")
    return sizes[0], sizes[1]


def _modules(files: SafetensorsDirectory) -> list[str]:
    """Names of modules with a weight of fp8, or with scales of one."""
    names = dict.fromkeys(
        name.removesuffix(".weight")
        for name, info in files.tensors.items()
        if name.endswith(".weight") and info.type in FP8_FORMATS
    )
    for suffix in _SCALES:
        names |= dict.fromkeys(
            name.removesuffix(f".{suffix}") for name in files.tensors if name.endswith(f".{suffix}")
        )
    return list(names)
