"""What the host is called, and its memory."""

from __future__ import annotations

import os
import platform
from pathlib import Path

_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)
"""(limit, usage) of cgroup v2 and v1. An unlimited group says `max`, or a number beyond the RAM."""

_WITHOUT_SYSCONF = 4 << 30


def name() -> str:
    """The processor's own name where the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "cpu"


def total_memory() -> int:
    """Bytes of RAM, or the cgroup's limit where that is less."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        total = _WITHOUT_SYSCONF
    limits = [_number(limit) for limit, _ in _CGROUP_FILES]
    return min([total, *(limit for limit in limits if limit)])


def free_memory() -> int:
    """Bytes that can still be allocated, what the page cache would give up included."""
    free = total_memory()
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = min(free, int(line.split()[1]) * 1024)
    except OSError:
        pass
    for limit_file, usage_file in _CGROUP_FILES:
        limit, usage = _number(limit_file), _number(usage_file)
        if limit is not None and usage is not None:
            free = min(free, max(0, limit - usage))
    return free


def _number(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
