"""Tests of what the cuda and rocm backends share: they need torch and Triton, but no card.

Kernels run in Triton's interpreter, patched by interpreter.py beside this file.
"""

import importlib.util
import os
from pathlib import Path

import pytest

NEEDED = ("torch", "triton")

if all(map(importlib.util.find_spec, NEEDED)):
    os.environ["TRITON_INTERPRET"] = "1"
    spec = importlib.util.spec_from_file_location(
        "triton_interpreter_patch", Path(__file__).with_name("interpreter.py")
    )
    interpreter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(interpreter)
    interpreter.install()
else:

    class Skipped(pytest.Module):
        """A module that is not imported."""

        def collect(self):
            pytest.skip("torch or triton is not installed", allow_module_level=True)

    def pytest_pycollect_makemodule(module_path, parent):
        return Skipped.from_parent(parent, path=module_path)
