"""Instruction-set levels: which the processor has, which of those really run."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import sys
from collections.abc import Mapping

from polysilicon_cpu import library

_PROBE_SECONDS = 60

_PROBE = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.ps_self_test.argtypes = [ctypes.c_char_p]
sys.exit(library.ps_self_test(sys.argv[2].encode()))
"""


def built() -> tuple[str, ...]:
    """The levels of this build, best first."""
    text = ctypes.create_string_buffer(256)
    library.load().ps_levels(text, len(text))
    return tuple(text.value.decode().split(","))


def supported(level: str) -> bool:
    """Whether the processor and the operating system have what a level needs."""
    return bool(library.load().ps_level_supported(level.encode()))


@functools.cache
def failure(level: str) -> str | None:
    """Why a level cannot be used, None when it can.

    Its kernels compute something small in a process of their own first: a virtual machine may
    announce instructions that it does not run, and that must not end the server.
    """
    if not supported(level):
        return "the processor has not its instructions"
    path = str(library.path())
    try:
        result = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROBE, path, level],
            capture_output=True,
            timeout=_PROBE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"its self-test could not be run ({type(error).__name__})"
    if result.returncode < 0:
        return f"its self-test was ended by signal {-result.returncode}"
    return None if result.returncode == 0 else "its self-test gave wrong results"


@functools.cache
def choose() -> str:
    """The best level that runs. Raises LibraryError when none does."""
    for level in built():
        if failure(level) is None:
            return level
    reasons = "; ".join(f"{level}: {failure(level)}" for level in built())
    raise library.LibraryError(
        f"no instruction-set level runs here ({reasons}): the native library is damaged or was "
        "built for another processor; reinstall polysilicon"
    )


def check(level: str) -> str:
    """The level itself. Raises ValueError when it cannot be used."""
    if level not in built():
        raise ValueError(f"level is one of {', '.join(built())}, got {level!r}")
    reason = failure(level)
    if reason is not None:
        raise ValueError(f"level {level} cannot be used: {reason}")
    return level


def details() -> Mapping[str, str]:
    """What `polysilicon backends` prints beside the level: others, and those that do not run."""
    chosen = built().index(choose())
    others = [level for level in built()[chosen + 1 :] if supported(level)]
    failed = [f"{level} ({failure(level)})" for level in built()[:chosen] if supported(level)]
    lists = {"other levels": others, "disabled": failed}
    return {key: f"{key}: {', '.join(values)}" for key, values in lists.items() if values}
