"""The command line as a user meets it: output, errors, exit statuses."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from polysilicon.backend import DeviceError
from polysilicon.commands.application import run
from polysilicon.errors import ConfigError, ModelError
from polysilicon.reference.device import ReferenceDevice

PROGRAM = (sys.executable, "-c", "from polysilicon.cli import main; main()")

PLUGIN = """
from polysilicon.backend import DeviceInfo
from polysilicon.backend import hookimpl
class B:
    priority = 0
    def __init__(self, name, contract=(1, 0)):
        self.name, self.contract = name, contract
    def probe(self): return [DeviceInfo(name="card [0]", memory=3 << 30)]
    def open(self, index, options): raise RuntimeError("no hardware")
"""
HOOK = "@hookimpl\ndef polysilicon_backends(): return [{}]\n"
PLUGINS = {
    "unimportable": "import no_such_vendor",
    "outdated": PLUGIN + HOOK.format("B('outdated', contract=(9, 1))"),
    "misspelt": PLUGIN + HOOK.format("B('misspelt')").replace("backends", "backend"),
    "probing": PLUGIN
    + "class C(B):\n    def probe(self): raise OSError('driver lost')\n"
    + HOOK.format("C('probing')"),
    "card": PLUGIN + HOOK.format("B('card')"),
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment with plugins of every kind of fault, two of one name among them."""
    for name, source in PLUGINS.items():
        _install(tmp_path, name, f"fake-{name}", name, source)
    _install(tmp_path, "card", "fake-zcard", "zcard", PLUGIN + HOOK.format("B('zcard')"))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("POLYSILICON")}
    return environment | {"PYTHONPATH": str(tmp_path), "COLUMNS": "80"}


def _install(folder: Path, plugin: str, distribution: str, module: str, source: str) -> None:
    (folder / f"fake_module_{module}.py").write_text(textwrap.dedent(source))
    info = folder / f"{distribution.replace('-', '_')}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(f"[polysilicon]\n{plugin} = fake_module_{module}\n")


