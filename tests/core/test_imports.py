"""Who may import whom."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "polysilicon"

VENDOR = {
    "aiter", "cuda", "cupy", "flashinfer", "hip", "jax", "jaxlib", "llama_cpp", "mlx", "mlx_lm",
    "numba", "pycuda", "pyopencl", "tensorflow", "tensorrt", "torch", "torchao", "triton", "vllm",
}  # fmt: skip
PURE = ("scheduler", "sequence", "policies", "budget", "kv", "request")
PURE_STANDARD = {
    "__future__", "abc", "array", "bisect", "collections", "copy", "dataclasses", "enum",
    "functools", "hashlib", "heapq", "itertools", "math", "operator", "struct", "types", "typing",
}  # fmt: skip
CONTRACT = {
    "polysilicon.backend", "polysilicon.device_checks", "polysilicon.executor",
    "polysilicon.host_memory", "polysilicon.hookspecs",
}  # fmt: skip


def imports(source: str, package: str = "") -> Iterator[tuple[int, str]]:
    """Line and full name of every import, relative ones resolved, wherever it stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, base] if base else parent)
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def within(name: str, modules: set[str]) -> bool:
    return any(name == module or name.startswith(module + ".") for module in modules)


def files(part: str) -> list[Path]:
    """The modules of a part of the core."""
    folder = CORE / part
    found = sorted(folder.rglob("*.py")) if folder.is_dir() else [CORE / f"{part}.py"]
    assert found
    assert all(path.is_file() for path in found), part
    return found


def imported_by(path: Path) -> list[tuple[str, str]]:
    """Place and full name of a file's imports."""
    parts = path.relative_to(CORE.parent if path.is_relative_to(CORE) else ROOT).parts
    return [
        (f"{path.relative_to(ROOT)}:{line}", name)
        for line, name in imports(path.read_text(), ".".join(parts[:-1]))
    ]


def top_level() -> list[str]:
    """The parts of the core: its modules and packages."""
    return sorted(
        path.stem
        for path in CORE.iterdir()
        if path.suffix == ".py" or (path.is_dir() and (path / "__init__.py").is_file())
    )


def plugin_trees() -> list[Path]:
    """Folders whose code comes in through entry points."""
    outside = [path for path in ROOT.glob("backends/*/polysilicon_*") if path.is_dir()]
    third = [path for path in ROOT.glob("plugins/*/polysilicon_*") if path.is_dir()]
    return [CORE / "reference", *outside, *third]


def test_imports_are_found_wherever_they_stand() -> None:
    source = (
        "import torch.nn\n"
        "def f():\n"
        "    from mlx import core\n"
        "    from .pages import Page\n"
        "    from ..request import Request\n"
        "    from . import radix\n"
    )
    assert list(imports(source, "polysilicon.kv")) == [
        (1, "torch.nn"),
        (3, "mlx.core"),
        (4, "polysilicon.kv.pages.Page"),
        (5, "polysilicon.request.Request"),
        (6, "polysilicon.kv.radix"),
    ]


def test_the_core_imports_no_vendor_library_and_no_backend() -> None:
    wrong = [
        (place, name)
        for path in sorted(CORE.rglob("*.py"))
        for place, name in imported_by(path)
        if name.split(".")[0] in VENDOR or name.split(".")[0].startswith("polysilicon_")
    ]
    assert not wrong


@pytest.mark.parametrize("tree", plugin_trees(), ids=lambda tree: tree.name)
def test_a_backend_imports_only_the_contract(tree: Path) -> None:
    own = {"polysilicon.reference" if tree.parent == CORE else tree.name}
    if tree.parent.name in ("cuda", "rocm"):
        own.add("polysilicon_torch")
    wrong = [
        (place, name)
        for path in sorted(tree.rglob("*.py"))
        for place, name in imported_by(path)
        if name.split(".")[0].startswith("polysilicon") and not within(name, CONTRACT | own)
    ]
    assert not wrong


@pytest.mark.parametrize("part", PURE)
def test_the_pure_parts_import_the_standard_library_and_numpy(part: str) -> None:
    allowed = {f"polysilicon.{name}" for name in (*PURE, "errors")} - {"polysilicon.scheduler"}
    wrong = [
        (place, name)
        for path in files(part)
        for place, name in imported_by(path)
        if not within(name, allowed | PURE_STANDARD | {"numpy"})
    ]
    assert not wrong


