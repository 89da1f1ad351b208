"""A file tried in a process of its own first, where a crash does no harm.

llama.cpp ends its process when an assertion fails, as some damaged files make it, or when it was
compiled for another processor. And built by gcc 12 its AMX kernels crash: they are used for weights
that are repacked into its extra buffer types, without which it runs slower, but runs.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TIMEOUT = 600.0
"""Seconds after which a trial counts as crashed; loading a large file takes a while."""

TRIAL = """
import sys
from pathlib import Path
import numpy as np
from polysilicon_llamacpp.library import Context, Model
model = Model(Path(sys.argv[1]), extra_buffers=sys.argv[2] == "with")
context = Context(model, cells=256, tokens=64, sequences=1, kv_dtype="f16", threads=1,
                  flash_attention="auto")
steps = np.arange(min(64, model.max_position), dtype=np.int32)
context.decode(steps % model.vocab_size, steps, steps * 0, steps[-1:])
"""


def extra_buffers_work(path: Path) -> bool:
    """Whether llama.cpp may use its extra buffers for this file: not where a few tokens through it
    crash with them and do not without. Raises ValueError where they crash either way."""
    if not crashes(path, "with"):
        return True
    if crashes(path, "without"):
        raise ValueError(
            f"llama.cpp crashes on {path}: download or convert it again, or compile llama.cpp for "
            "this machine (pip install --force-reinstall --no-binary llama-cpp-python "
            "llama-cpp-python)"
        )
    return False


def crashes(path: Path, extra_buffers: str) -> bool:
    """Whether the trial ends in any other way than by itself or with an exception, which loading
    will raise again."""
    command = [sys.executable, "-c", TRIAL, str(path), extra_buffers]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    return done.returncode not in (0, 1)
