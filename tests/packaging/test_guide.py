"""The authors' guide, followed to the letter: its files are made, installed and judged."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from polysilicon.testing import conformance

ROOT = Path(__file__).parents[2]
EXAMPLE = "From an empty folder to a passing kit"
KERNELS = "Kernels of your own"

OFFLINE = ("--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
LONG = ("test_engine*", "test_embeddings*", "test_sampling*", "test_attention_pages*")
"""Modules of the kit that take most of its time, and say nothing new of the reference's ops."""


def section(heading: str) -> str:
    """The text of a section of the guide, its subsections included."""
    text = (ROOT / "plugins" / "README.md").read_text()
    return re.split(r"^## ", text.partition(f"\n## {heading}\n")[2], maxsplit=1, flags=re.M)[0]


def blocks(heading: str, *languages: str) -> list[str]:
    """The code blocks of a section."""
    found = re.findall(r"^```(\w+)\n(.*?)^```$", section(heading), flags=re.M | re.S)
    return [text for language, text in found if language in languages]


def files(heading: str) -> dict[str, str]:
    """Contents by path of the files that a section gives: blocks whose first line is a path."""
    named = re.compile(r"# (\S+\.(?:py|toml))\n")
    found = [(named.match(text), text) for text in blocks(heading, "toml", "python")]
    return {first.group(1): text for first, text in found if first}


def commands(heading: str, program: str) -> list[list[str]]:
    """The calls of a program in a section, as lists of words."""
    lines = [line for block in blocks(heading, "sh") for line in block.splitlines()]
    return [words for words in map(shlex.split, lines) if words[0] == program]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Author:
    """Someone who follows the guide, in a folder and an environment of their own."""

    folder: Path
    python: Path

    def run(self, command: list[str], *further: str) -> subprocess.CompletedProcess[str]:
        """A command of the guide: of this environment, and without the network. The folder's
        modules go before those that are installed."""
        program, *words = command
        ours = {
            "pip": [sys.executable, "-m", "pip", "--python", str(self.python), *words, *OFFLINE],
            "pytest": [str(self.python), "-m", "pytest", "-p", "no:cacheprovider", *words],
            "polysilicon": [
                *(str(self.python), "-c", "from polysilicon.cli import main; main()", *words),
            ],
        }[program]
        left_out = ("POLYSILICON_PLUGINS", "PYTEST_ADDOPTS")
        environment = {name: value for name, value in os.environ.items() if name not in left_out}
        quiet = {"PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1"}
        return subprocess.run(
            [*ours, *further],
            cwd=self.folder,
            env=environment | quiet,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def kit(self, command: list[str], *further: str) -> str:
        """What the kit says, which must pass and leave out only what is not declared."""
        done = self.run(command, "-rs", *further)
        assert done.returncode == 0, done.stdout + done.stderr
        passed = re.search(r"(\d+) passed", done.stdout)
        assert passed, done.stdout
        skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
        assert all(": declares no " in line for line in skipped), skipped
        return done.stdout


@pytest.fixture(scope="module")
def author(tmp_path_factory: pytest.TempPathFactory) -> Author:
    """With the example made and installed. The environment is new and sees what is installed
    here."""
    home = tmp_path_factory.mktemp("author")
    venv.create(home / "environment", symlinks=os.name != "nt")
    python = home / "environment" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    site = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    ).strip()
    outer = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    lines = [f"import site; site.addsitedir({path!r})\n" for path in sorted(outer)]
    (Path(site) / "outer.pth").write_text("".join(lines))

    folder = home / "polysilicon-echo"
    (package,) = commands(EXAMPLE, "mkdir")
    assert package[1:] == ["-p", "polysilicon-echo/polysilicon_echo"]
    (folder / "polysilicon_echo").mkdir(parents=True)
    assert commands(EXAMPLE, "cd") == [["cd", "polysilicon-echo"]]
    for _, *empty in commands(EXAMPLE, "touch"):
        for path in empty:
            (folder / path).touch()
    for path, text in files(EXAMPLE).items():
        (folder / path).write_text(text)
    author = Author(folder=folder, python=python)
    for command in commands(EXAMPLE, "pip"):
        done = author.run(command)
        assert done.returncode == 0, done.stdout + done.stderr
    return author


def patch(folder: Path, change: str) -> None:
    """Make a change of one file, as `patch -p0` does where every line stands as the change says."""
    removed, added, *body = change.splitlines()
    name = removed.removeprefix("--- ")
    assert added == f"+++ {name}"
    numbers = re.compile(r"@@ -(\d+),(\d+) \+(\d+),(\d+) @@")
    starts = [index for index, line in enumerate(body) if line.startswith("@@")]
    lines = (folder / name).read_text().splitlines()
    for start, end in zip(starts, [*starts[1:], len(body)], strict=True):
        match = numbers.fullmatch(body[start])
        assert match, body[start]
        old_at, old_count, new_at, new_count = map(int, match.groups())
        hunk = [(line[:1] or " ", line[1:]) for line in body[start + 1 : end]]
        old = [text for kind, text in hunk if kind in " -"]
        new = [text for kind, text in hunk if kind in " +"]
        assert (len(old), len(new)) == (old_count, new_count)
        # What stands before is changed already.
        assert lines[new_at - 1 : new_at - 1 + old_count] == old, body[start]
        assert old_at <= new_at
        lines[new_at - 1 : new_at - 1 + old_count] = new
    (folder / name).write_text("\n".join(lines) + "\n")


