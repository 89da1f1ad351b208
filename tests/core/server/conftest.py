"""Running servers for the tests: `polysilicon serve` as users start it, on a free port."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from polysilicon.testing.tiny_models import tiny_llama
from polysilicon.testing.tiny_text import write_text_side

START_SECONDS = 120
COMMAND = [sys.executable, "-c", "from polysilicon.cli import main; main()", "serve"]


@dataclasses.dataclass(frozen=True, eq=False)
class Served:
    """A running server. lines: of its stderr so far."""

    url: str
    process: subprocess.Popen[str]
    lines: list[str]

    def client(self, **options) -> openai.OpenAI:
        return openai.OpenAI(
            **{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0} | options
        )

    def async_client(self, **options) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            **{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0} | options
        )

    def post(self, path: str, json: object = None, **options) -> httpx.Response:
        if json is not None:
            options["json"] = json
        return httpx.post(self.url + path, timeout=60, **options)

    def get(self, path: str, **options) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, **options)


@contextlib.contextmanager
def running(*arguments: str, environment: dict[str, str] | None = None) -> Iterator[Served]:
    process = subprocess.Popen(
        [*COMMAND, *arguments, "--port", "0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    lines: list[str] = []
    announced = threading.Event()
    url: list[str] = []

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"serving .* on (http://\S+)", line):
                url.append(found[1])
                announced.set()
        announced.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert announced.wait(START_SECONDS), "".join(lines)
        assert url, "".join(lines)
        yield Served(url[0], process, lines)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join()
        assert process.stderr is not None
        process.stderr.close()


@pytest.fixture(scope="session")
def serve() -> Callable[..., contextlib.AbstractContextManager[Served]]:
    """Starts `polysilicon serve` with the arguments given, on a free port, and ends it."""
    return running


@pytest.fixture(scope="session")
def server(smollm2_path: Path) -> Iterator[Served]:
    """SmolLM2, one server for all tests that leave it as it was; greedy where requests say nothing
    else, and with answers that do not depend on what runs beside them."""
    options = ("--served-model-name", "smollm2", "--temperature", "0", "--deterministic")
    with running(str(smollm2_path), *options) as served:
        yield served


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer; 211 tokens, 512 of context."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    tiny_llama().write(folder)
    write_text_side(folder)
    return folder


FAULTY = """
import ctypes, os, signal, time
from polysilicon.backend import CONTRACT_VERSION, DeviceInfo, DeviceLost, hookimpl
from polysilicon.reference.device import ReferenceDevice

def fail(batch):
    tokens = set(batch.tokens[batch.token_source < 0].tolist())
    if 101 in tokens:
        raise RuntimeError("the seam came apart")
    if 102 in tokens:
        ctypes.string_at(0)
    if 103 in tokens:
        raise DeviceLost("the cable was pulled")
    if 104 in tokens:
        os.kill(os.getpid(), signal.SIGKILL)
    if 105 in tokens:
        os._exit(7)
    if 106 in tokens:
        time.sleep(3600)
    if 107 in tokens:
        time.sleep(1.5)
    time.sleep(0.005)

class FaultyDevice(ReferenceDevice):
    def compile(self, forward, *, hidden=()):
        program = super().compile(forward, hidden=hidden)
        def run(batch, previous):
            fail(batch)
            return program(batch, previous)
        return run

class FaultyBackend:
    name = "faulty"
    contract = CONTRACT_VERSION
    priority = 0
    def probe(self):
        return [DeviceInfo(name="glass", memory=1 << 30)]
    def open(self, index, options):
        return FaultyDevice()

@hookimpl
def polysilicon_backends():
    return [FaultyBackend()]
"""


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a backend, for engine processes only, that fails on prompts with certain tokens and
    takes 5 ms for a step: 101 RuntimeError, 102 SIGSEGV, 103 DeviceLost, 104 SIGKILL, 105 exit,
    106 hangs, 107 takes 1.5 seconds."""
    site = tmp_path / "site"
    info = site / "faulty-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "faulty_plugin.py").write_text(FAULTY)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[polysilicon]\nfaulty = faulty_plugin\n")
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.delenv("POLYSILICON_PLUGINS", raising=False)
    return "faulty"