@pytest.mark.parametrize("part", PURE)
def test_the_pure_parts_do_no_input_or_output(part: str) -> None:
    forbidden = {"open", "print", "input", "exec", "eval", "__import__", "breakpoint"}
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in files(part)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.AsyncFunctionDef | ast.Await)
        or (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in forbidden
        )
        or (
            # Reading and writing files through numpy.
            isinstance(node, ast.Attribute)
            and node.attr in {"load", "save", "savez", "memmap", "fromfile", "tofile", "savetxt"}
        )
    ]
    assert not wrong


# What a part may not know: whoever calls it, and those beside it that it does not call.
ABOVE = {
    "request": {"kv", "scheduler", "engine", "server", "cli", "commands"},
    "kv": {"scheduler", "engine", "server", "cli", "commands", "models", "reference"},
    "scheduler": {"engine", "server", "cli", "commands", "models", "reference"},
    "sequence": {"scheduler", "engine", "server", "cli", "commands", "models", "reference"},
    "policies": {"kv", "scheduler", "engine", "server", "cli", "commands", "models", "reference"},
    "budget": {"kv", "scheduler", "engine", "server", "cli", "commands", "models", "reference"},
    "models": {
        "kv",
        "scheduler",
        "engine",
        "server",
        "cli",
        "commands",
        "reference",
        "quantization",
    },
    "quantization": {"kv", "scheduler", "engine", "server", "cli", "commands"},
    "weights": {"kv", "scheduler", "engine", "server", "cli", "commands", "models", "reference"},
    "sampling": {"kv", "scheduler", "engine", "server", "cli", "commands", "models", "reference"},
    "reference": {"kv", "scheduler", "engine", "server", "cli", "commands", "models"},
    "backend": {"kv", "scheduler", "engine", "server", "cli", "commands", "models", "reference"},
    "executor": {"kv", "scheduler", "engine", "server", "cli", "commands", "models", "reference"},
    "ops": {"kv", "scheduler", "engine", "server", "cli", "commands", "models", "reference"},
    "batch": {"kv", "scheduler", "engine", "server", "cli", "commands", "models", "reference"},
    "engine": {"server", "cli", "commands", "reference"},
    "server": {"cli", "commands", "reference", "kv", "scheduler"},
    "bench": {"server", "cli", "commands", "reference", "kv", "scheduler"},
    "evals": {"server", "cli", "commands", "reference", "kv", "scheduler"},
}


@pytest.mark.parametrize("part", [part for part in ABOVE if part in top_level()])
def test_calls_run_from_the_server_down_to_the_device(part: str) -> None:
    above = {f"polysilicon.{name}" for name in ABOVE[part]}
    wrong = [
        (place, name)
        for path in files(part)
        for place, name in imported_by(path)
        if within(name, above)
    ]
    assert not wrong


def modules_after(code: str) -> set[str]:
    """Names of `sys.modules` after running code in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_everything_loads_no_vendor_library() -> None:
    names = sorted(
        ".".join(path.relative_to(CORE.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in CORE.rglob("*.py")
    )
    loaded = modules_after("\n".join(f"import {name}" for name in names))
    assert set(names) <= loaded
    assert not {name for name in loaded if name.split(".")[0] in VENDOR}


def test_loading_and_probing_plugins_opens_no_other_part() -> None:
    """A listing of plugins must work where the rest of the core would not."""
    loaded = modules_after("from polysilicon.plugins import load_plugins; load_plugins()")
    assert "polysilicon.reference.plugin" in loaded
    assert not {n for n in loaded if n.split(".")[0] in VENDOR}
    assert not {n for n in loaded if within(n, {"polysilicon.engine", "polysilicon.server"})}


@pytest.mark.parametrize("part", PURE)
def test_the_pure_parts_load_nothing_else_of_the_core(part: str) -> None:
    loaded = {n for n in modules_after(f"import polysilicon.{part}") if within(n, {"polysilicon"})}
    allowed = {"polysilicon." + name for name in (*PURE, "errors")}
    assert {n for n in loaded if not within(n, allowed)} == {"polysilicon"}
