"""Build the CPU backend's native library into the source tree: run this file.

The wheel's build hook calls `build` too. Needs a C++20 compiler and CMake.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

NATIVE = Path(__file__).resolve().parent
PACKAGE = NATIVE.parent
OBJECTS = PACKAGE.parents[2] / "build" / "cpu"
LIBRARY = "libpolysilicon_cpu.so"


class BuildError(Exception):
    """The library cannot be built; the message says why and what to do."""


def build(
    target: Path = PACKAGE / LIBRARY,
    *,
    directory: Path = OBJECTS,
    flags: str = "",
    jobs: int | None = None,
    zig: bool = False,
) -> Path:
    """Configure, compile and copy the library to `target`.

    directory: where objects are kept between builds. flags: added for every file (sanitizers).
    jobs: compilers at a time; all the cores this process may use when None.
    zig: compile with the PyPI package `ziglang` instead of the system's compiler.
    """
    cmake = _cmake()
    if cmake is None:
        raise BuildError("cmake was not found: pip install cmake, or apt-get install cmake")
    compiler = _zig(directory) if zig else _compiler()
    generator = ["-G", "Ninja"] if _ninja() else []
    configure = [
        cmake,
        "-S",
        str(NATIVE),
        "-B",
        str(directory),
        *generator,
        f"-DCMAKE_CXX_COMPILER={compiler}",
        f"-DCMAKE_CXX_FLAGS={flags}",
    ]
    if _ninja():
        configure.append(f"-DCMAKE_MAKE_PROGRAM={_ninja()}")
    _run(configure)
    _run([cmake, "--build", str(directory), "--parallel", str(jobs or _cores())])
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    shutil.copyfile(directory / LIBRARY, partial)
    partial.replace(target)
    return target


def weak_symbols(directory: Path = OBJECTS) -> list[str]:
    """Weak symbols in what was compiled once per level, as `OBJECT: SYMBOL`.

    There must be none: the linker keeps one of several copies, perhaps that of a level that the
    processor cannot run.
    """
    found = []
    for path in sorted(directory.glob("CMakeFiles/level_*.dir/levels/**/*.o")):
        listed = subprocess.run(["nm", "-C", str(path)], text=True, capture_output=True, check=True)
        for line in listed.stdout.splitlines():
            kind, _, name = line[17:].partition(" ")
            if kind in ("W", "V", "u"):
                found.append(f"{path.parent.parent.name}/{path.name}: {name}")
    return found


def _compiler() -> str:
    named = os.environ.get("CXX")
    candidates = [named] if named else ["c++", "g++", "clang++"]
    for candidate in candidates:
        found = shutil.which(candidate)
        if found is not None:
            return found
    if named:
        raise BuildError(f"the compiler CXX={named} was not found")
    raise BuildError("no C++ compiler was found")


def _zig(directory: Path) -> str:
    """A script that calls zig's C++ compiler: CMake takes one program without arguments."""
    if importlib.util.find_spec("ziglang") is None:
        raise BuildError("the Python package ziglang is not installed")
    directory.mkdir(parents=True, exist_ok=True)
    script = directory / "zig-c++"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ziglang c++ "$@"\n')
    script.chmod(0o755)
    return str(script)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cmake() -> str | None:
    """CMake's PyPI wheel where it is installed, else the system's."""
    try:
        folder = importlib.import_module("cmake").CMAKE_BIN_DIR
    except ImportError:
        return shutil.which("cmake")
    return str(Path(folder) / "cmake")


def _ninja() -> str | None:
    """Ninja's PyPI wheel where it is installed, else the system's."""
    try:
        folder = importlib.import_module("ninja").BIN_DIR
    except ImportError:
        return shutil.which("ninja")
    return str(Path(folder) / "ninja")


def _run(command: list[str]) -> None:
    result = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if result.returncode:
        tail = "\n".join(result.stdout.splitlines()[-40:])
        raise BuildError(f"{' '.join(command[:2])} failed:\n{tail}")
    if "warning:" in result.stdout:
        print(result.stdout, file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=PACKAGE / LIBRARY)
    parser.add_argument("--directory", type=Path, default=OBJECTS)
    parser.add_argument("--flags", default="", help="for every file, e.g. -fsanitize=address")
    parser.add_argument("--check", action="store_true", help="fail on weak symbols of a level")
    arguments = parser.parse_args()
    try:
        print(build(arguments.target, directory=arguments.directory, flags=arguments.flags))
    except BuildError as error:
        sys.exit(str(error))
    if arguments.check and (found := weak_symbols(arguments.directory)):
        sys.exit("weak symbols in level files:\n" + "\n".join(found))


if __name__ == "__main__":
    main()
