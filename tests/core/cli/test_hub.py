"""Models of the Hugging Face hub, with its library's functions replaced at their boundary."""

from __future__ import annotations

import fnmatch
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from polysilicon.catalogue import resolve_model
from polysilicon.errors import DownloadError, ModelError
from polysilicon.hub import fetch_config, fetch_from_hub


class FakeHub:
    """Repositories as lists of file names, and the functions that are called."""

    def __init__(self, root: Path, repositories: dict[str, list[str]]) -> None:
        self.root, self.repositories = root, repositories
        self.calls: list[str] = []

    def hf_hub_download(self, repo_id: str, filename: str) -> str:
        self.calls.append("hf_hub_download")
        if filename not in self.repositories[repo_id]:
            raise made(errors.EntryNotFoundError)
        return self._write(repo_id, filename)

    def snapshot_download(
        self,
        repo_id: str,
        *,
        allow_patterns: list[str] | None = None,
        ignore_patterns: list[str] | None = None,
        local_files_only: bool = False,
    ) -> str:
        self.calls.append("snapshot_download")
        for name in self.repositories[repo_id]:
            # As the hub's library does, * matches slashes too.
            if (
                not local_files_only
                and any(fnmatch.fnmatch(name, p) for p in allow_patterns or ["*"])
                and not any(fnmatch.fnmatch(name, p) for p in ignore_patterns or [])
            ):
                self._write(repo_id, name)
        return str(self.root / repo_id)

    def list_repo_files(self, _: object, repo_id: str) -> list[str]:
        self.calls.append("list_repo_files")
        return self.repositories[repo_id]

    def _write(self, repo_id: str, name: str) -> str:
        path = self.root / repo_id / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
        return str(path)


def made(kind: type[Exception], message: str = "it said so") -> Exception:
    """An error of the library, whose constructors differ between its versions."""
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    error.server_message = None  # type: ignore[attr-defined]
    return error


def hub(monkeypatch: pytest.MonkeyPatch, root: Path, *files: str) -> FakeHub:
    fake = FakeHub(root, {"owner/repo": list(files)})
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fake.hf_hub_download)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    monkeypatch.setattr(
        huggingface_hub.HfApi, "list_repo_files", lambda api, repo: fake.list_repo_files(api, repo)
    )
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(root / "cache"))
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url: None)
    return fake


