"""Metal kernels without Metal: their bodies through the system's C++ compiler."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ATTRIBUTES = {
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "thread_index_in_simdgroup": "uint32_t",
    "simdgroup_index_in_threadgroup": "uint32_t",
}
"""Of those that MLX passes where the source names them."""

TYPES = {
    "float32": "float", "float16": "half", "bfloat16": "bfloat", "int8": "int8_t",
    "uint8": "uint8_t", "bool": "bool", "int32": "int32_t", "uint32": "uint32_t",
}  # fmt: skip

FLAGS = ["-std=c++17", "-O1", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter",
         "-Wno-unused-variable", "-Wno-maybe-uninitialized"]  # fmt: skip
"""What a kernel's template leaves out is unused, and registers of rows that are none stay
uninitialised."""


class KernelError(Exception):
    """A kernel that cannot be compiled, or went wrong when it ran."""


class Kernel:
    """What `mx.fast.metal_kernel` returns, as far as our launches use it."""

    def __init__(
        self, folder: Path, compiler: str, name: str, inputs: Sequence[str],
        outputs: Sequence[str], source: str, header: str,
    ) -> None:  # fmt: skip
        self.folder = folder
        self.compiler = compiler
        self.name = name
        self.inputs = inputs
        self.outputs = outputs
        self.source = source
        self.header = header
        self.launches = 0

    def __call__(
        self, *, inputs: Sequence[Any], template: Sequence[tuple[str, int | bool]],
        grid: tuple[int, int, int], threadgroup: tuple[int, int, int],
        output_shapes: Sequence[tuple[int, ...]], output_dtypes: Sequence[Any],
    ) -> list[Any]:  # fmt: skip
        import mlx.core as mx

        assert len(inputs) == len(self.inputs)
        assert all(dtype == mx.float32 for dtype in output_dtypes)
        mx.eval(*inputs)
        names = [str(array.dtype).removeprefix("mlx.core.") for array in inputs]
        host = [
            np.ascontiguousarray(np.array(array.view(mx.uint16) if name == "bfloat16" else array))
            for array, name in zip(inputs, names, strict=True)
        ]
        # What a kernel leaves out stays no number.
        results = [np.full(shape, np.nan, np.float32) for shape in output_shapes]
        types = [f"const {TYPES[name]}" for name in names] + ["float"] * len(results)
        launch = self._library(types, template).launch
        arrays = [*host, *results]
        pointers = (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))
        sizes = (ctypes.c_long * len(arrays))(*(array.size for array in arrays))
        message = ctypes.create_string_buffer(500)
        if launch(pointers, sizes, (ctypes.c_uint32 * 3)(*grid),
                  (ctypes.c_uint32 * 3)(*threadgroup), message, len(message)):  # fmt: skip
            raise KernelError(f"{self.name}: {message.value.decode()}")
        self.launches += 1
        return [mx.array(result) for result in results]

    def _library(
        self, types: Sequence[str], template: Sequence[tuple[str, int | bool]]
    ) -> ctypes.CDLL:
        text = self._program(types, template)
        path = self.folder / f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
        if not path.exists():
            source = path.with_suffix(".cpp")
            source.write_text(text)
            command = [
                self.compiler, *FLAGS, "-shared", "-I", str(self.folder), str(source), "-o",
                str(path),
            ]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise KernelError(f"{self.name}:\n{done.stderr[:3000]}")
        return ctypes.CDLL(str(path))

    def _program(self, types: Sequence[str], template: Sequence[tuple[str, int | bool]]) -> str:
        """The body under the signature that MLX writes, and its launch."""
        used = [name for name in ATTRIBUTES if re.search(rf"\b{name}\b", self.source)]
        parameters = ", ".join(
            f"{'bool' if isinstance(value, bool) else 'int'} {name}" for name, value in template
        )
        values = ", ".join(str(value).lower() for _, value in template)
        names = [*self.inputs, *self.outputs]
        arrays = [f"shim::Array<{t}> {n}" for t, n in zip(types, names, strict=True)]
        attributes = [f"{ATTRIBUTES[name]} {name}" for name in used]
        passed = [
            f'shim::Array<{t}>(call->pointers[{i}], call->sizes[{i}], "{n}")'
            for i, (t, n) in enumerate(zip(types, names, strict=True))
        ]
        return f"""
#include "metal_shim.h"
#define uint uint32_t
#define long int64_t
{self.header}
template <{parameters}>
void kernel({", ".join([*arrays, *attributes])}) {{
{self.source}
}}
#undef long
struct Call {{ void** pointers; const long* sizes; }};
static void body(void* arguments) {{
  const Call* call = static_cast<const Call*>(arguments);
  kernel<{values}>({", ".join([*passed, *(f"shim::{name}()" for name in used)])});
}}
extern "C" int launch(void** pointers, const long* sizes, const uint32_t* grid,
                      const uint32_t* threads, char* message, int room) {{
  Call call{{pointers, sizes}};
  const std::string error = shim::run({{grid[0], grid[1], grid[2]}},
                                      {{threads[0], threads[1], threads[2]}}, body, &call);
  std::strncpy(message, error.c_str(), room - 1);
  return error.empty() ? 0 : 1;
}}
"""


@pytest.fixture(scope="session")
def make_kernel(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Kernel]:
    """Stands in for `mx.fast.metal_kernel`."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler is here to compile Metal's kernels with")
    folder = tmp_path_factory.mktemp("kernels")
    shim = shutil.copy(Path(__file__).parent / "shim" / "metal_shim.h", folder)
    subprocess.run([compiler, *FLAGS, "-x", "c++-header", shim, "-o", f"{shim}.gch"], check=True)

    def make(
        *, name: str, input_names: Sequence[str], output_names: Sequence[str], source: str,
        header: str = "",
    ) -> Kernel:  # fmt: skip
        return Kernel(folder, compiler, name, input_names, output_names, source, header)

    return make


class Emulation:
    """Whether the backend launches its kernels as it does on a GPU, and those it made, by name."""

    def __init__(self) -> None:
        self.active = True
        self.kernels: dict[str, Kernel] = {}

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self.active = False
        yield
        self.active = True


@pytest.fixture
def emulation(
    make_kernel: Callable[..., Kernel], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Emulation]:
    import mlx.core as mx

    from polysilicon_metal import kernels, ops

    emulation = Emulation()

    def make(**arguments: Any) -> Kernel:
        kernel = make_kernel(**arguments)
        emulation.kernels[kernel.name.removeprefix("polysilicon_")] = kernel
        return kernel

    kernels._kernel.cache_clear()
    monkeypatch.setattr(mx.fast, "metal_kernel", make)
    monkeypatch.setattr(ops, "has_gpu", lambda: emulation.active)
    yield emulation
    kernels._kernel.cache_clear()
