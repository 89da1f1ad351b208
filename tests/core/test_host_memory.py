"""What is left of the host's memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from polysilicon import host_memory
from polysilicon.backend import OutOfMemory


def test_cgroup_limit_bounds_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, usage = tmp_path / "max", tmp_path / "current"
    monkeypatch.setattr(host_memory, "_CGROUP_FILES", ((str(limit), str(usage)),))
    unbounded = host_memory.total_memory()
    assert host_memory.free_memory() <= unbounded
    limit.write_text("max\n")
    usage.write_text("1000\n")
    assert host_memory.total_memory() == unbounded
    limit.write_text("5000\n")
    assert (host_memory.total_memory(), host_memory.free_memory()) == (5000, 4000)
    usage.write_text("6000\n")
    assert host_memory.free_memory() == 0


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "free_memory", lambda: 10 << 20)
    host_memory.check_fits("weights", 10 << 20)
    with pytest.raises(OutOfMemory, match="10,485,761 bytes of weights"):
        host_memory.check_fits("weights", (10 << 20) + 1)


def test_little_is_not_worth_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "free_memory", lambda: pytest.fail("asked"))
    host_memory.check_fits("weights", host_memory.SMALL - 1)
