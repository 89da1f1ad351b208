"""Where threads may run: one on each physical core that this process, or its container, has."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path

ROOT = Path("/")
_NODES = Path("sys/devices/system/node")


def places(root: Path = ROOT, allowed: Collection[int] | None = None) -> tuple[int, ...]:
    """Processors to run threads on, one of each physical core (SMT siblings are left out).

    allowed: processors that this process may use; what the system says when None.
    """
    if allowed is None:
        allowed = _affinity()
    chosen: list[int] = []
    seen: set[int] = set()
    for processor in sorted(allowed):
        if processor not in seen:
            chosen.append(processor)
            seen |= _siblings(root, processor)
    return tuple(chosen)


def nodes(chosen: Collection[int], root: Path = ROOT) -> tuple[int, ...]:
    """The NUMA nodes whose processors are among those chosen: where memory is near to one of them.
    Empty where the system tells of no nodes."""
    return tuple(
        node
        for node in _online_nodes(root)
        if not _parse_list(_read(root / _NODES / f"node{node}/cpulist") or "").isdisjoint(chosen)
    )


def quota(root: Path = ROOT) -> float | None:
    """Processors' worth of time that the cgroup allows, None where it does not limit it."""
    limits = [_quota_v2(path) for path in _cgroup_paths(root, "")]
    limits += [_quota_v1(path) for path in _cgroup_paths(root, "cpu")]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def default_threads(chosen: Collection[int], root: Path = ROOT) -> int:
    """A thread for each place, and no more than the quota keeps running: one that is throttled
    would keep all others waiting."""
    limit = quota(root)
    count = len(chosen) if limit is None else min(len(chosen), math.floor(limit + 0.05))
    return max(1, count)


def details(chosen: Collection[int], root: Path = ROOT) -> Mapping[str, str]:
    """What `polysilicon backends` prints."""
    limit, online, used = quota(root), _online_nodes(root), nodes(chosen, root)
    text = {"threads": f"{default_threads(chosen, root)} threads, {len(chosen)} cores"}
    if limit is not None:
        text["quota"] = f"quota of {limit:g} cores"
    if len(used) > 1:
        text["numa"] = f"memory spread over {len(used)} NUMA nodes"
    elif used and len(online) > 1:
        text["numa"] = f"on NUMA node {used[0]} of {len(online)}"
    return text


def _affinity() -> Collection[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _siblings(root: Path, processor: int) -> set[int]:
    topology = root / f"sys/devices/system/cpu/cpu{processor}/topology"
    for name in ("core_cpus_list", "thread_siblings_list"):
        text = _read(topology / name)
        if text is not None:
            return {processor, *_parse_list(text)}
    return {processor}


def _parse_list(text: str) -> set[int]:
    """`0-2,8` as numbers; nothing where it is malformed."""
    numbers: set[int] = set()
    for item in text.split(","):
        first, _, last = item.strip().partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            return set()
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def _cgroup_paths(root: Path, controller: str) -> list[Path]:
    """This process' cgroup in the hierarchy of a controller (that of v2 for ""), and its parents:
    each may have a limit of its own."""
    base = root / "sys/fs/cgroup" / controller
    own = ""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = ([*line.split(":", 2), "", ""])[:3]
        if controller in controllers.split(","):
            own = path.strip("/")
    parts = [part for part in own.split("/") if part not in ("", "..")]
    return [base.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def _quota_v2(path: Path) -> float | None:
    words = (_read(path / "cpu.max") or "").split()
    if len(words) != 2 or not (words[0].isdigit() and words[1].isdigit()) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])


def _quota_v1(path: Path) -> float | None:
    time, period = _read(path / "cpu.cfs_quota_us"), _read(path / "cpu.cfs_period_us")
    if time is None or period is None or not (time.isdigit() and period.isdigit()):
        return None
    return int(time) / int(period) if int(period) else None


def _online_nodes(root: Path) -> list[int]:
    return sorted(_parse_list(_read(root / _NODES / "online") or ""))


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
