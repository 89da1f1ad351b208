"""What the entry point promises before any device is opened."""

from __future__ import annotations

import importlib.resources
import re
import subprocess
import sys

import pytest

from polysilicon_opencl.options import Options
from polysilicon_opencl.runtime import argument_types, source_of


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout


def test_importing_the_plugin_loads_no_pyopencl():
    code = (
        "import sys\n"
        "from polysilicon_opencl import plugin\n"
        "[backend] = plugin.polysilicon_backends()\n"
        "print(backend.name, 'pyopencl' in sys.modules)"
    )
    assert run(code).split() == ["opencl", "False"]


def test_probe_without_pyopencl_names_the_mend():
    code = (
        "import sys\n"
        "sys.modules['pyopencl'] = None\n"
        "from polysilicon_opencl.plugin import OpenCLBackend\n"
        "print(OpenCLBackend().probe().reason)"
    )
    assert "pip install pyopencl" in run(code)


def test_probe_without_a_platform_names_the_mend():
    """The ICD loader finds no driver in an empty folder."""
    code = (
        "import os\n"
        "os.environ['OCL_ICD_VENDORS'] = os.environ['OPENCL_VENDOR_PATH'] = '/nonexistent/'\n"
        "from polysilicon_opencl.plugin import OpenCLBackend\n"
        "print(getattr(OpenCLBackend().probe(), 'reason', 'pocl-opencl-icd'))"
    )
    assert "pocl-opencl-icd" in run(code)


def test_an_unknown_device_is_refused(backend):
    with pytest.raises(ValueError, match="none has index 99"):
        backend.open(99, {})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lanes": "4"}, "unknown option 'lanes'"),
        ({"shapes": "tpu"}, "shapes is one of auto, cpu, gpu"),
        ({"deterministic": "1"}, "not deterministic"),
        ({"activations": "int8"}, "float32"),
    ],
)
def test_options_that_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        Options.parse(given)


def test_options_that_are_taken():
    assert Options.parse({"deterministic": "0", "activations": "auto"}) == Options()
    assert Options.parse({"shapes": "gpu"}).shapes == "gpu"


def test_arguments_are_read_from_a_kernel_s_declaration():
    types = argument_types(source_of("pages"), "copy_slots")
    assert [kind is None for kind in types] == [True, True, True, False]


def test_functions_that_are_given_local_memory_are_inlined():
    """Or PoCL's threads share it: see `INLINED` in common.cl."""
    folder = importlib.resources.files("polysilicon_opencl") / "kernels"
    given = [
        (path.name, qualifiers.split()[0], name)
        for path in folder.iterdir()
        for qualifiers, name, parameters in re.findall(
            r"^(\w[\w ]*?)(\w+)\(([^;{}]*)\)\n\{", path.read_text("utf-8"), flags=re.M
        )
        if re.search(r"\blocal\b", parameters)
    ]
    assert ("common.cl", "INLINED", "lanes_sum") in given
    assert ("sampling.cl", "INLINED", "narrow") in given
    assert {first for _, first, _ in given} == {"INLINED"}
