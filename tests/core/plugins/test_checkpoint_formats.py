"""Formats of quantised checkpoints that plugins read: what is checked of them, and one at work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from polysilicon.format_matrix import formats
from polysilicon.plugin_checks import PluginStatus
from polysilicon.plugins import PluginRecord, load_plugins
from polysilicon.weights.checkpoint import open_checkpoint

Install = Callable[..., str]

PLUGIN = """
import dataclasses
from polysilicon.backend import Dense
from polysilicon.weights.formats.format import LogicalTensor
from polysilicon.weights.formats.settings import stated_settings

class Doubled:
    name = "doubled"
    encodings = {{"doubled:2": "dense:f32"}}
    def recognizes(self, files):
        settings = stated_settings(files)
        return settings is not None and settings.method == self.name
    def open(self, files):
        return {{
            name: LogicalTensor(
                info=dataclasses.replace(info, type="doubled:2"),
                read=lambda name=name: Dense(array=files.array(name) / 2),
            )
            for name, info in files.tensors.items()
        }}

@hookimpl
def polysilicon_checkpoint_formats():
    doubled = Doubled()
    {change}
    return [doubled]
"""


def plugin(change: str = "pass") -> str:
    return PLUGIN.format(change=change)


def record(name: str) -> PluginRecord:
    (found,) = (r for r in load_plugins().records if r.name == name)
    return found


def test_a_good_format_is_supplied_and_reads(install: Install, tmp_path: Path) -> None:
    install("opal", plugin())
    assert record("opal").checkpoint_formats == ("doubled",)
    added = load_plugins().checkpoint_formats
    assert [format.name for format in added] == ["doubled"]
    assert [f.encoding for f in formats(added) if f.type == "doubled:2"] == ["dense:f32"]
    save_file({"x": np.array([2, 4], np.float32)}, tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "doubled"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with open_checkpoint(tmp_path, added=added) as checkpoint:
        assert checkpoint.tensors["x"].type == "doubled:2"
        assert list(checkpoint.weight("x").dequantize()) == [1, 2]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("doubled.name = 'auto'", "'auto' is not valid"),
        ("doubled.name = 'Doubled'", "lower-case"),
        ("doubled.name = 'gptq'", "one of polysilicon's own"),
        ("doubled.encodings = ['dense:f32']", "not a mapping of types to encodings"),
        ("doubled.encodings = {'a': 4}", "not a mapping of types to encodings"),
        ("return [Doubled]", "the class Doubled"),
        ("return [doubled, doubled]", "twice"),
        ("return Fake('x')", "not a list or tuple"),
        ("return [Fake('x')]", "name, encodings, recognizes() and open()"),
    ],
)
def test_a_wrong_one_is_recorded(install: Install, change: str, reason: str) -> None:
    install("opal", plugin(change))
    assert record("opal").status != PluginStatus.LOADED
    assert reason in record("opal").reason
    assert load_plugins().checkpoint_formats == ()


def test_of_two_with_one_name_the_first_is_used(install: Install) -> None:
    install("opal", plugin())
    install("ruby", plugin())
    assert record("opal").status == PluginStatus.LOADED
    assert record("ruby").status == PluginStatus.DUPLICATE
    assert "'opal'" in record("ruby").reason
