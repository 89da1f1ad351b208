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


@pytest.fixture(scope="module")
def server(smollm2_path: Path) -> Iterator[Served]:
    """SmolLM2, one server for a module."""
    with running(str(smollm2_path), "--served-model-name", "smollm2") as served:
        yield served
