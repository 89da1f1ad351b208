"""Streams as shells leave them: closed, full, gone, in another encoding; and plugins that print."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from polysilicon.backend import DeviceLost
from polysilicon.commands.application import run
from polysilicon.reference.device import ReferenceProgram

PROGRAM = f"{sys.executable} -c 'from polysilicon.cli import main; main()'"


def shell(command: str, **variables: str) -> tuple[int, str, str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("POLYSILICON")}
    done = subprocess.run(
        ["/bin/sh", "-c", command],
        capture_output=True,
        env=environment | {"OPENBLAS_NUM_THREADS": "1"} | variables,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
class TestShell:
    @pytest.mark.parametrize("arguments", ["plugins", "--help", "run --help", "plugins --json"])
    def test_closed_output(self, arguments: str) -> None:
        assert shell(f"{PROGRAM} {arguments} >&-") == (0, "", "")

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
    def test_full_output(self) -> None:
        status, _, err = shell(f"{PROGRAM} plugins --json > /dev/full")
        assert status == 1
        assert err.startswith("error: standard output: ")
        assert len(err.splitlines()) == 1

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ("run MODEL -", "the prompt is empty"),
            ("chat MODEL", ""),
            ("generate MODEL -", ""),
        ],
    )
    def test_closed_input(self, arguments: str, message: str, smollm2_path: Path) -> None:
        command = f"{arguments} --backend reference".replace("MODEL", str(smollm2_path))
        status, out, err = shell(f"{PROGRAM} {command} <&-")
        assert "Traceback" not in err
        assert status == (1 if message else 0)
        assert out == ""
        assert message in err

    def test_input_that_is_no_utf8(self, smollm2_path: Path) -> None:
        run_it = f"{PROGRAM} run {smollm2_path} - --backend reference --max-tokens 1"
        status, out, err = shell(f"printf 'a \\377 b' | {run_it}", PYTHONIOENCODING="utf-8:strict")
        assert (status, "Traceback" in err) == (0, False)
        assert out.endswith("\n")

    def test_a_plugin_that_prints_does_not_spoil_json(self, tmp_path: Path) -> None:
        (tmp_path / "loud_plugin.py").write_text(
            "from polysilicon.backend import Unavailable, hookimpl\n"
            "print('imported')\n"
            "class Loud:\n"
            "    name, contract, priority = 'loud', (1, 0), 0\n"
            "    def probe(self):\n"
            "        print('probed')\n"
            "        return Unavailable(reason='no card')\n"
            "    def open(self, index, options): raise NotImplementedError\n"
            "@hookimpl\n"
            "def polysilicon_backends():\n"
            "    print('asked')\n"
            "    return [Loud()]\n"
        )
        info = tmp_path / "loud-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: loud\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[polysilicon]\nloud = loud_plugin\n")
        status, out, err = shell(f"{PROGRAM} backends --json", PYTHONPATH=str(tmp_path))
        assert status == 0
        loud = next(entry for entry in json.loads(out)["backends"] if entry["name"] == "loud")
        assert loud["reason"] == "no card"
        assert all(word in err for word in ("imported", "asked", "probed"))


def test_lone_surrogates_in_lines(
    smollm2_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"text": "a\\ud800b", "tag": "\\udfff"}\n')
    assert run(["tokenize", str(smollm2_path), str(file)]) == 0
    line = json.loads(capsys.readouterr().out)
    assert (line["text"], line["tag"]) == ("a\ud800b", "\udfff")
    assert line["ids"]


def test_a_lost_device_takes_nothing_from_the_lines_that_are_done(
    smollm2_path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call, calls = ReferenceProgram.__call__, 0

    def lost_later(self: ReferenceProgram, *arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls > 5:
            raise DeviceLost("cable pulled")
        return call(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ReferenceProgram, "__call__", lost_later)
    file = tmp_path / "in.jsonl"
    lines = [{"prompt": "One", "max_tokens": 50}, {"prompt": "Two", "max_tokens": 2}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    status = run(["generate", str(smollm2_path), str(file), "--backend", "reference"])
    captured = capsys.readouterr()
    first, second = (json.loads(line) for line in captured.out.splitlines())
    assert status == 1
    assert captured.err.splitlines()[-1] == "error: the device failed: cable pulled"
    assert (first["finish_reason"], first["error"]) == ("error", "the device failed: cable pulled")
    assert second["finish_reason"] == "length"
    assert len(second["output_ids"]) == 2
    assert "error" not in second


def test_a_file_with_n_gives_run_one_answer(
    smollm2_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.json"
    file.write_text('{"n": 3, "max_tokens": 2, "backend": "reference"}')
    answer = ["run", str(smollm2_path), "The capital of France is", "--config", str(file)]
    assert run(answer) == 0
    assert capsys.readouterr().out == " Paris.\n"


@pytest.mark.parametrize(
    ("template", "status", "message"),
    [(b"", 1, "the prompt is empty"), (b"x" * (2 << 20), 2, "1 MiB"), (b"\xff", 2, "utf-8")],
)
def test_a_template_file_that_is_none(
    template: bytes,
    status: int,
    message: str,
    smollm2_path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "template.jinja"
    file.write_bytes(template)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    flags = ["--backend", "reference", "--max-tokens", "1", "--chat-template", str(file)]
    assert run(["chat", str(smollm2_path), *flags]) == status
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_line_without_end(
    tmp_path: Path, smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "in.jsonl"
    with file.open("wb") as output:
        output.truncate((64 << 20) + 1)
        output.write(b'{"text": "')
    assert run(["tokenize", str(smollm2_path), str(file)]) == 2
    assert "line 1 is longer than 64 MiB" in capsys.readouterr().err
