"""The options of `open`."""

from __future__ import annotations

import pytest

from polysilicon_cpu import levels
from polysilicon_cpu.options import Options
from polysilicon_cpu.plugin import CPUBackend


def test_all_options():
    options = Options.parse(
        {"threads": "3", "level": "avx2", "activations": "int8", "deterministic": "1", "pin": "1"}
    )
    assert options == Options(
        threads=3, level="avx2", activations="int8", deterministic=True, pin=True
    )


def test_activations_are_auto_by_default():
    assert Options.parse({}).activations == "auto"


@pytest.mark.parametrize(
    ("given", "named"),
    [({"threads": "0"}, "threads"), ({"threads": "-1"}, "threads"), ({"threads": "x"}, "threads"),
     ({"threads": "99999"}, "threads"), ({"activations": "f16"}, "activations"),
     ({"deterministic": "yes"}, "deterministic"), ({"pin": "2"}, "pin"), ({"cores": "2"}, "cores")],
)  # fmt: skip
def test_wrong_options_are_named(given, named):
    with pytest.raises(ValueError, match=named):
        Options.parse(given)


def test_levels_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match="portable"):
        CPUBackend().open(0, {"level": "sse9"})


def test_other_devices_are_refused():
    with pytest.raises(ValueError, match="device 0"):
        CPUBackend().open(1, {})


def test_a_level_can_be_forced():
    for level in levels.built():
        if levels.failure(level) is None:
            device = CPUBackend().open(0, {"level": level, "threads": "1"})
            assert device.level == level
            device.close()


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_more_threads_than_cores_work(threads):
    device = CPUBackend().open(0, {"threads": str(threads), "pin": "1"})
    assert device.threads == threads
    device.close()
