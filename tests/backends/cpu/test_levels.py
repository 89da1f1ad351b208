"""Choosing a level, and leaving out those that do not run."""

from __future__ import annotations

import subprocess

import pytest

from polysilicon.backend import Unavailable
from polysilicon_cpu import levels, library
from polysilicon_cpu.plugin import CPUBackend


@pytest.fixture(autouse=True)
def _forget_results():
    levels.failure.cache_clear()
    levels.choose.cache_clear()
    yield
    levels.failure.cache_clear()
    levels.choose.cache_clear()


def result(code: int):
    return lambda *arguments, **options: subprocess.CompletedProcess(arguments, code)


def test_every_level_of_this_processor_passes_its_self_test():
    assert "portable" in levels.built()
    for level in levels.built():
        if levels.supported(level):
            assert levels.failure(level) is None


def test_the_best_level_is_chosen_and_shown():
    best = next(level for level in levels.built() if levels.supported(level))
    assert levels.choose() == best
    (info,) = CPUBackend().probe()
    assert info.details["level"] == best
    others = [level for level in levels.built() if levels.supported(level) and level != best]
    assert info.details.get("other levels", "") == (
        f"other levels: {', '.join(others)}" if others else ""
    )
    assert info.memory > 0


@pytest.mark.parametrize("code", [-4, -11, 1])
def test_a_level_whose_self_test_fails_is_left_out(monkeypatch, code):
    """Ended by SIGILL or SIGSEGV, or with wrong results."""

    def run(command, **options):
        return subprocess.CompletedProcess(command, 0 if command[-1] == "portable" else code)

    monkeypatch.setattr(subprocess, "run", run)
    assert levels.choose() == "portable"
    if any(levels.supported(level) for level in levels.built() if level != "portable"):
        assert "self-test" in levels.details()["disabled"]


def test_a_self_test_that_hangs_disables_its_level(monkeypatch):
    def run(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(library.LibraryError, match="no instruction-set level"):
        levels.choose()


def test_no_level_makes_the_backend_unavailable(monkeypatch):
    monkeypatch.setattr(subprocess, "run", result(-4))
    found = CPUBackend().probe()
    assert isinstance(found, Unavailable)
    assert "signal 4" in found.reason
    assert "reinstall" in found.reason


def test_a_level_tested_once_is_not_tested_again(monkeypatch):
    calls = []
    monkeypatch.setattr(
        subprocess, "run", lambda *a, **o: calls.append(a) or subprocess.CompletedProcess(a, 0)
    )
    for _ in range(3):
        levels.choose()
    assert len(calls) == 1


def test_a_missing_library_is_explained(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "path", lambda: tmp_path / library.NAME)
    library.load.cache_clear()
    try:
        found = CPUBackend().probe()
        assert isinstance(found, Unavailable)
        assert "apt-get install g++" in found.reason
        (tmp_path / library.REASON).write_text("no C++ compiler was found\n")
        found = CPUBackend().probe()
        assert isinstance(found, Unavailable)
        assert "no C++ compiler was found" in found.reason
        (tmp_path / library.NAME).write_bytes(b"not a library")
        found = CPUBackend().probe()
        assert isinstance(found, Unavailable)
        assert "cannot be loaded" in found.reason
    finally:
        library.load.cache_clear()