def called(*arguments: str, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [*PROGRAM, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_plugins_of_every_kind_of_fault(environment: dict[str, str]) -> None:
    listed = json.loads(called("plugins", "--json", environment=environment))
    own = {r["name"]: r["status"] for r in listed if r["distribution"] == "polysilicon"}
    assert own["reference"] == "loaded"
    others = [r for r in listed if r["distribution"] != "polysilicon"]
    assert [(r["name"], r["distribution"], r["status"]) for r in others] == [
        ("card", "fake-card", "loaded"),
        ("card", "fake-zcard", "duplicate"),
        ("misspelt", "fake-misspelt", "failed"),
        ("outdated", "fake-outdated", "incompatible"),
        ("probing", "fake-probing", "loaded"),
        ("unimportable", "fake-unimportable", "failed"),
    ]
    assert all(bool(r["reason"]) == (r["status"] != "loaded") for r in listed)
    rows = [
        re.split(r" {2,}", line) for line in called("plugins", environment=environment).splitlines()
    ]
    for record in listed:
        owner = f"{record['distribution']} {record['version']}"
        (row,) = (row for row in rows if [row[0], row[2]] == [record["name"], owner])
        assert row[1] == record["status"]
        assert record["reason"] in row[3:]


def test_backends_of_every_kind_of_fault(environment: dict[str, str]) -> None:
    listed = json.loads(called("backends", "--json", environment=environment))
    status = {b["name"]: (b["status"], b["reason"]) for b in listed["backends"]}
    in_tree = ("cuda", "rocm", "metal", "cpu")
    assert [name for name in status if name not in in_tree] == ["card", "probing", "reference"]
    assert status["reference"] == ("available", "")
    assert status["probing"] == ("faulty", "its probe failed: OSError: driver lost")
    assert status["card"][0] == "faulty"
    assert "RuntimeError: no hardware" in status["card"][1]
    assert "f16" in listed["backends"][-1]["capabilities"]["kv_dtypes"]
    assert [r["name"] for r in listed["unloaded"]] == [
        "card", "misspelt", "outdated", "unimportable",
    ]  # fmt: skip
    table = called("backends", environment=environment)
    for word in ("card [0]", "driver lost", "no_such_vendor", "contract 9.1", "fake-zcard"):
        assert word in table


def test_the_matrix() -> None:
    printed = json.loads(called("backends", "--matrix", "--json"))
    support = {(f["container"], f["type"]): f["support"] for f in printed["formats"]}
    assert support["gguf", "Q4_K"]["reference"] == "native"
    assert support["safetensors", "BF16"]["reference"] == "native"
    assert support["gguf", "I64"]["reference"] == "refused"
    lines = called("backends", "--matrix").splitlines()
    rows = [line for line in lines if line.split()[0] in ("gguf", "safetensors")]
    assert len(rows) == len(support)
    # Below the table, why backends cannot run here, and what came of the lanes.
    below = lines[1 + len(rows) :]
    lanes = [line.split()[1].rstrip(":") for line in below if line.startswith("lane ")]
    assert lanes == sorted(printed["lanes"])
    others = [line for line in below if not line.startswith(("lane ", "note: ", "*: "))]
    assert len(others) == len(printed["unavailable"])
    assert all(" is not installed: " in line for line in others)


def test_a_lane_answers_for_a_backend_that_cannot_run_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """By what its device declared there, in a column of its own."""
    declared = {
        "compute": "f32", "kv_dtypes": ["f16"], "page_sizes": [16], "encodings": ["dense:*"]
    }  # fmt: skip
    kit = {
        "kit": True, "passed": 800, "skipped": {"declares no x": 2}, "xfailed": {"t::b": "why"},
        "failed": [],
    }  # fmt: skip
    own = kit | {"kit": False, "passed": 3, "skipped": {}, "xfailed": {}, "failed": ["t::a"]}
    report = {
        "name": "elsewhere", "date": "2026-01-02", "device": "card", "shows": ["emulation"],
        "capabilities": declared, "runs": [kit, kit, own],
    }  # fmt: skip
    (tmp_path / "elsewhere.json").write_text(json.dumps(report))
    monkeypatch.setattr("polysilicon.lane_reports.REPORTS", tmp_path)
    assert run(["backends", "--matrix", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    reported = {(f["container"], f["type"]): f["reported"] for f in printed["formats"]}
    assert reported["gguf", "F16"] == {"elsewhere": "native"}
    assert reported["gguf", "Q4_K"] == {"elsewhere": "transcoded"}
    assert reported["gguf", "I64"] == {"elsewhere": "refused"}
    assert all("elsewhere" not in f["support"] for f in printed["formats"])
    assert run(["backends", "--matrix"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[-1] == "elsewhere*"
    assert (
        "lane elsewhere: emulation on card, 2026-01-02: "
        "800 passed, 1 expected to fail, 2 skipped; "
        "one more setting: 800 passed, 1 expected to fail, 2 skipped; own tests: 1 failed, 3 passed"
    ) in lines


def test_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    assert run(["backends"]) == 0
    lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    assert len(lines) > 2
    assert max(map(len, lines)) <= 80


def test_no_plugin_at_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.metadata.distributions", lambda: [])
    assert run(["plugins"]) == 0
    assert "install it" in capsys.readouterr().out


def test_pull_prints_the_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model.gguf"
    model.touch()
    assert run(["pull", str(model)]) == 0
    assert capsys.readouterr().out == f"{model}\n"


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("polysilicon.catalogue.resolve_model", fail)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ModelError("it is\nbroken"), 1, "error: it is broken\n"),
        (ConfigError("wrong"), 2, "error: wrong\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: int,
    message: str,
) -> None:
    failing(monkeypatch, error)
    assert run(["pull", "x"]) == status
    assert capsys.readouterr() == ("", message)


def test_a_fault_of_our_own_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        run(["pull", "x"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pull", "--no-such-flag"], "no such option"),
        (["no-such-command"], "no such command"),
        (["pull", "a", "b"], "unexpected extra argument"),
    ],
)
def test_wrong_usage(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert message in captured.err.lower()
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["--help"], ["pull", "-h"], ["--version"]])
def test_asking_is_no_error(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert run(arguments) == 0
    captured = capsys.readouterr()
    assert captured.out
    assert captured.err == ""


def test_a_reader_that_goes_away() -> None:
    process = subprocess.Popen(
        [*PROGRAM, "plugins", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=120) == 1


WHILE_IT_WORKS = """
import polysilicon.catalogue as c
c.resolve_model = lambda *a, **k: os.kill(os.getpid(), signal.SIGINT)
"""
WHILE_IT_LOADS = """
class Finder:
    def find_spec(name, path=None, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT between processes")
@pytest.mark.parametrize("moment", [WHILE_IT_WORKS, WHILE_IT_LOADS])
def test_an_interrupt(moment: str) -> None:
    call = "from polysilicon.cli import main; sys.argv[1:] = ['pull', 'x']; main()"
    source = f"import os, signal, sys\n{moment}\n{call}"
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, b"", b"")


def test_tune(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", "--backend", "reference"]) == 0
    assert capsys.readouterr().out == "backend reference has nothing to tune on numpy\n"

    def measured(device: ReferenceDevice, report: Callable[[str], None]) -> str:
        report("product: 2.0 us")
        return "there"

    monkeypatch.setattr(ReferenceDevice, "tune", measured)
    assert run(["tune", "--backend", "reference"]) == 0
    assert capsys.readouterr().out == "product: 2.0 us\nkept for numpy in there\n"

    def lost(device: ReferenceDevice, report: Callable[[str], None]) -> str:
        raise DeviceError("the card is gone")

    monkeypatch.setattr(ReferenceDevice, "tune", lost)
    assert run(["tune", "--backend", "reference"]) == 1
    assert capsys.readouterr().err == "error: backend reference failed: the card is gone\n"