@pytest.fixture
def further(author: Author, tmp_path: Path) -> Author:
    """With a program and an op of its own, in a copy that goes before the example."""
    folder = tmp_path / "polysilicon-echo"
    shutil.copytree(author.folder, folder)
    for path, text in files(KERNELS).items():
        (folder / path).write_text(text)
    (change,) = blocks(KERNELS, "diff")
    patch(folder, change)
    return Author(folder=folder, python=author.python)


def test_the_example_is_under_100_lines() -> None:
    found = files(EXAMPLE)
    assert found.keys() == {
        "pyproject.toml", "polysilicon_echo/plugin.py", "polysilicon_echo/device.py",
    }  # fmt: skip
    # The lines that name the files are the guide's.
    assert sum(len(text.splitlines()) - 1 for text in found.values()) < 100


def test_the_example_imports_what_a_plugin_may() -> None:
    """And the reference, which the guide says is for learning."""
    allowed = ("backend", "device_checks", "host_memory", "reference")
    for path, text in (files(EXAMPLE) | files(KERNELS)).items():
        if not path.endswith(".py"):
            continue
        for node in ast.walk(ast.parse(text)):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                package, _, rest = name.partition(".")
                assert package != "polysilicon" or rest.split(".")[0] in allowed, (path, name)
    assert "**Importing `polysilicon.reference` is for learning.**" in section(EXAMPLE)


def test_the_example_is_listed(author: Author) -> None:
    said = [author.run(command).stdout for command in commands(EXAMPLE, "polysilicon")[:2]]
    plugins, backends = (re.findall(r"^echo +(.*?) *$", text, flags=re.M) for text in said)
    assert [line.split() for line in plugins] == [["loaded", "polysilicon-echo", "0.1.0", "echo"]]
    (line,) = backends
    assert line.startswith("available ")
    assert "compute f32; KV f16 f32; pages of 16 32; " in line
    assert line.endswith("; computes on the processor in place of its hardware: taken only by name")


def test_importing_the_installed_plugin_loads_no_device(author: Author, tmp_path: Path) -> None:
    code = "import sys, polysilicon_echo.plugin; print('polysilicon_echo.device' in sys.modules)"
    done = subprocess.run(
        [author.python, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.split() == ["False"]


def test_the_kit_passes(author: Author) -> None:
    whole, one = commands(EXAMPLE, "pytest")
    assert "test_steps.py" in author.kit(
        whole, *(f"--ignore-glob=/*/{name}" for name in LONG), "-v"
    )
    author.kit(one)


def test_a_model_runs(author: Author, smollm2_path: Path) -> None:
    _, _, command = commands(EXAMPLE, "polysilicon")
    words = [str(smollm2_path) if word == "smollm2" else word for word in command]
    done = author.run(words, "--max-tokens", "4", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_a_program_and_an_op_of_its_own_pass(further: Author) -> None:
    for command in commands(KERNELS, "pytest"):
        further.kit(command)


def test_a_mistake_in_the_op_is_found(further: Author) -> None:
    """Unless it is listed as expected, which the guide's setting does for the tests it names."""
    path = further.folder / "polysilicon_echo" / "program.py"
    text = path.read_text()
    assert text.count("np.mean(h * h") == 1
    path.write_text(text.replace("np.mean(h * h", "np.mean(abs(h)"))
    elementwise, _ = commands(KERNELS, "pytest")
    done = further.run(elementwise, "-k", "rms_norm or gated")
    assert done.returncode == 1, done.stdout + done.stderr
    mistaken = re.findall(r"^FAILED \S*::(\w+)", done.stdout, flags=re.M)
    assert set(mistaken) == {"test_rms_norm"}, done.stdout
    _, setting = blocks(EXAMPLE, "toml")
    with (further.folder / "pyproject.toml").open("a") as project:
        project.write("\n" + setting)
    done = further.run(elementwise, "-k", "rms_norm or gated")
    assert done.returncode == 0, done.stdout
    assert re.search(rf"\b{len(mistaken)} xfailed", done.stdout)


def test_the_table_names_files_and_modules_that_exist() -> None:
    """And every module of the kit."""
    rows = re.findall(r"^\|[^|]+\|[^|]*\|([^|]+)\|([^|]+)\|$", section(KERNELS), flags=re.M)
    plugin = ROOT / "plugins" / "opencl" / "polysilicon_opencl"
    sources = {name for cell, _ in rows for name in re.findall(r"`([^`]+\.(?:py|cl))`", cell)}
    assert sources
    assert {name for name in sources if not (plugin / name).is_file()} == set()
    judges = {name for _, cell in rows for name in re.findall(r"`(test_\w+)`", cell)}
    assert judges == {path.stem for path in Path(conformance.__file__).parent.glob("test_*.py")}
