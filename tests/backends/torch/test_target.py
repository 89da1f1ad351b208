"""What architectures are, and how the one at hand is found."""

from types import SimpleNamespace

import pytest
import torch

from polysilicon_torch import target as targets
from polysilicon_torch.target import INTERPRETER, TARGETS, UnsupportedTarget, detect, named


def card(monkeypatch, hip, **properties):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties)
    )
    return detect(torch.device("cuda", 0))


def test_the_cpu_is_the_interpreter():
    assert detect(torch.device("cpu")) is INTERPRETER


def test_a_cuda_card(monkeypatch):
    found = card(monkeypatch, None, major=9, minor=0, multi_processor_count=114)
    assert (found.name, found.family, found.kind, found.warp_size) == (
        "sm_90",
        "hopper",
        "cuda",
        32,
    )
    assert found.compute_units == 114


def test_a_hip_card_is_named_with_its_features(monkeypatch):
    found = card(
        monkeypatch, "7.0", gcnArchName="gfx942:sramecc+:xnack-", multi_processor_count=228
    )
    assert (found.name, found.kind, found.warp_size, found.fp8) == ("gfx942", "hip", 64, "fnuz")
    assert found.compute_units == 228


@pytest.mark.parametrize(
    ("name", "family", "warp_size"),
    [
        ("sm_87", "ampere", 32),
        ("sm_103", "blackwell", 32),
        ("sm_121", "blackwell", 32),
        ("gfx940", "cdna", 64),
        ("gfx1151", "rdna", 32),
        ("gfx1200", "rdna", 32),
    ],
)
def test_an_architecture_without_facts_is_taken_for_the_next_older(name, family, warp_size):
    found = named(name)
    assert (found.name, found.family, found.warp_size) == (name, family, warp_size)


def test_an_architecture_between_two_promises_the_lesser_shared_memory():
    assert named("sm_87").shared_memory == TARGETS["sm_86"].shared_memory


@pytest.mark.parametrize("name", ["sm_75", "gfx906", "gfx1030"])
def test_too_old(name):
    with pytest.raises(UnsupportedTarget, match=r"older than .*--backend cpu"):
        named(name)


@pytest.mark.parametrize("name", ["", "sm_", "sm_9000", "gfx", "gfx_90", "apple-m4"])
def test_no_architecture(name):
    with pytest.raises(UnsupportedTarget, match="is no GPU architecture"):
        named(name)


def test_the_compiler_agrees_on_the_size_of_a_warp():
    compiler = pytest.importorskip("triton.backends.amd.compiler")
    for target in targets.TARGETS.values():
        if target.kind == "hip":
            assert compiler.HIPOptions(arch=target.name).warp_size == target.warp_size
