"""Discovery, checks and records of plugins."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from polysilicon.backend import CONTRACT_VERSION
from polysilicon.plugin_checks import PluginStatus
from polysilicon.plugins import PluginRecord, Restriction, load_plugins

Install = Callable[..., str]

GOOD = """
@hookimpl
def polysilicon_backends():
    return [Fake({name!r})]
"""


def good(name: str) -> str:
    return GOOD.format(name=name)


def record(name: str, distribution: str | None = None) -> PluginRecord:
    """The one record of a name (and distribution) after loading everything."""
    records = [
        r
        for r in load_plugins().records
        if r.name == name and distribution in (None, r.distribution)
    ]
    assert len(records) == 1, records
    return records[0]


def backend_names() -> list[str]:
    return [backend.name for backend in load_plugins().backends]


def test_the_reference_backend_comes_in_through_its_entry_point(site: Path) -> None:
    assert record("reference") == PluginRecord(
        name="reference",
        distribution="polysilicon",
        version=record("reference").version,
        status=PluginStatus.LOADED,
        backends=("reference",),
    )


def test_a_good_plugin_is_loaded(install: Install) -> None:
    install("opal", good("opal"), version="2.5")
    assert record("opal") == PluginRecord(
        name="opal",
        distribution="fake-opal",
        version="2.5",
        status=PluginStatus.LOADED,
        backends=("opal",),
    )
    assert backend_names() == ["reference", "opal"]


def test_records_are_frozen(site: Path) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        record("reference").reason = "x"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_vendor", "cannot be imported: ModuleNotFoundError: No module named"),
        ("raise SystemExit(3)", "cannot be imported: SystemExit: 3"),
        ("raise BaseException", "cannot be imported: BaseException"),
        ("1 +", "cannot be imported: SyntaxError"),
        ("", "implements no hook: mark one of polysilicon_architectures, polysilicon_backends"),
        (
            "def polysilicon_backends(): return []",
            "implements no hook",
        ),
        (
            "@hookimpl\ndef polysilicon_backend(): return []",
            "unknown hook 'polysilicon_backend': did you mean 'polysilicon_backends'?",
        ),
        (
            "@hookimpl\ndef polysilicon_backends(device): return []",
            "refused by pluggy: PluginValidationError",
        ),
        (
            "@hookimpl\ndef polysilicon_backends(): raise ValueError('a\\nb')",
            "polysilicon_backends failed: ValueError: a b",
        ),
        (
            "@hookimpl\ndef polysilicon_backends(): raise SystemExit",
            "polysilicon_backends failed: SystemExit",
        ),
        ("@hookimpl\ndef polysilicon_backends(): return Fake('opal')", "returned Fake, not a list"),
        ("@hookimpl\ndef polysilicon_backends(): return 'opal'", "returned str, not a list"),
        ("@hookimpl\ndef polysilicon_backends(): return [None]", "a NoneType, which is not an"),
        ("@hookimpl\ndef polysilicon_backends(): return [Fake]", "the class Fake, which is not an"),
        ("@hookimpl\ndef polysilicon_backends(): return [Fake('auto')]", "'auto' is not valid"),
        ("@hookimpl\ndef polysilicon_backends(): return [Fake('Opal')]", "'Opal' is not valid"),
        ("@hookimpl\ndef polysilicon_backends(): return [Fake('o' * 33)]", "is not valid"),
        ("@hookimpl\ndef polysilicon_backends(): return [Fake(7)]", "7 is not valid"),
        (
            "@hookimpl\ndef polysilicon_backends(): return [Fake('opal', contract='1.0')]",
            "is '1.0', not (major, minor)",
        ),
        (
            "@hookimpl\ndef polysilicon_backends(): return [Fake('opal', priority='high')]",
            "priority of backend 'opal' is not an int",
        ),
        (
            "@hookimpl\ndef polysilicon_architectures(): return [Fake('opal')]",
            "returned a Fake, not an Architecture",
        ),
        (
            "class Bad(Fake):\n"
            "    contract = property(lambda self: 1 / 0)\n"
            "@hookimpl\ndef polysilicon_backends(): return [Bad('opal')]",
            "ZeroDivisionError",
        ),
    ],
)
def test_a_broken_plugin_is_recorded_and_the_rest_works(
    install: Install, source: str, reason: str
) -> None:
    install("broken", source)
    install("opal", good("opal"))
    broken = record("broken")
    assert broken.status is PluginStatus.FAILED
    assert reason in broken.reason
    assert "\n" not in broken.reason
    assert broken.backends == ()
    assert backend_names() == ["reference", "opal"]


def test_an_entry_point_of_nothing(install: Install) -> None:
    install("broken", "nothing = None", value="no_such_module_at_all")
    assert "No module named 'no_such_module_at_all'" in record("broken").reason


def test_an_entry_point_that_names_none(install: Install, site: Path) -> None:
    (site / "names_none.py").write_text("nothing = None")
    install("broken", "", value="names_none:nothing")
    assert record("broken").reason == "its entry point names None, not a module"


def test_an_object_may_be_the_plugin(install: Install, site: Path) -> None:
    (site / "object_plugin.py").write_text(
        "from polysilicon.backend import hookimpl\n"
        "class Plugin:\n"
        "    @hookimpl\n"
        "    def polysilicon_architectures(self): return ()\n"
        "plugin = Plugin()\n"
    )
    install("object", "", value="object_plugin:plugin")
    assert record("object").status is PluginStatus.LOADED


def test_an_interrupt_is_not_swallowed(install: Install) -> None:
    install("slow", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_plugins()


@pytest.mark.parametrize(
    ("contract", "mend"),
    [
        ((CONTRACT_VERSION[0] + 1, 0), "upgrade polysilicon"),
        ((CONTRACT_VERSION[0], CONTRACT_VERSION[1] + 1), "upgrade polysilicon"),
        ((CONTRACT_VERSION[0] - 1, 9), "upgrade the plugin"),
    ],
)
def test_another_contract_version_is_refused(
    install: Install, contract: tuple[int, int], mend: str
) -> None:
    install(
        "opal", f"@hookimpl\ndef polysilicon_backends(): return [Fake('o', contract={contract})]"
    )
    found = record("opal")
    assert found.status is PluginStatus.INCOMPATIBLE
    assert f"built for contract {contract[0]}.{contract[1]}" in found.reason
    assert f"this polysilicon has {CONTRACT_VERSION[0]}.{CONTRACT_VERSION[1]}" in found.reason
    assert mend in found.reason
    assert backend_names() == ["reference"]


def test_an_earlier_minor_version_is_served(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polysilicon.plugin_checks.CONTRACT_VERSION", (1, 4))
    install("opal", "@hookimpl\ndef polysilicon_backends(): return [Fake('o', contract=(1, 3))]")
    assert record("opal").status is PluginStatus.LOADED


def test_two_plugins_of_one_name(install: Install) -> None:
    install("opal", good("opal"), distribution="fake-b")
    install("opal", good("opal-two"), distribution="fake-a", version="3.1")
    assert record("opal", "fake-a").status is PluginStatus.LOADED
    second = record("opal", "fake-b")
    assert second.status is PluginStatus.DUPLICATE
    assert "fake-a 3.1 has a plugin of the same name" in second.reason
    assert backend_names() == ["reference", "opal-two"]


def test_a_broken_plugin_does_not_hold_its_name(install: Install) -> None:
    install("opal", "import no_such_vendor", distribution="fake-a")
    install("opal", good("opal"), distribution="fake-b")
    assert record("opal", "fake-a").status is PluginStatus.FAILED
    assert record("opal", "fake-b").status is PluginStatus.LOADED


def test_a_third_party_cannot_take_an_in_tree_name(install: Install) -> None:
    install("reference", good("reference"), distribution="aaa")
    assert record("reference", "polysilicon").status is PluginStatus.LOADED
    assert record("reference", "aaa").status is PluginStatus.DUPLICATE


def test_two_backends_of_one_name(install: Install) -> None:
    install("one", good("opal"))
    install("two", "@hookimpl\ndef polysilicon_backends(): return [Fake('other'), Fake('opal')]")
    second = record("two")
    assert second.status is PluginStatus.DUPLICATE
    assert "'opal' is supplied by plugin 'one' of fake-one 1.0" in second.reason
    # All or nothing: the backend whose name was free is not taken either.
    assert backend_names() == ["reference", "opal"]


def test_one_plugin_with_a_backend_twice(install: Install) -> None:
    install("one", "@hookimpl\ndef polysilicon_backends(): return [Fake('opal'), Fake('opal')]")
    assert record("one").reason == "supplies backend 'opal' twice"


def test_one_distribution_installed_twice(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = install("opal", good("opal"), version="2.0")
    behind = tmp_path / "behind"
    behind.mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(behind)])
    info = behind / "fake_opal-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: Fake.Opal\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[polysilicon]\nopal = {module}\n")
    first, second = (r for r in load_plugins().records if r.name == "opal")
    assert (first.status, first.version) == (PluginStatus.LOADED, "2.0")
    assert (second.status, second.version) == (PluginStatus.DUPLICATE, "1.0")
    assert "is installed twice: 2.0 in " in second.reason
    assert str(behind) in second.reason


def test_one_folder_twice_on_the_search_path_is_no_duplicate(
    install: Install, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("opal", good("opal"))
    link = tmp_path / "link"
    link.symlink_to(site)
    monkeypatch.syspath_prepend(link)
    assert record("opal").status is PluginStatus.LOADED


def test_two_entry_points_of_one_module(install: Install) -> None:
    module = install("one", good("opal"))
    install("two", "", value=module)
    second = record("two")
    assert second.status is PluginStatus.DUPLICATE
    assert second.reason == "is the same module as plugin 'one'"


def test_a_hook_wrapper_cannot_touch_what_others_return(install: Install) -> None:
    install(
        "aaa",
        """
        import pluggy
        @pluggy.HookimplMarker("polysilicon")(wrapper=True)
        def polysilicon_backends():
            yield
            return []
        """,
    )
    install("opal", good("opal"))
    assert "opal" in backend_names()


@pytest.mark.parametrize(
    ("value", "loaded"),
    [
        ("opal", ["opal", "reference"]),
        ("opal, ruby", ["opal", "reference", "ruby"]),
        ("", ["reference"]),
        (" , ", ["reference"]),
        ("-opal", ["reference", "ruby"]),
        ("opal,-reference", ["opal"]),
        ("-opal,-ruby,-reference", []),
        ("ruby,opal,-ruby", ["opal", "reference"]),
    ],
)
def test_the_environment_restricts_what_loads(
    install: Install, monkeypatch: pytest.MonkeyPatch, value: str, loaded: list[str]
) -> None:
    install("opal", good("opal"))
    install("ruby", good("ruby"))
    monkeypatch.setenv("POLYSILICON_PLUGINS", value)
    assert sorted(backend_names()) == loaded
    for found in load_plugins().records:
        if found.name not in loaded:
            assert found.status is PluginStatus.BLOCKED
            assert "POLYSILICON_PLUGINS" in found.reason


def test_a_blocked_plugin_is_not_imported(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = install("opal", good("opal"))
    monkeypatch.setenv("POLYSILICON_PLUGINS", "-opal")
    load_plugins()
    assert module not in sys.modules


def test_the_configuration_blocks(install: Install) -> None:
    install("opal", good("opal"))
    plugins = load_plugins(["opal"])
    assert [b.name for b in plugins.backends] == ["reference"]
    (blocked,) = (r for r in plugins.records if r.status is PluginStatus.BLOCKED)
    assert "block_plugins" in blocked.reason


def test_a_name_that_is_allowed_but_not_installed(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("opal", good("opal"))
    monkeypatch.setenv("POLYSILICON_PLUGINS", "opel")
    found = record("opel")
    assert found.status is PluginStatus.MISSING
    assert "did you mean 'opal'?" in found.reason


def test_no_restriction_without_the_variable() -> None:
    assert Restriction.parse(None).reason_against("anything", in_tree=False) == ""


def test_the_order_is_stable(install: Install) -> None:
    for name in ("zinc", "opal", "mica"):
        install(name, good(name))
    assert [r.name for r in load_plugins().records] == ["reference", "mica", "opal", "zinc"]


def test_damaged_metadata(install: Install, site: Path) -> None:
    install("opal", good("opal"))
    for text in ("[polysilicon]\nno equals sign\n", "[console_scripts]\nno equals sign\n"):
        info = site / f"damaged{len(text)}-1.0.dist-info"
        info.mkdir()
        (info / "entry_points.txt").write_text(text)
    assert record("opal").status is PluginStatus.LOADED
    assert record("unreadable").status is PluginStatus.FAILED
    assert f"{site} has damaged metadata: reinstall it" in record("unreadable").reason
