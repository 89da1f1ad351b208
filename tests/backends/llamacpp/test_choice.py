"""When the executor is taken, and what it refuses."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from polysilicon.config import Config
from polysilicon.engine.loading import Loaded, load
from polysilicon.engine.whole_models import choose_provider
from polysilicon.errors import ConfigError, ModelError, PluginError
from polysilicon.plugins import load_plugins
from polysilicon.request import Request
from polysilicon_llamacpp import loading, trial

from .conftest import Judge, greedy, serve

Opened = Callable[..., Loaded]


@pytest.fixture
def without_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *a: None if name == "llama_cpp" else found(name, *a),
    )


@dataclasses.dataclass
class SafetensorsStub:
    format: str = "safetensors"
    path: Path = Path("a-model")


def test_the_plugin_supplies_the_executor() -> None:
    (record,) = (r for r in load_plugins().records if r.name == "llamacpp")
    assert (record.status, record.executors, record.backends) == ("loaded", ("llamacpp",), ())


def test_loading_plugins_loads_no_llama_cpp() -> None:
    code = "from polysilicon.plugins import load_plugins as load; import sys; load()"
    command = [sys.executable, "-c", f"{code}; print(*sys.modules)"]
    loaded = subprocess.check_output(command, text=True).split()
    assert "polysilicon_llamacpp.plugin" in loaded
    assert "llama_cpp" not in loaded


@pytest.mark.usefixtures("without_llama_cpp")
def test_what_to_install(tiny_path: Path) -> None:
    mend = r"pip install 'polysilicon\[llamacpp\]'"
    with pytest.raises(PluginError, match=mend):
        load(Config(executor="llamacpp"), tiny_path)
    with pytest.raises(ModelError, match=rf"gpt2.*{mend}"):
        load(Config(), tiny_path)


@pytest.mark.parametrize("values", [{"executor": "native"}, {"backend": "reference"}])
def test_who_wants_our_own_gets_it(tiny_path: Path, values: dict[str, str]) -> None:
    with pytest.raises(ModelError, match="gpt2"):
        load(Config.model_validate(values), tiny_path)


def test_names_and_kinds_that_do_not_fit(tiny_path: Path) -> None:
    with pytest.raises(PluginError, match="did you mean 'llamacpp'"):
        load(Config(executor="llamacp"), tiny_path)
    with pytest.raises(ConfigError, match="--backend reference"):
        load(Config(executor="llamacpp", backend="reference"), tiny_path)
    with pytest.raises(ConfigError, match="safetensors"):
        choose_provider(Config(executor="llamacpp"), load_plugins(), SafetensorsStub())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "mend"),
    [
        ({"max_sequences": 129}, "--max-sequences"),
        ({"kv_dtype": "q4_0"}, "--kv-dtype"),
        ({"kv_memory": 1}, "--kv-memory"),
        ({"kv_pages": 400}, "--kv-pages"),
        ({"max_length": 257}, "--max-length"),
        ({"deterministic": True}, "--deterministic"),
        ({"activations": "bf16"}, "--activations"),
        ({"device": 1}, "--device"),
        ({"backend_option": {"speed": "9"}}, "threads"),
        ({"backend_option": {"threads": "-1"}}, "threads"),
        ({"backend_option": {"flash_attention": "maybe"}}, "flash_attention"),
    ],
)
def test_settings_that_cannot_be(opened: Opened, values: dict[str, object], mend: str) -> None:
    with pytest.raises(ConfigError, match=mend):
        opened(**values)


def test_settings_that_can(opened: Opened) -> None:
    loaded = opened(kv_memory=100 << 10, max_length=200)
    # Two layers of keys and values of 64 float32 each: 1 KiB a token.
    assert loaded.engine.max_length <= 112
    assert any("--kv-memory" in note for note in loaded.notes)
    assert opened(max_length=100).engine.max_length == 100


def test_a_file_that_llama_cpp_refuses(tiny_path: Path, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    path = tmp_path / "odd.gguf"
    content = tiny_path.read_bytes()
    assert content.count(b"blk.1.ffn_up.weight") == 1
    path.write_bytes(content.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with pytest.raises(ConfigError, match=r"cannot load .*odd\.gguf.*ffn_up"):
        load(Config(), path)


def test_a_trial_survives_what_it_tries(tiny_path: Path, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    assert trial.extra_buffers_work(tiny_path)
    assert not trial.crashes(tmp_path / "missing.gguf", "with")
    damaged = tmp_path / "damaged.gguf"
    content = tiny_path.read_bytes()
    layers = content.index(b"gpt2.block_count") + len(b"gpt2.block_count") + 4
    damaged.write_bytes(content[:layers] + bytes(4) + content[layers + 4 :])
    with pytest.raises(ConfigError, match=r"crashes on .*damaged\.gguf"):
        load(Config(), damaged)


@pytest.mark.parametrize(
    ("code", "works"),
    [
        ("pass", True),
        ("raise ValueError", True),
        ("import os, sys; sys.argv[2] == 'with' and os.abort()", False),
    ],
)
def test_what_a_trial_decides(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, works: bool
) -> None:
    monkeypatch.setattr(trial, "TRIAL", code)
    assert trial.extra_buffers_work(tiny_path) is works


def test_without_extra_buffers_it_says_so_and_is_right(
    opened: Opened, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "extra_buffers_work", lambda path: False)
    loaded = opened()
    assert any("AMX" in note for note in loaded.notes)
    ids = tuple(np.random.default_rng(9).integers(0, 256, 40).tolist())
    request = Request(id="a", prompt=ids, params=greedy(20))
    judge([request], serve(loaded, [request]))


def test_it_is_no_backend(tiny_path: Path) -> None:
    with pytest.raises(PluginError, match="--executor llamacpp"):
        load(Config(backend="llamacpp"), tiny_path)
