"""A server as a process of its own, for tests, soak runs and benchmarks (Linux: reads /proc)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

POLYSILICON = (sys.executable, "-c", "from polysilicon.cli import main; main()")
_START_SECONDS = 300.0
_END_SECONDS = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resources:
    """Of one process. rss: bytes."""

    fds: int
    threads: int
    rss: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ServerProcess:
    """A running `polysilicon serve`. lines: of its stderr so far."""

    url: str
    process: subprocess.Popen[str]
    lines: list[str]

    @property
    def engine_pid(self) -> int | None:
        """The engine process, the server's own child; None while there is none."""
        return next(
            (
                pid
                for pid in children(self.process.pid)
                if b"polysilicon.engine.process" in _read(pid, "cmdline")
            ),
            None,
        )


@contextlib.contextmanager
def serving(
    model: str, arguments: Sequence[str] = (), *, environment: Mapping[str, str] | None = None
) -> Iterator[ServerProcess]:
    """`polysilicon serve MODEL` on a free port, ended by SIGTERM. Raises RuntimeError with what it
    said when it does not start."""
    process = subprocess.Popen(
        [*POLYSILICON, "serve", model, *arguments, "--port", "0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    lines: list[str] = []
    url: list[str] = []
    known = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"serving .* on (http://\S+)", line):
                url.append(found[1])
                known.set()
        known.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        if not known.wait(_START_SECONDS) or not url:
            raise RuntimeError(f"the server did not start:\n{''.join(lines)}")
        yield ServerProcess(url=url[0], process=process, lines=lines)
    finally:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join()
        assert process.stderr is not None
        process.stderr.close()


def children(pid: int) -> list[int]:
    """Processes whose parent is this one."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return bool(fields) and fields[0] != b"Z"


def resources(pid: int) -> Resources:
    """What a process holds now. Raises OSError when it has ended."""
    status = Path(f"/proc/{pid}/status").read_text()
    numbers = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+)", status, re.M)}
    return Resources(
        fds=len(os.listdir(f"/proc/{pid}/fd")),
        threads=numbers["Threads"],
        rss=numbers["VmRSS"] << 10,
    )


def wait_until(condition: Callable[[], bool], seconds: float, interval: float = 0.05) -> bool:
    """Whether the condition came to hold in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval)
    return True


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
