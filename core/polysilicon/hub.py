"""Checkpoints from the Hugging Face hub, kept in its own cache."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from polysilicon.errors import DownloadError, ModelError

PREFIX = "hf:"
_SPEC = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<file>.+))?")
_SPLIT = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_SAFETENSORS = ("*.safetensors", "*.json", "*.model", "*.jinja", "merges.txt", "vocab.txt")
_CONFIG = "config.json"
_LISTED = 30


def fetch_from_hub(spec: str) -> Path:
    """The file or directory of `hf:owner/repo[:file]`, fetched unless the hub's cache has it.

    Without a file, the repository's safetensors, else its only GGUF model, are taken. The hub
    library's environment (HF_HOME, HF_TOKEN, HF_HUB_OFFLINE) applies, and it shows its own bars.

    Raises ModelError when the spec names no model, DownloadError when it cannot be fetched.
    """
    match = _SPEC.fullmatch(spec.removeprefix(PREFIX))
    if match is None:
        raise ModelError(f"{spec!r:.200} is not of the form hf:owner/repo[:file]")
    repo, file = match["repo"], match["file"]
    if file is not None and not {"", ".", ".."}.isdisjoint(file.split("/")):
        raise ModelError(f"{spec!r:.200}: a file is named as the repository lists it, folder/file")
    with _errors_of(repo, file):
        if file is not None:
            return _fetch_file(repo, file)
        names = _names(repo)
        if any("/" not in name and name.endswith(".safetensors") for name in names):
            return _snapshot(repo, _SAFETENSORS)
        return _fetch_file(repo, _only_gguf(repo, names))


def fetch_config(spec: str) -> Path:
    """The config.json of `hf:owner/repo`, and nothing else of it.

    Raises ModelError when the spec names no repository, or a file of one; DownloadError when it
    cannot be fetched.
    """
    match = _SPEC.fullmatch(spec.removeprefix(PREFIX))
    if match is None:
        raise ModelError(f"{spec!r:.200} is not of the form hf:owner/repo")
    if match["file"] is not None:
        raise ModelError(
            f"{spec!r:.200} names a file, and of the hub only a config.json is read without the "
            "weights: leave the file out, or fetch it (polysilicon pull) and give its path"
        )
    with _errors_of(match["repo"], _CONFIG):
        return _fetch_file(match["repo"], _CONFIG)


def _fetch_file(repo: str, file: str) -> Path:
    import huggingface_hub

    if not isinstance(huggingface_hub.try_to_load_from_cache(repo, file), str):
        _reach(repo, file)
    split = _SPLIT.fullmatch(file)
    if split is None:
        return Path(huggingface_hub.hf_hub_download(repo, file))
    # A split model needs all of its parts; its readers find them beside the first.
    pattern = f"{split['stem']}-*-of-{split['count']}.gguf"
    return _snapshot(repo, [pattern]) / file


def _snapshot(repo: str, patterns: Iterable[str]) -> Path:
    import huggingface_hub

    return Path(
        huggingface_hub.snapshot_download(
            repo, allow_patterns=list(patterns), ignore_patterns=["*/*.safetensors", "*/*.json"]
        )
    )


def _reach(repo: str, file: str) -> None:
    """Ask the hub for a file once, and raise what its library does where there is no answer: what
    comes after would try again for half a minute before it raised the same."""
    import huggingface_hub
    from huggingface_hub import constants, errors

    if not constants.HF_HUB_OFFLINE:
        with suppress(errors.HfHubHTTPError, errors.EntryNotFoundError):  # which are answers
            huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(repo, file))


def _names(repo: str) -> list[str]:
    """The files of a repository: the hub's list, or offline those that its cache has."""
    import huggingface_hub
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        folder = Path(huggingface_hub.snapshot_download(repo, local_files_only=True))
        return [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
    _reach(repo, _CONFIG)
    return huggingface_hub.HfApi().list_repo_files(repo)


def _only_gguf(repo: str, names: Iterable[str]) -> str:
    """The one GGUF model among a repository's files; of a split one, its first part."""
    models: dict[object, str] = {}
    for name in sorted(names):
        if name.lower().endswith(".gguf") and "mmproj" not in name.lower():
            split = _SPLIT.fullmatch(name)
            models.setdefault((split["stem"], split["count"]) if split else name, name)
    found = list(models.values())
    if not found:
        raise ModelError(f"hf:{repo} holds neither safetensors nor GGUF files: choose another")
    if len(found) > 1:
        rest = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
        raise ModelError(
            f"hf:{repo} holds {len(found)} GGUF models: name one, as hf:{repo}:{found[0]}. "
            f"There are {', '.join(found[:_LISTED])}{rest}"
        )
    return found[0]


@contextmanager
def _errors_of(repo: str, file: str | None) -> Iterator[None]:
    """Turn what the hub's library raises into errors that name the mend."""
    from huggingface_hub import errors

    try:
        yield
    except (ModelError, DownloadError):
        raise
    except errors.GatedRepoError:
        raise DownloadError(
            f"hf:{repo} is gated: accept its terms on its page and log in (`hf auth login`, or set "
            "HF_TOKEN)"
        ) from None
    except errors.HFValidationError as error:
        raise ModelError(f"hf:{repo:.100} cannot be a name on the hub: {_line(error)}") from None
    except errors.RepositoryNotFoundError:
        raise DownloadError(
            f"hf:{repo} does not exist or is private: check the name, or log in (`hf auth login`)"
        ) from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise DownloadError(
            f"hf:{repo} is not in the hub's cache and the hub cannot be reached: check the network "
            f"and that HF_HUB_OFFLINE is not set ({_line(error)})"
        ) from None
    except errors.EntryNotFoundError:
        raise DownloadError(f"hf:{repo} has no file {file!r}: check its list of files") from None
    except Exception as error:  # the library raises its transport's own errors, by version
        raise DownloadError(
            f"cannot fetch hf:{repo}: {_line(error)}. Check the network, the free space and the "
            "hub's status, then try again"
        ) from error


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
