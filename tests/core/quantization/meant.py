"""What round-to-nearest makes of a checkpoint, computed beside what is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from polysilicon.quantization.directory import DirectoryOutput, choose_grids
from polysilicon.quantization.gguf_output import GGUF_FORMATS, GGUFOutput
from polysilicon.quantization.layouts import LAYOUTS
from polysilicon.quantization.output import Output
from polysilicon.quantization.source import ModelSource
from polysilicon.weights.checkpoint import Checkpoint
from polysilicon.weights.encodings import Float32


def meant(checkpoint: Checkpoint, to: str, folder: Path, **options: Any) -> dict[str, Float32]:
    """What round-to-nearest makes of a checkpoint's tensors, by the names of those written."""
    folder.mkdir()
    gguf = to in GGUF_FORMATS
    source = ModelSource(checkpoint, gguf=gguf, stacks=not gguf and LAYOUTS[to].stacks)
    output: Output
    if gguf:
        output = GGUFOutput(folder / "model.gguf", source, to)
    else:
        grids = choose_grids(source, to, options.get("bits"), options.get("group"))
        output = DirectoryOutput(folder, source, to, grids)
    values = {}
    for name, unit in source.units.items():
        fit, dense = output.fit(unit), source.values(unit)
        if fit is None:
            narrow = (
                np.float32
                if gguf
                else {"f16": np.float16, "bf16": ml_dtypes.bfloat16}[source.dense_dtype]
            )
            values[name] = dense.astype(narrow).astype(np.float32)
            continue
        rounded = []
        for matrix in dense.reshape(-1, *dense.shape[-2:]):
            grid = fit(matrix, None)
            rounded.append(grid.weight(grid.nearest(matrix)).dequantize())
        values[name] = np.stack(rounded).reshape(dense.shape)
    return values
