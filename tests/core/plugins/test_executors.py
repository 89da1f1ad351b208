"""Executors of whole models that plugins supply: what is checked of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from polysilicon.plugin_checks import PluginStatus
from polysilicon.plugins import PluginRecord, load_plugins
from polysilicon.selection import why_not

Install = Callable[..., str]

PLUGIN = """
class Whole:
    contract = (1, 0)
    formats = frozenset({{"gguf"}})
    name = "whole"
    def probe(self):
        {probe}
    def open(self, path, settings):
        raise RuntimeError("there is nothing behind it")

@hookimpl
def polysilicon_executors():
    whole = Whole()
    {change}
    return [whole]
"""


def plugin(change: str = "pass", probe: str = "return None") -> str:
    return PLUGIN.format(change=change, probe=probe)


def record(name: str) -> PluginRecord:
    (found,) = (r for r in load_plugins().records if r.name == name)
    return found


def test_a_good_executor_is_supplied(install: Install) -> None:
    install("opal", plugin())
    assert record("opal").executors == ("whole",)
    assert record("opal").backends == ()
    assert "whole" in [provider.name for provider in load_plugins().executors]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("whole.name = 'native'", "not 'auto' or 'native'"),
        ("whole.name = 'auto'", "not 'auto' or 'native'"),
        ("whole.name = 'Whole'", "lower-case"),
        ("whole.formats = 'gguf'", "frozenset"),
        ("whole.contract = (0, 9)", "built for contract 0.9"),
        ("whole.contract = '1.0'", "(major, minor)"),
        ("return [Whole]", "the class Whole"),
        ("return [whole, whole]", "twice"),
        ("return Fake('x')", "not a list or tuple"),
        ("return [Fake('x')]", "formats"),
    ],
)
def test_a_wrong_one_is_recorded(install: Install, change: str, reason: str) -> None:
    install("opal", plugin(change))
    assert record("opal").status != PluginStatus.LOADED
    assert reason in record("opal").reason
    assert "whole" not in [provider.name for provider in load_plugins().executors]


def test_of_two_with_one_name_the_first_is_used(install: Install) -> None:
    install("opal", plugin())
    install("ruby", plugin())
    assert record("opal").status == PluginStatus.LOADED
    assert record("ruby").status == PluginStatus.DUPLICATE
    assert "'opal'" in record("ruby").reason


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        ("return None", None),
        ("return Unavailable(reason='install it')", "install it"),
        ("raise OSError('no such library')", "its probe failed: OSError: no such library"),
        ("raise SystemExit(3)", "its probe failed: SystemExit: 3"),
        ("return True", "its probe returned True"),
    ],
)
def test_why_it_cannot_run(install: Install, probe: str, reason: str | None) -> None:
    install("opal", plugin(probe=probe))
    (provider,) = (p for p in load_plugins().executors if p.name == "whole")
    found = why_not(provider)
    assert found == reason or (reason is not None and (found or "").startswith(reason))
