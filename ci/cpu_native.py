"""Random checks of the CPU backend's kernels without Python, on this processor or an emulated one.

    python ci/cpu_native.py                      every level that runs here
    python ci/cpu_native.py neon                 for aarch64, under qemu-user
    python ci/cpu_native.py amx                  with AMX's tiles emulated, on AVX512
    python ci/cpu_native.py --sanitize thread    under a sanitizer: thread, address or undefined
    python ci/cpu_native.py --compiler clang++-16

Builds tests/backends/cpu/native, where a warning is an error (but under sanitizers, whose checks
cause false ones), and runs it: self-tests, and products, attention, norms and sampling against
float64 at every level. Fails at the first result out of bounds, naming its case.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "tests" / "backends" / "cpu" / "native"
CROSS_COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"
SYSROOT = "/usr/aarch64-linux-gnu"
AARCH64 = (
    "-DCMAKE_SYSTEM_NAME=Linux",
    "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
    f"-DCMAKE_CXX_COMPILER={CROSS_COMPILER}",
)
PROCESSORS = ("max", "cortex-a76", "cortex-a72")
"""What qemu pretends to be: all that it knows; with dot products and without them."""


def needed(target: str) -> dict[str, str]:
    """Debian's packages by the program of each that a target needs."""
    programs = {"cmake": "cmake"}
    if target == "neon":
        programs |= {CROSS_COMPILER: "g++-aarch64-linux-gnu", EMULATOR: "qemu-user"}
    return programs


def build(target: str, sanitizer: str | None, compiler: str | None) -> Path:
    """The program that checks."""
    variant = "-".join(filter(None, (target, sanitizer, compiler and Path(compiler).name)))
    directory = ROOT / "build" / f"cpu-checks-{variant}"
    options = list(AARCH64) if target == "neon" else []
    options += [f"-DCMAKE_CXX_COMPILER={compiler}"] if compiler else []
    options += ["-G", "Ninja"] if shutil.which("ninja") else []
    options.append(f"-DPS_AMX_EMULATION={'ON' if target == 'amx' else 'OFF'}")
    if sanitizer:
        options += [
            f"-DCMAKE_CXX_FLAGS=-fsanitize={sanitizer} -fno-sanitize-recover=all"
            " -fno-omit-frame-pointer",
            "-DCMAKE_BUILD_TYPE=Debug",
            "-DCMAKE_CXX_FLAGS_DEBUG=-O1 -g1",  # -O3 takes several times as long
        ]
    else:
        options.append("-DCMAKE_CXX_FLAGS=-Werror")
    subprocess.run(
        ["cmake", "-S", str(SOURCES), "-B", str(directory), *options], check=True, stdout=sys.stderr
    )
    subprocess.run(["cmake", "--build", str(directory), "--parallel"], check=True)
    return directory / "polysilicon_cpu_checks"


def commands(target: str, program: Path, cases: int, seed: int) -> list[list[str]]:
    numbers = [str(cases), str(seed)]
    if target == "neon":
        return [
            [EMULATOR, "-cpu", processor, "-L", SYSROOT, str(program), *numbers]
            for processor in PROCESSORS
        ]
    return [[str(program), *numbers, *(["amx"] if target == "amx" else [])]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", nargs="?", choices=("host", "neon", "amx"), default="host")
    parser.add_argument("--cases", type=int, help="of each kind; 5000, and 200 under qemu")
    parser.add_argument("--seed", type=int, default=time.time_ns() % (1 << 32))
    parser.add_argument("--sanitize", choices=("thread", "address", "undefined"))
    parser.add_argument("--compiler", help="for this machine; else CMake's choice")
    arguments = parser.parse_args()
    target: str = arguments.target
    if target == "neon" and arguments.compiler:
        parser.error(f"neon is compiled with {CROSS_COMPILER}: leave --compiler out")
    missing = {name: package for name, package in needed(target).items() if not shutil.which(name)}
    if missing:
        sys.exit(f"missing: {', '.join(missing)}; apt-get install {' '.join(missing.values())}")
    cases = arguments.cases or (200 if target == "neon" else 5000)
    try:
        program = build(target, arguments.sanitize, arguments.compiler)
        for command in commands(target, program, cases, arguments.seed):
            print("==", *command, flush=True)
            subprocess.run(command, check=True)
    except subprocess.CalledProcessError as error:
        sys.exit(f"failed with {error.returncode} (--seed {arguments.seed})")
    print(f"passed (--seed {arguments.seed})")


if __name__ == "__main__":
    main()
