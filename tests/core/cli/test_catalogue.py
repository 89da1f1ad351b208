"""Models by name: fetched once, checked and kept, or taken from installed wheels."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import os
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from polysilicon import catalogue
from polysilicon.catalogue import (
    CATALOGUE,
    CatalogueEntry,
    WheelPart,
    cache_directory,
    fetch_entry,
    names_model,
    resolve_model,
)
from polysilicon.errors import DownloadError, ModelError

CONTENT = b"GGUF" + os.urandom(70_000)
HALVES = (CONTENT[:30_000], CONTENT[30_000:])


def write_wheel(folder: Path, distribution: str, members: dict[str, bytes]) -> Path:
    """A wheel that pip takes."""
    stem = distribution.replace("-", "_")
    info = f"{stem}-1.0.dist-info"
    files = members | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={_urlsafe_sha256(data)},{len(data)}\n" for name, data in files.items()
    )
    path = folder / f"{stem}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")
    return path


def _urlsafe_sha256(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def entry(parts: int = 1) -> CatalogueEntry:
    return CatalogueEntry(
        name="tiny",
        file="tiny.gguf",
        size=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        licence="none",
        download_size=len(CONTENT),
        parts=tuple(
            WheelPart(
                distribution=f"polysilicon-test-tiny-{i}",
                version="1.0",
                member=f"polysilicon_test_tiny_{i}/data.part{i}",
            )
            for i in range(parts)
        ),
    )


def members(part: int, data: bytes) -> dict[str, bytes]:
    return {f"polysilicon_test_tiny_{part}/data.part{part}": data}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of our own."""
    monkeypatch.setenv("POLYSILICON_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is all that pip sees."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing may be fetched")

    monkeypatch.setattr(catalogue, "fetch_wheels", fail)


def leftovers(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file()]


def test_a_model_is_fetched_once(index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wheel(index, "polysilicon-test-tiny-0", members(0, CONTENT))
    path = fetch_entry(entry())
    assert path.read_bytes() == CONTENT
    assert path.name == "tiny.gguf"
    assert leftovers(cache) == [path]
    offline(monkeypatch)
    assert fetch_entry(entry()) == path


def test_parts_are_put_together(index: Path, cache: Path) -> None:
    for part, data in enumerate(HALVES):
        write_wheel(index, f"polysilicon-test-tiny-{part}", members(part, data))
    assert fetch_entry(entry(2)).read_bytes() == CONTENT


def test_a_cut_file_in_the_cache_is_replaced(index: Path) -> None:
    write_wheel(index, "polysilicon-test-tiny-0", members(0, CONTENT))
    path = fetch_entry(entry())
    path.write_bytes(CONTENT[:-1])
    assert fetch_entry(entry()).read_bytes() == CONTENT


@pytest.mark.parametrize(
    "data", [CONTENT[:-1], CONTENT[:-1] + b"x" * (CONTENT[-1:] != b"x") + b"", b""]
)
def test_another_content_is_refused(index: Path, cache: Path, data: bytes) -> None:
    write_wheel(index, "polysilicon-test-tiny-0", members(0, data))
    with pytest.raises(DownloadError, match="is not the published file: its SHA-256 is"):
        fetch_entry(entry())
    assert leftovers(cache) == []


def test_more_than_was_published_is_not_unpacked(index: Path, cache: Path) -> None:
    write_wheel(index, "polysilicon-test-tiny-0", members(0, CONTENT + b"x"))
    with pytest.raises(DownloadError, match="is larger than published"):
        fetch_entry(entry())
    assert leftovers(cache) == []


def test_parts_that_are_too_much_together(index: Path, cache: Path) -> None:
    write_wheel(index, "polysilicon-test-tiny-0", members(0, CONTENT))
    write_wheel(index, "polysilicon-test-tiny-1", members(1, CONTENT))
    with pytest.raises(DownloadError, match="is not the published file"):
        fetch_entry(entry(2))
    assert leftovers(cache) == []


def test_a_wheel_without_the_file(index: Path) -> None:
    write_wheel(index, "polysilicon-test-tiny-0", {"other.txt": CONTENT})
    with pytest.raises(DownloadError, match="does not hold polysilicon_test_tiny_0/data"):
        fetch_entry(entry())


def test_an_index_that_does_not_offer_it(index: Path, cache: Path) -> None:
    with pytest.raises(DownloadError, match=r"not offer polysilicon-test-tiny-0==1") as error:
        fetch_entry(entry())
    assert "pip install --no-deps polysilicon-test-tiny-0==1.0" in str(error.value)
    assert leftovers(cache) == []


def test_an_index_that_cannot_be_reached(
    index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    # The discard port: nothing listens there.
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(DownloadError, match="the package index cannot be reached"):
        fetch_entry(entry())
    assert leftovers(cache) == []


def test_too_little_space(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = dataclasses.make_dataclass("Usage", ["free"])
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(free=100_000))
    offline(monkeypatch)
    with pytest.raises(DownloadError, match=r"needs 0 MB in .*Free some, or set POLYSILICON_CACHE"):
        fetch_entry(entry())


def test_a_cache_that_cannot_be_written(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("a file stands where the directory should")
    offline(monkeypatch)
    with pytest.raises(DownloadError, match=r"cannot keep tiny in .*POLYSILICON_CACHE"):
        fetch_entry(entry())


def test_a_write_that_fails(index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wheel(index, "polysilicon-test-tiny-0", members(0, CONTENT))

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(DownloadError, match=r"No space left on device. Free space"):
        fetch_entry(entry())
    assert leftovers(cache) == []


def test_an_interruption_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Any, directory: Path, **__: Any) -> None:
        directory.mkdir()
        (directory / "half.whl").write_bytes(b"PK")
        raise KeyboardInterrupt

    monkeypatch.setattr(catalogue, "fetch_wheels", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch_entry(entry())
    assert leftovers(cache) == []


def test_what_a_killed_process_left_is_removed_a_day_later(index: Path, cache: Path) -> None:
    write_wheel(index, "polysilicon-test-tiny-0", members(0, CONTENT))
    old, fresh = cache / "partial" / "old", cache / "partial" / "fresh"
    for folder in (old, fresh):
        folder.mkdir(parents=True)
        (folder / "half.whl").touch()
    os.utime(old, (time.time() - 90_000,) * 2)
    fetch_entry(entry())
    assert not old.exists()
    assert fresh.exists()


def test_concurrent_calls(index: Path, cache: Path) -> None:
    write_wheel(index, "polysilicon-test-tiny-0", members(0, CONTENT))
    results: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: results.append(fetch_entry(entry()).read_bytes()))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [CONTENT] * 3
    assert len(leftovers(cache)) == 1


def installed(folder: Path, part: int, data: bytes) -> Path:
    """Unpack a part's wheel into a folder of the search path; the data file."""
    with zipfile.ZipFile(
        write_wheel(folder, f"polysilicon-test-tiny-{part}", members(part, data))
    ) as archive:
        archive.extractall(folder)
    return folder / f"polysilicon_test_tiny_{part}" / f"data.part{part}"


def test_an_installed_wheel_is_used_in_place(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    offline(monkeypatch)
    path = installed(tmp_path, 0, CONTENT)
    assert fetch_entry(entry()) == path
    assert not cache.exists()


def test_installed_parts_are_put_together_without_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for part, data in enumerate(HALVES):
        installed(tmp_path, part, data)
    offline(monkeypatch)
    assert fetch_entry(entry(2)).read_bytes() == CONTENT


def test_another_release_that_is_installed_is_not_used(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    path = installed(tmp_path, 0, CONTENT[::-1])
    write_wheel(index, "polysilicon-test-tiny-0", members(0, CONTENT))
    assert fetch_entry(entry()) != path
    assert fetch_entry(entry()).read_bytes() == CONTENT


def test_the_default_is_smollm2(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fetch(wanted: CatalogueEntry, **_: Any) -> Path:
        asked.append(wanted.name)
        return Path(wanted.file)

    monkeypatch.setattr(catalogue, "fetch_entry", fetch)
    assert resolve_model() == resolve_model(None) == resolve_model("smollm2")
    assert resolve_model("gemma3-270m").name == "gemma-3-270m-q4_k_m.gguf"
    assert asked == ["smollm2"] * 3 + ["gemma3-270m"]


def test_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").touch()
    assert resolve_model(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/model.gguf") == tmp_path / "model.gguf"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("smolm2", "did you mean 'smollm2'?"),
        ("zzz", "Known names: smollm2, gemma3-270m."),
        ("/no/such/file.gguf", "neither an existing path nor a name"),
        ("a\0b", "neither an existing path nor a name"),
        ("~nobody-of-that-name/model.gguf", "neither an existing path nor a name"),
        ("x" * 100_000, "neither an existing path nor a name"),
    ],
)
def test_what_is_no_model(spec: str, message: str) -> None:
    with pytest.raises(ModelError) as error:
        resolve_model(spec)
    assert message in str(error.value)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"POLYSILICON_CACHE": "/models", "XDG_CACHE_HOME": "/xdg"}, "/models"),
        ("linux", {"POLYSILICON_CACHE": "~/models"}, "/home/me/models"),
        ("linux", {"XDG_CACHE_HOME": "/xdg"}, "/xdg/polysilicon"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/polysilicon"),
        ("linux", {}, "/home/me/.cache/polysilicon"),
        ("darwin", {}, "/home/me/Library/Caches/polysilicon"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/polysilicon"),
    ],
)
def test_the_cache_directory(
    monkeypatch: pytest.MonkeyPatch, platform: str, variables: dict[str, str], expected: str
) -> None:
    for name in ("POLYSILICON_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.platform", platform)
    assert cache_directory() == Path(expected)


@pytest.mark.skipif(os.name == "nt", reason="Windows takes a neighbour of the user's directory")
def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYSILICON_CACHE", "~nobody-of-that-name/models")
    with pytest.raises(DownloadError, match=r"no home directory.* set POLYSILICON_CACHE"):
        cache_directory()


def test_what_can_only_mean_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").touch()
    (tmp_path / "other.txt").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").touch()
    (tmp_path / "config.json").touch()
    for text in ("smollm2", "gemma3-270m", "model.gguf", "./folder", "hf:owner/repo:file.gguf"):
        assert names_model(text), text
    prompts = ("", "smollm", "SmolLM2", "missing.gguf", "other.txt", "a model.gguf")
    hostile = ("a\0b", "x" * 100_000, "~nobody-of-that-name", "\udcff")
    for text in (*prompts, *hostile, "hf: what is it?", "The capital of France is"):
        assert not names_model(text), text


def test_the_real_files_are_those_of_the_catalogue(smollm2_path: Path, gemma3_path: Path) -> None:
    for path, name in ((smollm2_path, "smollm2"), (gemma3_path, "gemma3-270m")):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        assert (digest, path.stat().st_size) == (CATALOGUE[name].sha256, CATALOGUE[name].size)


def test_the_licence_terms_are_told() -> None:
    assert "ai.google.dev/gemma/terms" in CATALOGUE["gemma3-270m"].notice
    assert all(entry.licence for entry in CATALOGUE.values())