def present(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def test_a_named_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = hub(monkeypatch, tmp_path, "a.gguf", "sub/b.gguf")
    assert resolve_model("hf:owner/repo:sub/b.gguf") == tmp_path / "owner/repo/sub/b.gguf"
    assert fake.calls == ["hf_hub_download"]


def test_a_safetensors_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wanted = [
        "config.json", "generation_config.json", "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json",
        "tokenizer.model", "chat_template.jinja", "merges.txt",
    ]  # fmt: skip
    hub(
        monkeypatch, tmp_path, *wanted, "pytorch_model.bin", "README.md", "q4.gguf",
        "onnx/model.onnx", "original/model.safetensors", "original/params.json",
    )  # fmt: skip
    assert fetch_from_hub("hf:owner/repo") == tmp_path / "owner/repo"
    assert present(tmp_path / "owner/repo") == sorted(wanted)


def test_the_only_gguf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub(monkeypatch, tmp_path, "README.md", "model.Q4_K_M.gguf", "mmproj-model.gguf")
    assert fetch_from_hub("hf:owner/repo") == tmp_path / "owner/repo/model.Q4_K_M.gguf"


@pytest.mark.parametrize("spec", ["hf:owner/repo", "hf:owner/repo:m/q-00001-of-00003.gguf"])
def test_all_parts_of_a_split_gguf(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spec: str
) -> None:
    parts = [f"m/q-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    hub(monkeypatch, tmp_path, "README.md", *parts)
    assert fetch_from_hub(spec) == tmp_path / "owner/repo" / parts[0]
    assert present(tmp_path / "owner/repo") == parts


def test_several_ggufs_are_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub(monkeypatch, tmp_path, *(f"q{i:02}.gguf" for i in range(40)))
    with pytest.raises(ModelError, match=r"40 GGUF models: name one, as hf:owner/repo:q00.gguf"):
        fetch_from_hub("hf:owner/repo")


def test_nothing_that_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub(monkeypatch, tmp_path, "README.md", "pytorch_model.bin")
    with pytest.raises(ModelError, match="neither safetensors nor GGUF"):
        fetch_from_hub("hf:owner/repo")


def test_offline_from_the_hub_s_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = hub(monkeypatch, tmp_path, "model.gguf")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    fake._write("owner/repo", "model.gguf")
    assert fetch_from_hub("hf:owner/repo") == tmp_path / "owner/repo/model.gguf"
    assert "list_repo_files" not in fake.calls


@pytest.mark.parametrize(
    "spec", ["hf:", "hf:repo", "hf:owner/repo/more", "hf:owner/repo:", "hf:../repo x"]
)
def test_a_spec_of_another_form(spec: str) -> None:
    with pytest.raises(ModelError, match=r"is not of the form hf:owner/repo\[:file\]"):
        fetch_from_hub(spec)


@pytest.mark.parametrize("file", ["../x.gguf", "/etc/passwd", "a/../../x.gguf", "a//b", "."])
def test_a_file_outside_the_repository(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str
) -> None:
    fake = hub(monkeypatch, tmp_path, "a.gguf")
    with pytest.raises(ModelError, match="named as the repository lists it"):
        fetch_from_hub(f"hf:owner/repo:{file}")
    assert not fake.calls


@pytest.mark.parametrize("repo", ["../..", "a--b/c", "-/-", "owner/repo.git", "a" * 200 + "/b"])
def test_what_the_hub_s_library_holds_for_no_name(repo: str) -> None:
    """Which has nothing to do with the network."""
    for fetch in (fetch_config, fetch_from_hub):
        with pytest.raises(ModelError, match="cannot be a name on the hub") as raised:
            fetch(f"hf:{repo}")
        assert "network" not in str(raised.value)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (made(errors.GatedRepoError), "is gated: accept its terms"),
        (made(errors.RepositoryNotFoundError), "does not exist or is private"),
        (made(errors.LocalEntryNotFoundError), "HF_HUB_OFFLINE is not set"),
        (made(errors.OfflineModeIsEnabled), "HF_HUB_OFFLINE is not set"),
        (made(errors.EntryNotFoundError), "has no file 'a.gguf'"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (
            RuntimeError("of a transport"),
            "cannot fetch hf:owner/repo: RuntimeError: of",
        ),
    ],
)
def test_errors_of_the_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, message: str
) -> None:
    hub(monkeypatch, tmp_path, "a.gguf")

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(DownloadError, match="hf:owner/repo") as raised:
        fetch_from_hub("hf:owner/repo:a.gguf")
    assert message in str(raised.value)


@pytest.mark.parametrize("spec", ["hf:owner/repo", "hf:owner/repo:a.gguf"])
def test_a_hub_that_cannot_be_reached_is_asked_once(
    spec: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What would try again and again is not called at all."""
    fake = hub(monkeypatch, tmp_path, "a.gguf")
    asked = []

    def unreachable(url: str) -> None:
        asked.append(url)
        raise OSError("no such host")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", unreachable)
    with pytest.raises(DownloadError, match=r"no such host\. Check the network"):
        fetch_from_hub(spec)
    assert len(asked) == 1
    assert "owner/repo" in asked[0]
    assert fake.calls == []


def test_an_answer_of_any_kind_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub(monkeypatch, tmp_path, "a.gguf")

    def answered(url: str) -> None:
        raise made(errors.EntryNotFoundError)

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", answered)
    assert fetch_from_hub("hf:owner/repo") == tmp_path / "owner/repo/a.gguf"


def test_what_the_cache_has_needs_no_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The library falls back to its cache at once where the hub cannot be reached."""
    fake = hub(monkeypatch, tmp_path, "a.gguf")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda repo, file: "kept")
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", pytest.fail)
    assert fetch_from_hub("hf:owner/repo:a.gguf").name == "a.gguf"
    assert fake.calls == ["hf_hub_download"]


def test_the_real_library_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is called exists in the library, and its own offline error is understood."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for spec in ("hf:owner/repo", "hf:owner/repo:a.gguf"):
        with pytest.raises(DownloadError, match="not in the hub's cache"):
            fetch_from_hub(spec)


def test_the_real_library_in_a_process_of_its_own(tmp_path: Path) -> None:
    """Where nothing else has imported any of its modules, which it loads when they are asked
    for."""
    script = (
        "from polysilicon.errors import DownloadError\n"
        "from polysilicon.hub import fetch_from_hub\n"
        "try:\n"
        "    fetch_from_hub('hf:owner/repo')\n"
        "except DownloadError as error:\n"
        "    print(error)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert "hf:owner/repo is not in the hub's cache" in ended.stdout
