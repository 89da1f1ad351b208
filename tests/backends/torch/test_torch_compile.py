"""The ahead-of-time check itself: what it finds, and that it finds it again in its cache."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).resolve().parents[3] / "ci" / "torch_compile.py"

# Stands where polysilicon_torch.triton's modules do.
KERNELS = """
import triton
import triton.language as tl
from polysilicon_torch.specialisation import Specialisation

@triton.jit
def product(a, b, output, inputs, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr):
    place, sums = tl.arange(0, BLOCK), tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, inputs, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        left = tl.load(a + place[:, None] * inputs + at[None, :])
        sums = tl.dot(left, tl.load(b + place[None, :] * inputs + at[:, None]), sums)
    tl.store(output + place[:, None] * BLOCK + place[None, :], sums)

@triton.jit
def broken(a, BLOCK: tl.constexpr):
    tl.store(a, no_such_name)

def made(name, block=16, warps=4, stages=2, **more):
    return Specialisation.of(
        name,
        product,
        {"a": "*bf16", "b": "*bf16", "output": "*fp32", "inputs": "i32"},
        {"BIAS": None},
        {"BLOCK": block, "BLOCK_K": 64, "num_warps": warps, "num_stages": stages},
        divisible=frozenset({"inputs"}),
        **more,
    )

def specialisations(target, tuning):
    yield made("small", decode=True)

def more_specialisations(target, tuning):
    yield made("spilling", block=128, warps=1, decode=True)
    yield made("spilling prefill", block=128, warps=1)
    yield made("large", block=128, warps=8, stages=8)
    yield Specialisation.of("broken", broken, {"a": "*fp32"}, {}, {"BLOCK": 16})
    yield Specialisation.of("misfit", broken, {"b": "*fp32"}, {}, {"BLOCK": 16})
"""
RUN = """
import sys
sys.path.insert(0, {folder!r})
import torch_compile
torch_compile.kernels.__path__[:] = [{kernels!r}]
sys.exit(torch_compile.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def check(tmp_path_factory):
    """Run the check with arguments on KERNELS, with a cache of its own: exit status, what it
    printed, and the rows that it kept."""
    folder = tmp_path_factory.mktemp("check")
    (folder / "kernels").mkdir()
    (folder / "kernels" / "fake.py").write_text(KERNELS)
    script = RUN.format(folder=str(CHECK.parent), kernels=str(folder / "kernels"))
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}

    def run(*arguments):
        kept = folder / "kept.json"
        done = subprocess.run(
            [sys.executable, "-c", script, "--json", str(kept), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=570,
            check=False,
        )
        assert not done.stderr, done.stderr
        rows = {(r["name"], r["target"]): r for r in json.loads(kept.read_text())["kernels"]}
        return done.returncode, done.stdout, rows

    return run


def test_what_it_reads_from_the_binaries(check):
    status, text, rows = check("--targets", "sm_80,gfx942")
    assert status == 0
    assert set(rows) == {("small", "sm_80"), ("small", "gfx942")}
    for row in rows.values():
        assert not row["problems"]
        assert 8 < row["registers"] < 256
        assert row["shared"] > 0
        assert row["spilled"] == 0
    assert "2 compilations, 2 of them not in the cache" in text
    status, text, again = check("--targets", "sm_80,gfx942", "--all", "--most", "1")
    assert (status, again) == (0, rows)
    assert "2 compilations, 0 of them not in the cache" in text


def test_what_it_refuses(check):
    status, text, rows = check("--targets", "sm_89", "--all")
    assert status == 1
    problems = {name: row["problems"] for (name, _), row in rows.items()}
    assert not problems["small"]
    assert "a decode kernel spills" in problems["spilling"][0]
    assert rows["spilling prefill", "sm_89"]["spilled"] > 0
    assert not problems["spilling prefill"]
    assert "bytes of shared memory, of 101376" in problems["large"][0]
    assert "no_such_name" in problems["broken"][0]
    assert "the specialisation and the kernel differ in" in problems["misfit"][0]
    assert text.count("FAILED fake: ") == 4
    assert "6 compilations for sm_89: 4 failed" in text


def test_a_compilation_that_takes_too_long(check):
    status, _, rows = check("--targets", "sm_90", "--cap", "0.01")
    assert status == 1
    assert rows["small", "sm_90"]["problems"] == ["no end after 0 s"]
