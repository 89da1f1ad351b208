"""What the checkpoint readers share: a mapped file, a tensor's entry, names made fit to print."""

from __future__ import annotations

import dataclasses
import hashlib
import mmap
import os
import stat
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from polysilicon.errors import ModelError

DOWNLOAD_AGAIN = "The file is damaged or was cut short: download or convert it again."

_SHOWN_CHARACTERS = 80
_SAMPLE_BYTES = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """What a checkpoint's header says of one tensor.

    type: the format's own name of the stored type (`Q4_K`, `BF16`). shape: the logical shape,
    outputs first. nbytes: its size in the file.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    nbytes: int


class MappedFile:
    """A regular, non-empty file mapped read-only.

    Arrays made from `data` are views that hold the map: it is unmapped when the last one goes. The
    file must not be shortened while it is mapped (the system ends the process when a lost page is
    read); replacing it by another is harmless.
    """

    def __init__(self, path: Path) -> None:
        """Raises ModelError when the path is missing, unreadable, empty or no regular file."""
        self.path = path
        try:
            # Opening a pipe would wait for its writer.
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise ModelError(f"{path} is not a regular file. Give the path of a model file.")
            if status.st_size == 0:
                raise ModelError(f"{path} is empty. {DOWNLOAD_AGAIN}")
            with path.open("rb") as file:
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ModelError(f"{path} does not exist. Check the path.") from None
        except OSError as error:
            raise ModelError(
                f"{path} cannot be opened: {error.strerror}. Check the path and its permissions."
            ) from None
        except ValueError:
            raise ModelError(f"{shown(str(path))} is no valid path. Check it.") from None
        self.size = len(self.map)
        self._bytes = np.frombuffer(self.map, np.uint8)

    def data(self, start: int, size: int) -> npt.NDArray[np.uint8]:
        """Bytes `[start, start + size)`, which must lie inside the file, as a read-only view."""
        assert 0 <= start <= start + size <= self.size
        return self._bytes[start : start + size]


def directory_names(path: Path) -> list[str]:
    """The sorted names of a directory's entries. Raises ModelError when it cannot be listed."""
    try:
        return sorted(os.listdir(path))
    except OSError as error:
        raise ModelError(
            f"{path} cannot be listed: {error.strerror}. Check its permissions."
        ) from None


def shown(name: str) -> str:
    """A name out of an untrusted file as an error message prints it: escaped, of bounded length."""
    cut = name[:_SHOWN_CHARACTERS]
    return ascii(cut) + ("..." if len(name) > len(cut) else "")


def header_fingerprint(parts: Iterable[bytes], samples: Iterable[npt.NDArray[np.uint8]]) -> str:
    """Hex SHA-256 over `parts` and, of each tensor's bytes in `samples`, 4 KiB from the middle.

    Fine-tunes of one base model share every name, shape and size, so headers alone do not tell
    them apart; samples do, unless two checkpoints differ only outside of them.
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    for tensor in samples:
        start = max(0, (len(tensor) - _SAMPLE_BYTES) // 2)
        digest.update(tensor[start : start + _SAMPLE_BYTES].tobytes())
    return digest.hexdigest()
