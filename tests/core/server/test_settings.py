"""What the server is told, and what it refuses to be told."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from polysilicon.commands.application import run
from polysilicon.config import Config
from polysilicon.errors import ConfigError
from polysilicon.server.settings import API_KEY_VARIABLE, Settings


@pytest.mark.parametrize(
    ("config", "path", "names"),
    [
        (Config(), "/models/a.gguf", ("smollm2",)),
        (Config(model="gemma3-270m"), "/models/b.gguf", ("gemma3-270m",)),
        (Config(model="hf:owner/repo"), "/cache/x", ("hf:owner/repo",)),
        (Config(model="./here/model.gguf"), "/here/model.gguf", ("model.gguf",)),
        (Config(served_model_name=("one", "two")), "/models/a.gguf", ("one", "two")),
    ],
)
def test_model_names(config, path, names) -> None:
    assert Settings.from_config(config, Path(path)).model_names == names


def test_api_keys_come_together(tmp_path, monkeypatch) -> None:
    keys = tmp_path / "keys"
    keys.write_text("\n# none\n one \ntwo\n")
    monkeypatch.setenv(API_KEY_VARIABLE, "three")
    config = Config(api_key=("zero", "one"), api_key_file=str(keys))
    settings = Settings.from_config(config, Path("x"))
    assert settings.api_keys == ("zero", "one", "three", "two")
    monkeypatch.delenv(API_KEY_VARIABLE)
    assert Settings.from_config(Config(), Path("x")).api_keys == ()


@pytest.mark.parametrize("content", [b"", b"# only\n", b"\xff\xfe", b"two words", "ключ".encode()])
def test_key_files_that_cannot_be_used(tmp_path, content) -> None:
    keys = tmp_path / "keys"
    keys.write_bytes(content)
    for file in (keys, tmp_path / "missing", tmp_path):
        with pytest.raises(ConfigError, match="--api-key"):
            Settings.from_config(Config(api_key_file=str(file)), Path("x"))


def test_sampling_defaults_are_the_operators() -> None:
    config = Config(temperature=0.5, top_k=3, n=4, stop=("x",))
    assert Settings.from_config(config, Path("x")).sampling == {"temperature": 0.5, "top_k": 3}


def test_ports_and_hosts_that_cannot_be_used(capsys, smollm2_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert run(["serve", str(smollm2_path), "--port", port]) == 2
    for host in ("256.0.0.1", "no such host", "203.0.113.7"):
        assert run(["serve", str(smollm2_path), "--host", host]) == 2
    assert run(["serve", str(smollm2_path), "--port", "70000"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 5
    assert all(error.startswith("error: ") and "--port" in error for error in errors)


def test_requests_that_say_nothing_are_sampled_as_other_servers_sample_them(
    serve, tiny_path: Path
) -> None:
    ask = {"prompt": [5, 6, 7], "max_tokens": 20, "logprobs": 0}
    with serve(str(tiny_path), "--backend", "reference") as served:
        texts = [
            served.post("/v1/completions", {**ask, "seed": seed}).json()["choices"][0]["text"]
            for seed in (1, 1, 2)
        ]
    assert texts[0] == texts[1] != texts[2]
