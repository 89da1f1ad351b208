"""How much memory this machine, or the container it runs in, has and has left: for backends whose
devices compute in the host's memory, which may import this module as they do `polysilicon.backend`.
"""

from __future__ import annotations

import os
from pathlib import Path

from polysilicon.backend import OutOfMemory

SMALL = 4 << 20
"""Bytes so few that asking the system how many are free takes longer than using them."""

_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)
"""(limit, usage) of cgroup v2 and v1. An unlimited group says `max`, or a number beyond the RAM."""

_WITHOUT_SYSCONF = 4 << 30
"""What is assumed where the system tells nothing (no POSIX sysconf)."""


def total_memory() -> int:
    """Bytes of RAM, or the cgroup's limit where that is less."""
    total = _sysconf_bytes("SC_PHYS_PAGES") or _WITHOUT_SYSCONF
    limits = [_read_number(limit) for limit, _ in _CGROUP_FILES]
    return min([total, *(limit for limit in limits if limit)])


def free_memory() -> int:
    """Bytes that can still be allocated, as far as the system tells."""
    free = _available_bytes() or total_memory()
    for limit_file, usage_file in _CGROUP_FILES:
        limit, usage = _read_number(limit_file), _read_number(usage_file)
        if limit is not None and usage is not None:
            free = min(free, max(0, limit - usage))
    return free


def check_fits(what: str, size: int) -> None:
    """Raises OutOfMemory where `size` bytes are more than are free: the system gives address space
    for more than there is, and ends the process when it is used."""
    if size < SMALL:
        return
    free = free_memory()
    if size > free:
        raise OutOfMemory(f"{size:,} bytes of {what} do not fit in the {free:,} that are free")


def _read_number(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _sysconf_bytes(pages: str) -> int | None:
    try:
        return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _available_bytes() -> int | None:
    """Free memory and what the page cache would give up (`MemAvailable` where Linux reports it)."""
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return _sysconf_bytes("SC_AVPHYS_PAGES")
