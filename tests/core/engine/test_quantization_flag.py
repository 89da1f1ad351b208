"""`--quantization` reaches the reader, with the formats of plugins."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from polysilicon import plugins
from polysilicon.config import load_config
from polysilicon.engine import loading
from polysilicon.errors import ModelError
from polysilicon.testing.tiny_models import tiny_llama


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("gptq", r"no tensor NAME\.qweight.*Leave --quantization out"),
        ("gtpq", "'gtpq' is not known: did you mean 'gptq'"),
    ],
)
def test_a_mismatch_is_an_error(tmp_path: Path, name: str, match: str) -> None:
    tiny_llama().write(tmp_path)
    with pytest.raises(ModelError, match=match):
        loading.load(load_config(flags={"quantization": name}), tmp_path)


def test_plugins_formats_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked:
        name = "asked"
        encodings: Mapping[str, str] = MappingProxyType({})

        def recognizes(self, files: Any) -> bool:
            return False

        def open(self, files: Any) -> Any:
            raise ModelError(f"{files.path} was opened.")

    def with_format(*blocked: Any) -> plugins.Plugins:
        return plugins.Plugins(
            records=(), backends=(), executors=(), architectures=(), checkpoint_formats=(Asked(),)
        )

    monkeypatch.setattr(loading, "load_plugins", with_format)
    tiny_llama().write(tmp_path)
    with pytest.raises(ModelError, match="was opened"):
        loading.load(load_config(flags={"quantization": "asked"}), tmp_path)
